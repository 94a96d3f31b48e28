"""An SGLang plug-in that lets the hierarchical cache run with its device pool in host memory.

SGLang's CPU engine lacks two things: the host pool pins its memory through CUDA, and the copies
between device and host pool are GPU kernels. `activate` takes pinning away and does the copies
with torch, for every host layout and either io backend. It also lowers what SGLang leaves free of
the host's memory, 10 GiB, to what a small machine has, and lets an idle engine (`--sleep-on-idle`)
rest for milliseconds instead of a second: two idle engines would spin on both cores of a small
machine, and a second is long for what the hierarchical cache does when idle. Everything else is
SGLang's own: radix cache, host pool, storage threads, the calls into the storage backend.
"""

import sys
from importlib.metadata import version

WRITTEN_FOR = "0.5.23"
POOL = "sglang.srt.mem_cache.pool_host"
RESERVED_BYTES = 1 << 30
IDLE_SLEEPER = "sglang.srt.managers.scheduler_components.idle_sleeper.IdleSleeper"
IDLE_MILLISECONDS = 3


def activate():
    """Entry point of group ``sglang.srt.plugins``; SGLang calls it in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if version("sglang") != WRITTEN_FOR:
        raise RuntimeError(f"this plug-in replaces internals of SGLang {WRITTEN_FOR} only")
    replaced = f"{POOL}.mha.MHATokenToKVPoolHost"
    HookRegistry.register(f"{POOL}.base.HostKVCache.__init__", on_small_hosts, HookType.BEFORE)
    HookRegistry.register(f"{replaced}.load_to_device_per_layer", load_layer, HookType.REPLACE)
    HookRegistry.register(f"{IDLE_SLEEPER}.maybe_sleep", rest, HookType.REPLACE)
    HookRegistry.register(f"{replaced}.backup_from_device_all_layer", back_up, HookType.REPLACE)


def on_small_hosts(*args, **kwargs):
    sys.modules[f"{POOL}.base"].HICACHE_HOST_MEMORY_RESERVE_BYTES = RESERVED_BYTES
    return args, {**kwargs, "pin_memory": False}


def rest(sleeper):
    sleeper.poller.poll(IDLE_MILLISECONDS)


def load_layer(pool, device_pool, host_indices, device_indices, layer, io_backend, **_):
    page, offset = host_indices // pool.page_size, host_indices % pool.page_size
    for component, device in enumerate((pool.device_k_buffers, pool.device_v_buffers)):
        device[layer][device_indices] = by_page(pool, component, layer)[page, offset]


def back_up(pool, device_pool, host_indices, device_indices, io_backend):
    page, offset = host_indices // pool.page_size, host_indices % pool.page_size
    for component, device in enumerate((pool.device_k_buffers, pool.device_v_buffers)):
        for layer in range(pool.layer_num):
            by_page(pool, component, layer)[page, offset] = device[layer][device_indices]


def by_page(pool, component, layer):
    """One layer's keys or values in the host pool, ``[page, token, head, dim]``, as a view."""
    buffer = pool.kv_buffer[component]
    if pool.layout == "layer_first":
        return buffer[layer].unflatten(0, (-1, pool.page_size))
    if pool.layout == "page_first":
        return buffer[:, layer].unflatten(0, (-1, pool.page_size))
    if pool.layout == "page_first_direct":
        return buffer[:, layer]
    if pool.layout == "page_head":
        return buffer[:, :, :, layer].transpose(1, 2)
    raise ValueError(f"host layout {pool.layout!r} is not one this plug-in copies")
