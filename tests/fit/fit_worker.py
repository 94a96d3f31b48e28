"""A fit of made-up captures in a process of its own, to be interrupted.

Arguments: folder, seconds per sequence, and optionally "resume". Prints each finished sequence.
"""

import sys
import time
from pathlib import Path

import torch

from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.fit.accumulate import FitOptions
from kvstore_xfer.fit.run import InterruptedFitError, Side, fit
from kvstore_xfer.fit.text import TokenSequence
from kvstore_xfer.models.attention import AttentionKind
from kvstore_xfer.models.description import ModelDescription
from kvstore_xfer.rope.spec import RopeSpec

SEQUENCES = 40


def side(name, layers, delay):
    rope = RopeSpec("default", 8, 8, (1.0, 0.1, 0.01, 0.001), 1.0, False)
    model = ModelDescription(
        name=name,
        model_type="llama",
        layers=layers,
        query_heads=2,
        kv_heads=2,
        key_dim=8,
        value_dim=8,
        hidden_size=16,
        vocab_size=100,
        max_positions=100,
        parameters=layers,
        dtype="float32",
        rope=rope,
        tokenizer_digest="tokenizer",
        weights_digest=name,
        attention=AttentionKind.FULL,
        refusal=None,
    )

    def capture(tokens):
        time.sleep(delay)
        generator = torch.Generator().manual_seed(sum(tokens) * 10 + layers)
        shape = (layers, len(tokens), 2, 8)
        return KvPage(*(torch.randn(shape, generator=generator) for _ in range(2)))

    return Side(model, capture)


def sequences(first=0):
    return [
        TokenSequence(f"d{n}", tuple(range(n, n + 10))) for n in range(first, first + SEQUENCES)
    ]


def main(folder, delay, *flags):
    try:
        fit(
            side("source", 2, delay),
            side("target", 3, delay),
            sequences(),
            Path(folder),
            FitOptions(),
            resume="resume" in flags,
            progress=lambda done, total: print(done, flush=True),
        )
    except InterruptedFitError as interrupt:
        print(f"interrupted: {interrupt}", flush=True)
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), *sys.argv[3:])
