"""The documentation is true: links resolve, commands parse, nothing local leaks in."""

import re
import shlex
from pathlib import Path

import pytest

from kvstore_xfer.cli.main import _COMMANDS, _parser

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
_COMMAND = re.compile(r"^ {4}(?:\$ )?(kvxfer [^#\n]*)", re.MULTILINE)


def _commands(text):
    joined = text.replace("\\\n", " ")
    return [" ".join(match.split()) for match in _COMMAND.findall(joined)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_names_a_file(page):
    links = [link for link in _LINK.findall(page.read_text()) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_one_the_parser_takes(page):
    for command in _commands(page.read_text()):
        arguments = shlex.split(command)[1:]
        assert arguments[0] in _COMMANDS, command
        assert callable(_parser(arguments).parse_args(arguments).run), command


def test_the_readme_shows_every_command():
    text = (ROOT / "README.md").read_text()
    assert [name for name in _COMMANDS if f"kvxfer {name}" not in text] == []


def test_no_page_has_a_figure_left_to_fill_in():
    assert [
        page.name for page in PAGES if re.search(r"^FIGURES$|TODO|TBD", page.read_text(), re.M)
    ] == []
