"""What must be true before anything is measured: the right models, maps and fit for the right text.

Each check returns why not, as ``field: reason``, or an empty string.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvstore_xfer.errors import ArtifactError, ModelError
from kvstore_xfer.fit.accumulate import require_pair
from kvstore_xfer.mapper.maps import assign_heads
from kvstore_xfer.rope.rotate import rope_tables, strip_rope

if TYPE_CHECKING:
    from kvstore_xfer.gate.arms import Runner
    from kvstore_xfer.gate.record import Thresholds
    from kvstore_xfer.mapper.artifact import Artifact
    from kvstore_xfer.mapper.maps import Mapper

_ROPE_TOLERANCE = 0.05  # bf16 keys of one token differ by about 0.01; another RoPE gives about 1
_PROBE_TOKENS = 64


def wrong_models(mapper: Mapper, source: Runner, target: Runner) -> str:
    """Whether these are the two models of the mapper, by everything in their fingerprints."""
    for role, runner, fitted in (
        ("source", source, mapper.source),
        ("target", target, mapper.target),
    ):
        if runner.description.fingerprint() != fitted.fingerprint():
            return (
                f"models.{role}: {runner.description.name} is not the {role} this mapper was "
                f"fitted for ({fitted.name}); give the right model with --{role} or fit again"
            )
    return ""


def wrong_definition(
    artifact: Artifact, source: Runner, target: Runner, limits: Thresholds, token: int
) -> str:
    """Pair, geometry, RoPE, head map and the size of the fit; `token` is any common token."""
    mapper = artifact.mapper
    try:
        require_pair(mapper.source, mapper.target)
    except ModelError as error:
        return f"pair: {error}"
    return (
        _wrong_geometry(mapper)
        or wrong_cache(source, token)
        or wrong_cache(target, token)
        or _wrong_heads(mapper)
        or _small_fit(artifact, limits)
    )


def _wrong_geometry(mapper: Mapper) -> str:
    try:
        mapper.validate()
    except ArtifactError as error:
        return f"geometry: {error}"
    return ""


def wrong_cache(runner: Runner, token: int) -> str:
    """The cache has the described shape, and its keys the described RoPE.

    The first layer's keys see only the token and its position: without their rotation the keys of
    one token are equal at all positions.
    """
    model, positions = runner.description, torch.arange(_PROBE_TOKENS)
    page = runner.capture([token] * len(positions))
    shape = (model.layers, len(positions), model.kv_heads)
    if page.keys.shape != (*shape, model.key_dim) or page.values.shape != (*shape, model.value_dim):
        return (
            f"geometry: {model.name} gives keys {tuple(page.keys.shape)} and values "
            f"{tuple(page.values.shape)}, described are {(*shape, model.key_dim)} and "
            f"{(*shape, model.value_dim)}"
        )
    if model.rope is None:
        return f"rope: {model.name} has no supported RoPE"
    keys = strip_rope(page.keys[0].cpu(), model.rope, *rope_tables(model.rope, positions)).float()
    spread = float((keys - keys[:1]).norm(dim=-1).max() / keys[0].norm(dim=-1).max())
    if not spread <= _ROPE_TOLERANCE:
        return (
            f"rope: without the described RoPE, keys of one token in {model.name} still depend on "
            f"their position (by {spread:.0%}); describe and fit again"
        )
    return ""


def _wrong_heads(mapper: Mapper) -> str:
    expected = assign_heads(mapper.source.kv_heads, mapper.target.kv_heads)
    if mapper.method.per_head and mapper.head_assignment != expected:
        return (
            f"head_map: target heads read source heads {list(mapper.head_assignment)}, fitted maps "
            f"read {list(expected)}"
        )
    return ""


def _small_fit(artifact: Artifact, limits: Thresholds) -> str:
    """Few sequences, or few tokens for each input: such maps repeat what they have seen."""
    fitted = artifact.fit.get("calibration", {})
    sequences, tokens = fitted.get("sequences", 0), fitted.get("tokens_per_sequence", 0)
    if sequences < limits.min_fit_sequences:
        return (
            f"calibration: fitted on {sequences} sequences, needed are "
            f"{limits.min_fit_sequences}; fit on more text"
        )
    inputs = artifact.mapper.inputs
    if sequences * tokens < limits.min_rows_per_input * inputs:
        return (
            f"calibration: fitted on {sequences * tokens} tokens for maps of {inputs} inputs, "
            f"needed are {limits.min_rows_per_input:g} for each; fit on more text or with fewer "
            "--layers"
        )
    return ""
