"""A check as a tier serves that holds the newest tokens of a prompt back."""

import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch

from kvstore_xfer.cli.main import main
from kvstore_xfer.gate.arms import converted, run_arms
from kvstore_xfer.gate.attention import attention_cosines
from kvstore_xfer.gate.check import check
from kvstore_xfer.gate.decide import arms_failure, held_back_failure
from kvstore_xfer.gate.lengths import cut_lengths
from kvstore_xfer.gate.record import Thresholds
from kvstore_xfer.gate.relation import fit_relation, make_probes
from kvstore_xfer.gate.score import score_passage
from kvstore_xfer.gate.tasks import TaskItem, run_tasks
from kvstore_xfer.mapper.artifact import load
from kvstore_xfer.mapper.convert import TorchConverter
from kvxfer_transformers.queries import capture_queries

PREFIX, HELD = 192, 40
CUT = PREFIX - HELD


@pytest.fixture
def converter(family_mapper):
    return TorchConverter(family_mapper.artifact.mapper, torch.float32)


def after_held(f, page, passage):
    """What the target says of the tail, having read the held-back tokens itself."""
    return f.target.read_after(page, passage.tokens[CUT:])[HELD:]


def test_what_is_held_back_is_read_by_the_target(family_mapper, converter):
    f = family_mapper
    first, other = (
        f.passages[0],
        next(p for p in f.passages[1:] if p.document != f.passages[0].document),
    )
    found = run_arms(f.source, f.target, converter, f.passages, PREFIX, hold_back=HELD)
    native = f.target.read_after(f.target.capture(first.tokens[:PREFIX]), first.tokens[PREFIX:])
    mapped, wrong = (
        converted(converter, f.source.capture(p.tokens[:CUT]), f.target.description)
        for p in (first, other)
    )
    following = torch.tensor(first.tokens[PREFIX + 1 :])
    for arm, page in {"mapped": mapped, "wrong": wrong, "none": None}.items():
        expected = score_passage(after_held(f, page, first), native, following)
        assert found.scores[arm][0].kl == pytest.approx(expected.kl, rel=1e-4)
        assert found.scores[arm][0].loss == pytest.approx(expected.loss, rel=1e-5)
    assert found.scores["native"][0].kl == found.scores["identity"][0].kl == 0
    assert (found.prefix_tokens, found.converted_tokens) == (20 * PREFIX, 20 * CUT)
    (cosines,) = attention_cosines(f.source, f.target, converter, [first], PREFIX, hold_back=HELD)
    read = f.target.attention_after(mapped, first.tokens[CUT:])[:, HELD:].double()
    own = f.target.attention_after(
        f.target.capture(first.tokens[:PREFIX]), first.tokens[PREFIX:]
    ).double()
    assert cosines == pytest.approx(torch.cosine_similarity(own, read, dim=-1).mean(1).tolist())


def test_a_question_is_read_behind_the_held_back_end_of_its_context(family_mapper, converter):
    """Only the arms that are converted; the target's own cache and the source have all of it."""
    f = family_mapper
    tokens = f.passages[0].tokens
    items = [
        TaskItem(name, tokens[:PREFIX], tokens[PREFIX : PREFIX + 8], (tokens[200:204],), 0)
        for name in ("a", "b")
    ]
    asked = {}

    class Reader:
        description = f.target.description
        capture = staticmethod(f.target.capture)

        @staticmethod
        def read_after(page, read):
            asked[None if page is None else page.keys.shape[1]] = tuple(read)
            return f.target.read_after(page, read)

    run_tasks(f.source, Reader, converter, items, hold_back=HELD)
    question = tokens[PREFIX : PREFIX + 8] + tokens[200:203]
    assert asked == {
        PREFIX: question,
        CUT: tokens[CUT:PREFIX] + question,
        None: tokens[CUT:PREFIX] + question,
    }


