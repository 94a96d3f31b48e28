"""A process of its own that puts load on a tier whose metrics are on the tier's own port.

    python own_port.py MANIFEST [SECONDS]

The store fails at times, as stores do: some of its calls raise.
"""

import itertools
import json
import sys
import time
from pathlib import Path

import torch

from kvstore_xfer import exporter
from kvstore_xfer.family import load_family
from kvstore_xfer.fit.text import cut_sequences
from kvstore_xfer.metrics import set_build_info
from kvstore_xfer.tier.open import open_tier
from kvxfer_transformers.model import load_model
from kvxfer_transformers.session import Session, engine_of

BLOCK = 16


def failing(call, every):
    """One call of `every` raises."""
    numbers = itertools.count(1)

    def wrapped(*args, **kwargs):
        if next(numbers) % every == 0:
            raise OSError(5, "injected")
        return call(*args, **kwargs)

    return wrapped


def main(manifest, seconds):
    torch.set_num_threads(1)
    family = load_family(manifest)
    set_build_info("transformers", "test")
    models = {name: load_model(e.path, dtype=torch.float32) for name, e in family.models.items()}
    tiers = {name: open_tier(manifest, name, engine_of(m, BLOCK)) for name, m in models.items()}
    tiers["large"]._store.exists = failing(tiers["large"]._store.exists, 7)
    tiers["small"]._store.stats = failing(tiers["small"]._store.stats, 2)
    sessions = [Session(models[name], tiers[name]) for name in ("small", "large")]
    text = Path(family.models["small"].path).parent / "text" / "heldout.jsonl"
    passages = cut_sequences(text, models["small"].tokenize, tokens=200, count=40)
    print(json.dumps({"port": exporter.serve(family.metrics)}), flush=True)
    deadline = time.monotonic() + seconds
    for passage in itertools.cycle(passages):
        for session in sessions:
            session.prefill(list(passage.tokens))
        time.sleep(0.2)
        if time.monotonic() > deadline:
            break
    for tier in tiers.values():
        tier.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
