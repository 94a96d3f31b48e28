"""Before a fit: is this pair likely to pass, and with which method?

The pair is fitted on a few dozen sequences, once on half of them and once on all, and measured as
the check measures it, on documents of its own. Error that comes from too little text falls with
one over the number of sequences, so the two fits say what is left with as many as a real fit will
have: ``KL(N) = a + b / N``. The thresholds are the gate's, on interval ends as there; the intervals
of a few passages are narrowed to what as many as the gate has would leave, by the square root of
their numbers.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore_xfer.errors import ModelError, TextError
from kvstore_xfer.fit.accumulate import HELD_OUT_EVERY, FitOptions, require_pair
from kvstore_xfer.fit.run import Side, fit
from kvstore_xfer.gate.arms import Runner, run_arms
from kvstore_xfer.gate.attention import attention_cosines
from kvstore_xfer.gate.decide import arms_failure, attention_failure
from kvstore_xfer.gate.definition import wrong_cache
from kvstore_xfer.gate.figures import CONTROLS, arm_figures, attention_figures, first_broken_arm
from kvstore_xfer.gate.lengths import CALIBRATION
from kvstore_xfer.gate.record import Thresholds
from kvstore_xfer.mapper.convert_select import make_converter
from kvstore_xfer.mapper.maps import Method, same_geometry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore_xfer.fit.text import TokenSequence
    from kvstore_xfer.models.description import ModelDescription

LIKELY = "likely"
UNLIKELY = "unlikely"
PLANNED_SEQUENCES = 500
PLANNED_PASSAGES = 60  # as `kvxfer check` takes
_ARMS = ("native", "mapped", "wrong", "none", "source")
_CHECKED_EVERY = 4  # documents kept for measuring
_LEAST_CHECKED = 2  # one is the other's wrong document
LEAST_SEQUENCES = 2 * HELD_OUT_EVERY + _LEAST_CHECKED
LEAST_TOKENS = 5  # a quarter is read after the rest, and its second token predicted
_LEAST_LEFT = 0.5  # no extrapolation promises more than half of the measured KL
_RIDGE = 1e-3  # trials do not pick it: on held-out sequences it is the usual choice


@dataclass(frozen=True)
class MethodForecast:
    """One method: what was measured with all sequences, what is expected of a real fit."""

    method: str
    layers: int
    parameters: int
    kl: float
    expected_kl: float
    top1: float
    cosine: float
    worst_cosine: float
    failure: str

    @property
    def passes(self) -> bool:
        return not self.failure


@dataclass(frozen=True)
class Forecast:
    """The verdict on a pair; `method` is the smallest that is expected to pass, else the best.

    Larger methods than one that is expected to pass are not tried.
    `reason` is what stands against it, empty when nothing does. `controls` holds the KL of the
    arms that need no mapper.
    """

    verdict: str
    method: str
    reason: str
    methods: tuple[MethodForecast, ...] = ()
    controls: tuple[tuple[str, float], ...] = ()
    sequences: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def predict(
    source: Runner,
    target: Runner,
    sequences: Sequence[TokenSequence],
    *,
    thresholds: Thresholds | None = None,
    planned: int = PLANNED_SEQUENCES,
    passages: int = PLANNED_PASSAGES,
    device: str = "cpu",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Forecast:
    """Forecast the gate's verdict on `passages` for a fit on `planned` sequences of this length.

    Raises TextError when there are too few sequences or documents.
    """
    reason = _impossible(source, target, sequences[0].tokens[1])
    if reason:
        return Forecast(UNLIKELY, "", reason)
    fitted, checked = _split(sequences)
    limits, methods = thresholds or Thresholds(), []
    tried = methods_of(source.description, target.description)
    for number, method in enumerate(tried):
        trial = _Trial(source, target, method, checked, device)
        whole = trial.measure(fitted, None)
        half = trial.measure(fitted[: len(fitted) // 2], whole.layers)
        shares = len(fitted) / planned, trial.documents / passages
        methods.append(_forecast(method, half, whole, shares, limits))
        progress(number + 1, len(tried))
        if methods[-1].passes:
            break  # what follows is larger
    controls = tuple((arm, whole.figures["arms"][arm]["kl"]["mean"]) for arm in CONTROLS)
    best = methods[-1] if methods[-1].passes else min(methods, key=lambda m: m.expected_kl)
    verdict = LIKELY if best.passes else UNLIKELY
    return Forecast(verdict, best.method, best.failure, tuple(methods), controls, len(sequences))


def methods_of(source: ModelDescription, target: ModelDescription) -> tuple[Method, ...]:
    """What is tried for this pair, small ones first."""
    fine_tune = (Method.RESIDUAL,) if same_geometry(source, target) else ()
    return (*fine_tune, Method.HEAD_LOCAL, Method.FULL_HEAD)


def _impossible(source: Runner, target: Runner, token: int) -> str:
    """What no fit can mend."""
    try:
        require_pair(source.description, target.description)
    except ModelError as error:
        return f"pair: {error}"
    return wrong_cache(source, token) or wrong_cache(target, token)


def _split(
    sequences: Sequence[TokenSequence],
) -> tuple[list[TokenSequence], list[TokenSequence]]:
    """By document: most to fit on, the rest to measure on."""
    documents = list(dict.fromkeys(sequence.document for sequence in sequences))
    kept = set(documents[_CHECKED_EVERY - 1 :: _CHECKED_EVERY])
    fitted = [sequence for sequence in sequences if sequence.document not in kept]
    checked = [sequence for sequence in sequences if sequence.document in kept]
    if len(kept) < _LEAST_CHECKED or len(fitted) < 2 * HELD_OUT_EVERY:
        remedy = "more text, a larger --sequences or a smaller --sequence-tokens"
        if len(kept) < _LEAST_CHECKED:
            remedy = f"text of {_LEAST_CHECKED * _CHECKED_EVERY} documents or more (a .txt is one)"
        raise TextError(
            f"--text: {len(sequences)} sequences of {len(documents)} documents; a forecast needs "
            f"{2 * HELD_OUT_EVERY} to fit on and two documents to measure on, every "
            f"{_CHECKED_EVERY}th; give {remedy}"
        )
    return fitted, checked


@dataclass(frozen=True)
class _Measured:
    """One trial fit: its size and the gate's figures."""

    layers: int
    parameters: int
    figures: dict[str, Any]
    attention: dict[str, Any]
    broken: str | None


