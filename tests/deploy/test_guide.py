"""docs/deploy.md names what is in deploy/, and nothing that is not."""

import re

from manifest_checks import NEWEST, OLDEST, SECRETS
from rendered import KUSTOMIZE, OVERLAYS, ROOT, compose

from kvstore_xfer.cli.main import _parser
from kvstore_xfer.store.remote.valkey_url import PASSWORD_VARIABLE

GUIDE = (ROOT / "docs" / "deploy.md").read_text()


def test_every_path_exists():
    paths = set(re.findall(r"\bdeploy/[\w./-]*\w", GUIDE))
    assert len(paths) > 5
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_commands_inside_containers_are_ones_the_parser_takes():
    engine = compose()["services"]["sglang-32b"]["environment"]
    commands = re.findall(r"kvxfer (doctor [^\n]*)", GUIDE)
    assert len(commands) == 2
    for command in commands:
        parsed = _parser(command.split()).parse_args(command.split())
        assert str(parsed.manifest) == engine["KVXFER_CONFIG"]


def test_every_overlay_and_component_is_explained():
    components = [folder.name for folder in (KUSTOMIZE / "components").iterdir()]
    named = [name for name in [*OVERLAYS, *components] if f"`{name}`" not in GUIDE]
    assert named == []


def test_secrets_have_the_names_and_keys_that_are_read():
    assert [name for name in sorted(SECRETS) if f"`{name}`" not in GUIDE] == []
    assert f"--from-literal={PASSWORD_VARIABLE}=" in GUIDE
    engine = compose()["services"]["sglang-14b"]["environment"]
    assert PASSWORD_VARIABLE in engine


def test_versions_and_ports_are_the_checked_ones():
    assert f"{OLDEST} and {NEWEST}" in GUIDE
    ports = [
        port["published"]
        for service in compose()["services"].values()
        for port in service.get("ports", [])
    ]
    assert [port for port in ports if f":{port}" not in GUIDE] == []
