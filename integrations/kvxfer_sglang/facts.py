"""What the running engine is: read once at attach.

SGLang hands a storage backend a config with a served name and ranks, and a host pool. Weights,
KV dtype, speculation and adapters are known to the same process only through its runtime context,
which `read_facts` consults. What cannot be read is None, and None never converts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from kvstore_xfer.blocks.key import heads_of_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

UNIGRAM_HASHES = "sglang-sha256"
BIGRAM_HASHES = "sglang-sha256-bigram"

# What the uint8 bytes of SGLang's pools are, by the name of --kv-cache-dtype. On ROCm the same
# name stands for another encoding, and "auto" may mean a checkpoint's own.
_EIGHT_BIT_FLOATS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_KV_POOL = "kv"

T = TypeVar("T")


@dataclass(frozen=True)
class EngineFacts:
    """One rank of one engine. Ranges are half-open, in heads and layers of the whole model.

    `kv_dtype` is torch's name of what the pool's bytes mean, `pool_dtype` of how SGLang stores
    them. `layers` counts the model's own, `draft_layers` those packed behind them. `alterations`
    are load options by which the engine computes something else than the model's files describe.
    None: not known.
    """

    sglang_version: str | None
    served_name: str | None
    model_path: str | None
    revision: str | None
    weight_version: str | None
    alterations: tuple[tuple[str, str], ...] | None
    compute_dtype: str | None
    kv_dtype: str | None
    pool_dtype: str
    page_size: int
    layout: str
    pool_class: str
    pool_format: str | None
    layers: int
    draft_layers: int
    first_layer: int
    heads: int
    head_range: tuple[int, int] | None
    hash_scheme: str | None
    is_mla: bool
    writes: bool
    lora: bool | None
    multimodal_rope: bool | None
    tp_rank: int
    tp_size: int
    pp_size: int
    context_parallel_size: int
    sidecar_pools: tuple[str, ...]

    @property
    def weights(self) -> tuple[str | None, str | None]:
        """To be compared with `weights_in_use`."""
        return self.model_path, self.weight_version

    @property
    def layer_range(self) -> tuple[int, int]:
        return self.first_layer, self.first_layer + self.layers


def read_facts(storage_config: Any, pool: Any, pool_names: Collection[str] = ()) -> EngineFacts:
    """The facts of this process.

    `storage_config` is SGLang's HiCacheStorageConfig, `pool` the host pool of the KV anchor,
    `pool_names` the names of all registered host pools. Raises AttributeError when those two lack
    what SGLang 0.5.23 gives them; whatever else cannot be read is None.
    """
    target_layers = int(pool.target_layer_num)
    model_path, weight_version = weights_in_use()
    setting = _known(lambda: str(_context().get_model().kv_cache_dtype))
    logical = logical_dtype(pool.dtype, setting)
    return EngineFacts(
        sglang_version=sglang_version(),
        served_name=storage_config.model_name,
        model_path=model_path,
        revision=_known(lambda: _context().get_model().revision),
        weight_version=weight_version,
        alterations=_known(_alterations),
        compute_dtype=_known(lambda: _name(_model_config().dtype)),
        kv_dtype=None if logical is None else _name(logical),
        pool_dtype=_name(pool.dtype),
        page_size=int(pool.page_size),
        layout=str(pool.layout),
        pool_class=type(pool).__name__,
        pool_format=pool.storage_format_tag,
        layers=target_layers,
        draft_layers=int(pool.layer_num) - target_layers,
        first_layer=int(pool.start_layer or 0),
        heads=1 if storage_config.is_mla_model else int(pool.head_num),
        head_range=_head_range(storage_config, pool),
        hash_scheme=_known(_hash_scheme),
        is_mla=bool(storage_config.is_mla_model),
        writes=bool(storage_config.is_storage_writer),
        lora=_known(lambda: bool(_context().get_lora().enable_lora)),
        multimodal_rope=_known(lambda: bool(_model_config().model_is_mrope)),
        tp_rank=int(storage_config.tp_rank),
        tp_size=int(storage_config.tp_size),
        pp_size=int(storage_config.pp_size),
        context_parallel_size=int(storage_config.attn_cp_size) * int(storage_config.dcp_size),
        sidecar_pools=tuple(sorted({_text(name) for name in pool_names} - {_KV_POOL})),
    )


def sglang_version() -> str | None:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def weights_in_use() -> tuple[str | None, str | None]:
    """Path and SGLang's version name of the weights that this process computes with now.

    Cheap enough for every call. A running engine can be given other weights, and SGLang then
    empties its own tiers but not the storage: blocks of `EngineFacts.weights` are no longer its.
    """
    path = _known(lambda: str(_context().get_model().model_path))
    return path, _known(lambda: str(_context().get_serving().weight_version))


def logical_dtype(stored: torch.dtype, setting: str | None) -> torch.dtype | None:
    """What the pool's bytes mean; None when neither they nor ``--kv-cache-dtype`` say so."""
    if stored is not torch.uint8:
        return stored
    return None if torch.version.hip else _EIGHT_BIT_FLOATS.get(setting or "")


def _alterations() -> tuple[tuple[str, str], ...]:
    model = _context().get_model()
    altered = {}
    if model.json_model_override_args != "{}":
        altered["json_model_override_args"] = str(model.json_model_override_args)
    if model.load_format == "dummy":
        altered["load_format"] = "dummy"
    quantized_by_files = getattr(_model_config().hf_config, "quantization_config", None) is not None
    if model.quantization is not None and not quantized_by_files:
        altered["quantization"] = str(model.quantization)
    return tuple(sorted(altered.items()))


def _hash_scheme() -> str:
    """EAGLE-like speculation keys pages by token pairs; SGLang itself says which kinds do."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    chosen = SpeculativeAlgorithm.from_string(_context().get_spec().speculative_algorithm)
    return BIGRAM_HASHES if chosen.is_eagle() else UNIGRAM_HASHES


def _head_range(storage_config: Any, pool: Any) -> tuple[int, int] | None:
    """None when the model's head count is not known or does not agree with the pool's."""
    if storage_config.is_mla_model:
        return 0, 1
    total = _known(lambda: int(_model_config().get_total_num_kv_heads()))
    if total is None:
        return None
    rank, size = int(storage_config.tp_rank), int(storage_config.tp_size)
    first, last = heads_of_rank(total, rank, size)
    return (first, last) if last - first == int(pool.head_num) else None


def _context() -> Any:
    from sglang.srt import runtime_context

    return runtime_context


def _model_config() -> Any:
    return _context().process_model_config()


def _known(read: Callable[[], T]) -> T | None:
    """SGLang raises these when a name moved in another version or is not published yet."""
    try:
        return read()
    except (ImportError, AttributeError, RuntimeError, ValueError):
        return None


def _text(name: Any) -> str:
    return str(name.value) if isinstance(name, Enum) else str(name)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
