"""What our errors print: one line that a terminal can show, whatever they quote."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_xfer.errors import KvxferError


def every_error(kind=KvxferError):
    return [kind, *(e for child in kind.__subclasses__() for e in every_error(child))]


@pytest.mark.parametrize("kind", every_error())
@given(quoted=st.text())
def test_an_error_is_one_printable_line(kind, quoted):
    printed = str(kind(f"family.yaml: store: {quoted}"))
    assert printed.isprintable()
    assert printed.startswith("family.yaml: store: ")
    assert quoted in printed or not quoted.isprintable()
