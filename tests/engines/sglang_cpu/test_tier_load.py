"""Both engines under concurrent requests over shared prefixes."""

import random
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sglang_cpu.engine import NEW_TOKENS, PAGE

ROUNDS, ROUND_SECONDS, CLIENTS = 12, 10, 32
PREFIXES, TAILS = 8, 4
WHOLE = 12  # pages of a prompt
WARM_ROUNDS = 4
GROWTH = 64 << 20  # bytes; one whole prompt of the large model takes 1.8 MiB


def make_prompts(texts):
    """Eleven shared pages, then a page and a half of each prompt's own."""
    shared = texts(PREFIXES, tokens=(WHOLE - 1) * PAGE)
    tails = texts(PREFIXES * TAILS, tokens=24)
    return [shared[i % PREFIXES] + tail for i, tail in enumerate(tails)]


def memory(server):
    """Resident bytes of all processes of a server."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            group = int(status.with_name("stat").read_text().rpartition(")")[2].split()[2])
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        except (OSError, ValueError):
            continue  # it ended meanwhile
        if group == server.process.pid:
            total += int(fields.get("VmRSS", "0 kB").split()[0]) * 1024
    return total


class Load:
    """Clients that ask at random until the time is up, and what they were told."""

    def __init__(self, engines, prompts):
        self.engines, self.prompts = engines, prompts
        self.lock = threading.Lock()
        self.asked = 0
        self.answers = defaultdict(set)
        self.sizes = []

    def client(self, seed, deadline):
        choose = random.Random(seed)
        while time.monotonic() < deadline:
            prompt = choose.choice(self.prompts)
            name = choose.choice(["small", "large"])
            server = getattr(self.engines, name).server
            reply = server.generate(prompt, max_new_tokens=NEW_TOKENS)
            with self.lock:
                self.asked += 1
                self.answers[name, tuple(prompt)].add((reply.in_any_tier, tuple(reply.token_ids)))

    def run(self, pool):
        """Each round begins with nothing in the engines' own tiers, every other one with no
        derived blocks either: so all prefixes are read, or converted, by 32 requests at once."""
        pair = (self.engines.small, self.engines.large)
        for number in range(ROUNDS):
            for engine in pair:
                engine.server.flush_cache()
            if number % 2 == 0:
                self.engines.large.server.clear_storage()
            deadline = time.monotonic() + ROUND_SECONDS
            seeds = range(CLIENTS * number, CLIENTS * (number + 1))
            list(pool.map(self.client, seeds, [deadline] * CLIENTS))
            self.sizes.append([memory(engine.server) for engine in pair])


@pytest.mark.timeout(900, func_only=True)
def test_two_minutes_of_concurrent_requests(engines, texts, oracle):
    prompts = make_prompts(texts)
    for first in range(0, len(prompts), PREFIXES):  # each shared prefix once at a time
        engines.small.store_all(prompts[first : first + PREFIXES])
    before, native = engines.large.lookups(), engines.large.written("native")
    load = Load(engines, prompts)
    with ThreadPoolExecutor(CLIENTS) as pool:
        load.run(pool)
    assert load.asked > 2 * len(prompts)

    # The small model's blocks of every prompt are there, so nothing else can have been served.
    assert {outcome for outcome, _ in engines.large.lookups() - before} == {"converted", "derived"}
    assert engines.large.written("native") == native
    wrong = []
    for (name, prompt), given in load.answers.items():
        right = oracle.of_source(prompt)
        if name == "large":
            right = oracle.of_target(prompt, WHOLE * PAGE)
        wrong += [
            (name, prompt, g) for g in given if g[0] != WHOLE * PAGE or not right.agrees(g[1])
        ]
    assert not wrong

    assert engines.small.errors() == engines.large.errors() == 0
    for first, last in zip(load.sizes[WARM_ROUNDS], load.sizes[-1], strict=True):
        assert last - first < GROWTH
