"""Inside SGLang, for `bench_sglang.py`: the tier and SGLang's file backend behind one attachment.

Which of them answers is one byte of a file, so that two requests, one after the other, are served
by either in the same process. The file backend is driven by SGLang's own code for it.
"""

import mmap
import os
from types import SimpleNamespace

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hicache_storage import HiCacheFile

from kvxfer_sglang.hicache import KvxferStorage

SWITCH = "KVXFER_BENCH_SWITCH"
FILE = b"f"


class BothBackends(KvxferStorage):
    def __init__(self, storage_config, kwargs=None):
        super().__init__(storage_config, kwargs)
        with open(os.environ[SWITCH], "r+b") as file:
            self._switch = mmap.mmap(file.fileno(), 1)
        self._backend = HiCacheFile(storage_config)

    def _controller(self):
        """What SGLang's functions for a backend without `interface_v1` use of their object."""
        pool = self.mem_pool_host
        return SimpleNamespace(
            storage_backend=self._backend, storage_host_pool=pool, page_size=pool.page_size
        )

    def batch_exists(self, keys, extra_info=None):
        if self._switch[:1] == FILE:
            return self._backend.batch_exists(keys, extra_info)
        return super().batch_exists(keys, extra_info)

    def batch_get_v1(self, keys, host_indices, extra_info=None):
        if self._switch[:1] == FILE:
            operation = SimpleNamespace(request_id="", is_terminated=lambda: False)
            read = HiCacheController._generic_page_get(
                self._controller(), operation, keys, host_indices, extra_info
            )
            return [number < read for number in range(len(keys))]
        return super().batch_get_v1(keys, host_indices, extra_info)

    def batch_set_v1(self, keys, host_indices, extra_info=None):
        if self._switch[:1] == FILE:
            stored = HiCacheController._generic_page_set(
                self._controller(), keys, host_indices, extra_info
            )
            return [stored] * len(keys)
        return super().batch_set_v1(keys, host_indices, extra_info)
