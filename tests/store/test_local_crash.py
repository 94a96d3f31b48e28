"""Two processes write and read one store at once while both are killed again and again."""

import math
import random
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

from kvstore_xfer.store.base import ReadRequest, ReadStatus
from kvstore_xfer.store.local import LocalStore
from kvstore_xfer.store.testing import block_key

SECONDS = 60
WORKER = Path(__file__).with_name("crash_worker.py")
CAP = 64 * 8192


def start(root, name, seed):
    command = [sys.executable, WORKER, root, name, str(seed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def kill_until(root, enough):
    """Number of kills. Fails when a worker ended by itself: it saw wrong bytes, or crashed.

    `enough` is asked with the number of workers started and the seconds so far. A worker's time
    runs from before or after the opening of its stores: on a busy machine it would never come to
    that otherwise.
    """
    chance = random.Random(7)
    begin = time.monotonic()
    seed = 0
    running, begun, kill_at = {}, {}, {}
    while running or not enough(seed, time.monotonic() - begin):
        for name in ("0", "1"):
            now = time.monotonic()
            if name not in running and not enough(seed, now - begin):
                seed += 1
                running[name] = start(root, name, seed)
                begun[name] = root / f"{chance.choice(['begun', 'opened'])}-{name}-{seed}"
            elif name in begun and begun[name].exists():
                kill_at[name] = now + chance.uniform(0.01, 1.4)
                del begun[name]
            elif name in running and (
                running[name].poll() is not None or now > kill_at.get(name, math.inf)
            ):
                worker = running.pop(name)
                kill_at.pop(name, None)
                worker.kill()
                output, _ = worker.communicate()
                assert worker.returncode == -9, output
        time.sleep(0.005)
    return seed


def allowed_versions(journal):
    """Per key: what the last confirmed change left, or any change begun after it."""
    allowed = defaultdict(lambda: {0})
    confirmed = 0
    for line in journal.read_text().splitlines():
        word, number, version = line.split()
        if word == "done":
            allowed[int(number)] = {int(version)}
            confirmed += 1
        else:
            allowed[int(number)].add(int(version))
    return allowed, confirmed


def found_version(result):
    if result.status is ReadStatus.MISSING:
        return 0
    assert result.status is ReadStatus.OK
    return int.from_bytes(result.payload[8:16], "little")


def assert_sound(store):
    """Verify finds nothing, and files and index are the same set."""
    keys = [row.key for row in store.scan()]
    results = store.read([ReadRequest(key) for key in keys])
    assert {result.status for result in results} <= {ReadStatus.OK}
    store._folder._tick(sweep=True)
    sizes = [path.stat().st_size for path in (store.root / "blocks").rglob("*.*")]
    stats = store.stats()
    assert (stats.blocks, stats.corrupt_blocks) == (len(keys), 0)
    assert (len(sizes), sum(sizes)) == (len(keys), sum(row.size for row in store.scan()))
    assert list((store.root / "tmp").iterdir()) == []


def verdict(root):
    """Number of confirmed changes; fails unless all that was confirmed is there."""
    total = 0
    with LocalStore(root / "store", min_free_bytes=0) as store:
        for name in ("0", "1"):
            allowed, confirmed = allowed_versions(root / f"journal-{name}")
            total += confirmed
            numbers = sorted(allowed)
            results = store.read([ReadRequest(block_key(n, name)) for n in numbers])
            for number, result in zip(numbers, results, strict=True):
                assert found_version(result) in allowed[number]
        assert_sound(store)
    with LocalStore(root / "capped", min_free_bytes=0, max_bytes=CAP) as capped:
        assert_sound(capped)
        assert 0 < capped.stats().bytes <= CAP
        assert capped.stats().evicted_blocks > 0
    return total


@pytest.mark.timeout(SECONDS + 120)
def test_killed_writers_lose_nothing_and_corrupt_nothing(tmp_path):
    kills = kill_until(tmp_path, lambda _, seconds: seconds > SECONDS)
    assert kills > SECONDS / 2
    assert verdict(tmp_path) > 10 * SECONDS
