"""From pairs of caches to moments, and from moments to a mapper.

One `Accumulator` holds the moments of keys (RoPE stripped) and values, each on fitted and on
held-out sequences: every `HELD_OUT_EVERY`-th sequence is held out. Layers, k and ridge are picked
on the held-out ones; the maps themselves are then solved on all sequences.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvstore_xfer.errors import ConfigError, ModelError
from kvstore_xfer.fit.first_token import FirstToken
from kvstore_xfer.fit.moments import Moments
from kvstore_xfer.fit.select import Choice, Component, choose, rank_layers
from kvstore_xfer.fit.solve import solve_ridge
from kvstore_xfer.mapper.maps import LayerMap, Mapper, Method, assign_heads, same_geometry
from kvstore_xfer.rope.rotate import rope_tables, strip_rope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore_xfer.blocks.page import KvPage
    from kvstore_xfer.models.description import ModelDescription
    from kvstore_xfer.rope.spec import RopeSpec

HELD_OUT_EVERY = 8
_LARGEST_FLOAT16 = 65_504.0


@dataclass(frozen=True)
class FitOptions:
    """What a user may set of a fit.

    `layers` and `ridge` None mean: pick on held-out sequences; `rank` None: for a low-rank mapper
    as many parameters as a head-local one of the same layers, for a residual one picked on held-out
    sequences, layer by layer. `weighted` takes the row weights of the target's attention
    (head-local and full-head); `hidden` is the width of an MLP.
    """

    method: Method = Method.HEAD_LOCAL
    layers: int | None = None
    ridge: float | None = None
    rank: int | None = None
    weighted: bool = False
    hidden: int = 1024

    @property
    def weights(self) -> str:
        """As the command line and the manifest name them."""
        return "attention" if self.weighted else "none"


class Accumulator:
    """Streams caches of one ordered pair into moments.

    Raises
    ------
    ModelError
        The two models cannot be a pair: tokenizers differ, or a cache must not be converted.
    ConfigError
        More layers asked for than the source has, or the moments would not fit into memory.
    """

    def __init__(
        self,
        source: ModelDescription,
        target: ModelDescription,
        options: FitOptions,
        device: str = "cpu",
    ) -> None:
        require_options(source, target, options)
        self._source, self._target, self._options = source, target, options
        self._heads = assign_heads(source.kv_heads, target.kv_heads)
        groups = target.kv_heads if options.method is Method.HEAD_LOCAL else 1
        self._widths = tuple(
            (source_dim * source.kv_heads // spread, target_dim * target.kv_heads // groups)
            for source_dim, target_dim, spread in (
                (source.key_dim, target.key_dim, self._spread),
                (source.value_dim, target.value_dim, self._spread),
            )
        )
        shapes = [(groups, source.layers * x, target.layers * y) for x, y in self._widths]
        needed = sum(2 * Moments.bytes_needed(*shape) for shape in shapes)
        full = options.method is Method.FULL_HEAD
        require_memory(needed, device, "use --method head-local" if full else "")
        self.moments = {
            f"{component}.{split}": Moments.zero(*shape, device=device)
            for component, shape in zip(("keys", "values"), shapes, strict=True)
            for split in ("fitted", "held_out")
        }
        self._first = FirstToken(target, device)
        self.moments |= self._first.moments

    @property
    def _spread(self) -> int:
        """In how many parts the source's heads enter: one head at a time, or all together."""
        return self._source.kv_heads if self._options.method is Method.HEAD_LOCAL else 1

    def add(self, index: int, source: KvPage, target: KvPage) -> None:
        """Add one sequence: its number, and both models' caches of all its tokens."""
        pairs = later_pairs(index, (self._source, source), (self._target, target), self._first)
        for component, (inputs, outputs) in pairs.items():
            self.moments[f"{component}.{split_of(index)}"].update(
                read_by(self._options.method, self._heads, inputs), self._outputs(outputs)
            )

    def choose(self) -> Choice:
        """Source layers, their number and the ridges; the moments stay as they are."""
        require_split(self.moments["keys.fitted"].rows, self.moments["keys.held_out"].rows)
        components = self._components()
        ranking = rank_layers(components, self._source.layers, self._target.layers)
        return choose(components, ranking, layers=self._options.layers, ridge=self._options.ridge)

    def finish(self) -> tuple[Mapper, Choice]:
        """Choose, solve and assemble the mapper (without a digest: saving gives it one)."""
        choice = self.choose()
        keys, values = (
            self._solve(component, choice, ridges)
            for component, ridges in zip(self._components(), choice.ridges, strict=True)
        )
        mapper = Mapper(self._options.method, self._source, self._target, self._heads, keys, values)
        return self.complete(mapper), choice

    def complete(self, mapper: Mapper) -> Mapper:
        """A mapper of these models with what the target holds at position 0."""
        return self._first.give(mapper)

    def _components(self) -> tuple[Component, ...]:
        return tuple(
            Component(self.moments[f"{name}.fitted"], self.moments[f"{name}.held_out"], *widths)
            for name, widths in zip(("keys", "values"), self._widths, strict=True)
        )

    def _solve(
        self, component: Component, choice: Choice, ridges: tuple[float, ...]
    ) -> tuple[LayerMap, ...]:
        everything = component.fitted
        everything.merge(component.held_out)
        heads = self._target.kv_heads
        maps = []
        for target, (layers, ridge) in enumerate(zip(choice.layers, ridges, strict=True)):
            affine = solve_ridge(
                everything, component.inputs(layers), component.outputs(target), ridge
            )
            weight = (
                affine.weight if self._options.method is Method.HEAD_LOCAL else affine.weight[0]
            )
            maps.append(
                LayerMap(
                    layers,
                    weight.to("cpu", weight_dtype(weight)),
                    affine.bias.reshape(heads, -1).to("cpu", torch.float32),
                )
            )
        return tuple(maps)

    def _outputs(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[L_t, T, H_t, d_t]`` -> ``[H_t, T, L_t * d_t]`` or ``[1, T, L_t * H_t * d_t]``."""
        if self._options.method is Method.HEAD_LOCAL:
            return tensor.permute(2, 1, 0, 3).flatten(2)
        return tensor.transpose(0, 1).flatten(1)[None]


def read_by(method: Method, heads: Sequence[int], tensor: torch.Tensor) -> torch.Tensor:
    """What the target's heads read: ``[L_s, T, H_s, d_s]`` -> ``[H_t, T, L_s * d_s]``.

    In a full-head map all read the same, ``[1, T, L_s * H_s * d_s]``. `heads` is the source head
    of each target head.
    """
    if method is Method.HEAD_LOCAL:
        chosen = torch.tensor(heads, device=tensor.device)
        return tensor.index_select(2, chosen).permute(2, 1, 0, 3).flatten(2)
    return tensor.transpose(0, 1).flatten(1)[None]


def split_of(index: int) -> str:
    """Which side sequence `index` is on: "fitted" or "held_out"."""
    return "held_out" if index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else "fitted"


def require_split(fitted: float, held_out: float) -> None:
    """Raises ConfigError unless there are rows on both sides."""
    if not fitted or not held_out:
        raise ConfigError(
            f"--sequences: a fit needs at least {HELD_OUT_EVERY} sequences (one of them is "
            "held out); give a larger number or more text"
        )


def require_pair(source: ModelDescription, target: ModelDescription) -> None:
    """Raises ModelError unless blocks of `source` may in principle be converted for `target`."""
    for model in (source, target):
        if model.refusal is not None:
            raise ModelError(
                f"{model.name}: its cache cannot be converted: {model.refusal}; choose another "
                "model"
            )
    if source.tokenizer_digest != target.tokenizer_digest:
        raise ModelError(
            f"{source.name} and {target.name}: tokenizers differ (vocabulary, merges or added "
            "tokens), so token i is not the same text in both; choose models of one family"
        )


def require_options(
    source: ModelDescription, target: ModelDescription, options: FitOptions
) -> None:
    """What an accumulator asks first, and can be asked before the models are loaded.

    Raises ModelError and ConfigError.
    """
    require_pair(source, target)
    require_layers(source, options.layers)
    if options.method.residual:
        require_same_geometry(source, target, options.method)


def require_same_geometry(
    source: ModelDescription, target: ModelDescription, method: Method
) -> None:
    """Raises ConfigError unless each layer and head of one has its like in the other."""
    if not same_geometry(source, target):
        raise ConfigError(
            f"--method {method.value}: the models differ in layers or heads; use head-local or "
            "low-rank"
        )


def require_layers(source: ModelDescription, wanted: int | None) -> None:
    """Raises ConfigError when more layers are wanted than the source has."""
    if wanted is not None and not 1 <= wanted <= source.layers:
        raise ConfigError(
            f"--layers {wanted}: {source.name} has {source.layers} layers; "
            f"give 1 to {source.layers} or 'auto'"
        )


def require_rank(wanted: int | None, largest: int) -> None:
    """Raises ConfigError for a rank beyond the smaller side of what it would be the rank of."""
    if wanted is not None and wanted > largest:
        raise ConfigError(
            f"--rank {wanted}: the largest possible with these models and layers is {largest}; "
            f"give 1 to {largest} or 'auto'"
        )


def component_pairs(
    index: int, source: tuple[ModelDescription, KvPage], target: tuple[ModelDescription, KvPage]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What sequence `index` adds to a fit: keys without RoPE and values, source and target.

    Each ``[L, T, H, d]``. Raises ModelError for values that are not numbers.
    """
    for model, page in (source, target):
        require_finite(model, index, page)
    keys = tuple(stripped(page, model.rope) for model, page in (source, target))
    return {"keys": (keys[0], keys[1]), "values": (source[1].values, target[1].values)}


def later_pairs(
    index: int,
    source: tuple[ModelDescription, KvPage],
    target: tuple[ModelDescription, KvPage],
    first: FirstToken,
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """`component_pairs` behind position 0, which goes to `first`."""
    pairs = component_pairs(index, source, target)
    first.add(pairs["keys"][1], pairs["values"][1])
    return {name: (inputs[:, 1:], outputs[:, 1:]) for name, (inputs, outputs) in pairs.items()}


def stripped(page: KvPage, rope: RopeSpec | None) -> torch.Tensor:
    """The page's keys without RoPE; its first token stands at position 0."""
    if rope is None:
        raise ModelError("a model without a supported RoPE cannot be fitted")
    positions = torch.arange(page.keys.shape[1], device=page.keys.device)
    return strip_rope(page.keys, rope, *rope_tables(rope, positions))


def weight_dtype(weight: torch.Tensor) -> torch.dtype:
    """float16 has three bits more than bfloat16, but a small range."""
    largest = weight.abs().max() if weight.numel() else 0.0
    return torch.float16 if largest <= _LARGEST_FLOAT16 else torch.bfloat16


def require_finite(model: ModelDescription, index: int, page: KvPage) -> None:
    """Raises ModelError for infinities and nan."""
    if not (page.keys.isfinite().all() and page.values.isfinite().all()):
        raise ModelError(
            f"{model.name}: its cache of sequence {index} holds values that are not numbers; "
            "run it in another --dtype"
        )


def _available_bytes() -> int:
    """Free memory and what the page cache would give back, which sysconf does not count."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def require_memory(needed: int, device: str, lighter: str = "") -> None:
    """Raises ConfigError when `device` has fewer than `needed` bytes free.

    `lighter` is what needs less, if anything does.
    """
    if device == "cpu":
        available = _available_bytes()
    else:
        available, _ = torch.cuda.mem_get_info(device)
    if needed > available:
        remedy = " or ".join(filter(None, (lighter, "use a device with more memory (--device)")))
        raise ConfigError(
            f"--method: the moments of this pair take {needed / 2**30:.1f} GiB, {device} has "
            f"{available / 2**30:.1f} GiB free; {remedy}"
        )
