"""What a tiered store does behind the callers' back: copies up, copies down, late deletions.

One thread, bounded queues. Uploads are queued as keys and read again when their turn comes, so
that they hold no memory; promotions are queued as bytes, up to a limit. What does not fit is
dropped and counted: the block stays where it is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

from kvstore_xfer import metrics
from kvstore_xfer.errors import StoreError
from kvstore_xfer.store.base import ReadRequest, ReadStatus, WriteRequest, WriteStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore_xfer.blocks.header import BlockHeader
    from kvstore_xfer.store.base import BlockStore, ReadResult
    from kvstore_xfer.store.remote.store import RemoteStore

_log = logging.getLogger(__name__)

QUEUED_KEYS = 8192
QUEUED_BYTES = 256 << 20
_UPLOAD_KEYS = 16
_ATTEMPTS = 5
_POLL_SECONDS = 0.1
_CLOSE_SECONDS = 10.0


class Promotion(NamedTuple):
    """A block on its way into faster levels."""

    header: BlockHeader
    payload: bytes
    levels: Sequence[BlockStore]


class Upload(NamedTuple):
    key: str
    far: RemoteStore
    overwrite: bool
    attempts: int = 0


class Mover:
    """`read_near` reads blocks from the near levels, for uploads."""

    def __init__(self, read_near: Callable[[list[ReadRequest]], list[ReadResult]]) -> None:
        self._read_near = read_near
        self._changed = threading.Condition()
        self._promotions: deque[Promotion] = deque()
        self._promoted_bytes = 0
        self._uploads: deque[Upload] = deque()
        self._deletions: dict[RemoteStore, set[str]] = {}
        self._busy: set[str] = set()
        self._closed = False
        self.dropped: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._work, name="kvxfer-mover", daemon=True)
        self._thread.start()

    def promote(self, header: BlockHeader, payload: bytes, levels: Sequence[BlockStore]) -> None:
        with self._changed:
            if self._closed or self._promoted_bytes + len(payload) > QUEUED_BYTES:
                self._drop("promotion")
                return
            self._promoted_bytes += len(payload)
            self._promotions.append(Promotion(header, payload, levels))
            self._changed.notify_all()

    def has_room(self, size: int) -> bool:
        """Whether a promotion of `size` bytes would be kept."""
        return self._promoted_bytes + size <= QUEUED_BYTES

    def upload(self, keys: Sequence[str], far: RemoteStore, *, overwrite: bool) -> None:
        with self._changed:
            for key in keys:
                if self._closed or len(self._uploads) >= QUEUED_KEYS:
                    self._drop("upload")
                else:
                    self._uploads.append(Upload(key, far, overwrite))
            self._changed.notify_all()

    def delete_later(self, keys: Sequence[str], far: RemoteStore) -> None:
        """Keep trying; until then `is_deleted` hides them."""
        with self._changed:
            self._deletions.setdefault(far, set()).update(keys)
            self._changed.notify_all()

    def is_deleted(self, key: str, far: RemoteStore) -> bool:
        waiting = self._deletions.get(far)
        return waiting is not None and key in waiting

    def forget(self, keys: Sequence[str]) -> None:
        """Cancel what is queued for blocks about to change; returns when none is under way."""
        changing = set(keys)
        with self._changed:
            kept = [p for p in self._promotions if p.header.key not in changing]
            self._promotions = deque(kept)
            self._promoted_bytes = sum(len(p.payload) for p in kept)
            self._uploads = deque(u for u in self._uploads if u.key not in changing)
            self._changed.wait_for(lambda: not self._busy & changing)

    def flush(self, seconds: float) -> bool:
        """Whether everything queued was done within this time."""
        with self._changed:
            return self._changed.wait_for(self._idle, seconds)

    def close(self) -> None:
        self.flush(_CLOSE_SECONDS)
        with self._changed:
            self._closed = True
            left = len(self._uploads) + sum(map(len, self._deletions.values()))
            self._changed.notify_all()
        self._thread.join(_CLOSE_SECONDS)
        if left:
            _log.warning("%d blocks did not reach the far store before closing", left)

    def _idle(self) -> bool:
        waiting = self._promotions or self._uploads or any(self._deletions.values())
        return not waiting and not self._busy

    def _drop(self, kind: str, count: int = 1) -> None:
        if not count:
            return
        self.dropped[kind] += count
        metrics.STORE_MOVES.labels(kind, "dropped").inc(count)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or not self._idle(), timeout=None)
                if self._closed:
                    return
            try:
                done = self._promote_one() or self._upload_some() or self._delete_some()
            except Exception:  # noqa: BLE001 - one failure must not end the thread
                _log.exception("moving blocks between levels failed")
                done = False
            if not done:
                time.sleep(_POLL_SECONDS)  # only what waits for an engine that is away

    def _promote_one(self) -> bool:
        with self._changed:
            if not self._promotions:
                return False
            item = self._promotions.popleft()
            self._promoted_bytes -= len(item.payload)
            self._busy = {item.header.key}
        try:
            for level in item.levels:
                (status,) = level.write([WriteRequest(item.header, [memoryview(item.payload)])])
                metrics.STORE_MOVES.labels("promotion", status.value).inc()
        finally:
            self._rest()
        return True

    def _upload_some(self) -> bool:
        batch = self._take_uploads()
        if not batch:
            return False
        try:
            self._send(batch)
        finally:
            self._rest()
        return True

    def _take_uploads(self) -> list[Upload]:
        """Some for one engine that can be reached, oldest first."""
        with self._changed:
            first = next((item for item in self._uploads if item.far.available), None)
            if first is None:
                return []
            same = [u for u in self._uploads if u.far is first.far]
            batch = [u for u in same if u.overwrite == first.overwrite][:_UPLOAD_KEYS]
            taken = set(map(id, batch))
            self._uploads = deque(u for u in self._uploads if id(u) not in taken)
            self._busy = {item.key for item in batch}
        return batch

    def _send(self, batch: list[Upload]) -> None:
        results = self._read_near([ReadRequest(item.key, touch=False) for item in batch])
        ready = [
            (item, WriteRequest(result.header, [memoryview(result.payload)]))
            for item, result in zip(batch, results, strict=True)
            if result.status is ReadStatus.OK
            and result.header is not None
            and result.payload is not None
        ]
        self._drop("upload", len(batch) - len(ready))  # evicted before their turn came
        far = batch[0].far
        statuses = far.write([request for _, request in ready], overwrite=batch[0].overwrite)
        for (item, _), status in zip(ready, statuses, strict=True):
            metrics.STORE_MOVES.labels("upload", status.value).inc()
            if status is WriteStatus.ERROR:
                self._again(item)

    def _again(self, item: Upload) -> None:
        """An engine that is away is waited for; one that answers has a few attempts."""
        if not item.far.available:
            with self._changed:
                self._uploads.append(item)
            return
        if item.attempts + 1 >= _ATTEMPTS:
            self._drop("upload")
            return
        with self._changed:
            self._uploads.append(item._replace(attempts=item.attempts + 1))

    def _delete_some(self) -> bool:
        with self._changed:
            waiting = [(far, list(keys)) for far, keys in self._deletions.items() if keys]
        done = False
        for far, keys in waiting:
            try:
                answers = far.try_delete(keys)
            except StoreError:
                continue
            with self._changed:
                answered = [k for k, a in zip(keys, answers, strict=True) if a is not None]
                self._deletions[far].difference_update(answered)
                self._changed.notify_all()
            done = done or bool(answered)
        return done

    def _rest(self) -> None:
        with self._changed:
            self._busy = set()
            self._changed.notify_all()
