"""A pytest plug-in, not a conftest: outside LMCache's interpreter it could not be imported."""

import pytest
from toy import Toy


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A made-up pair with an accepted mapper, whose models need no files."""
    return Toy(tmp_path, monkeypatch)
