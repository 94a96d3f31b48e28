import pytest
from environments import REPOSITORY, PackageLinks, engine_python
from sglang_cpu.server import Launch, SglangServer

FAMILY = REPOSITORY / "tests" / "data" / "family"


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


@pytest.fixture(scope="module")
def start_server(sglang_python, sglang_path, tmp_path_factory):
    """``start_server("small", storage={...}, ...)``: a ready server, stopped after the module."""
    servers = []

    def start(model, **settings):
        launch = Launch(
            python=sglang_python,
            model=FAMILY / model,
            work=tmp_path_factory.mktemp(model),
            paths=[sglang_path],
            **settings,
        )
        servers.append(SglangServer(launch))
        servers[-1].wait_until_ready()
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
