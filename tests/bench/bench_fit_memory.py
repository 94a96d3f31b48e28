"""Does a fit's memory grow with the sequences? ``python tests/bench/bench_fit_memory.py``.

Each size runs in a process of its own on made-up captures (no models in memory) and reports its
peak resident memory above what the imports take. Exits 1 when eight times the sequences need more
than a tenth more.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

SIZES = (64, 512)
TOKENS, LAYERS, HEADS, WIDTH = 256, 6, 4, 32
ALLOWED_GROWTH = 1.1


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def fit_once(count):
    import torch

    from kvstore_xfer.blocks.page import KvPage
    from kvstore_xfer.fit.accumulate import FitOptions
    from kvstore_xfer.fit.run import Side, fit
    from kvstore_xfer.fit.text import TokenSequence
    from kvstore_xfer.models.attention import AttentionKind
    from kvstore_xfer.models.description import ModelDescription
    from kvstore_xfer.rope.spec import RopeSpec

    torch.set_num_threads(1)
    rope = RopeSpec("default", WIDTH, WIDTH, (1.0,) * (WIDTH // 2), 1.0, False)
    names = ("layers", "query_heads", "kv_heads", "key_dim", "value_dim", "hidden_size")
    sizes = dict(zip(names, (LAYERS, HEADS, HEADS, WIDTH, WIDTH, HEADS * WIDTH), strict=True))
    sides = []
    for name in ("source", "target"):
        model = ModelDescription(
            name=name,
            model_type="llama",
            vocab_size=100,
            max_positions=4096,
            parameters=1,
            dtype="float32",
            rope=rope,
            tokenizer_digest="t",
            weights_digest=name,
            attention=AttentionKind.FULL,
            refusal=None,
            **sizes,
        )

        def capture(tokens):
            shape = (LAYERS, len(tokens), HEADS, WIDTH)
            return KvPage(torch.randn(shape), torch.randn(shape))

        sides.append(Side(model, capture))
    sequences = [TokenSequence(str(n), tuple(range(n, n + TOKENS))) for n in range(count)]
    before = peak_mib()
    with tempfile.TemporaryDirectory() as folder:
        fit(*sides, sequences, Path(folder), FitOptions(layers=2, ridge=1e-3))
    sys.stdout.write(f"{peak_mib() - before:.1f}\n")


def measure(count):
    command = [sys.executable, __file__, "--one", str(count)]
    output = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(output.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", type=int, help="run this size here and print its MiB")
    one = parser.parse_args().one
    if one is not None:
        fit_once(one)
        return 0
    peaks = {count: measure(count) for count in SIZES}
    for count, peak in peaks.items():
        rows = count * TOKENS
        sys.stdout.write(f"{count:>5} sequences, {rows:>7} rows: {peak:8.1f} MiB above imports\n")
    return int(peaks[SIZES[1]] > ALLOWED_GROWTH * peaks[SIZES[0]])


if __name__ == "__main__":
    sys.exit(main())
