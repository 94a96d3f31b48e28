"""The shipped pair by its full protocol: what docs/fidelity.md states, and the floors it must keep.

192 tokens mapped, the next 64 read natively, 60 held-out passages, 300 calibration passages.
"""

import json
from pathlib import Path

import pytest

from kvstore_xfer.cli.main import main

FAMILY = Path(__file__).parents[1] / "data" / "family"

# source, target, method: largest KL, smallest top-1 agreement
FLOORS = {
    ("small", "large", "head-local"): (0.025, 0.89),
    ("small", "large", "head-local --weights attention"): (0.0145, 0.91),
    ("small", "large", "low-rank"): (0.010, 0.92),
    ("large", "small", "head-local"): (0.011, 0.92),
    ("large", "small", "low-rank"): (0.0045, 0.95),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("source", "target", "method"), FLOORS)
def test_a_plain_fit_reaches_its_figures_and_leaves_the_controls_behind(
    source, target, method, tmp_path, capsys
):
    mapper, text = tmp_path / "mapper", FAMILY / "text"
    models = ["--source", str(FAMILY / source), "--target", str(FAMILY / target)]
    size = ["--sequences", "300", "--sequence-tokens", "256", "--dtype", "float32"]
    calibration = str(text / "calibration.jsonl")
    assert not main(
        [
            "fit",
            *models,
            "--text",
            calibration,
            "--out",
            str(mapper),
            "--method",
            *method.split(),
            *size,
        ]
    )
    capsys.readouterr()
    held_out = str(text / "heldout.jsonl")
    lengths = ["--lengths", "calibration,short"]  # beyond 256 tokens these models cannot read
    assert not main(
        ["check", str(mapper), "--text", held_out, "--dtype", "float32", "--json", *lengths]
    )
    record = json.loads(capsys.readouterr().out)
    arms = {
        arm: {name: cell["mean"] for name, cell in row.items()}
        for arm, row in record["arms"].items()
    }
    largest_kl, smallest_top1 = FLOORS[source, target, method]
    assert record["passages"] == 60
    assert record["prefix_tokens"] == 192
    assert record["tail_tokens"] == 64
    assert arms["mapped"]["kl"] <= largest_kl
    assert arms["mapped"]["top1"] >= smallest_top1
    assert arms["wrong"]["kl"] > 4 * arms["mapped"]["kl"]
    assert arms["none"]["kl"] > 4 * arms["mapped"]["kl"]
    assert record["identity_max_abs_diff"] == 0.0
