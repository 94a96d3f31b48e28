"""The shipped pair by its full protocol: what docs/fidelity.md states, and the floors it must keep.

192 tokens mapped, the next 64 read natively, 60 held-out passages, 300 calibration passages. Both
models run every text once for all methods.
"""

import pytest

from kvstore_xfer.fit.accumulate import FitOptions
from kvstore_xfer.fit.run import fit
from kvstore_xfer.fit.text import cut_sequences
from kvstore_xfer.gate.check import check
from kvstore_xfer.gate.lengths import CALIBRATION, SHORT, cut_lengths
from kvstore_xfer.mapper.maps import Method
from kvxfer_transformers.remembered import RememberedModel

PREFIX, TAIL = 192, 64
HEAD_LOCAL, WEIGHTED = FitOptions(), FitOptions(weighted=True)
LOW_RANK = FitOptions(Method.LOW_RANK)
# source, target, method: largest KL, smallest top-1 agreement
FLOORS = {
    ("small", "large", HEAD_LOCAL): (0.025, 0.89),
    ("small", "large", WEIGHTED): (0.0145, 0.91),
    ("small", "large", LOW_RANK): (0.010, 0.92),
    ("large", "small", HEAD_LOCAL): (0.011, 0.92),
    ("large", "small", LOW_RANK): (0.0045, 0.95),
}


@pytest.fixture(scope="module")
def remembered(family_models, tmp_path_factory):
    work = tmp_path_factory.mktemp("remembered")
    models = {"small": family_models.source, "large": family_models.target}
    return {name: RememberedModel(model, work / name) for name, model in models.items()}


@pytest.fixture(scope="module")
def sequences(family_models):
    f = family_models
    return cut_sequences(f.calibration, f.source.tokenize, tokens=PREFIX + TAIL, count=300)


@pytest.fixture(scope="module")
def lengths(family_models):
    """Beyond 256 tokens these models cannot read."""
    f, wanted = family_models, (CALIBRATION, SHORT)
    sizes = {"prefix": PREFIX, "tail": TAIL, "count": 60, "longest": 0, "wanted": wanted}
    return cut_lengths(f.heldout, f.source.tokenize, **sizes)


def _id(value):
    weighted = getattr(value, "weighted", False)
    return f"{value.method.value}{'-weighted' * weighted}" if hasattr(value, "method") else value


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("source", "target", "options"), FLOORS, ids=_id)
def test_a_plain_fit_reaches_its_figures_and_leaves_the_controls_behind(
    source, target, options, remembered, sequences, lengths, tmp_path
):
    models = remembered[source], remembered[target]
    artifact = fit(*(model.side for model in models), sequences, tmp_path / "mapper", options)
    first, short = lengths
    record = check(artifact, *models, first.passages, PREFIX, lengths=[short])
    assert record.accepted, record.reason
    arms = {
        arm: {name: cell["mean"] for name, cell in row.items()} for arm, row in record.arms.items()
    }
    largest_kl, smallest_top1 = FLOORS[source, target, options]
    assert (record.passages, record.prefix_tokens, record.tail_tokens) == (60, PREFIX, TAIL)
    assert arms["mapped"]["kl"] <= largest_kl
    assert arms["mapped"]["top1"] >= smallest_top1
    assert arms["wrong"]["kl"] > 4 * arms["mapped"]["kl"]
    assert arms["none"]["kl"] > 4 * arms["mapped"]["kl"]
    assert record.identity_max_abs_diff == 0.0
