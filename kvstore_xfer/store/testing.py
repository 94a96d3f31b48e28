"""The conformance suite of the store protocol: one test per sentence of the contract.

A store's test class inherits `BlockStoreTests` and supplies `make_store`, `raw_get` and
`raw_put`. The raw calls go around the store, so that its own bookkeeping cannot hide damage.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvstore_xfer.blocks.header import BlockHeader, payload_checksum
from kvstore_xfer.store.base import ReadRequest, ReadResult, ReadStatus, WriteRequest, WriteStatus

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore_xfer.store.base import BlockStore

_HOSTILE_KEYS = ("", "x" * 600, "../../etc/passwd", "v1/a/b/c/d/e", "\udcff", "v1/\0", "v1/a")


def block_key(number: int, identity: str = "model-a", kind: str = "native") -> str:
    return f"v1/{identity}/h0-2.l0-4/{kind}/{number:064x}"


def block_bytes(number: int, size: int = 5000) -> bytes:
    """Bytes that belong to a number and to no other."""
    return random.Random(number).randbytes(size)


def write_request(key: str, payload: bytes) -> WriteRequest:
    """The payload is passed in several runs."""
    runs = [memoryview(payload)[: len(payload) // 3], memoryview(payload)[len(payload) // 3 :]]
    return WriteRequest(BlockHeader(key, len(payload)), [memoryview(b""), *runs])


def put(store: BlockStore, key: str, payload: bytes, *, overwrite: bool = False) -> WriteStatus:
    return store.write([write_request(key, payload)], overwrite=overwrite)[0]


def get(store: BlockStore, key: str) -> ReadResult:
    return store.read([ReadRequest(key)])[0]


class BlockStoreTests(ABC):
    """Subclass as ``class TestMyStore(BlockStoreTests)``."""

    listing_knows_created = True  # False: a scan tells when the store received the block

    @abstractmethod
    def make_store(self, folder: Path) -> BlockStore:
        """Open the store whose data live in or belong to `folder`; called again to reopen it."""

    @abstractmethod
    def raw_get(self, folder: Path, key: str) -> bytes:
        """The stored bytes of a block, header included, read around the store."""

    @abstractmethod
    def raw_put(self, folder: Path, key: str, raw: bytes) -> None:
        """Replace the stored bytes of a block around the store."""

    def test_a_written_block_is_read_back(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            _equal(put(store, block_key(1), block_bytes(1)), WriteStatus.STORED)
            result = get(store, block_key(1))
        _equal((result.status, result.payload), (ReadStatus.OK, block_bytes(1)))

    def test_the_header_comes_back_with_its_checksum(self, tmp_path: Path) -> None:
        payload = block_bytes(1, 24)
        header = BlockHeader(block_key(1), 24, 1, 3, 1, 2, 2, "bfloat16", 128, created=5.0)
        with self.make_store(tmp_path) as store:
            store.write([WriteRequest(header, [memoryview(payload)])])
            found = get(store, block_key(1)).header
        _equal(found, replace(header, checksum=payload_checksum([memoryview(payload)])))

    def test_a_read_fills_the_runs_of_the_caller(self, tmp_path: Path) -> None:
        payload = block_bytes(1, 4099)
        memory = bytearray(3 * 4099)
        cuts = [0, 1, 1, 7, 2000, 4099]
        runs = [
            memoryview(memory)[2 * begin : 2 * begin + end - begin] for begin, end in pairwise(cuts)
        ]
        with self.make_store(tmp_path) as store:
            put(store, block_key(1), payload)
            (result,) = store.read([ReadRequest(block_key(1), runs)])
        _equal((result.status, result.payload), (ReadStatus.OK, None))
        _equal(b"".join(runs), payload)

    def test_thousands_of_runs_are_filled_in_order(self, tmp_path: Path) -> None:
        payload = block_bytes(1, 30_000)
        memory = bytearray(len(payload))
        runs = [memoryview(memory)[at : at + 10] for at in range(0, len(payload), 10)]
        with self.make_store(tmp_path) as store:
            source = [memoryview(payload)[at : at + 6] for at in range(0, len(payload), 6)]
            store.write([WriteRequest(BlockHeader(block_key(1), len(payload)), source)])
            (result,) = store.read([ReadRequest(block_key(1), runs)])
        _equal((result.status, bytes(memory)), (ReadStatus.OK, payload))

    def test_empty_and_large_payloads(self, tmp_path: Path) -> None:
        large = block_bytes(2, 16 << 20)
        with self.make_store(tmp_path) as store:
            statuses = store.write(
                [write_request(block_key(1), b""), write_request(block_key(2), large)]
            )
            _equal(statuses, [WriteStatus.STORED] * 2)
            _equal(get(store, block_key(1)).payload, b"")
            _equal(get(store, block_key(2)).payload == large, True)

    def test_a_missing_block_is_missing(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            _equal(get(store, block_key(1)), ReadResult(ReadStatus.MISSING))
            _equal(store.exists([block_key(1)]), [False])

    def test_exists_answers_per_key_in_order(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            put(store, block_key(1), b"x")
            keys = [block_key(2), block_key(1), block_key(1), block_key(3)]
            _equal(store.exists(keys), [False, True, True, False])
            _equal(store.exists([]), [])

    def test_a_batch_keeps_order_and_duplicates(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            numbers = [3, 1, 2, 1, 9, 3]
            store.write([write_request(block_key(n), block_bytes(n)) for n in (1, 2, 3)])
            results = store.read([ReadRequest(block_key(n)) for n in numbers])
        expected = [None if n == 9 else block_bytes(n) for n in numbers]
        _equal([result.payload for result in results], expected)

    def test_a_batch_may_come_from_a_generator(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            requests: Any = (write_request(block_key(n), block_bytes(n)) for n in range(3))
            _equal(store.write(requests), [WriteStatus.STORED] * 3)
            keys: Any = (block_key(n) for n in range(4))
            _equal(store.exists(keys), [True] * 3 + [False])
            reads: Any = (ReadRequest(block_key(n)) for n in range(3))
            _equal(_payloads(store.read(reads)), [block_bytes(n) for n in range(3)])

    def test_a_destination_of_another_size_is_a_mismatch(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            put(store, block_key(1), block_bytes(1))
            for size in (0, 4999, 5001):
                request = ReadRequest(block_key(1), [memoryview(bytearray(size))])
                (result,) = store.read([request])
                _equal(result.status, ReadStatus.MISMATCH)
                _equal(result.header and result.header.payload_bytes, 5000)
            _equal(get(store, block_key(1)).status, ReadStatus.OK)

    def test_a_useless_destination_is_an_error_of_its_item_only(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            put(store, block_key(1), block_bytes(1))
            read_only = ReadRequest(block_key(1), [memoryview(bytes(5000))])
            strided = ReadRequest(block_key(1), [memoryview(bytearray(10_000))[::2]])
            results = store.read([read_only, strided, ReadRequest(block_key(1))])
        statuses = [ReadStatus.ERROR, ReadStatus.ERROR, ReadStatus.OK]
        _equal([result.status for result in results], statuses)

    def test_without_overwrite_the_first_block_is_kept(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            requests = [write_request(block_key(1), block_bytes(n)) for n in (1, 2)]
            _equal(store.write(requests), [WriteStatus.STORED, WriteStatus.EXISTS])
            _equal(put(store, block_key(1), block_bytes(3)), WriteStatus.EXISTS)
            _equal(get(store, block_key(1)).payload, block_bytes(1))

    def test_overwrite_replaces(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            put(store, block_key(1), block_bytes(1))
            status = put(store, block_key(1), block_bytes(2, 77), overwrite=True)
            _equal(status, WriteStatus.STORED)
            _equal(get(store, block_key(1)).payload, block_bytes(2, 77))
            _equal(store.stats().blocks, 1)

    def test_the_payload_is_not_kept(self, tmp_path: Path) -> None:
        payload = bytearray(block_bytes(1))
        with self.make_store(tmp_path) as store:
            header = BlockHeader(block_key(1), len(payload))
            store.write([WriteRequest(header, [memoryview(payload)])])
            payload[:] = bytes(len(payload))
            _equal(get(store, block_key(1)).payload, block_bytes(1))

    def test_an_impossible_write_is_an_error_of_its_item_only(self, tmp_path: Path) -> None:
        bad = [WriteRequest(BlockHeader(key, 1), [memoryview(b"x")]) for key in _HOSTILE_KEYS]
        bad += [
            WriteRequest(BlockHeader(block_key(1), 2), [memoryview(b"x")]),
            WriteRequest(BlockHeader(block_key(1), 1, tokens=-1), [memoryview(b"x")]),
            WriteRequest(BlockHeader(block_key(1), 1, first_token=-1), [memoryview(b"x")]),
            WriteRequest(BlockHeader(block_key(1), 1, dtype="x" * 70_000), [memoryview(b"x")]),
        ]
        with self.make_store(tmp_path) as store:
            statuses = store.write([*bad, write_request(block_key(2), b"y")])
            _equal(statuses, [WriteStatus.ERROR] * len(bad) + [WriteStatus.STORED])
            _equal([row.key for row in store.scan()], [block_key(2)])

    def test_hostile_keys_are_missing(self, tmp_path: Path) -> None:
        keys = list(_HOSTILE_KEYS)
        with self.make_store(tmp_path) as store:
            put(store, block_key(1), b"x")
            _equal(store.exists(keys), [False] * len(keys))
            _equal(store.delete(keys), [False] * len(keys))
            results = store.read([ReadRequest(key) for key in keys])
            _equal({result.status for result in results}, {ReadStatus.MISSING})
            _equal(store.exists([block_key(1)]), [True])

    def test_delete_tells_what_was_there(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            put(store, block_key(1), b"x")
            keys = [block_key(1), block_key(2), block_key(1)]
            _equal(store.delete(keys), [True, False, False])
            _equal(get(store, block_key(1)).status, ReadStatus.MISSING)
            _equal(put(store, block_key(1), b"y"), WriteStatus.STORED)

    def test_scan_is_in_key_order_and_by_prefix(self, tmp_path: Path) -> None:
        keys = [block_key(n, f"model-{m}") for m in "ab" for n in (1, 2, 10)]
        with self.make_store(tmp_path) as store:
            store.write([write_request(key, key.encode()) for key in reversed(keys)])
            _equal([row.key for row in store.scan()], sorted(keys))
            _equal([row.key for row in store.scan("v1/model-b/")], sorted(keys[3:]))
            _equal(list(store.scan("v1/model-c")) + list(store.scan("x" * 600)), [])

    def test_a_scan_row_describes_its_block(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            header = BlockHeader(block_key(1), 5000, created=123.0)
            store.write([WriteRequest(header, [memoryview(block_bytes(1))])])
            (row,) = store.scan()
            _equal(row.key, block_key(1))
            _equal(row.created == 123.0, self.listing_knows_created)
            _equal(row.size, len(self.raw_get(tmp_path, block_key(1))))
            _equal(row.accessed > 1e9, True)

    def test_stats_count_blocks_and_bytes(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            _equal((store.stats().blocks, store.stats().bytes), (0, 0))
            store.write([write_request(block_key(n), block_bytes(n)) for n in range(3)])
            stats = store.stats()
            _equal((stats.blocks, stats.bytes), (3, sum(row.size for row in store.scan())))

    def test_blocks_survive_a_reopening(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            put(store, block_key(1), block_bytes(1))
        with self.make_store(tmp_path) as store:
            _equal(get(store, block_key(1)).payload, block_bytes(1))

    def test_a_closed_store_answers_with_errors(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path)
        put(store, block_key(1), b"x")
        store.close()
        store.close()
        _equal(store.exists([block_key(1)]), [False])
        _equal(store.delete([block_key(1)]), [False])
        _equal(get(store, block_key(1)).status, ReadStatus.ERROR)
        _equal(put(store, block_key(2), b"x"), WriteStatus.ERROR)

    def test_a_flipped_bit_anywhere_is_corrupt_and_removed(self, tmp_path: Path) -> None:
        payload = block_bytes(1, 300)
        with self.make_store(tmp_path) as store:
            put(store, block_key(1), payload)
            intact = self.raw_get(tmp_path, block_key(1))
            text_end = intact.index(b"}") + 1
            meaningful = [*range(0, text_end, 7), *range(len(intact) - 300, len(intact), 23)]
            for position in meaningful:
                put(store, block_key(1), payload)
                self._damage(store, tmp_path, _flip(self.raw_get(tmp_path, block_key(1)), position))
            _equal(store.stats().corrupt_blocks, len(meaningful))

    def test_a_truncated_block_is_corrupt_and_removed(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            put(store, block_key(1), block_bytes(1))
            size = len(self.raw_get(tmp_path, block_key(1)))
            for length in (0, 1, 19, 20, 100, size // 2, size - 1):
                put(store, block_key(1), block_bytes(1))
                raw = self.raw_get(tmp_path, block_key(1))
                self._damage(store, tmp_path, raw[:length])

    def test_an_intact_block_of_another_key_is_corrupt(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            put(store, block_key(1), block_bytes(1))
            put(store, block_key(2), block_bytes(2))
            self._damage(store, tmp_path, self.raw_get(tmp_path, block_key(2)))

    def test_damage_leaves_the_rest_of_a_batch_alone(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            store.write([write_request(block_key(n), block_bytes(n)) for n in range(4)])
            raw = self.raw_get(tmp_path, block_key(2))
            self.raw_put(tmp_path, block_key(2), _flip(raw, len(raw) - 1))
            results = store.read([ReadRequest(block_key(n)) for n in range(4)])
            _equal(_payloads(results), [None if n == 2 else block_bytes(n) for n in range(4)])

    def test_writers_and_readers_in_threads_never_mix_blocks(self, tmp_path: Path) -> None:
        versions = [block_bytes(n, 20_000) for n in range(4)]

        def work(thread: int) -> bool:
            chance = random.Random(thread)
            ok = True
            for _ in range(25):
                key = block_key(chance.randrange(4))
                put(store, key, chance.choice(versions), overwrite=True)
                result = get(store, block_key(chance.randrange(4)))
                seen = (ReadStatus.MISSING, ReadStatus.OK)
                ok = ok and result.status in seen and result.payload in (None, *versions)
            return ok

        with self.make_store(tmp_path) as store, ThreadPoolExecutor(8) as pool:
            _equal(list(pool.map(work, range(8))), [True] * 8)
            _equal(store.stats().corrupt_blocks, 0)

    def _damage(self, store: BlockStore, folder: Path, raw: bytes) -> None:
        """Block 1 with these bytes: never served, gone afterwards, and counted."""
        before = store.stats().corrupt_blocks
        self.raw_put(folder, block_key(1), raw)
        _equal(get(store, block_key(1)), ReadResult(ReadStatus.CORRUPT))
        _equal(store.exists([block_key(1)]), [False])
        _equal(get(store, block_key(1)).status, ReadStatus.MISSING)
        _equal(store.stats().corrupt_blocks, before + 1)


def _flip(raw: bytes, position: int) -> bytes:
    return raw[:position] + bytes([raw[position] ^ 1 << position % 8]) + raw[position + 1 :]


def _payloads(results: Sequence[ReadResult]) -> list[bytes | None]:
    return [result.payload for result in results]


def _equal(found: object, expected: object) -> None:
    """Like an assert statement, which pytest does not explain in an installed package."""
    if found != expected:
        raise AssertionError(f"found {str(found)[:300]}, expected {str(expected)[:300]}")
