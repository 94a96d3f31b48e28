"""One of two processes that work on the same stores until somebody kills them.

Arguments: folder, worker number, seed. Every change to a key of its own is announced in a journal
before it begins and confirmed after the store has reported it, so that the parent knows what must
be there. Exits with 3 and one line when a read returns what nobody can have written.
"""

import os
import random
import sys
from pathlib import Path

from kvstore_xfer.store.base import ReadRequest, ReadStatus, WriteStatus
from kvstore_xfer.store.local import LocalStore
from kvstore_xfer.store.testing import block_bytes, block_key, write_request

CAP = 64 * 8192
SHARED = "shared"


def payload(number, version):
    """Names its own key and version, so that a reader can tell what it must be."""
    content = block_bytes(1000 * number + version, 100 + 37 * (version % 97))
    return number.to_bytes(8, "little") + version.to_bytes(8, "little") + content


def check(number, result):
    """Version found, or None; dies on wrong bytes."""
    if result.status is ReadStatus.MISSING:
        return None
    if result.status is ReadStatus.OK:
        version = int.from_bytes(result.payload[8:16], "little")
        if result.payload == payload(number, version):
            return version
    sys.stdout.write(f"wrong: {number} {result.status} {(result.payload or b'')[:16].hex()}\n")
    sys.stdout.flush()
    os._exit(3)


class Worker:
    def __init__(self, root, name, seed):
        self.chance = random.Random(seed)
        self.name = name
        self.version = int(seed) * 100_000
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self.journal = os.open(root / f"journal-{name}", flags, 0o644)
        self.store = LocalStore(root / "store", min_free_bytes=0)
        self.capped = LocalStore(root / "capped", max_bytes=CAP, min_free_bytes=0)

    def note(self, word, number, version):
        os.write(self.journal, f"{word} {number} {version}\n".encode())

    def change_own_keys(self):
        numbers = self.chance.sample(range(40), self.chance.randrange(1, 6))
        keys = [block_key(n, self.name) for n in numbers]
        self.version += 1
        version = self.version if self.chance.random() < 0.8 else 0
        for number in numbers:
            self.note("begin", number, version)
        if version:
            requests = [
                write_request(key, payload(n, version))
                for key, n in zip(keys, numbers, strict=True)
            ]
            statuses = self.store.write(requests, overwrite=True)
            done = [status is WriteStatus.STORED for status in statuses]
        else:
            self.store.delete(keys)
            done = [not there for there in self.store.exists(keys)]
        for number, confirmed in zip(numbers, done, strict=True):
            if confirmed:
                self.note("done", number, version)

    def change_shared_keys(self):
        store = self.chance.choice([self.store, self.capped])
        numbers = self.chance.sample(range(100), 4)
        self.version += 1
        requests = [write_request(block_key(n, SHARED), payload(n, self.version)) for n in numbers]
        store.write(requests, overwrite=self.chance.random() < 0.5)
        store.delete([block_key(self.chance.randrange(100), SHARED)])

    def read_anything(self):
        store = self.chance.choice([self.store, self.capped])
        owner = self.chance.choice([SHARED, "0", "1"])
        numbers = self.chance.sample(range(40), 6)
        results = store.read([ReadRequest(block_key(n, owner)) for n in numbers])
        for number, result in zip(numbers, results, strict=True):
            check(number, result)

    def run(self):
        while True:
            self.chance.choice(
                [self.change_own_keys, self.change_shared_keys, self.read_anything]
            )()


if __name__ == "__main__":
    root, name, seed = Path(sys.argv[1]), *sys.argv[2:]
    (root / f"begun-{name}-{seed}").touch()
    worker = Worker(root, name, seed)
    (root / f"opened-{name}-{seed}").touch()
    worker.run()
