"""The tier behind two real SGLang engines that are alive at once, over one store."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang_cpu.engine import PAGE, extra_config

from kvstore_xfer.blocks.header import BlockHeader
from kvstore_xfer.gate.record import ACCEPTED, GateRecord, subject
from kvstore_xfer.mapper.artifact import Artifact, record_gate, save
from kvstore_xfer.mapper.maps import LayerMap, Mapper, Method, assign_heads
from kvstore_xfer.store.base import ReadRequest, ReadStatus
from kvstore_xfer.store.local.store import LocalStore

VOCABULARY = 2048
WHOLE = 12  # pages in a prompt of `texts`, which has 8 tokens more


def test_a_model_answers_from_storage_as_from_its_own_cache(engines, texts):
    engines.small.assert_serves_its_own_pages(texts(20))


def test_the_large_model_is_served_from_the_small_ones_blocks(engines, texts, oracle):
    prompts = texts(20)
    engines.small.store_all(prompts)
    firsts = [engines.large.ask_and_store(prompt) for prompt in prompts]
    engines.large.server.flush_cache()
    for prompt, first in zip(prompts, firsts, strict=True):
        assert first.reply.from_storage == WHOLE * PAGE
        assert first.blocks == {("converted", "none"): WHOLE}
        assert oracle.of_target(prompt, WHOLE * PAGE).agrees(first.reply.token_ids)
        second = engines.large.ask(prompt)
        assert second.reply.from_storage == WHOLE * PAGE
        assert second.blocks == {("derived", "none"): WHOLE}
        assert second.reply.token_ids == first.reply.token_ids


def distributions(engine, prompts, starts, **request):
    """Replies, and log-probabilities ``[tokens, vocabulary]`` after each token from a start on."""
    replies = engine.server.generate_all(
        prompts,
        max_new_tokens=1,
        return_logprob=True,
        logprob_start_len=starts,
        top_logprobs_num=VOCABULARY,
        **request,
    )
    return replies, [table_of(reply.meta) for reply in replies]


def table_of(meta):
    # The first row belongs to the token at the start itself, the last one to the new token.
    rows = [*meta["input_top_logprobs"][1:], meta["output_top_logprobs"][0]]
    table = np.full((len(rows), VOCABULARY), -np.inf)
    for line, row in zip(table, rows, strict=True):
        values, tokens, _ = zip(*row, strict=True)
        line[list(tokens)] = values
    return table


@pytest.mark.timeout(900, func_only=True)  # 8 million log-probabilities as JSON
def test_distributions_agree_within_the_interval_of_the_gate(engines, texts, family_mapper):
    """60 passages; of the 64 tokens behind a prefix the first half in one, the second in the next.

    As many from each half as the gate has, and half as much to send.
    """
    prefix, half = WHOLE * PAGE, 32
    passages = texts(60, tokens=prefix + 2 * half)
    engines.small.store_all([passage[: prefix + 1] for passage in passages])
    engines.large.server.flush_cache()  # passages of another length begin with the same text
    kl, top1 = [], []
    for first in range(0, len(passages), 10):  # a few at a time: an answer takes 2 MB
        starts = [prefix + half * (number % 2) for number in range(first, first + 10)]
        prompts = [
            passage[: start + half]
            for passage, start in zip(passages[first : first + 10], starts, strict=True)
        ]
        _, natives = distributions(engines.large, prompts, starts, extra_key="native")
        before = engines.large.lookups()
        replies, mappeds = distributions(engines.large, prompts, starts)
        blocks = engines.large.lookups() - before
        assert blocks["converted", "none"] + blocks["derived", "none"] == 10 * WHOLE, blocks
        assert {reply.from_storage for reply in replies} == {prefix}
        for native, mapped in zip(natives, mappeds, strict=True):
            assert native.shape == mapped.shape == (half, VOCABULARY)
            kl.append((np.exp(native) * (native - mapped)).sum(-1).mean())
            top1.append((native.argmax(-1) == mapped.argmax(-1)).mean())
    promised = family_mapper.record.arms["mapped"]
    assert promised["kl"]["low"] <= np.mean(kl) <= promised["kl"]["high"]
    assert promised["top1"]["low"] <= np.mean(top1) <= promised["top1"]["high"]


def stored(store, kind):
    """Headers and payloads of the blocks of one kind, by chain hash."""
    with LocalStore(store) as opened:
        keys = [row.key for row in opened.scan("v1/")]
        wanted = [key for key in keys if BlockHeader(key, 0).block_key.kind.startswith(kind)]
        results = opened.read([ReadRequest(key) for key in wanted])
    found = {}
    for result in results:
        assert result.status is ReadStatus.OK
        found[result.header.block_key.chain_hash] = result
    return found


def delete(store, kind, hashes):
    with LocalStore(store) as opened:
        keys = [row.key for row in opened.scan("v1/")]
        chosen = [
            key
            for key in keys
            for parsed in [BlockHeader(key, 0).block_key]
            if parsed.kind.startswith(kind) and parsed.chain_hash in hashes
        ]
        assert all(opened.delete(chosen))


def test_a_longer_prompt_is_converted_at_the_right_positions(engines, texts):
    """The anchor is not the root: SGLang asks only for the pages behind those it has."""
    known = set(stored(engines.store, "derived"))
    (prompt,) = texts(1, tokens=36 * PAGE + 5)
    own = {"extra_key": "anchor"}  # other tests ask about the same text
    engines.small.ask_and_store(prompt, **own)
    engines.large.ask_and_store(prompt[: 23 * PAGE + 5], **own)
    extended = engines.large.ask_and_store(prompt, **own)
    assert extended.blocks == {("converted", "none"): 13}
    in_two = {k: v for k, v in stored(engines.store, "derived").items() if k not in known}
    assert sorted(block.header.first_token for block in in_two.values()) == [
        PAGE * number for number in range(36)
    ]

    delete(engines.store, "derived", in_two.keys())
    engines.large.server.flush_cache()
    assert engines.large.ask_and_store(prompt, **own).blocks == {("converted", "none"): 36}
    at_once = stored(engines.store, "derived")
    for name, block in in_two.items():
        assert at_once[name].payload == block.payload
        assert at_once[name].header.first_token == block.header.first_token


def test_a_native_block_replaces_the_derived_one(engines, manifest, texts):
    (prompt,) = texts(1, tokens=9 * PAGE + 3)
    own = {"extra_key": "replaced"}
    engines.small.ask_and_store(prompt, **own)
    before = set(stored(engines.store, "derived"))
    assert engines.large.ask_and_store(prompt, **own).of("converted") == 9
    made = set(stored(engines.store, "derived")) - before
    assert len(made) == 9
    # With the pair off, the large model computes the prompt itself.
    engines.large.attach(manifest(engines.store, policy={"enabled": False}))
    assert engines.large.ask_and_store(prompt, **own).blocks == {("declined", "disabled"): 9}
    assert not made & set(stored(engines.store, "derived"))
    engines.large.attach(engines.manifest)
    assert engines.large.fresh(prompt, **own).blocks == {("native", "none"): 9}


def down_mapper(folder, artifact):
    """A mapper large -> small of random numbers, with a forged acceptance: it would serve."""
    source, target = artifact.mapper.target, artifact.mapper.source
    generator = torch.Generator().manual_seed(0)

    def maps(width_in, width_out):
        weights = torch.randn(
            target.layers, target.kv_heads, width_in, width_out, generator=generator
        )
        return tuple(
            LayerMap((0,), weight.clone() / width_in, torch.zeros(target.kv_heads, width_out))
            for weight in weights
        )

    mapper = Mapper(
        method=Method.HEAD_LOCAL,
        source=source,
        target=target,
        head_assignment=assign_heads(source.kv_heads, target.kv_heads),
        keys=maps(source.key_dim, target.key_dim),
        values=maps(source.value_dim, target.value_dim),
    )
    saved = save(folder, Artifact(mapper))
    rates = {
        "prefill_tokens_per_second": 1.0,
        "conversion_tokens_per_second": 1e6,
        "longest_prefix_tokens": 4096,
    }
    record = GateRecord(ACCEPTED, "", **subject(saved.mapper, "float32"), **rates)
    record_gate(folder, "float32", record.to_json())
    return folder


def test_a_derived_block_is_never_a_source(engines, manifest, texts, family_mapper, tmp_path):
    down = manifest(
        engines.store,
        mapper=down_mapper(tmp_path / "down", family_mapper.artifact),
        source="large",
        target="small",
    )
    native, derived = texts(2, tokens=9 * PAGE + 3)
    own = {"extra_key": "source"}
    engines.large.ask_and_store(native, **own)
    before = set(stored(engines.store, "native"))
    engines.small.ask_and_store(derived, **own)
    assert engines.large.ask_and_store(derived, **own).of("converted") == 9
    delete(engines.store, "native", set(stored(engines.store, "native")) - before)

    engines.small.attach(down)
    assert engines.small.ask(native, **own).blocks == {("converted", "none"): 9}
    # The large model holds this prompt too, but only as blocks derived from the small one's.
    assert engines.small.ask(derived, **own).blocks == {("missed", "absent"): 9}
    engines.small.attach(engines.manifest)


def test_tenants_share_nothing(engines, texts):
    (prompt,) = texts(1, tokens=9 * PAGE + 3)
    engines.small.ask_and_store(prompt, extra_key="one")
    for engine, tenant in ((engines.small, "two"), (engines.large, "three")):
        other = engine.ask(prompt, extra_key=tenant)
        assert other.reply.cached.get("storage", 0) == 0
        assert other.blocks == {("missed", "absent"): 9}
    own = engines.large.ask(prompt, extra_key="one")
    assert own.reply.from_storage == 9 * PAGE


def other_weights(folder, model):
    """A copy of a model whose values have the other sign."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith("v_proj.weight"):
            weights[name] = -weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_other_weights_under_the_same_name_share_nothing(engines, texts, tmp_path):
    (prompt,) = texts(1, tokens=9 * PAGE + 3)
    own = {"extra_key": "weights"}
    engine, server = engines.small, engines.small.server
    before = engine.ask_and_store(prompt, **own)
    changed = other_weights(tmp_path / "small", server.launch.model)

    def load(folder):
        server.call("POST", "/update_weights_from_disk", {"model_path": str(folder)})

    load(changed)
    after = engine.fresh(prompt, **own)
    assert after.blocks == {("missed", "absent"): 9}
    assert after.reply.token_ids != before.reply.token_ids
    assert engine.refused() == {"not_in_family"}
    # Nor for a sibling, which finds only what the original weights computed.
    (elsewhere,) = texts(1, tokens=11 * PAGE)
    engine.ask_and_store(elsewhere, extra_key="changed")
    assert engines.large.ask(elsewhere, extra_key="changed").of("missed") == 10

    load(server.launch.model)
    again = engine.fresh(prompt, **own)
    assert again.blocks == {("native", "none"): 9}
    assert again.reply.token_ids == before.reply.token_ids
    assert engine.refused() == set()