@dataclass(frozen=True)
class _Trial:
    source: Runner
    target: Runner
    method: Method
    checked: list[TokenSequence]
    device: str

    @property
    def documents(self) -> int:
        return len({passage.document for passage in self.checked})

    def measure(self, fitted: Sequence[TokenSequence], layers: int | None) -> _Measured:
        source, target = (Side(m.description, m.capture) for m in (self.source, self.target))
        options = FitOptions(self.method, layers=layers, ridge=_RIDGE)
        with tempfile.TemporaryDirectory() as folder:
            artifact = fit(source, target, fitted, Path(folder), options, device=self.device)
        converter = make_converter(artifact.mapper, self.target.dtype, "cpu")
        pair, prefix = (self.source, self.target, converter), len(fitted[0].tokens) * 3 // 4
        scores = run_arms(*pair, self.checked, prefix, _ARMS)
        cosines = attention_cosines(*pair, self.checked, prefix)
        documents = [passage.document for passage in self.checked]
        return _Measured(
            int(artifact.fit["k"]),
            artifact.mapper.parameters,
            arm_figures(scores),
            attention_figures(documents, cosines),
            first_broken_arm(scores),
        )


def _forecast(
    method: Method,
    half: _Measured,
    whole: _Measured,
    shares: tuple[float, float],
    limits: Thresholds,
) -> MethodForecast:
    """`shares`: what there was of the sequences and of the passages that there will be."""
    mapped = whole.figures["arms"]["mapped"]
    kl, before = mapped["kl"]["mean"], half.figures["arms"]["mapped"]["kl"]["mean"]
    falling = max(0.0, before - kl)
    expected = max(_LEAST_LEFT * kl, kl - falling * max(0.0, 1 - shares[0]))
    worst = whole.attention["by_layer"][whole.attention["worst_layer"]]["mean"]
    forecast = MethodForecast(
        method=method.value,
        layers=whole.layers,
        parameters=whole.parameters,
        kl=kl,
        expected_kl=expected,
        top1=mapped["top1"]["mean"],
        cosine=whole.attention["mean"]["mean"],
        worst_cosine=worst,
        failure="",
    )
    scale, width = expected / kl if kl else 1.0, min(1.0, shares[1] ** 0.5)
    return replace(forecast, failure=_failure(whole, scale, width, limits))


def _failure(whole: _Measured, scale: float, width: float, limits: Thresholds) -> str:
    """What the gate would say, once KL has fallen by `scale` and intervals to `width`.

    What is lost in loss, agreement and cosine is taken to fall with KL.
    """
    if whole.broken is not None:
        return f"logits: the {whole.broken} arm gave values that are not numbers"

    def toward_one(value: float) -> float:
        return 1 - (1 - value) * scale

    def moved(cell: dict[str, float], move: Callable[[float], float]) -> dict[str, float]:
        mean = cell["mean"]
        return {end: move(mean + width * (value - mean)) for end, value in cell.items()}

    attention = {
        "worst_layer": whole.attention["worst_layer"],
        "mean": moved(whole.attention["mean"], toward_one),
        "by_layer": [moved(cell, toward_one) for cell in whole.attention["by_layer"]],
    }
    arms = {arm: dict(row) for arm, row in whole.figures["arms"].items()}
    native, mapped = arms["native"]["loss"]["mean"], arms["mapped"]
    mapped["top1"] = moved(mapped["top1"], toward_one)
    mapped["loss"] = moved(mapped["loss"], lambda loss: native + (loss - native) * scale)
    figures = {
        "prefix_tokens": 0,
        "arms": arms,
        "kl_share": {
            arm: moved(cell, lambda share: share * scale)
            for arm, cell in whole.figures["kl_share"].items()
        },
        "perplexity_ratio": moved(
            whole.figures["perplexity_ratio"], lambda ratio: float(ratio**scale)
        ),
    }
    return attention_failure(attention, limits) or arms_failure(
        CALIBRATION, figures, figures, limits
    )
