"""The published MLP (arXiv 2608.03893): where a linear map falls short, and time is no matter.

Per target head and component ``Linear(p, n) - ReLU - Linear(n, n) - ReLU - Linear(n, d_t)``, Adam
1e-3, batches of 4,096 rows, mean squared error on standardised data, at most 20 epochs; the epoch
that is best on held-out sequences is kept, and training stops `PATIENCE` epochs after it. Inputs
are those of the head-local map of the same pair, whose layers the first pass picks. The rows of
the second pass are kept on disk in float16 and read batch by batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstore_xfer.errors import ConfigError
from kvstore_xfer.fit.accumulate import require_finite, require_split, split_of, stripped
from kvstore_xfer.fit.checkpoint import NEEDS_ROOM
from kvstore_xfer.mapper.convert_dense import mlp
from kvstore_xfer.mapper.maps import LayerMap, Mapper, Method, assign_heads

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore_xfer.blocks.page import KvPage
    from kvstore_xfer.fit.select import Choice
    from kvstore_xfer.models.description import ModelDescription

HIDDEN, EPOCHS, BATCH, RATE, PATIENCE = 1024, 20, 4096, 1e-3, 2
_COMPONENTS = ("keys", "values")


class RowFiles:
    """Rows of both models on disk, float16: one file per component, side and split.

    Keys are without RoPE. Raises ConfigError when the disk is full.
    """

    def __init__(self, folder: Path, source: ModelDescription, target: ModelDescription) -> None:
        self._folder = folder
        self._models = {"source": source, "target": target}
        self.rows = {"fitted": 0, "held_out": 0}
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.glob("rows.*"):
            file.unlink()

    def add(self, index: int, source: KvPage, target: KvPage) -> None:
        """Append one sequence, without position 0."""
        split = split_of(index)
        for side, page in (("source", source), ("target", target)):
            model = self._models[side]
            require_finite(model, index, page)
            parts = zip(_COMPONENTS, (stripped(page, model.rope), page.values), strict=True)
            for name, part in parts:
                rows = part[:, 1:].transpose(0, 1).to("cpu", torch.float16).contiguous().numpy()
                self._append(self._folder / f"rows.{name}.{side}.{split}", rows.tobytes())
        self.rows[split] += source.keys.shape[1] - 1

    @staticmethod
    def _append(file: Path, data: bytes) -> None:
        try:
            with file.open("ab") as stream:
                stream.write(data)
        except OSError as error:
            raise ConfigError(f"--out {file}: {error.strerror}; {NEEDS_ROOM}") from None

    def read(self, name: str, side: str, split: str) -> np.memmap:
        """``[N, L, H, d]`` of one component of one model."""
        model = self._models[side]
        width = model.key_dim if name == "keys" else model.value_dim
        shape = (self.rows[split], model.layers, model.kv_heads, width)
        return np.memmap(self._folder / f"rows.{name}.{side}.{split}", np.float16, "r", shape=shape)


@dataclass
class _Data:
    """Rows of one target layer and component: inputs ``[N, k, H_t, d_s]``, outputs."""

    inputs: np.memmap
    outputs: np.memmap
    layers: list[int]
    heads: list[int]
    layer: int

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """``[H_t, n, p]`` and ``[H_t, n, d_t]``, float32; `rows` ascending."""
        read = torch.from_numpy(self.inputs[rows][:, self.layers][:, :, self.heads])
        written = torch.from_numpy(self.outputs[rows, self.layer])
        return read.float().permute(2, 0, 1, 3).flatten(2), written.float().transpose(0, 1)


def train(
    files: RowFiles,
    source: ModelDescription,
    target: ModelDescription,
    choice: Choice,
    *,
    hidden: int = HIDDEN,
    epochs: int = EPOCHS,
) -> tuple[Mapper, tuple[tuple[float, ...], ...]]:
    """Train all maps on the CPU; held-out R^2 per component and target layer.

    The same rows give the same maps: seeds are fixed.
    """
    require_split(files.rows["fitted"], files.rows["held_out"])
    heads = assign_heads(source.kv_heads, target.kv_heads)
    components: list[list[LayerMap]] = []
    scores: list[tuple[float, ...]] = []
    for name in _COMPONENTS:
        trained = []
        for layer, layers in enumerate(choice.layers):
            fitted, held_out = (
                _Data(
                    files.read(name, "source", split),
                    files.read(name, "target", split),
                    list(layers),
                    list(heads),
                    layer,
                )
                for split in ("fitted", "held_out")
            )
            tensors, score = _train_layer(fitted, held_out, hidden, epochs)
            trained.append((_layer_map(layers, tensors), score))
        components.append([layer for layer, _ in trained])
        scores.append(tuple(score for _, score in trained))
    keys, values = map(tuple, components)
    mapper = Mapper(Method.MLP, source, target, heads, keys, values)
    mapper.validate()
    return mapper, tuple(scores)


def _train_layer(
    fitted: _Data, held_out: _Data, hidden: int, epochs: int
) -> tuple[list[torch.Tensor], float]:
    generator = torch.Generator().manual_seed(0)
    shift_x, scale_x, shift_y, scale_y = _standardisation(fitted)
    widths = (shift_x.shape[2], hidden, hidden, shift_y.shape[2])
    tensors = _initial(len(shift_x), widths, generator)
    adam = torch.optim.Adam(tensors, lr=RATE)
    best, kept, waited = -float("inf"), tensors, 0
    for _ in range(epochs):
        order = torch.randperm(len(fitted), generator=generator).numpy()
        for start in range(0, len(order), BATCH):
            x, y = fitted.batch(np.sort(order[start : start + BATCH]))
            predicted = mlp((x - shift_x) / scale_x, tensors)
            loss = (predicted - (y - shift_y) / scale_y).square().mean((1, 2)).sum()
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
        reached = _score(held_out, tensors, (shift_x, scale_x, shift_y, scale_y))
        waited = 0 if reached > best else waited + 1
        if reached > best:
            best, kept = reached, [tensor.detach().clone() for tensor in tensors]
        if waited == PATIENCE:
            break
    return _unstandardised(kept, shift_x, scale_x, shift_y, scale_y), best


def _initial(heads: int, widths: tuple[int, ...], generator: torch.Generator) -> list[torch.Tensor]:
    """As torch's Linear does: uniform within the inverse root of the inputs."""
    tensors = []
    for width_in, width_out in pairwise(widths):
        for shape in ((heads, width_in, width_out), (heads, width_out)):
            bound = width_in**-0.5
            drawn = torch.rand(shape, generator=generator) * 2 * bound - bound
            tensors.append(drawn.requires_grad_())
    return tensors


