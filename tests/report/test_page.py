"""The page of a check: complete, self-contained, and honest about what was not reached."""

import builtins
import xml.etree.ElementTree as ET
from dataclasses import asdict, replace
from html.parser import HTMLParser

import pytest

from kvstore_xfer.errors import ConfigError
from kvstore_xfer.gate.record import GateRecord
from kvstore_xfer.report.page import render, require_report, write_report

CELL = {"mean": 0.5, "low": 0.4, "high": 0.6}


class Page(HTMLParser):
    """Tags that load something, the text, and whether all tags are closed in order."""

    VOID = ("meta", "br", "link", "img", "input", "hr")

    def __init__(self, html):
        super().__init__()
        self.text, self.loads, self.open = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            inside = (value or "").startswith(("#", "data:"))
            outside = name in ("src", "href", "xlink:href") and not inside
            if outside or tag in ("script", "link", "iframe"):
                self.loads.append((tag, name, value))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def svgs(html):
    return [part.split("</svg>")[0] + "</svg>" for part in html.split("<figure>")[1:]]


@pytest.fixture(scope="module")
def record(family_mapper):
    """The fixture's record, with another length, a length left out, and questions."""
    record = family_mapper.record
    short = {
        "passages": 20,
        "documents": 13,
        "prefix_tokens": 48,
        "tail_tokens": 64,
        "arms": {arm: row for arm, row in record.arms.items() if arm != "identity"},
        "kl_share": record.kl_share,
        "perplexity_ratio": record.perplexity_ratio,
        "behind_both": {"mean": 0.0123, "low": 0.0, "high": 0.02},
    }
    double = {**short, "prefix_tokens": 448}
    tasks = {
        "items": 40,
        "chance": 0.25,
        "arms": dict.fromkeys(("native", "mapped", "wrong", "none", "source"), CELL),
        "retention": CELL,
        "floor_normalised": {"mean": 0.9, "low": 0.7, "high": 1.0},
        "gap_recovered": None,
    }
    skipped = {"skipped": "512 tokens are more than the models' 256"}
    lengths = {"short": short, "double": double, "fourfold": skipped}
    return replace(record, lengths=lengths, tasks=tasks, hold_back_tokens=16)


def test_the_page_says_everything_and_loads_nothing(family_mapper, record):
    html = render(family_mapper.artifact, record)
    page = Page(html)
    text = " ".join(" ".join(page.text).split())
    assert page.loads == []
    assert page.open == []
    assert "✓ ACCEPTED" in text
    assert text.index("ACCEPTED") < text.index("What was asked") < text.index("Cost")
    kl = record.arms["mapped"]["kl"]
    assert f"{kl['mean']:.4f} [{kl['low']:.4f}, {kl['high']:.4f}]" in text
    assert "fourfold: not measured: 512 tokens are more than the models' 256" in text
    assert "short: nats a token behind both models (mean) 0.0123 at most 0.05 ✓ met" in text
    assert "double: growth of KL (means) 1.0000 at most 1.5 ✓ met" in text
    assert "The newest 16 tokens of every prefix are computed by the target, too" in text
    assert "questions: floor-normalised retention 0.7000 at least 0.8 ✗ missed" in text
    assert f"{family_mapper.artifact.mapper.parameters:,}" in text
    assert record.mapper_digest in text


def test_the_figures_are_drawings_with_text(family_mapper, record):
    drawings = svgs(render(family_mapper.artifact, record))
    assert len(drawings) == 5
    for drawing in drawings:
        root = ET.fromstring(drawing)
        assert root.iter("{http://www.w3.org/2000/svg}text")
    assert "short" not in drawings[0]
    ids = [i for d in drawings for i in _clip_ids(d)]
    assert len(ids) == len(set(ids))


def _clip_ids(drawing):
    path = "{http://www.w3.org/2000/svg}clipPath"
    return [element.get("id") for element in ET.fromstring(drawing).iter(path)]


def test_equal_records_give_equal_pages(family_mapper, record):
    assert render(family_mapper.artifact, record) == render(family_mapper.artifact, record)


def test_a_rejection_shows_its_reason_and_only_what_was_reached(family_mapper):
    about = {
        name: value
        for name, value in asdict(family_mapper.record).items()
        if name.endswith(("_fingerprint", "_rope", "_digest")) or name == "dtype"
    }
    reason = "structure.keys: layer 3 <is> a copy"
    record = GateRecord("rejected", reason, **about, stage="structure")
    html = render(family_mapper.artifact, record)
    text = " ".join(" ".join(Page(html).text).split())
    assert "✗ REJECTED" in text
    assert reason in text
    assert "<figure>" not in html
    assert "Mapped cache and controls" not in text


def test_what_the_page_needs_is_asked_for_before_the_check(tmp_path, monkeypatch, family_mapper):
    with pytest.raises(ConfigError, match=r"--report .*its folder cannot be written"):
        require_report(tmp_path / "none" / "page.html")
    require_report(tmp_path / "page.html")
    write_report(tmp_path / "page.html", family_mapper.artifact, family_mapper.record)
    assert "ACCEPTED" in (tmp_path / "page.html").read_text(encoding="utf-8")
    plain = builtins.__import__

    def without(name, *rest):
        if name == "jinja2":
            raise ImportError(name="jinja2")
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"--report: needs jinja2; pip install .*\[report\]"):
        require_report(tmp_path / "page.html")
