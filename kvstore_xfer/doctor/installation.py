"""What is installed on this machine."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import TYPE_CHECKING

import torch

from kvstore_xfer import __version__
from kvstore_xfer.doctor.findings import note, ok, problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore_xfer.doctor.findings import Finding

# Engines that converted blocks are tested with, and the group their plug-in of ours is in.
_ENGINES = {"sglang": ("0.5.23", "sglang.srt.plugins"), "lmcache": ("0.5.6", "")}


def check_installation() -> Iterator[Finding]:
    """Versions, GPU, kernels, engines. Without an engine or a GPU everything else still works."""
    libraries = ", ".join(f"{name} {_version(name)}" for name in ("torch", "transformers"))
    text = f"kvstore_xfer {__version__}, Python {platform.python_version()}, {libraries}"
    yield ok("installation", text)
    yield from _gpu()
    for engine, (tested, group) in _ENGINES.items():
        yield from _engine(engine, tested, group)


def _gpu() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield note("GPU", "none that torch can use: conversion runs on the CPU")
        return
    try:
        torch.zeros(8, device="cuda").sum().item()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        remedy = "compare the driver with torch's CUDA version (nvidia-smi, torch.version.cuda)"
        yield problem("GPU", "gpu", f"torch sees a GPU and cannot use it: {reason}", remedy)
        return
    yield ok("GPU", torch.cuda.get_device_name(0))
    if _version("triton") is None:
        text = "not installed: conversion cannot use the GPU"
        yield problem("Triton", "triton", text, "pip install 'kvstore-xfer[kernels]'")
    else:
        yield ok("Triton", str(_version("triton")))


def _engine(engine: str, tested: str, group: str) -> Iterator[Finding]:
    installed = _version(engine)
    if installed is None:
        yield note(engine, "not installed in this environment")
    elif installed != tested:
        text = f"{installed} is not the tested version: blocks are stored, nothing is converted"
        yield problem(engine, "engine_version", text, f"pip install {engine}=={tested}")
    elif group and "kvxfer" not in {point.name for point in entry_points(group=group)}:
        text = f"{installed}, but our plug-in is not registered there"
        yield problem(engine, "plugin", text, f"install kvstore-xfer into {engine}'s environment")
    else:
        yield ok(engine, installed)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
