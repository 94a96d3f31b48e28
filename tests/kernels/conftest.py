"""Triton 3.6's interpreter turns arrays of one element into numbers in a way NumPy deprecates."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
NUMPY_DEPRECATION = "ignore:Conversion of an array with ndim:DeprecationWarning"


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(NUMPY_DEPRECATION))
