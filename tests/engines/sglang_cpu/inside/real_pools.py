"""Host pools of SGLang's own classes, in plain memory, filled with distinct values."""

import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.pool_host.mha import (
    AsymmetricMHATokenToKVPoolHost,
    MHATokenToKVPoolHost,
)
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

DEVICE_TOKENS = 64


def mha_pool(layout, *, page_size=4, layers=3, heads=2, dim=8, value_dim=8, dtype=torch.bfloat16):
    """An MHA pool; of the asymmetric class when keys and values differ in width."""
    kind = MHATokenToKVPoolHost if dim == value_dim else AsymmetricMHATokenToKVPoolHost
    keys = tuple(torch.zeros(DEVICE_TOKENS, heads, dim, dtype=dtype) for _ in range(layers))
    values = tuple(torch.zeros(DEVICE_TOKENS, heads, value_dim, dtype=dtype) for _ in keys)
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=keys,
            v=values,
            k_data_ptrs=torch.tensor([key.data_ptr() for key in keys]),
            v_data_ptrs=torch.tensor([value.data_ptr() for value in values]),
            layout=KVBufferLayout.NHD,
        ),
        page_size=page_size,
        head_num=heads,
        head_dim=dim,
        v_head_dim=value_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return fill(kind(info, layout=layout, **common(page_size, layers)))


def mla_pool(layout, *, page_size=4, layers=3, rank=12, rope_dim=4, dtype=torch.bfloat16):
    width = rank + rope_dim
    rows = tuple(torch.zeros(DEVICE_TOKENS, 1, width, dtype=dtype) for _ in range(layers))
    info = MLABufferInfo(
        buffers=rows,
        data_ptrs=torch.tensor([row.data_ptr() for row in rows]),
        layer_indices=tuple(range(layers)),
        device_layer_num=layers,
        page_size=page_size,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope_dim,
        kv_cache_dim=width,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    settings = common(page_size, layers)
    return fill(MLATokenToKVPoolHost(info, layout=layout, target_layer_num=layers, **settings))


def common(page_size, layers):
    return {
        "host_to_device_ratio": 2.0,
        "host_size": 0,
        "page_size": page_size,
        "pin_memory": False,
        "device_capacity_tokens": DEVICE_TOKENS,
        "start_layer": 0,
        "end_layer": layers - 1,
    }


def fill(pool):
    parts = [pool.kv_buffer] if isinstance(pool.kv_buffer, torch.Tensor) else pool.kv_buffer
    for part in parts:
        part.copy_(torch.randn(part.shape))
    return pool
