"""A minute of `fuzz.py`, with another seed every day; ``make fuzz`` takes ten."""

import datetime

import fuzz


def test_hostile_bytes_are_refused_in_one_line():
    steps = fuzz.fuzz(60, datetime.date.today().toordinal())
    assert min(steps.values()) > 3, steps
