"""Component `mooncake`: its own commands, on small sizes and free ports, hold a block."""

import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest
from rendered import containers, of_kind, overlay, pods
from servers import Process, connects, debian_library, free_port

from kvstore_xfer.store.remote.mooncake_url import HOST_VARIABLE, options_of
from kvstore_xfer.store.testing import block_bytes, block_key, get, put
from kvstore_xfer.store.url import open_store

LIBRARIES = Path(next(iter(find_spec("nvidia.cuda_runtime").submodule_search_locations)), "lib")
SMALL = {"MOONCAKE_GLOBAL_SEGMENT_SIZE": "67108864", "MOONCAKE_LOCAL_BUFFER_SIZE": "16777216"}
POD_ADDRESS = "127.0.0.1"


def _container(name):
    return next(
        container
        for _, pod in pods(overlay("sglang-mooncake"))
        for container in containers(pod)
        if container["name"] == name
    )


def _command(container):
    """As the pod would run it, with this interpreter's programs."""
    program, *rest = container["command"]
    scripts = Path(sysconfig.get_path("scripts"))
    found = sys.executable if program == "python3" else scripts / program
    return [found, *rest, *container["args"]]


def _variables(container):
    """The container's environment, on a machine whose address is the loop."""
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    return {
        entry["name"]: entry.get("value", POD_ADDRESS)
        for entry in container["env"]
        if "value" in entry or entry["valueFrom"] == address
    }


@pytest.fixture
def ports():
    """Those of the manifests -> free ones, with the name of the master's Service before them."""
    (service,) = [
        item
        for item in of_kind(overlay("sglang-mooncake"), "Service")
        if item["metadata"]["name"] == "mooncake-master"
    ]
    return {str(entry["port"]): str(free_port()) for entry in service["spec"]["ports"]}


@pytest.fixture
def here(ports):
    """``here(text)``: addresses and ports of the cluster as they are on this machine."""

    def translate(text):
        for port, free in ports.items():
            text = text.replace(f"mooncake-master:{port}", f"127.0.0.1:{free}")
            text = text.replace(f"port={port}", f"port={free}")
        assert "mooncake-master" not in text
        return text

    return translate


@pytest.fixture
def pool(here, ports, tmp_path):
    debian_library("ibverbs", package="libibverbs1")
    debian_library("numa", package="libnuma1")
    master = Process(
        [here(str(word)) for word in _command(_container("master"))],
        tmp_path / "master",
        lambda: all(connects(int(port)) for port in ports.values()),
    )
    lender = _container("pool")
    listening = str(free_port())
    variables = _variables(lender)
    assert variables.keys() >= SMALL.keys()
    given = {name: here(value) for name, value in (variables | SMALL).items()}
    process = Process(
        [str(word).replace("=8090", f"={listening}") for word in _command(lender)],
        tmp_path / "pool",
        lambda: connects(int(listening)),
        given | {"LD_LIBRARY_PATH": str(LIBRARIES)},
    )
    yield process
    process.kill()
    master.kill()


def test_an_engine_stores_and_reads_through_the_component(pool, here, ports, monkeypatch):
    (family,) = [
        config["data"]["family.yaml"]
        for config in of_kind(overlay("sglang-mooncake"), "ConfigMap")
        if "family.yaml" in config["data"]
    ]
    url = next(line for line in family.splitlines() if line.startswith("store: "))
    monkeypatch.setenv(HOST_VARIABLE, _variables(_container("engine"))[HOST_VARIABLE])
    # What the URL leaves out are the manifests' own ports.
    address = here(url.removeprefix("store: "))
    admin, metadata = ports["9003"], ports["8080"]
    address += f"?metadata=http://127.0.0.1:{metadata}/metadata&admin=http://127.0.0.1:{admin}"
    with open_store(address) as store:
        put(store, block_key(1), block_bytes(1, 4096))
        assert get(store, block_key(1)).payload == block_bytes(1, 4096)
        assert [row.key for row in store.scan()] == [block_key(1)]


def test_what_the_url_leaves_out_are_the_services_ports(ports):
    options = options_of("mooncake://mooncake-master")
    addresses = (options.metadata, options.admin, f":{options.master[1]}")
    used = {address.rpartition(":")[2].partition("/")[0] for address in addresses}
    assert used == set(ports)
