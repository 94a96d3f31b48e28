"""LMCache's real server with both plug-ins, in both of its transfer modes."""

import itertools
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import yaml
from clients import Cache, Worker, connected
from server import LmcacheServer, eventually

from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.mapper.artifact import load
from kvstore_xfer.mapper.convert import TorchConverter

CHUNK, CHUNKS = 64, 5
TOKENS = CHUNK * CHUNKS
MODES = ["engine_driven", "lmcache_driven"]
MANIFEST = Path(os.environ["TEST_MANIFEST"])


@pytest.fixture(scope="module", params=MODES)
def running(request, tmp_path_factory):
    with LmcacheServer(sys.executable, MANIFEST, tmp_path_factory.mktemp("server")) as server:
        yield server, request.param


class Family:
    """The trained pair of the manifest: geometry and the real mapper, caches of random numbers."""

    def __init__(self):
        manifest = yaml.safe_load(MANIFEST.read_text())
        self.mapper = load(manifest["pairs"][0]["mapper"]).mapper
        self.paths = {name: entry["path"] for name, entry in manifest["models"].items()}
        self.models = {"small": self.mapper.source, "large": self.mapper.target}

    def cache(self, role):
        model = self.models[role]
        return Cache(self.paths[role], model.layers, model.kv_heads, model.key_dim)

    def page(self, role, tokens, seed=0):
        model = self.models[role]
        shape = (model.layers, tokens, model.kv_heads, model.key_dim)
        generator = torch.Generator().manual_seed(seed)
        return KvPage(*(torch.randn(shape, generator=generator) for _ in range(2)))

    def converted(self, page):
        model = self.models["large"]
        shape = (model.layers, page.keys.shape[1], model.kv_heads, model.key_dim)
        target = KvPage(torch.empty(shape), torch.empty(shape))
        TorchConverter(self.mapper, torch.float32).convert([page], [0], [target])
        return target


@pytest.fixture(scope="module")
def family():
    return Family()


@pytest.fixture(scope="module")
def workers(running, family):
    """A worker of each model; the server is the same for the whole module."""
    server, mode = running
    with connected(server.port) as client:
        made = [
            Worker(client, family.cache(role), number, mode)
            for number, role in enumerate(("small", "large"), start=1)
        ]
        yield made
        for worker in made:
            worker.close()


numbers = itertools.count()


def prompt(chunks=CHUNKS):
    seed = next(numbers)
    return [(seed * 7919 + 31 * i) % 2000 for i in range(CHUNK * chunks + 9)]


def equal(one, other):
    return torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


def answer(worker, tokens, request, salt=""):
    hit = worker.look_up(tokens, request, salt)
    page = worker.retrieve(tokens, request, hit * CHUNK, salt) if hit else None
    worker.end(request)
    return hit, page


def answer_in_the_end(worker, tokens, request, salt=""):
    """LMCache misses while it is still loading the same chunks for an earlier request."""
    answers = []

    def found():
        answers.append(answer(worker, tokens, f"{request}-{len(answers)}", salt))
        return answers[-1][0] > 0

    eventually(found, 20)
    return answers[-1]


def stored(server, before, count):
    name = "kvxfer_written_blocks_total"
    eventually(lambda: server.total(name, kind="native") >= before + count, 20)


def store_in_two_steps(server, worker, tokens, page, request, salt=""):
    """As a chunked prefill does; returns when the tier has all and LMCache's memory is empty."""
    before = server.total("kvxfer_written_blocks_total", kind="native")
    assert worker.look_up(tokens, request, salt) == 0
    worker.store(tokens, request, 0, page.cut(0, 2 * CHUNK), salt)
    worker.store(tokens, request, 2 * CHUNK, page.cut(2 * CHUNK, TOKENS), salt)
    worker.end(request)
    stored(server, before, CHUNKS)
    server.clear()


def test_the_large_model_reads_what_the_small_one_stored(running, workers, family):
    server, _ = running
    small, large = workers
    tokens, page = prompt(), family.page("small", TOKENS)
    assert answer(large, tokens, "cold") == (0, None)
    store_in_two_steps(server, small, tokens, page, "store")
    hit, own = answer(small, tokens, "own")
    assert hit == CHUNKS
    assert equal(own, page)
    expected = family.converted(page)
    outcomes = []
    for request in ("first", "second"):
        server.clear()
        before = {
            o: server.total("kvxfer_lookup_blocks_total", target="large", outcome=o)
            for o in ("converted", "derived")
        }
        hit, got = answer(large, tokens, request)
        assert hit == CHUNKS
        assert equal(got, expected)
        outcomes.append(
            {
                o: server.total("kvxfer_lookup_blocks_total", target="large", outcome=o) - n
                for o, n in before.items()
            }
        )
        eventually(
            lambda: server.total("kvxfer_written_blocks_total", kind="derived") >= CHUNKS, 20
        )
    assert outcomes == [{"converted": CHUNKS, "derived": 0}, {"converted": 0, "derived": CHUNKS}]
    report = server.adapter()
    assert {row["name"] for row in report["engines"]} == {"small", "large"}
    assert all(row["refusals"] == [] for row in report["engines"])


