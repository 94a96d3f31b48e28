"""Everything that must not pass is rejected, each with a reason of its own."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvstore_xfer.fit.accumulate import FitOptions
from kvstore_xfer.fit.run import Side, fit
from kvstore_xfer.fit.text import TokenSequence, cut_sequences
from kvstore_xfer.gate.arms import run_arms
from kvstore_xfer.gate.check import check
from kvstore_xfer.gate.decide import arms_failure
from kvstore_xfer.gate.figures import arm_figures
from kvstore_xfer.gate.record import Thresholds
from kvstore_xfer.mapper.convert import TorchConverter
from kvstore_xfer.mapper.maps import Method
from kvstore_xfer.rope.spec import RopeSpec

PREFIX = 192
LIMITS = Thresholds(min_passages=8)
CALIBRATION_ARMS = ("native", "mapped", "wrong", "none", "source")


def each_layer(mapper, change):
    """The mapper with every map changed: ``change(index, layer)``."""
    parts = {
        name: tuple(change(n, layer) for n, layer in enumerate(getattr(mapper, name)))
        for name in ("keys", "values")
    }
    return replace(mapper, **parts)


def zero(_, layer):
    return replace(layer, weight=torch.zeros_like(layer.weight), bias=torch.zeros_like(layer.bias))


def one_head_lost(index, layer):
    weight = layer.weight.clone()
    weight[1] *= index != 2
    return replace(layer, weight=weight)


def copy_of_the_source(mapper):
    """Every target layer takes the source layer at its relative place as it is."""
    width = mapper.target.key_dim

    def plain(index, layer):
        weight = torch.zeros_like(layer.weight)
        first = index * len(layer.source_layers) // mapper.target.layers * width
        weight[:, first : first + width] = torch.eye(width, dtype=weight.dtype)
        return replace(layer, weight=weight, bias=torch.zeros_like(layer.bias))

    return each_layer(mapper, plain)


def shifted_weights(mapper):
    """Head h has the maps of head h + 1; the assignment does not show it."""
    return each_layer(
        mapper,
        lambda _, layer: replace(layer, weight=layer.weight.roll(1, 0), bias=layer.bias.roll(1, 0)),
    )


def noisy(_, layer):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(layer.weight.shape, generator=generator)
    weight = layer.weight.float()
    return replace(layer, weight=(weight + 1.0 * weight.std() * noise).to(layer.weight.dtype))


SPOILED = {
    "layers in reverse": (
        lambda m: replace(m, keys=m.keys[::-1], values=m.values[::-1]),
        "structure",
        "layers are exchanged",
    ),
    "two layers exchanged": (
        lambda m: replace(m, values=(m.values[1], m.values[0], *m.values[2:])),
        "structure",
        "structure.values: mapped layer",
    ),
    "head assignment shifted": (
        lambda m: replace(m, head_assignment=(*m.head_assignment[1:], m.head_assignment[0])),
        "definition",
        "head_map: target heads read source heads [1, 2, 3, 0]",
    ),
    "head weights shifted": (shifted_weights, "structure", "heads are exchanged"),
    "zero": (lambda m: each_layer(m, zero), "structure", "the same for every token"),
    "one head lost": (
        lambda m: each_layer(m, one_head_lost),
        "structure",
        "layer 2 head 1 is mapped to the same for every token",
    ),
    "identity": (copy_of_the_source, "structure", "is a copy of the source's"),
    "noise": (lambda m: each_layer(m, noisy), "attention", "attention."),
    "a layer missing": (
        lambda m: replace(m, keys=m.keys[:-1]),
        "definition",
        "geometry: mapper: key maps do not cover all layers",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_mapper_is_rejected_with_its_own_reason(family_mapper, name):
    spoil, stage, words = SPOILED[name]
    artifact = replace(family_mapper.artifact, mapper=spoil(family_mapper.artifact.mapper))
    record = check(
        artifact,
        family_mapper.source,
        family_mapper.target,
        family_mapper.passages[::2],
        PREFIX,
        thresholds=LIMITS,
    )
    assert (record.verdict, record.stage) == ("rejected", stage), record.reason
    assert words in record.reason
    assert record.concerns_mapper


def quick_fit(source, target, text, folder, *, sequences, tokens, **options):
    cut = cut_sequences(text, source.tokenize, tokens=tokens, count=sequences)
    sides = (Side(model.description, model.capture) for model in (source, target))
    return fit(*sides, cut, folder, FitOptions(ridge=1e-3, **options))


@pytest.mark.parametrize(
    ("sequences", "tokens", "method", "reason"),
    [
        (10, 256, Method.HEAD_LOCAL, "calibration: fitted on 10 sequences, needed are 32"),
        (40, 64, Method.FULL_HEAD, "calibration: fitted on 2560 tokens for maps of 768 inputs"),
    ],
)
def test_a_fit_on_too_little_text_is_rejected(
    family_mapper, tmp_path, sequences, tokens, method, reason
):
    f = family_mapper
    size = {"sequences": sequences, "tokens": tokens, "method": method}
    artifact = quick_fit(f.source, f.target, f.calibration, tmp_path, layers=6, **size)
    record = check(artifact, f.source, f.target, f.passages[::2], PREFIX, thresholds=LIMITS)
    assert (record.verdict, record.stage) == ("rejected", "definition")
    assert record.reason.startswith(reason)


def test_a_mapper_of_another_pair_is_rejected_even_under_a_false_name(family_mapper, tmp_path):
    """Fitted for an untrained target: its own manifest gives it away, a forged one does not."""
    f = family_mapper
    torch.manual_seed(0)
    stranger = type(f.target.model)(f.target.model.config).eval()
    description = replace(f.target.description, weights_digest="another", name="stranger")
    other = replace(f.target, model=stranger, description=description)
    artifact = quick_fit(
        f.source, other, f.calibration, tmp_path, layers=2, sequences=32, tokens=64
    )
    record = check(artifact, f.source, f.target, f.passages[::2], PREFIX, thresholds=LIMITS)
    assert record.reason.startswith("models.target: ")
    forged = replace(artifact, mapper=replace(artifact.mapper, target=f.target.description))
    record = check(forged, f.source, f.target, f.passages[::2], PREFIX, thresholds=LIMITS)
    assert (record.verdict, record.stage) == ("rejected", "attention")


def test_copies_of_the_fitted_text_under_other_names_are_no_held_out_text(family_mapper):
    f = family_mapper
    copies = [
        TokenSequence(f"copy {number % 8}", (*sequence.tokens[:-9], *range(9)))
        for number, sequence in enumerate(f.sequences[:20])
    ]
    record = check(f.artifact, f.source, f.target, copies, 192)
    assert (record.verdict, record.stage) == ("rejected", "held_out")
    assert record.reason.startswith("held_out: 20 of 20 passages repeat text of the fit")


def test_a_fit_on_the_held_out_text_is_rejected(family_mapper, tmp_path):
    f = family_mapper
    artifact = quick_fit(f.source, f.target, f.heldout, tmp_path, layers=1, sequences=40, tokens=64)
    record = check(artifact, f.source, f.target, f.passages, PREFIX)
    assert (record.verdict, record.stage) == ("rejected", "held_out")
    assert record.reason.startswith("held_out: 13 of the text's 13 documents were used in the fit")


class Misdescribed:
    """A model whose description says that its keys are not rotated."""

    def __init__(self, model):
        width = model.description.key_dim
        still = RopeSpec("default", width, width, (0.0,) * (width // 2), 1.0, False)
        self.description = replace(model.description, rope=still)
        self.dtype, self.tokenize = model.dtype, model.tokenize
        self.capture, self.read_after = model.capture, model.read_after


@pytest.fixture(scope="module")
def rotated(family_mapper, tmp_path_factory):
    """Maps between rotated keys: exact rotation is part of what the map has to learn."""
    models = [Misdescribed(m) for m in (family_mapper.source, family_mapper.target)]
    folder = tmp_path_factory.mktemp("rotated")
    size = {"sequences": 200, "tokens": 64, "layers": 6}
    artifact = quick_fit(*models, family_mapper.calibration, folder, **size)
    return SimpleNamespace(source=models[0], target=models[1], artifact=artifact)


def test_maps_fitted_without_un_rotating_are_rejected(family_mapper, rotated):
    passages = family_mapper.passages[::2]
    record = check(
        rotated.artifact, rotated.source, rotated.target, passages, PREFIX, thresholds=LIMITS
    )
    assert (record.verdict, record.stage) == ("rejected", "definition")
    assert record.reason.startswith("rope: without the described RoPE, keys of one token in ")


def test_they_would_be_rejected_beyond_their_length_too(family_mapper, rotated):
    """Even if nobody looked at the RoPE."""
    f = family_mapper

    def measure(mapper, tokens):
        passages = cut_sequences(f.heldout, f.source.tokenize, tokens=tokens, count=16)
        converter = TorchConverter(mapper, torch.float32)
        prefix = tokens - 16
        scores = run_arms(f.source, f.target, converter, passages, prefix, CALIBRATION_ARMS)
        return {"prefix_tokens": prefix, **arm_figures(scores)}

    lenient = Thresholds(min_top1=0, max_perplexity_ratio=9, max_behind_both=9, max_kl_share=1)
    at, beyond = (measure(rotated.artifact.mapper, tokens) for tokens in (64, 256))
    reason = arms_failure("fourfold", beyond, at, lenient)
    assert reason.startswith(("lengths.fourfold.growth: KL is", "lengths.fourfold.kl_share"))
