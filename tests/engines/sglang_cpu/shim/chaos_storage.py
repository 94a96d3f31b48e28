"""The tier inside SGLang's own failure injector, from attach to detach.

SGLang wraps a backend in its injector when these variables are set as the backend is made, which
otherwise takes an engine of its own.
"""

import os

from kvxfer_sglang.hicache import KvxferStorage

CHAOS = {
    "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.2",
    "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",
}


class ChaosStorage(KvxferStorage):
    def __init__(self, storage_config, kwargs):
        os.environ.update(CHAOS)
        super().__init__(storage_config, kwargs)

    def close(self):
        for name in CHAOS:
            os.environ.pop(name, None)
        super().close()