def test_the_server_confirms_places_where_it_moves_the_data(running, workers, family):
    server, mode = running
    before = server.status()["kvxfer_places"]
    small, _ = workers
    store_in_two_steps(server, small, prompt(), family.page("small", TOKENS), "places")
    expected = CHUNKS if mode == "lmcache_driven" else 0

    def grew():
        after = server.status()["kvxfer_places"]
        return after["agreed"] - before["agreed"] == expected

    eventually(grew, 10)
    assert server.status()["kvxfer_places"]["contradicted"] == 0


@pytest.mark.parametrize("size", [32, 64])
def test_the_server_says_how_vllm_packs_on_a_cpu(running, family, tmp_path, size):
    """The manifest says nothing; LMCache's server knows the block size of a worker like vLLM's."""
    _, mode = running
    with (
        LmcacheServer(sys.executable, MANIFEST, tmp_path) as server,
        connected(server.port) as client,
    ):
        worker = Worker(client, family.cache("small"), 1, mode, packed=size)
        assert worker.look_up(prompt(), "packed") == 0
        eventually(lambda: server.adapter()["engines"], 20)
        (row,) = server.adapter()["engines"]
        assert (row["name"], row["layout"], row["stored"]) == ("small", "packed", True)
        assert row["refusals"] == []
        assert row["block_sizes"] == [size]
        log = server.log.read_text()
        assert re.search(r"LMCache INFO:\S* kvxfer: family tests .*, local store", log)
        worker.close()


def test_tenants_and_concurrent_requests(running, workers, family):
    """Eight requests at once, of two tenants and both models: everyone gets the own bytes."""
    server, _ = running
    small, _ = workers
    tokens = prompt()
    pages = {salt: family.page("small", TOKENS, seed) for seed, salt in enumerate(("a", "b"), 1)}
    for salt, page in pages.items():
        store_in_two_steps(server, small, tokens, page, f"store-{salt}", salt)
    failures, everyone = [], threading.Barrier(8)

    def ask(role, salt, number):
        with connected(server.port) as client:
            worker = Worker(client, family.cache(role), number, running[1])
            everyone.wait(60)
            hit, got = answer(worker, tokens, f"{role}-{salt}-{number}", salt)
            page = pages[salt]
            expected = page if role == "small" else family.converted(page)
            # LMCache misses what it is loading for somebody else at this moment.
            if hit and not (hit == CHUNKS and equal(got, expected)):
                failures.append((role, salt, hit))
            everyone.wait(60)  # LMCache forgets a model when one of its workers leaves
            worker.close()

    threads = [
        threading.Thread(target=ask, args=(role, salt, 100 + 10 * n + k))
        for n, role in enumerate(("small", "large"))
        for k, salt in enumerate(("a", "b", "a", "b"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for salt, page in pages.items():
        hit, got = answer_in_the_end(small, tokens, f"end-{salt}", salt)
        assert hit == CHUNKS
        assert equal(got, page)
    assert answer(small, tokens, "no-salt") == (0, None)


def test_a_request_that_is_cancelled_during_its_lookup(running, workers, family):
    server, _ = running
    small, large = workers
    tokens, page = prompt(), family.page("small", TOKENS, 7)
    failures = server.total("kvxfer_errors_total")
    store_in_two_steps(server, small, tokens, page, "store-cancel")
    for number in range(5):
        whole = large._key(tokens, f"cancel-{number}", 0, TOKENS, None, "")
        large._client.lookup(whole, 1).result(timeout=20)
        large.end(f"cancel-{number}")
    hit, got = answer_in_the_end(large, tokens, "after")
    assert hit == CHUNKS
    assert equal(got, family.converted(page))

    def settled():  # LMCache may still load for requests that are gone
        return server.adapter()["waiting"] == {"stores": 0, "lookups": 0, "loads": 0}

    eventually(settled, 20)
    assert server.total("kvxfer_errors_total") == failures, "a task ended by its time limit"


def test_lmcaches_own_bench_passes_with_loads_through_the_plug_in(running, tmp_path):
    """Its model is none of the family's: stored plainly, for this server."""
    _, mode = running
    arguments = ["--l2-store-policy", "skip_l1"]
    with LmcacheServer(sys.executable, MANIFEST, tmp_path, arguments=arguments) as server:
        bench = [sys.executable, "-m", "lmcache.cli.main", "bench", "server", "--mode", "cpu"]
        bench += ["--rpc-url", f"tcp://127.0.0.1:{server.port}"]
        bench += ["--url", f"http://127.0.0.1:{server.http}", "--transfer-mode", mode]
        bench += ["--num-tokens", "256", "--kvcache-shape-spec", "(2,64,16,2,64):bfloat16:4"]
        bench += ["--start", "0", "--end", "2", "--interval", "0.5"]
        bench += ["--format", "json", "--output", "out.json"]
        done = subprocess.run(
            bench, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert done.stdout.count("CHECKSUM MATCH OK") + done.stderr.count("CHECKSUM MATCH OK") == 2
        assert server.total("kvxfer_lookup_blocks_total", outcome="native") == 8
        assert server.total("lmcache_mp_lookup_hit_l2_keys_total") == 8
        assert server.total("kvxfer_conversion_refused", reason="not_in_family") == 1
