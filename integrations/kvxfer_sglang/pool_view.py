"""Pages of SGLang's host pool as canonical blocks, in place.

SGLang keeps a token's keys and values in one of several layouts. Each is a permutation of
``[page, layer, token, head, dim]``, so each can be shown as blocks by strides alone: reading a
page copies nothing, and what is written to a view is what SGLang loads to the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvstore_xfer.blocks.page import KvPage, KvShape, array_runs
from kvstore_xfer.errors import KvxferError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

# Pools of other kinds keep part of a page elsewhere (scales, index keys), so their blocks would
# be incomplete. By name, because the classes cannot be imported without SGLang.
_TWO_COMPONENT_POOLS = {"MHATokenToKVPoolHost", "AsymmetricMHATokenToKVPoolHost"}
_LATENT_POOLS = {"MLATokenToKVPoolHost"}


class UnsupportedPoolError(KvxferError, ValueError):
    """The host pool keeps pages in a form that this package cannot show as blocks."""


class _PageInPlace(KvPage):
    """A page whose bytes are known; its tensors are made when somebody asks for them.

    Each operation on a tensor lets go of the interpreter, which an engine keeps busy.
    """

    _view: PoolView
    _number: int
    _runs: list[memoryview]

    def __init__(self, view: PoolView, number: int, runs: list[memoryview]) -> None:
        vars(self).update(_view=view, _number=number, _runs=runs)  # pages are frozen

    @property
    def keys(self) -> torch.Tensor:
        return self._view._keys[self._number]

    @property
    def values(self) -> torch.Tensor:
        return self._view._values[self._number]

    def segments(self) -> list[memoryview]:
        # docstring inherited
        return self._runs


class PoolView:
    """Every page of one host pool. Holds views only; safe to use from several threads.

    `shape` is the geometry of one page, with the pool's layers and this rank's heads, in `dtype`:
    SGLang stores 8-bit floats as uint8, `dtype` says what the bytes are. Raises
    UnsupportedPoolError for a pool class, layout or geometry it does not know.
    """

    def __init__(self, pool: Any, dtype: torch.dtype) -> None:
        self.page_size = int(pool.page_size)
        keys, values = (_by_page(part, pool).view(dtype) for part in _components(pool))
        self._keys, self._values = keys, values
        self.pages = len(keys)
        self._layout = pool.layout
        self.shape = KvPage(keys[0], values[0]).shape
        in_place = KvPage(keys[0], values[0]).segments() is not None
        self._bytes = [_as_bytes(part) for part in (keys, values)] if in_place else None
        expected = _declared_shape(pool, dtype)
        if self.shape != expected:
            raise UnsupportedPoolError(
                f"host pool {type(pool).__name__}: its buffer has pages of {self.shape}, its "
                f"attributes say {expected}; this version of SGLang is not supported"
            )

    def page(self, slot: int) -> KvPage:
        """The page that starts at token `slot`, as views into the pool.

        Raises IndexError for a slot that does not start a page of this pool.
        """
        number, offset = divmod(slot, self.page_size)
        if offset or not 0 <= number < self.pages:
            raise IndexError(f"slot {slot} does not start one of {self.pages} pages")
        if self._bytes is None:
            return KvPage(self._keys[number], self._values[number])
        runs = [run for part in self._bytes for run in array_runs(part[number])]
        return _PageInPlace(self, number, runs)

    def pages_at(self, slots: torch.Tensor) -> list[KvPage]:
        """One page per `page_size` entries of `slots` (int64, the slots of whole pages in turn)."""
        return [self.page(slot) for slot in slots[:: self.page_size].tolist()]

    def flat_page(self, flat: torch.Tensor) -> KvPage:
        """A page that SGLang hands over as one flat tensor, in the pool's order, as views of it."""
        shape = self.shape
        flat = flat.view(-1).view(shape.dtype)
        split = shape.layers * shape.tokens * shape.heads * shape.key_dim
        parts = (flat[:split], flat[split:])
        order = _ONE_PAGE[self._layout](shape.layers, shape.tokens, shape.heads)
        keys, values = (
            _VIEWS[self._layout](part.view(*order, width), shape.tokens)[0]
            for part, width in zip(parts, (shape.key_dim, shape.value_dim), strict=True)
        )
        return KvPage(keys, values)


def _components(pool: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values in the pool's layout. A latent pool is all keys, with values of width 0."""
    kind, buffer = type(pool).__name__, pool.kv_buffer
    if kind in _TWO_COMPONENT_POOLS:
        return buffer[0], buffer[1]
    if kind in _LATENT_POOLS and isinstance(buffer, torch.Tensor):
        return buffer, buffer[..., :0]
    raise UnsupportedPoolError(
        f"host pool {kind}: not one of {sorted(_TWO_COMPONENT_POOLS | _LATENT_POOLS)}; "
        "its pages are not stored"
    )


def _as_bytes(component: torch.Tensor) -> np.ndarray:
    return component.detach().view(torch.uint8).numpy()


def _by_page(component: torch.Tensor, pool: Any) -> torch.Tensor:
    """``[page, layer, token, head, dim]``, a view of one component of the pool."""
    view = _VIEWS.get(pool.layout)
    if view is None:
        raise UnsupportedPoolError(
            f"host pool layout {pool.layout!r}: not one of {sorted(_VIEWS)}; start SGLang with "
            "another --hicache-mem-layout"
        )
    return view(component, int(pool.page_size))


# Dimensions: L layer, S slot (page N times tokens T), H head, D dim.


def _layer_first(part: torch.Tensor, tokens: int) -> torch.Tensor:
    layers, slots, heads, dim = part.shape  # L S H D
    return part.view(layers, slots // tokens, tokens, heads, dim).transpose(0, 1)


def _page_first(part: torch.Tensor, tokens: int) -> torch.Tensor:
    slots, layers, heads, dim = part.shape  # S L H D
    return part.view(slots // tokens, tokens, layers, heads, dim).transpose(1, 2)


def _page_first_direct(part: torch.Tensor, tokens: int) -> torch.Tensor:
    return part  # N L T H D


def _page_head(part: torch.Tensor, tokens: int) -> torch.Tensor:
    return part.permute(0, 3, 2, 1, 4)  # N H T L D


_VIEWS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "layer_first": _layer_first,
    "page_first": _page_first,
    "page_first_direct": _page_first_direct,
    "page_head": _page_head,
}

_ONE_PAGE: dict[str, Callable[[int, int, int], tuple[int, ...]]] = {
    "layer_first": lambda layers, tokens, heads: (layers, tokens, heads),
    "page_first": lambda layers, tokens, heads: (tokens, layers, heads),
    "page_first_direct": lambda layers, tokens, heads: (1, layers, tokens, heads),
    "page_head": lambda layers, tokens, heads: (1, heads, tokens, layers),
}


def _declared_shape(pool: Any, dtype: torch.dtype) -> KvShape:
    latent = type(pool).__name__ in _LATENT_POOLS
    return KvShape(
        layers=int(pool.layer_num),
        tokens=int(pool.page_size),
        heads=1 if latent else int(pool.head_num),
        key_dim=int(pool.kv_cache_dim if latent else pool.head_dim),
        value_dim=0 if latent else int(pool.v_head_dim),
        dtype=dtype,
    )
