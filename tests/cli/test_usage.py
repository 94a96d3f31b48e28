"""Wrong arguments of every command: one line that names the option, no usage above it, exit 2."""

import shlex

import pytest

from kvstore_xfer.cli.main import _COMMANDS, main

FIT = "fit --source s --target t --text x --out o"


@pytest.fixture
def refused(capfd, tmp_path, monkeypatch):
    """Runs a command whose arguments cannot be parsed; returns its one line."""
    monkeypatch.chdir(tmp_path)

    def call(command):
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(command))
        output = capfd.readouterr()
        assert (ended.value.code, output.out) == (2, "")
        assert output.err.endswith("\n")
        assert output.err.count("\n") == 1, output.err
        assert not list(tmp_path.iterdir())
        return output.err.rstrip("\n")

    return call


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("", "kvxfer: error: the following arguments are required: COMMAND; see 'kvxfer --help'"),
        ("--bogus", "kvxfer: error: the following arguments are required: COMMAND;"),
        ("nonsense", "kvxfer: error: argument COMMAND: invalid choice: 'nonsense'"),
        ("fit", "kvxfer fit: error: the following arguments are required: --source, --target, "),
        (f"{FIT} --bogus 3", "kvxfer fit: error: unrecognized arguments: --bogus 3; see"),
        (f"{FIT} 'a\nb'", "kvxfer fit: error: unrecognized arguments: a\\nb; see"),
        (f"{FIT} --method best", "kvxfer fit: error: argument --method: invalid choice: 'best'"),
        (f"{FIT} --ridge -1", "kvxfer fit: error: argument --ridge: '-1' is neither 'auto' nor a"),
        (f"{FIT} --ridge 0", "kvxfer fit: error: argument --ridge: '0' is neither 'auto' nor a"),
        (f"{FIT} --layers 0", "kvxfer fit: error: argument --layers: '0' is neither 'auto' nor a"),
        (f"{FIT} --rank x", "kvxfer fit: error: argument --rank: 'x' is neither 'auto' nor a"),
        (f"{FIT} --hidden 0", "kvxfer fit: error: argument --hidden: '0' is not a whole number"),
        ("check m --text t --passages 0", "kvxfer check: error: argument --passages: '0' is not"),
        ("check m --text t --lengths a", "kvxfer check: error: argument --lengths: 'a' is no"),
        ("predict --text t", "kvxfer predict: error: the following arguments are required: "),
        ("eval m --few-shot x", "kvxfer eval: error: argument --few-shot: 'x' is not a whole"),
        ("eval m --few-shot -1", "kvxfer eval: error: argument --few-shot: "),
        ("plan", "kvxfer plan: error: the following arguments are required: FAMILY.yaml, "),
        ("family", "kvxfer family: error: the following arguments are required: COMMAND; see"),
        ("store pin u", "kvxfer store pin: error: the following arguments are required: --prefix,"),
        ("bench map --bogus", "kvxfer bench map: error: unrecognized arguments: --bogus; see"),
    ],
)
def test_a_wrong_argument_is_one_line(refused, command, line):
    told = refused(command)
    assert told.startswith(line)
    assert told.endswith(" --help'")


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_command_tells_an_unknown_option_as_its_own(refused, command):
    assert refused(f"{command} --bogus").startswith(f"kvxfer {command}: error: ")


@pytest.mark.parametrize("command", _COMMANDS)
def test_help_is_the_usage_and_the_options(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    output = capsys.readouterr()
    assert (ended.value.code, output.err) == (0, "")
    assert output.out.startswith(f"usage: kvxfer {command} ")
    assert "-h, --help" in output.out
