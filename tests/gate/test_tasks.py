"""Questions about a context: reading the file, scoring, and what the gate asks."""

import json
import math

import pytest
import torch

from kvstore_xfer.errors import TextError
from kvstore_xfer.gate.check import check
from kvstore_xfer.gate.decide import tasks_failure
from kvstore_xfer.gate.figures import task_figures
from kvstore_xfer.gate.record import Thresholds
from kvstore_xfer.gate.tasks import TaskItem, TaskScores, read_tasks, run_tasks
from kvstore_xfer.mapper.convert import TorchConverter

CHOICES = 4


def continuations(passages, tokenizer):
    """A context, and which of four texts follows it; the others follow other contexts."""
    rows = []
    for number, passage in enumerate(passages):
        follows = [passages[(number + 3 * step) % len(passages)] for step in range(CHOICES)]
        texts = [tokenizer.decode(p.tokens[200:224]) for p in follows]
        right = number % CHOICES
        texts[0], texts[right] = texts[right], texts[0]
        rows.append(
            {
                "context": tokenizer.decode(passage.tokens[:192]),
                "question": tokenizer.decode(passage.tokens[192:200]),
                "choices": texts,
                "answer": right,
            }
        )
    return rows


@pytest.fixture(scope="module")
def tasks_file(family_mapper, tmp_path_factory):
    file = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    rows = continuations(family_mapper.passages, family_mapper.target.tokenizer)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_the_gate_answers_questions_from_the_mapped_cache(family_mapper, tasks_file):
    f = family_mapper
    items = read_tasks(tasks_file, f.target.tokenize)
    limits = Thresholds(min_passages=4, min_task_items=20, min_task_retention=0.5)
    few = f.passages[::3]
    record = check(f.artifact, f.source, f.target, few, 192, tasks=items, thresholds=limits)
    assert record.verdict == "accepted", record.reason
    told = record.tasks
    assert (told["items"], told["chance"], told["above_chance"]) == (20, 1 / CHOICES, True)
    right = {arm: cell["mean"] for arm, cell in told["arms"].items()}
    assert right["native"] >= right["mapped"] > 1 / CHOICES
    kept = (right["mapped"] - 0.25) / (right["native"] - 0.25)
    assert told["floor_normalised"]["mean"] == pytest.approx(kept)
    strict = Thresholds(min_passages=4, min_task_items=21)
    with pytest.raises(TextError, match=r"--tasks: 20 questions .* needed are 21"):
        check(f.artifact, f.source, f.target, few, 192, tasks=items, thresholds=strict)


def test_an_item_is_scored_by_likelihood_a_token_or_by_greedy_decoding(family_mapper):
    f = family_mapper
    tokens = f.passages[0].tokens
    cache = f.target.capture(tokens[:192])
    greedy = []
    for _ in range(3):
        logits = f.target.read_after(cache, (*tokens[192:200], *greedy))
        greedy.append(int(logits[-1].argmax()))
    choices = (tuple(greedy), tuple(tokens[200:210]))
    free = TaskItem("a", tokens[:192], tokens[192:200], (choices[0],), 0)
    wrong = TaskItem("b", tokens[:192], tokens[192:200], (choices[1],), 0)
    scores = [
        float(
            torch.log_softmax(f.target.read_after(cache, (*tokens[192:200], *choice)).double(), -1)[
                torch.arange(7, 7 + len(choice)), torch.tensor(choice)
            ].mean()
        )
        for choice in choices
    ]
    best = TaskItem("c", tokens[:192], tokens[192:200], choices, int(scores[1] > scores[0]))
    converter = TorchConverter(f.artifact.mapper, torch.float32)
    found = run_tasks(f.source, f.target, converter, [free, wrong, best])
    assert found.right["native"] == [1.0, 0.0, 1.0]
    assert found.chance == [0.0, 0.0, 0.5]


def scores(right, chance=0.25):
    """`right` gives the number of right answers in 40 for native, mapped, wrong, none, source."""
    arms = ("native", "mapped", "wrong", "none", "source")
    columns = {arm: [1.0] * n + [0.0] * (40 - n) for arm, n in zip(arms, right, strict=True)}
    return TaskScores([str(n) for n in range(40)], [chance] * 40, columns)


@pytest.mark.parametrize(
    ("right", "reason"),
    [
        ((36, 36, 12, 11, 20), ""),
        ((36, 22, 12, 11, 20), "tasks.floor_normalised: retention above chance may be"),
        ((36, 36, 36, 11, 20), "tasks.wrong: the mapped cache may answer no better"),
        ((36, 36, 12, 36, 20), ""),  # a task that needs no context has no such control
        ((36, 35, 12, 11, 35), ""),  # a source as good as the target is no control either
        ((11, 9, 9, 9, 9), ""),  # the target is guessing: nothing can be asked of the mapper
    ],
)
def test_the_verdict_on_tasks(right, reason):
    figures = task_figures(scores(right))
    found = tasks_failure(figures, Thresholds())
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_ratios_by_the_definitions():
    figures = task_figures(scores((36, 32, 12, 11, 20)))
    assert figures["retention"]["mean"] == pytest.approx(32 / 36)
    assert figures["floor_normalised"]["mean"] == pytest.approx((32 - 10) / (36 - 10))
    assert figures["gap_recovered"]["mean"] == pytest.approx((32 - 20) / (36 - 20))
    assert task_figures(scores((36, 32, 12, 11, 36)))["gap_recovered"] is None
    assert math.isclose(figures["chance"], 0.25)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "correct the line"),
        ('{"context": "a", "question": "b"}', "no 'answer'"),
        ('{"context": "", "question": "b", "answer": "c"}', "with something in them"),
        ('{"context": "a", "question": "b", "choices": ["c"], "answer": 1}', "number of a choice"),
        ('{"context": "a", "question": "b", "choices": ["c"], "answer": "c"}', "number of a"),
        ("[1]", "correct the line"),
    ],
)
def test_a_bad_line_is_named(family_models, tmp_path, line, complaint):
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"context": "a", "question": "b", "answer": "c"}\n' + line + "\n")
    with pytest.raises(TextError) as error:
        read_tasks(file, family_models.source.tokenize)
    assert f"{file}:2: " in str(error.value)
    assert complaint in str(error.value)


def test_a_file_without_questions_is_named(family_models, tmp_path):
    file = tmp_path / "tasks.jsonl"
    with pytest.raises(TextError, match=r"tasks.jsonl: No such file"):
        read_tasks(file, family_models.source.tokenize)
    file.write_text("\n")
    with pytest.raises(TextError, match="holds no question"):
        read_tasks(file, family_models.source.tokenize)
