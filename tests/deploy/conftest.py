"""What the deployment tests share."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
for folder in (Path(__file__).parent, ROOT / "deploy", ROOT / "tests" / "store"):
    sys.path.insert(0, str(folder))  # modules of no package

_METRIC = re.compile(r"\bkvxfer_[a-z_]+")
_SUFFIXES = ("_bucket", "_sum", "_count")


@pytest.fixture(scope="session")
def unknown_metrics():
    """``unknown_metrics(expression)``: our metrics in it that the code does not export."""
    from kvstore_xfer import metrics

    known = {metrics.exported_name(metric) for metric in metrics.all_metrics()}

    def unknown(expression):
        names = set(_METRIC.findall(re.sub(r"\b\w+:\w+:\w+\b", "", expression)))
        plain = {name for name in names if name not in known}
        return {
            name
            for name in plain
            if not any(name.removesuffix(suffix) in known for suffix in _SUFFIXES)
        }

    return unknown
