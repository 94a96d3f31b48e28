"""The short form of `faults.py`: no wrong byte, no unreported loss, no call beyond its budget."""

import faults
import pytest

# Seconds a call may take: two time-outs (lookup and transfer), and room for a busy machine. A tier
# has two seconds for a read.
BUDGET = dict.fromkeys(faults.SCENARIOS, 2.0) | {"S3 answers 500, slow bodies": 3.0}
BUDGET |= {name: 3.0 for name in faults.SCENARIOS if name.startswith("a tier's")}


@pytest.mark.parametrize("name", [n for n in faults.SCENARIOS if not n.startswith("SIGKILL")])
def test_nothing_wrong_and_nothing_lost(name):
    found = faults.run(name, short=True)
    assert (found["wrong bytes"], found["unreported losses"]) == (0, 0), found
    assert found["calls"] > 30
    assert found["longest call"] < BUDGET[name], found
