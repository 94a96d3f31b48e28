"""Random histories of a local store, compared with a dictionary after every step."""

import hashlib
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore_xfer.store.base import ReadRequest, ReadStatus, WriteStatus
from kvstore_xfer.store.local import LocalStore
from kvstore_xfer.store.local.layout import Layout
from kvstore_xfer.store.local.writer import Writer
from kvstore_xfer.store.testing import block_bytes, block_key, get, write_request

NUMBERS = st.integers(0, 7)
VERSIONS = st.integers(0, 1000)
SIZES = st.sampled_from([0, 1, 100, 4096, 5000])


class CrashError(BaseException):
    """Stands for the death of the process at one point."""


class LocalStoreMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.store = LocalStore(self.root, min_free_bytes=0)
        self.model = {}
        self.damaged = set()
        self.corrupt = 0

    def teardown(self):
        self.store.close()
        shutil.rmtree(self.root)

    def file(self, number):
        digest = hashlib.sha256(block_key(number).encode()).hexdigest()
        (path,) = (self.root / "blocks").rglob(f"{digest}.*")
        return path

    @rule(
        items=st.lists(st.tuples(NUMBERS, VERSIONS, SIZES), min_size=1, max_size=4),
        overwrite=st.booleans(),
    )
    def write(self, items, overwrite):
        requests = [write_request(block_key(n), block_bytes(v, size)) for n, v, size in items]
        statuses = self.store.write(requests, overwrite=overwrite)
        for (number, version, size), status in zip(items, statuses, strict=True):
            kept = number in self.model and not overwrite
            assert status is (WriteStatus.EXISTS if kept else WriteStatus.STORED)
            if not kept:
                self.model[number] = block_bytes(version, size)
                self.damaged.discard(number)

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=6))
    def read(self, numbers):
        numbers = list(dict.fromkeys(numbers))
        results = self.store.read([ReadRequest(block_key(n)) for n in numbers])
        for number, result in zip(numbers, results, strict=True):
            if number in self.damaged:
                assert result.status is ReadStatus.CORRUPT
                self.damaged.remove(number)
                del self.model[number]
                self.corrupt += 1
            elif number in self.model:
                assert result.payload == self.model[number]
            else:
                assert result.status is ReadStatus.MISSING

    @rule(numbers=st.lists(NUMBERS, max_size=3, unique=True))
    def delete(self, numbers):
        found = self.store.delete([block_key(n) for n in numbers])
        assert found == [n in self.model for n in numbers]
        for number in numbers:
            self.model.pop(number, None)
            self.damaged.discard(number)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def corrupt_a_byte(self, data):
        number = data.draw(st.sampled_from(sorted(self.model)))
        raw = bytearray(self.file(number).read_bytes())
        payload = range(4096, len(raw)) or range(20)
        raw[data.draw(st.sampled_from(payload))] ^= 0x41
        if number not in self.damaged:  # the same byte twice would heal it
            self.file(number).write_bytes(raw)
            self.damaged.add(number)

    @rule()
    def reopen(self):
        self.store.close()
        self.store = LocalStore(self.root, min_free_bytes=0)

    @rule(number=NUMBERS, version=VERSIONS, written=st.booleans())
    def crash_while_publishing(self, number, version, written):
        request = write_request(block_key(number), block_bytes(version))

        def die(*_):
            raise CrashError

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Writer, "_publish", die)
            if not written:
                patch.setattr("kvstore_xfer.store.local.writer.write_block", die)
            patch.setattr(Layout, "remove_payload", lambda *_: None)  # the dead remove nothing
            with pytest.raises(CrashError):
                self.store.write([request], overwrite=True)
        self.store._folder.sweep_temporaries()

    @precondition(lambda self: not self.damaged)
    @rule()
    def lose_the_index(self):
        self.store.close()
        shutil.rmtree(self.root / "index")
        self.store = LocalStore(self.root, min_free_bytes=0)
        self.corrupt = 0

    @invariant()
    def index_and_files_agree_with_the_model(self):
        keys = [block_key(n) for n in sorted(self.model)]
        assert self.store.exists([block_key(n) for n in range(8)]) == [
            n in self.model for n in range(8)
        ]
        assert [row.key for row in self.store.scan()] == keys
        sizes = [path.stat().st_size for path in (self.root / "blocks").rglob("*.*")]
        stats = self.store.stats()
        assert (stats.blocks, len(sizes)) == (len(keys), len(keys))
        assert stats.corrupt_blocks == self.corrupt
        assert list((self.root / "tmp").iterdir()) == []
        if not self.damaged:
            assert sum(row.size for row in self.store.scan()) == sum(sizes)
            assert all(
                get(self.store, block_key(n)).payload == payload
                for n, payload in self.model.items()
            )


TestLocalStoreMachine = LocalStoreMachine.TestCase
TestLocalStoreMachine.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None, derandomize=True
)
