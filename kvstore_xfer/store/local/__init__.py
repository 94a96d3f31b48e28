"""The embedded store: a folder on a local disk, shared by several processes at once.

Reading order: `layout` (names in the folder), `payload` (bytes in and out of files),
`environment` and `index` (who is where, in LMDB), `folder` (what the stores of one process
share), `store` (the protocol).
"""

from kvstore_xfer.store.local.store import LocalStore

__all__ = ["LocalStore"]
