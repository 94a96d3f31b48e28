"""``KVXFER_CONFIG`` and nothing else: no option of the hierarchical cache is given."""

from sglang_cpu.engine import TierEngine

from kvxfer_sglang.plugin import PAGE_SIZE


def test_the_variable_alone_turns_the_tier_on(launch, manifest, texts, tmp_path):
    (prompt,) = texts(1, tokens=5 * PAGE_SIZE + 3)
    variables = {"KVXFER_CONFIG": str(manifest(tmp_path))}
    settings = {"dtype": "float32", "environment": variables, "arguments": ["--enable-metrics"]}
    with launch("small", hierarchical=False, **settings) as server:
        engine = TierEngine(server, PAGE_SIZE)
        own = engine.ask_and_store(prompt).reply
        again = engine.fresh(prompt)
        assert again.reply.from_storage == 5 * PAGE_SIZE
        assert again.reply.token_ids == own.token_ids
        assert again.blocks == {("native", "none"): 5}
