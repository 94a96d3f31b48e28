"""A transformers `DynamicCache` as pages, and pages as a `DynamicCache`.

Only batch size one: a prefix belongs to one sequence.
"""

from __future__ import annotations

import torch
from transformers import DynamicCache

from kvstore_xfer.blocks.page import KvPage


def page_of_cache(cache: DynamicCache, start: int = 0, stop: int | None = None) -> KvPage:
    """Tokens ``[start, stop)`` of all layers, keys ``[L, T, H, Dk]`` as one new page."""

    def component(name: str) -> torch.Tensor:
        layers = [getattr(layer, name)[0, :, start:stop] for layer in cache.layers]
        return torch.stack(layers).transpose(1, 2)

    return KvPage(component("keys"), component("values"))


def cache_of_page(page: KvPage) -> DynamicCache:
    """A cache that holds the page's tokens; its tensors share the page's memory until it grows."""
    cache = DynamicCache()
    for index in range(page.keys.shape[0]):
        cache.update(
            *(part[index].transpose(0, 1)[None] for part in (page.keys, page.values)), index
        )
    return cache
