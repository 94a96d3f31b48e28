from types import SimpleNamespace

import pytest
from environments import REPOSITORY, PackageLinks, engine_python
from sglang_cpu.engine import NEW_TOKENS, TierEngine, extra_config, write_manifest
from sglang_cpu.oracle import Oracle
from sglang_cpu.server import Launch, SglangServer

FAMILY = REPOSITORY / "tests" / "data" / "family"
MODELS = {"small": FAMILY / "small", "large": FAMILY / "large"}


@pytest.fixture(scope="session")
def sglang_python():
    return engine_python("sglang")


@pytest.fixture(scope="session")
def sglang_path(tmp_path_factory):
    """A folder for PYTHONPATH: this clone and the CPU plug-in, as if both were installed."""
    links = PackageLinks(tmp_path_factory.mktemp("sglang") / "path")
    plugins = {"sglang.srt.plugins": {"sglang_on_cpu": "sglang_on_cpu:activate"}}
    links.add_distribution("sglang-on-cpu", "1", plugins)
    return links.folder


@pytest.fixture(scope="session")
def launch(sglang_python, sglang_path, tmp_path_factory):
    """``launch("small", storage={...}, ...)``: a starting server; whoever asks stops it."""

    def start(model, **settings):
        return SglangServer(
            Launch(
                python=sglang_python,
                model=FAMILY / model,
                work=tmp_path_factory.mktemp(model),
                paths=[sglang_path],
                **settings,
            )
        )

    return start


@pytest.fixture(scope="module")
def start_server(launch):
    """``start_server("small", storage={...}, ...)``: a ready server, stopped after the module."""
    servers = []

    def start(model, **settings):
        servers.append(launch(model, **settings))
        servers[-1].wait_until_ready()
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def manifest(family_mapper, tmp_path_factory):
    """``manifest(store_folder, ...)``: a manifest of the trained family, pair small -> large."""

    def make(store, *, models=MODELS, mapper=family_mapper.folder, query="?min_free=0", **pair):
        file = tmp_path_factory.mktemp("manifest") / "family.yaml"
        # These tests are about conversion: no prompt is sampled, or declined on a busy machine.
        always = {"sampled_share": 0.0, "budget_seconds": 60.0}
        pair["policy"] = {**always, **pair.get("policy", {})}
        entry = {"source": "small", "target": "large", "mapper": str(mapper), **pair}
        pairs = [entry] if {"small", "large"} <= models.keys() else []
        return write_manifest(file, f"local://{store}{query}", models, pairs)

    return make


@pytest.fixture(scope="session")
def engines(launch, manifest, tmp_path_factory):
    """Both models, each behind its own real engine, over one store; float32, 16-token pages."""
    store = tmp_path_factory.mktemp("store")
    file = manifest(store)
    settings = {"storage": extra_config(file), "dtype": "float32"}
    servers = [launch(name, arguments=["--enable-metrics"], **settings) for name in MODELS]
    try:
        for server in servers:
            server.wait_until_ready()
        small, large = (TierEngine(server) for server in servers)
        yield SimpleNamespace(small=small, large=large, store=store, manifest=file)
    finally:
        for server in servers:
            server.stop()


@pytest.fixture(scope="session")
def oracle(family_mapper):
    return Oracle(
        family_mapper.source, family_mapper.target, family_mapper.artifact.mapper, NEW_TOKENS
    )


@pytest.fixture(scope="session")
def texts(family_mapper):
    """``texts(count, tokens)``: token ids of held-out passages; calls may overlap."""
    from kvstore_xfer.fit.text import cut_sequences

    def cut(count, tokens=12 * 16 + 8):
        path, tokenize = family_mapper.heldout, family_mapper.source.tokenize
        return [list(s.tokens) for s in cut_sequences(path, tokenize, tokens=tokens, count=count)]

    return cut
