"""Triton reads TRITON_INTERPRET when it is imported, and transformers imports Triton."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
