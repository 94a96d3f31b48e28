"""`kvxfer fit`: the mapper of one ordered pair, from two models and a text."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore_xfer.cli.common import (
    auto_or_int,
    auto_or_ridge,
    judge_text,
    positive_int,
    progress,
    require_positions,
)
from kvstore_xfer.cli.models import add_pair_options, load_pair, require_two_models
from kvstore_xfer.errors import ConfigError, TextError
from kvstore_xfer.fit.accumulate import HELD_OUT_EVERY, FitOptions, require_options
from kvstore_xfer.fit.checkpoint import FOLDER, told
from kvstore_xfer.fit.run import Side, asked, fit, run_key, run_key_of
from kvstore_xfer.fit.text import cut_sequences
from kvstore_xfer.mapper.artifact import MANIFEST_FILE, PARTIAL, load
from kvstore_xfer.mapper.maps import Method
from kvstore_xfer.models.description import describe

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvstore_xfer.fit.text import TokenSequence
    from kvstore_xfer.mapper.artifact import Artifact
    from kvxfer_transformers.model import LoadedModel


# Which methods an option means something to; the others would ignore it.
_METHODS_OF = {
    "layers": tuple(method for method in Method if method is not Method.RESIDUAL),
    "weights": tuple(method for method in Method if method.affine),
    "rank": tuple(method for method in Method if method.encoded or method.residual),
    "hidden": (Method.MLP,),
    "ridge": tuple(method for method in Method if method is not Method.MLP),
}


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "fit",
        help="fit the mapper of one ordered pair from two models and a text",
        description="Fit a mapper that turns blocks of SOURCE into blocks of TARGET.",
    )
    add_pair_options(parser)
    parser.add_argument("--out", required=True, type=Path, help="mapper folder to write")
    parser.add_argument("--method", choices=[m.value for m in Method], default="head-local")
    parser.add_argument("--layers", type=auto_or_int, default=None, metavar="N|auto")
    parser.add_argument(
        "--weights",
        choices=["attention", "none"],
        help="row weights from the target's attention, head-local and full-head (default: none)",
    )
    parser.add_argument(
        "--rank",
        type=auto_or_int,
        default=None,
        metavar="N|auto",
        help="low-rank and low-rank-residual: as many parameters as a head-local map by default; "
        "residual: picked",
    )
    parser.add_argument("--hidden", type=positive_int, help="width of an mlp (default: 1024)")
    parser.add_argument("--ridge", type=auto_or_ridge, default=None, metavar="R|auto")
    parser.add_argument(
        "--sequences", type=positive_int, default=500, help="at most this many (default: 500)"
    )
    parser.add_argument(
        "--sequence-tokens", type=positive_int, default=1024, help="tokens each (default: 1024)"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on after the checkpoint of an interrupted fit; a finished one is left as it is",
    )
    parser.add_argument("--json", action="store_true", help="print the manifest's facts as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    chosen = _fit_options(options)
    _require_size(options)
    _require_vacant(options.out, resume=options.resume)
    _require_writable(options.out)
    # A folder is remembered by its full path: 'check' may run elsewhere.
    options.source, options.target = map(_located, (options.source, options.target))
    described = describe(options.source), describe(options.target)
    require_options(*described, chosen)
    require_two_models(*described)
    require_positions(options.sequence_tokens, *described)
    source, target = load_pair(options.source, options.target, options)
    sequences = cut_sequences(
        options.text, source.tokenize, tokens=options.sequence_tokens, count=options.sequences
    )
    _require_enough(options.text, sequences)
    judge_text(options.text, sequences, source.description.vocab_size)
    if (options.out / MANIFEST_FILE).exists():
        artifact = load(options.out)
        wanted = run_key(source.description, target.description, sequences, chosen)
        _require_same(options.out, artifact, {**wanted, **asked(chosen)})
    else:
        artifact = _fit(options, (source, target), sequences, chosen)
    sys.stdout.write(_as_json(artifact) if options.json else _as_text(artifact, options.out))
    return 0


def _fit(
    options: argparse.Namespace,
    models: tuple[LoadedModel, LoadedModel],
    sequences: Sequence[TokenSequence],
    chosen: FitOptions,
) -> Artifact:
    source, target = models
    with progress("fitting") as update:
        return fit(
            Side(source.description, source.capture),
            Side(target.description, target.capture, target.capture_queries, target.sensitivity),
            sequences,
            options.out,
            chosen,
            resume=options.resume,
            device=str(target.device),
            dtype=str(target.dtype).removeprefix("torch."),
            progress=update,
        )


def _fit_options(options: argparse.Namespace) -> FitOptions:
    """Raises ConfigError for options that the method does not have."""
    method, weighted = Method(options.method), options.weights == "attention"
    for name, methods in _METHODS_OF.items():
        given = getattr(options, name)
        if given not in (None, "none") and method not in methods:
            given = f"{given:g}" if isinstance(given, float) else given
            raise ConfigError(
                f"--{name} {given}: not for --method {method.value}, only for "
                f"{', '.join(other.value for other in methods)}; leave it out, or change --method"
            )
    chosen = FitOptions(method, options.layers, options.ridge, options.rank, weighted)
    return replace(chosen, hidden=options.hidden) if options.hidden else chosen


def _require_size(options: argparse.Namespace) -> None:
    """Raises ConfigError for numbers with which no text is enough."""
    if options.sequences < HELD_OUT_EVERY:
        raise ConfigError(
            f"--sequences {options.sequences}: every {HELD_OUT_EVERY}th is held out of a fit; give "
            f"{HELD_OUT_EVERY} or more"
        )
    if options.sequence_tokens < 2:
        raise ConfigError("--sequence-tokens 1: a fit leaves the first token out; give 2 or more")


def _require_enough(text: Path, sequences: Sequence[TokenSequence]) -> None:
    """Raises TextError for too little text."""
    if len(sequences) < HELD_OUT_EVERY:
        tokens = len(sequences[0].tokens)
        raise TextError(
            f"{text}: holds {len(sequences)} sequences of {tokens} tokens, a fit needs "
            f"{HELD_OUT_EVERY}; give more text or a smaller --sequence-tokens"
        )


def _located(model: str) -> str:
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def _require_vacant(out: Path, *, resume: bool) -> None:
    """Nothing is replaced: a mapper may be serving, and holds the record of its check.

    With `resume` a finished mapper may be there. Raises ConfigError.
    """
    if not out.is_dir():
        return
    found = sorted(name for name in os.listdir(out) if name not in (FOLDER, "lost+found"))
    found = [name for name in found if not name.endswith(PARTIAL)]
    if MANIFEST_FILE in found and not resume:
        raise ConfigError(
            f"--out {out}: holds a mapper; give another folder, or remove it and fit anew"
        )
    if found and MANIFEST_FILE not in found:
        raise ConfigError(f"--out {out}: holds other files ({found[0]}); give a folder of its own")


def _require_same(out: Path, artifact: Artifact, wanted: dict[str, str]) -> None:
    """A fit that has come to its end is gone on with by leaving it as it is.

    Raises ConfigError when the mapper is the end of another one.
    """
    made = {**run_key_of(artifact), **artifact.fit.get("asked", {})}
    differs = [name for name in wanted if made.get(name, wanted[name]) != wanted[name]]
    if differs:
        raise ConfigError(
            f"--out {out}: holds the mapper of another fit ({told(differs[0])} differs); give "
            "another folder, or remove it"
        )


def _require_writable(out: Path) -> None:
    """Before the models are loaded: the last step of a long fit must not be the one that fails.

    Leaves nothing behind; the folder is made when there is something to put into it. Its parent
    must be there: a slip of the pen would make a tree. Raises ConfigError.
    """
    try:
        if not out.absolute().parent.is_dir():
            raise ConfigError(
                f"--out {out}: there is no folder {out.parent}; make it first, or correct the path"
            )
        missing = not out.exists()
        out.mkdir(exist_ok=True)
        probe = out / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
        if missing:
            out.rmdir()
    except OSError as error:
        raise ConfigError(
            f"--out {out}: {error.strerror}; give a folder that can be written"
        ) from None


def _as_json(artifact: Artifact) -> str:
    facts: dict[str, Any] = {
        "mapper_digest": artifact.mapper.digest,
        "method": artifact.mapper.method.value,
    }
    facts |= {"parameters": artifact.mapper.parameters, **artifact.fit}
    return json.dumps(facts, indent=2) + "\n"


def _as_text(artifact: Artifact, out: Path) -> str:
    fitted, mapper = artifact.fit, artifact.mapper
    scores = {name: sum(row) / len(row) for name, row in fitted["held_out_r2"].items()}
    return (
        f"{out / MANIFEST_FILE}\n"
        f"  {mapper.source.name} -> {mapper.target.name}, {mapper.method.value}, "
        f"k = {fitted['k']}, {mapper.parameters:,} parameters\n"
        f"  held-out R^2: keys {scores['keys']:.3f}, values {scores['values']:.3f}\n"
        f"  next: kvxfer check {out} --text HELD_OUT_FILE\n"
    )
