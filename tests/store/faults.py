"""Break the stores on purpose, and count what must never happen.

    python tests/store/faults.py            # the figures of docs/reliability.md
    python tests/store/faults.py --short    # what the tests run

Every scenario counts calls, wrong bytes (a read that is OK and returns anything but what was
written) and unreported losses (a block whose write was confirmed, that nothing removed, and that
reads as missing), and the longest call in seconds. Scenarios of a tier count its `find` and `read`
of native blocks instead; a confirmed block that it calls absent is a loss.
"""

import argparse
import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).parent))

import s3_servers
import torch
import valkey_servers

from kvstore_xfer.blocks.identity import Identity
from kvstore_xfer.blocks.key import Shard
from kvstore_xfer.blocks.page import KvPage, KvShape
from kvstore_xfer.outcome import Reason
from kvstore_xfer.store.base import ReadRequest, ReadStatus, WriteStatus
from kvstore_xfer.store.local import LocalStore, folder
from kvstore_xfer.store.testing import block_bytes, block_key, write_request
from kvstore_xfer.store.url import open_store
from kvstore_xfer.tier.tier import Tier

SIZE = 40_000
SHAPE = KvShape(2, 16, 4, 32, 32, torch.float32)


class Count:
    """What happened to one store under one fault."""

    def __init__(self, store, chance, *, volatile=False):
        self.store, self.chance, self.volatile = store, chance, volatile
        self.confirmed = set()
        self.wrong = self.lost = self.calls = 0
        self.longest = 0.0
        self.statuses = Counter()

    def timed(self, call, *arguments):
        start = time.monotonic()
        result = call(*arguments)
        self.longest = max(self.longest, time.monotonic() - start)
        self.calls += 1
        return result

    def put(self, number):
        request = write_request(block_key(number), block_bytes(number, SIZE))
        (status,) = self.timed(self.store.write, [request])
        self.statuses[status.value] += 1
        if status in (WriteStatus.STORED, WriteStatus.EXISTS):
            self.confirmed.add(number)

    def read(self, number, *, final=False):
        (result,) = self.timed(self.store.read, [ReadRequest(block_key(number))])
        self.statuses[result.status.value] += 1
        if result.status is ReadStatus.OK:
            self.wrong += result.payload != block_bytes(number, SIZE)
        elif result.status is ReadStatus.MISSING or final:
            self.lost += number in self.confirmed and not self.volatile
        if result.status is ReadStatus.CORRUPT:
            self.confirmed.discard(number)  # reported, and gone

    def some(self, numbers):
        number = self.chance.randrange(numbers)
        if self.chance.random() < 0.4:
            self.put(number)
        elif self.chance.random() < 0.8:
            self.read(number)
        else:
            self.timed(self.store.exists, [block_key(number)])

    def figures(self):
        return {
            "calls": self.calls,
            "wrong bytes": self.wrong,
            "unreported losses": self.lost,
            "longest call": self.longest,
            "statuses": dict(sorted(self.statuses.items())),
        }


class TierCount:
    """The same for a tier over one store: prompts of four native blocks, the store's defaults."""

    def __init__(self, store, chance):
        identity = Identity("weights", "tokenizer", "float32", SHAPE.tokens, "test")
        self.tier = Tier(store, "model", identity, Shard(0, 4, 0, 2), SHAPE, [])
        self.chance = chance
        self.confirmed = set()
        self.wrong = self.lost = self.calls = 0
        self.longest = 0.0
        self.reasons = Counter()

    timed = Count.timed

    @staticmethod
    def prompt(number):
        names = [f"{number:032x}{block:032x}" for block in range(4)]
        return names, [page_of(4 * number + block) for block in range(4)]

    def write(self, number):
        names, pages = self.prompt(number)
        done = (WriteStatus.STORED, WriteStatus.EXISTS)
        if all(status in done for status in self.tier.write(names, pages, 0)):
            self.confirmed.add(number)

    def ask(self, number):
        names, expected = self.prompt(number)
        plans = self.timed(self.tier.find, names)
        pages = [KvPage.empty(SHAPE) for _ in names]
        results = self.timed(self.tier.read, plans, pages)
        for result, page, right in zip(results, pages, expected, strict=True):
            self.reasons[result.reason.value] += 1
            equal = torch.equal(page.keys, right.keys) and torch.equal(page.values, right.values)
            self.wrong += result.served and not equal
            self.lost += result.reason is Reason.ABSENT and number in self.confirmed
        return all(result.served for result in results)

    def until_served(self):
        """Everything confirmed, when the faults are over."""
        end = time.monotonic() + 60
        for number in sorted(self.confirmed):
            while not self.ask(number):
                if time.monotonic() > end:
                    self.lost += 1
                    break
                time.sleep(0.1)

    def figures(self):
        self.tier.close()
        return {
            "calls": self.calls,
            "wrong bytes": self.wrong,
            "unreported losses": self.lost,
            "longest call": self.longest,
            "reasons": dict(sorted(self.reasons.items())),
        }