def test_a_weight_update_that_leaves_old_pages_behind_turns_the_tier_off(engines, texts):
    (prompt,) = texts(1, tokens=9 * PAGE + 3)
    engine, server = engines.small, engines.small.server
    body = {"model_path": str(server.launch.model), "flush_cache": False}
    server.call("POST", "/update_weights_from_disk", body)
    assert engine.ask(prompt, extra_key="mixed").blocks == {}
    assert engine.refused() == {"weights_changed"}
    server.detach_storage()
    server.attach_storage(extra_config(engines.manifest))
    assert engine.refused() == {"weights_changed"}  # the old pages are still there
    assert engine.fresh(prompt, extra_key="mixed").blocks == {("missed", "absent"): 9}
    assert engine.refused() == set()


def test_clear_deletes_what_this_model_stored(engines, texts):
    (prompt,) = texts(1, tokens=9 * PAGE + 3)
    engines.small.ask_and_store(prompt, extra_key="cleared")
    engines.small.server.clear_storage()
    assert engines.small.fresh(prompt, extra_key="cleared").blocks == {("missed", "absent"): 9}
    assert stored(engines.store, "derived")  # the other model's blocks stay


def test_nothing_went_wrong_unnoticed(engines):
    """Last: no call of the tests above was answered from an unexpected error."""
    assert engines.small.errors() == engines.large.errors() == 0