def _standardisation(data: _Data) -> tuple[torch.Tensor, ...]:
    """Means and standard deviations ``[H, 1, p]`` of inputs, and of outputs, per column."""
    sums: list[torch.Tensor] = []
    for start in range(0, len(data), BATCH):
        x, y = data.batch(np.arange(start, min(start + BATCH, len(data))))
        parts = [f(part.double()).sum(1, keepdim=True) for part in (x, y) for f in _POWERS]
        sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
    result = []
    for total, squares in (sums[:2], sums[2:]):
        mean = total / len(data)
        spread = (squares / len(data) - mean.square()).clamp_min(1e-12).sqrt()
        result += [mean.float(), spread.float()]
    return tuple(result)


_POWERS = (torch.clone, torch.square)


@torch.no_grad()
def _score(data: _Data, tensors: list[torch.Tensor], scales: tuple[torch.Tensor, ...]) -> float:
    """Held-out R^2, mean over heads."""
    shift_x, scale_x, shift_y, scale_y = scales
    error = torch.zeros(len(shift_x), dtype=torch.float64)
    total, sums = torch.zeros_like(error), torch.zeros(())
    for start in range(0, len(data), BATCH):
        x, y = data.batch(np.arange(start, min(start + BATCH, len(data))))
        predicted = mlp((x - shift_x) / scale_x, tensors) * scale_y + shift_y
        error += (predicted - y).double().square().sum((1, 2))
        total += (y - shift_y).double().square().sum((1, 2))
        sums = sums + (y - shift_y).double().sum(1)
    total -= sums.square().sum(1) / len(data)  # about the held-out mean
    return float((1 - error / total.clamp_min(1e-300)).mean())


def _unstandardised(
    tensors: list[torch.Tensor],
    shift_x: torch.Tensor,
    scale_x: torch.Tensor,
    shift_y: torch.Tensor,
    scale_y: torch.Tensor,
) -> list[torch.Tensor]:
    """The same function of raw inputs and outputs."""
    first, first_bias, second, second_bias, last, last_bias = (t.detach() for t in tensors)
    first = first / scale_x.mT
    first_bias = first_bias - torch.bmm(shift_x, first)[:, 0]
    return [
        first,
        first_bias,
        second,
        second_bias,
        last * scale_y,
        last_bias * scale_y[:, 0] + shift_y[:, 0],
    ]


def _layer_map(layers: tuple[int, ...], tensors: list[torch.Tensor]) -> LayerMap:
    """bf16 keeps the range that raw inputs need; the last bias is float32 as everywhere."""
    *before, last, bias = tensors
    return LayerMap(
        layers, last.bfloat16(), bias.float(), tuple(part.bfloat16() for part in before)
    )
