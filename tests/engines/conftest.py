"""Tests against real engines: each runs in an environment of its own, built on first use.

They are never skipped. A test's time limit does not count its fixtures, which install gigabytes
and start servers under limits of their own.
"""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the helpers here are modules of no package


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(300, func_only=True))
