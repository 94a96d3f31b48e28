"""Commands run in this process; those that must fail do so in one line and change nothing."""

import pytest

from kvstore_xfer.cli.main import main


@pytest.fixture(autouse=True)
def digest_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("KVXFER_CACHE_DIR", str(tmp_path_factory.mktemp("digests")))


@pytest.fixture
def fails(tmp_path, capfd):
    """Runs a command that must fail; returns its one line."""

    def call(*arguments):
        before = tree(tmp_path)
        code = main([str(argument) for argument in arguments])
        output = capfd.readouterr()
        assert (code, output.out) == (2, "")
        lines = [line for line in output.err.splitlines() if line.strip()]
        assert len(lines) == 1, output.err
        assert tree(tmp_path) == before
        return lines[0]

    return call


def tree(folder):
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}
