"""Benchmarks through lm-evaluation-harness on local task files in its own format."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore")  # the harness's dependencies have many

CHOICES = 4
YAML = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{context}}}}\\n\\n{{{{question}}}}"
{more}
"""


@pytest.fixture(scope="module")
def task_folder(family_mapper, tmp_path_factory):
    """Which order of words follows, perplexity, and what greedy decoding says."""
    folder = tmp_path_factory.mktemp("tasks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        decode, passages = family_mapper.target.tokenizer.decode, family_mapper.passages
        rows = []
        for number, passage in enumerate(passages[:12]):
            said = passage.tokens[200:220]
            orders = [[step * i % 20 for i in range(20)] for step in (1, 3, 7, 9)]
            texts = [decode([said[i] for i in order]) for order in orders]
            right = number % CHOICES
            texts[0], texts[right] = texts[right], texts[0]
            rows.append(
                {
                    "context": decode(passage.tokens[:192]),
                    "question": decode(passage.tokens[192:200]),
                    "choices": texts,
                    "answer": right,
                    "text": decode(passage.tokens),
                }
            )
        data = folder / "data.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        choice = "doc_to_choice: choices\ndoc_to_target: answer\nmetric_list: [{metric: acc}]"
        loglik = 'doc_to_target: "{{text}}"\nmetric_list: [{metric: word_perplexity}]'
        generate = (
            'doc_to_target: "{{question}}"\ngeneration_kwargs: {until: ["\\n"], max_gen_toks: 4}\n'
            "metric_list: [{metric: exact_match}]"
        )
        for name, kind, more in (
            ("follows", "multiple_choice", choice),
            ("reads", "loglikelihood_rolling", loglik),
            ("says", "generate_until", generate),
        ):
            text = YAML.format(name=name, data=data, kind=kind, more=more)
            (folder / f"{name}.yaml").write_text(text)
        yield folder


@pytest.fixture
def model_of(family_mapper):
    from kvstore_xfer.mapper.convert import TorchConverter
    from kvxfer_transformers.harness import CachedModel

    f = family_mapper
    converter = TorchConverter(f.artifact.mapper, torch.float32)
    return lambda arm: CachedModel(arm, f.source, f.target, converter)


def request(*arguments):
    return SimpleNamespace(args=arguments)


def test_the_native_arm_is_the_model_itself(family_mapper, model_of):
    decode, tokens = family_mapper.target.tokenizer.decode, family_mapper.passages[0].tokens
    context, answer = (
        decode(tokens[:100]) + "\n\n" + decode(tokens[100:120]),
        decode(tokens[120:130]),
    )
    total, _ = model_of("native").loglikelihood([request(context, answer)])[0]
    ids = family_mapper.target.tokenize(context + answer)
    asked = len(family_mapper.target.tokenize(context))
    logs = torch.log_softmax(family_mapper.target.read_after(None, ids[:-1]).double(), -1)
    expected = sum(float(logs[i - 1, ids[i]]) for i in range(asked, len(ids)))
    assert total == pytest.approx(expected, abs=1e-3)
    rolled = model_of("native").loglikelihood_rolling([request(answer)])[0]
    start = [family_mapper.target.tokenizer.bos_token_id, *family_mapper.target.tokenize(answer)]
    logs = torch.log_softmax(family_mapper.target.read_after(None, start[:-1]).double(), -1)
    expected = sum(float(logs[i - 1, start[i]]) for i in range(1, len(start)))
    assert rolled == pytest.approx(expected, abs=1e-3)


def test_only_the_context_comes_from_the_cache(family_mapper, model_of):
    """The question is read natively: without a context all arms of the target agree."""
    decode, passages = family_mapper.target.tokenizer.decode, family_mapper.passages[:6]
    alone = [request(decode(p.tokens[:8]), decode(p.tokens[8:12])) for p in passages]
    after = [
        request(decode(p.tokens[:64]) + "\n\n" + decode(p.tokens[64:72]), decode(p.tokens[72:80]))
        for p in passages
    ]

    def distance(arm, requests):
        native, other = (model_of(name).loglikelihood(requests) for name in ("native", arm))
        return sum(abs(v - w) for (v, _), (w, _) in zip(native, other, strict=True))

    assert distance("mapped", alone) == pytest.approx(0, abs=1e-3)
    assert distance("none", alone) == pytest.approx(0, abs=1e-3)
    assert 0 < distance("mapped", after) < distance("none", after)


def test_generation_stops_where_it_is_told(family_mapper, model_of):
    decode, tokens = family_mapper.target.tokenizer.decode, family_mapper.passages[0].tokens
    context = decode(tokens[:64])
    free = model_of("native").generate_until([request(context, {"max_gen_toks": 12})])[0]
    assert free
    stop = free[len(free) // 2 :][:2]
    cut = model_of("native").generate_until(
        [request(context, {"until": [stop], "max_gen_toks": 12})]
    )[0]
    assert cut == free[: free.index(stop)]


def test_the_published_table_for_both_directions(
    family_mapper, family_models, task_folder, tmp_path, capsys
):
    from kvstore_xfer.cli.main import main
    from kvstore_xfer.fit.accumulate import FitOptions
    from kvstore_xfer.fit.run import Side, fit

    f = family_mapper
    sides = (Side(model.description, model.capture) for model in (f.target, f.source))
    fit(*sides, f.sequences[:32], tmp_path / "back", FitOptions(layers=9, ridge=1e-3))
    arguments = ["eval", str(f.folder), "--back", str(tmp_path / "back"), "--dtype", "float32"]
    arguments += ["--tasks", "follows,reads,says", "--include", str(task_folder), "--json"]
    arguments += ["--turns", str(f.heldout), "--handoffs", "3", "--turn-tokens", "16"]
    capsys.readouterr()
    assert main([*arguments, "--conversations", "4"]) == 0
    output = capsys.readouterr().out
    told = json.loads(output[output.index('{\n  "tasks"') :])
    rows = {(row["source"], row["task"]): row for row in told["tasks"]}
    assert len(rows) == 6
    follows = rows[f.source.description.name, "follows"]
    assert (follows["n"], follows["chance"], follows["metric"]) == (12, 1 / CHOICES, "acc")
    assert follows["native"] > 0.5
    assert follows["retention"] == pytest.approx(follows["mapped"] / follows["native"])
    reads = rows[f.source.description.name, "reads"]
    assert reads["metric"] == "1 / word_perplexity"
    assert 0 < reads["mapped"] <= 1
    assert all(math.isfinite(row["mapped"]) for row in rows.values())
    assert [turn["handoffs"] for turn in told["turns"]] == [1, 2, 3]
    assert all(turn["kl"]["mean"] > 0 for turn in told["turns"])


def test_what_eval_is_not_given_is_one_line(family_mapper, capsys):
    from kvstore_xfer.cli.main import main

    folder = str(family_mapper.folder)
    for arguments, words in (
        ([], "give --tasks NAME,... or --turns FILE"),
        (["--turns", str(family_mapper.heldout)], "give the other mapper with --back"),
        (["--tasks", "a", "--back", folder], "not back from"),
        (["--tasks", "no-such-task"], "the harness has no 'no-such-task'"),
    ):
        capsys.readouterr()
        assert main(["eval", folder, "--dtype", "float32", *arguments]) == 2
        assert words in capsys.readouterr().err
