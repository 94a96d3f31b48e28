"""``KVXFER_CONFIG`` and nothing else: no option of the hierarchical cache is given."""

from sglang_cpu.engine import TierEngine

from kvxfer_sglang.plugin import PAGE_SIZE


def test_the_variable_alone_turns_the_tier_on(launch, manifest, texts, tmp_path):
    """In SGLang's default layout, ``page_first``, and with its default wait for pages."""
    settings = {
        "dtype": "float32",
        "environment": {"KVXFER_CONFIG": str(manifest(tmp_path))},
        "arguments": ["--enable-metrics"],
        "max_total_tokens": 16384,
    }
    with launch("small", hierarchical=False, **settings) as server:
        engine = TierEngine(server, PAGE_SIZE)
        engine.assert_serves_its_own_pages(texts(20, tokens=5 * PAGE_SIZE + 8))
        assert engine.errors() == 0
