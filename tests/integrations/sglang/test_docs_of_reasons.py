"""docs/sglang.md lists every reason that the metrics can give, and none that they cannot."""

import re
from pathlib import Path

from kvstore_xfer.outcome import Reason
from kvxfer_sglang.refusals import Refusal

TEXT = (Path(__file__).parents[3] / "docs" / "sglang.md").read_text()


def section(start, end):
    part = TEXT[TEXT.index(start) : TEXT.index(end)]
    rows = re.findall(r"^\| (`[^|]*`) \| .* \|$", part, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}


def test_every_refusal_is_documented():
    listed = section("## What turns conversion off", "A single pair is off")
    assert listed == {reason.value for reason in Refusal}


def test_every_reason_of_a_block_is_documented():
    declined = section("A single pair is off", "## Other weights")
    missed = {"absent", "after_gap", "corrupt", "store_error", "shape_mismatch"}
    missed |= {"attaching", "not_stored"}
    assert declined == {reason.value for reason in Reason} - missed - {"none"}
    (row,) = re.findall(r"^\| `missed` \| .* \|$", TEXT, re.MULTILINE)
    assert missed <= set(re.findall(r"`([a-z_]+)`", row))
