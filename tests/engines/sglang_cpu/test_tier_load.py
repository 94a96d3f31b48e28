"""Both engines under concurrent requests over shared prefixes."""

import random
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sglang_cpu.engine import NEW_TOKENS, PAGE

SECONDS, CLIENTS, PREFIXES, TAILS = 120, 32, 8, 4
WARM_SECONDS, SAMPLE_SECONDS = 40, 5
GROWTH = 64 << 20  # bytes; one whole prompt of the large model takes 1.8 MiB


def make_prompts(texts):
    """Eleven shared pages, then a page and a half of each prompt's own."""
    shared = texts(PREFIXES, tokens=11 * PAGE)
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
        self.deadline = time.monotonic() + SECONDS
        self.lock = threading.Lock()
        self.asked = 0
        self.answers = defaultdict(set)
        self.sizes = []

    def client(self, seed):
        choose = random.Random(seed)
        while time.monotonic() < self.deadline:
            prompt = choose.choice(self.prompts)
            name = choose.choice(["small", "large"])
            server = getattr(self.engines, name).server
            reply = server.generate(prompt, max_new_tokens=NEW_TOKENS)
            with self.lock:
                self.asked += 1
                self.answers[name, tuple(prompt)].add(tuple(reply.token_ids))

    def watch(self):
        while time.monotonic() < self.deadline:
            time.sleep(SAMPLE_SECONDS)
            pair = (self.engines.small, self.engines.large)
            self.sizes.append([memory(engine.server) for engine in pair])

    def run(self):
        watcher = threading.Thread(target=self.watch)
        watcher.start()
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(self.client, range(CLIENTS)))
        watcher.join()


def is_right(oracle, name, prompt, tokens):
    """Some number of leading pages was converted, most often all of them or none."""
    if name == "small":
        return oracle.of_source(prompt).agrees(tokens)
    pages = (12, 0, *range(11, 0, -1))
    return any(oracle.of_target(prompt, PAGE * n).agrees(tokens) for n in pages)


@pytest.mark.timeout(900, func_only=True)
def test_two_minutes_of_concurrent_requests(engines, texts, oracle):
    prompts = make_prompts(texts)
    for prompt in prompts:
        engines.small.ask_and_store(prompt)
    load = Load(engines, prompts)
    load.run()
    wrong = [
        (name, prompt, tokens)
        for (name, prompt), given in load.answers.items()
        for tokens in given
        if not is_right(oracle, name, prompt, tokens)
    ]
    assert not wrong
    assert load.asked > 2 * len(prompts)
    assert engines.small.errors() == engines.large.errors() == 0
    warm = load.sizes[WARM_SECONDS // SAMPLE_SECONDS :]
    for before, after in zip(warm[0], warm[-1], strict=True):
        assert after - before < GROWTH