def page_of(number):
    page = KvPage.empty(SHAPE)
    generator = torch.Generator().manual_seed(number)
    for part in (page.keys, page.values):
        part.copy_(torch.randn(part.shape, generator=generator))
    return page


def power_cut(work, rounds, chance):
    """What was never synced is dropped or torn: payload pages, whole files, the last commits."""
    total = Counter()
    longest = 0.0
    for number in range(rounds):
        live, after = work / f"live-{number}", work / f"after-{number}"
        with LocalStore(live, min_free_bytes=0) as store:
            count = Count(store, chance)
            for n in range(20):
                count.put(n)
            shutil.copytree(live / "index", work / f"index-{number}")
            for n in range(20, 40):
                count.put(n)
            shutil.copytree(live, after)  # still open: nothing was closed in order
        if chance.random() < 0.5:  # metasync is off: the last commits may be undone
            shutil.rmtree(after / "index")
            shutil.copytree(work / f"index-{number}", after / "index")
        touched = _tear(after, chance)
        boot, folder._boot_id = folder._boot_id, lambda: "after the power cut"
        try:
            with LocalStore(after, min_free_bytes=0) as store:
                store._folder._tick(sweep=True)
                found = Count(store, chance)
                found.confirmed = set(range(40)) - touched
                for n in range(40):
                    found.read(n)
                for n in range(40):
                    found.put(n)
                for n in range(40):
                    found.read(n)
        finally:
            folder._boot_id = boot
        total += Counter(calls=found.calls, wrong=found.wrong, lost=found.lost)
        longest = max(longest, found.longest)
    return {
        "calls": total["calls"],
        "wrong bytes": total["wrong"],
        "unreported losses": total["lost"],
        "longest call": longest,
    }


def _tear(root, chance):
    """Numbers of the blocks whose file lost something."""
    names = {Path(path).name.split(".")[0]: path for path in root.glob("blocks/*/*")}
    touched = set()
    for number in chance.sample(range(40), 15):
        path = names[_digest(number)]
        size = path.stat().st_size
        touched.add(number)
        kind = chance.choice(["gone", "short", "zeros", "empty"])
        if kind == "gone":
            path.unlink()
        elif kind == "short":
            os.truncate(path, chance.randrange(size))
        elif kind == "empty":
            os.truncate(path, 0)
        else:
            with path.open("r+b") as file:
                file.seek(4096 * chance.randrange(size // 4096))
                file.write(bytes(4096))
    return touched


def _digest(number):
    import hashlib

    return hashlib.sha256(block_key(number).encode()).hexdigest()


def flipped_bits(work, rounds, chance):
    """In payloads and headers while the store is open."""
    with LocalStore(work / "flipped", min_free_bytes=0) as store:
        count = Count(store, chance)
        for n in range(40):
            count.put(n)
        for _ in range(rounds):
            number = chance.randrange(40)
            for path in (work / "flipped" / "blocks").glob(f"*/{_digest(number)}.*"):
                with path.open("r+b") as file:
                    file.seek(chance.randrange(path.stat().st_size))
                    byte = file.read(1)
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte[0] ^ 1 << chance.randrange(8)]))
            count.read(number)
            count.put(number)
            count.read(number)
        return count.figures()


