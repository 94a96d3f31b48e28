"""A storage backend that keeps pages in a dict and writes down each call of SGLang.

The file named by ``record`` in the extra config receives one JSON object per call.
"""

import json
import threading
from dataclasses import asdict

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from kvxfer_sglang.facts import read_facts
from kvxfer_sglang.refusals import conversion_refusals


class RecordingStorage(HiCacheStorage):
    def __init__(self, storage_config, kwargs):
        self.config = storage_config
        self.pages = {}
        self.path = storage_config.extra_config["record"]
        self.write_lock = threading.Lock()
        self.record("init", kwargs=kwargs, model=storage_config.model_name)

    def record(self, call, keys=(), extra_info=None, **details):
        prefix = None if extra_info is None else extra_info.prefix_keys
        line = {"call": call, "keys": list(keys), "prefix": prefix, **details}
        with self.write_lock, open(self.path, "a") as log:
            log.write(json.dumps(line) + "\n")

    def register_mem_pool_host(self, mem_pool_host):
        super().register_mem_pool_host(mem_pool_host)
        self.record("pool", layout=mem_pool_host.layout, shape=list(mem_pool_host.kv_buffer.shape))

    def on_host_pools_registered(self):
        facts = read_facts(self.config, self.mem_pool_host, self.registered_pools)
        self.record("facts", facts=asdict(facts), refusals=conversion_refusals(facts))

    def batch_exists(self, keys, extra_info=None):
        self.record("exists", keys, extra_info)
        return next((i for i, key in enumerate(keys) if key not in self.pages), len(keys))

    def batch_get_v1(self, keys, host_indices, extra_info=None):
        self.record("get", keys, extra_info)
        slots = host_indices[:: self.mem_pool_host.page_size].tolist()
        for key, slot in zip(keys, slots, strict=True):
            self.mem_pool_host.set_from_flat_data_page(slot, self.pages[key])
        return [True] * len(keys)

    def batch_set_v1(self, keys, host_indices, extra_info=None):
        slots = host_indices[:: self.mem_pool_host.page_size].tolist()
        for key, slot in zip(keys, slots, strict=True):
            self.pages[key] = self.mem_pool_host.get_data_page(slot).clone()
        self.record("set", keys, extra_info)
        return [True] * len(keys)

    def clear(self):
        self.pages.clear()
        self.record("clear")

    def close(self):
        self.record("close")

    def exists(self, key):
        raise NotImplementedError("interface_v1 never calls it")

    get = batch_get = set = batch_set = exists