def test_the_record_says_so_and_a_short_prefix_is_longer_by_what_is_held_back(family_mapper):
    f = family_mapper
    cut = partial(cut_lengths, f.heldout, f.target.tokenize, prefix=PREFIX, tail=64, longest=256)
    lengths = cut(count=16, hold_back=32)
    record = check(
        f.artifact,
        f.source,
        f.target,
        lengths[0].passages,
        PREFIX,
        lengths=lengths[1:],
        hold_back=32,
    )
    assert record.verdict == "accepted", record.reason
    assert record.hold_back_tokens == 32
    assert record.lengths["short"]["prefix_tokens"] == 48 + 32
    assert record.lengths["short"]["hold_back_tokens"] == 32
    short = next(length for length in cut(count=16, hold_back=144) if length.name == "short")
    assert short.skipped == "the calibration length's 192 are short"
    arms, before = record.arms, f.record.arms
    assert arms["mapped"]["kl"]["mean"] < before["mapped"]["kl"]["mean"] / 2
    assert arms["none"]["kl"]["mean"] < before["none"]["kl"]["mean"] / 2
    assert arms["source"]["loss"]["mean"] == pytest.approx(before["source"]["loss"]["mean"], 0.05)
    assert record.attention["mean"]["mean"] > f.record.attention["mean"]["mean"]


def test_growth_counts_what_is_left_open_by_the_held_back_tokens(family_mapper):
    figures = family_mapper.record.to_json()

    def at(prefix, mapped, none):
        arms = {arm: dict(cells) for arm, cells in figures["arms"].items()}
        for arm, kl in {"mapped": mapped, "none": none}.items():
            arms[arm]["kl"] = {"mean": kl, "low": kl, "high": kl}
        return {**figures, "prefix_tokens": prefix, "arms": arms}

    short, long = at(192, 0.004, 0.02), at(768, 0.008, 0.04)
    assert "KL is 2.00 times" in arms_failure("double", long, short, Thresholds())
    short, long = ({**length, "hold_back_tokens": 64} for length in (short, long))
    assert arms_failure("double", long, short, Thresholds()) == ""
    long["arms"]["mapped"]["kl"] = {"mean": 0.02, "low": 0.02, "high": 0.02}
    assert arms_failure("double", long, short, Thresholds()) == (
        "lengths.double.growth: KL over that of no context is 2.50 times that at the calibration "
        "length, allowed is 1.5"
    )


def test_a_record_holds_for_policies_that_hold_back_as_much(family_mapper):
    record = replace(family_mapper.record, hold_back_tokens=64)
    assert held_back_failure(record, 64) == held_back_failure(record, 100) == ""
    assert held_back_failure(record, 63).startswith(
        "hold_back_tokens: the check left the newest 64"
    )
    assert held_back_failure(family_mapper.record, 0) == ""


def test_the_watch_is_measured_likewise(family_mapper, converter):
    """The same x then costs less, and less is allowed."""
    f = family_mapper
    passages = f.passages[:6]
    queries = partial(capture_queries, f.target)
    probes = make_probes(f.target, queries, passages, PREFIX)
    whole, held = (
        fit_relation(f.source, f.target, converter, passages, PREFIX, probes, hold_back=hold)
        for hold in (0, HELD)
    )
    assert held.estimate([0.1]).mean > whole.estimate([0.1]).mean
    assert held.threshold > whole.threshold


def test_the_command_takes_what_the_policy_of_the_pair_holds_back(family_mapper, tmp_path, capsys):
    shutil.copytree(family_mapper.folder, tmp_path / "mapper")
    manifest = tmp_path / "family.yaml"
    manifest.write_text(
        "family: tiny\nstore: 'local:store'\n"
        "models: {small: {path: small}, large: {path: large}}\n"
        "pairs: [{source: small, target: large, mapper: mapper, "
        "policy: {hold_back_tokens: 32}}]\n"
    )
    base = ["check", str(tmp_path / "mapper"), "--text", str(family_mapper.heldout)]
    base += ["--dtype", "float32", "--passages", "16", "--lengths", "calibration"]
    base += ["--family", str(manifest)]
    assert main([*base, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["hold_back_tokens"] == 32
    assert load(tmp_path / "mapper").gate["float32"] == told
    assert main([*base, "--hold-back", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hold_back_tokens"] == 0
    assert main([*base, "--hold-back", "160"]) == 2
    assert (
        "--prefix-tokens 192 with --hold-back 160 (or the policy's): leaves 32 tokens to convert, "
        "a watch in production is measured on 36; give more --prefix-tokens, or hold back fewer"
    ) in capsys.readouterr().err
    assert main([*base]) == 0
    assert "the newest 32 tokens are computed by the target" in capsys.readouterr().out