def disk_full(work, rounds, chance):
    """The file size limit of the kernel fails writes half way, now and then."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with LocalStore(work / "full", min_free_bytes=0) as store:
        count = Count(store, chance)
        count.put(0)
        for number in range(rounds):
            limit = chance.choice([8192, 20_000, hard])
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            try:
                count.put(number)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            count.read(number)
        for number in range(rounds):
            count.read(number)
        return count.figures()


def valkey_faults(work, seconds, chance):
    """Killed, restarted, stopped and out of memory, beneath memory and disk."""
    near = "|".join(f"local://{work / name}?min_free=0" for name in ("memory", "disk"))
    with (
        valkey_servers.single(work / "valkey", "--maxmemory", "20mb") as server,
        open_store(f"{near}|valkey://127.0.0.1:{server.port}?timeout=300ms") as store,
    ):
        count = Count(store, chance)
        _torment(count, server, seconds)
        for number in sorted(count.confirmed):
            count.read(number, final=True)
        return count.figures()


def valkey_alone(work, seconds, chance):
    """The same server without near levels: what it lost with its memory is missing."""
    with (
        valkey_servers.single(work / "alone", "--maxmemory", "20mb") as server,
        open_store(f"valkey://127.0.0.1:{server.port}?timeout=300ms") as store,
    ):
        count = Count(store, chance, volatile=True)
        _torment(count, server, seconds)
        return count.figures()


def _torment(count, server, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        kind = count.chance.choice(["kill", "stop"])
        if kind == "kill":
            server.kill()
        else:
            server.pause()
        until = time.monotonic() + count.chance.uniform(0.2, 2)
        while time.monotonic() < until:
            count.some(1000)
        if kind == "kill":
            server.start()
        else:
            server.resume()
        until = time.monotonic() + count.chance.uniform(0.2, 2)
        while time.monotonic() < until:
            count.some(1000)


@contextlib.contextmanager
def s3_behind_a_proxy(work, options=""):
    """A proxy that makes faults, and a store behind it."""
    os.environ.update(s3_servers.LOGIN)
    with s3_servers.s3_server(work / "s3") as server:
        proxy = s3_servers.Proxy(server)
        where = f"region=us-east-1&endpoint={quote(proxy.endpoint)}{options}"
        with contextlib.closing(proxy), open_store(f"s3://{s3_servers.BUCKET}?{where}") as store:
            yield proxy, store


def s3_faults(work, seconds, chance):
    """500s in bursts and bodies slower than the time-out."""
    with s3_behind_a_proxy(work, "&timeout=500ms") as (proxy, store):
        count = Count(store, chance)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            proxy.failures = chance.choice([0, 1, 2, 20])
            proxy.body_seconds = chance.choice([0.0, 0.0, 0.0, 2.0])
            for _ in range(10):
                count.some(50)
        proxy.failures, proxy.body_seconds = 0, 0.0
        time.sleep(11)  # the breaker's longest pause
        for number in sorted(count.confirmed):
            count.read(number, final=True)
        return count.figures()


def tier_on_s3(work, seconds, chance):
    """Native blocks of a tier: 500s, answers that are late, bodies that do not end."""
    with s3_behind_a_proxy(work) as (proxy, store):
        count = TierCount(store, chance)
        for number in range(20):
            count.write(number)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            proxy.failures = chance.choice([0, 0, 2, 20])
            proxy.think_seconds = chance.choice([0.0, 0.0, 0.0, 3.0])
            proxy.body_seconds = chance.choice([0.0, 0.0, 5.0])
            for _ in range(10):
                count.ask(chance.randrange(20))
        proxy.failures, proxy.think_seconds, proxy.body_seconds = 0, 0.0, 0.0
        count.until_served()
        return count.figures()


def tier_on_valkey(work, seconds, chance):
    """Native blocks of a tier whose server stops and goes on, some of it between find and read."""
    with (
        valkey_servers.single(work / "valkey") as server,
        open_store(f"valkey://127.0.0.1:{server.port}") as store,
    ):
        count = TierCount(store, chance)
        for number in range(20):
            count.write(number)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            plans = count.tier.find(count.prompt(0)[0])
            server.pause()
            count.timed(count.tier.read, plans, [KvPage.empty(SHAPE) for _ in plans])
            for _ in range(chance.randrange(10)):
                count.ask(chance.randrange(20))
            server.resume()
            until = time.monotonic() + chance.uniform(0.2, 2)
            while time.monotonic() < until:
                count.ask(chance.randrange(20))
        count.until_served()
        return count.figures()


def kills(work, number, chance):
    """SIGKILL of two processes that write and read one folder; see test_local_crash.py."""
    from test_local_crash import kill_until, verdict

    del chance
    done = kill_until(work, lambda killed, _: killed >= number)
    confirmed = verdict(work)
    return {"calls": confirmed, "kills": done, "wrong bytes": 0, "unreported losses": 0}


SCENARIOS = {
    "SIGKILL of writers and readers, local": (kills, 6, 200),
    "power cut, local": (power_cut, 3, 100),
    "flipped bits, local": (flipped_bits, 100, 5000),
    "disk full mid-write, local": (disk_full, 60, 1000),
    "Valkey killed, stopped, full; under memory and disk": (valkey_faults, 5, 60),
    "Valkey killed, stopped, full; alone": (valkey_alone, 5, 60),
    "S3 answers 500, slow bodies": (s3_faults, 5, 60),
    "a tier's native blocks, S3 late, slow, failing": (tier_on_s3, 5, 60),
    "a tier's native blocks, Valkey stops and goes on": (tier_on_valkey, 5, 60),
}


def run(name, *, short, seed=1):
    scenario, few, many = SCENARIOS[name]
    work = Path(tempfile.mkdtemp(prefix="kvxfer-faults-"))
    try:
        return scenario(work, few if short else many, random.Random(seed))
    finally:
        shutil.rmtree(work)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true")
    parser.add_argument("names", nargs="*", help="only scenarios whose name holds one of these")
    args = parser.parse_args()
    short = args.short
    print("| fault | times | calls | wrong bytes | unreported losses | longest call |")
    print("|---|---|---|---|---|---|")
    for name, (_, few, many) in SCENARIOS.items():
        if args.names and not any(part in name for part in args.names):
            continue
        found = run(name, short=short)
        longest = f"{found['longest call']:.2f} s" if "longest call" in found else ""
        times = found.get("kills", few if short else many)
        unit = " s" if "Valkey" in name or "S3" in name else ""
        print(
            f"| {name} | {times}{unit} | {found['calls']} | {found['wrong bytes']} "
            f"| {found['unreported losses']} | {longest} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
