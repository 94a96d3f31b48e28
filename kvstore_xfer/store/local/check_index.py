"""Reads every row of an index, in a process of its own: a damaged page may end it with a signal.

``python -m kvstore_xfer.store.local.check_index FOLDER``; exits with 0 when all is well.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvstore_xfer.store.local.index import Index


def main(folder: Path) -> None:
    """Raises what makes it damaged."""
    index = Index(folder)
    try:
        blocks, recent = index.check()
    finally:
        index.close()
    if blocks != recent:
        raise SystemExit(f"{blocks} blocks, {recent} in the order of eviction")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
