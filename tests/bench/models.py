"""More models for the test bed, made from the shipped family: fine-tunes and broken siblings.

Each takes a minute or less on one core and is written to a folder that loads like any model.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

FAMILY = Path(__file__).parents[1] / "data" / "family"
_BATCH, _TOKENS = 8, 128


def fine_tune(base: Path, out: Path, steps: int = 60, rate: float = 3e-4) -> Path:
    """`base` trained on for `steps` batches of the second half of the calibration documents."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return _save(_trained(model, steps, rate), base, out)


def from_scratch(base: Path, out: Path, steps: int = 200) -> Path:
    """An unrelated model with the tokenizer of `base`: four layers, trained briefly by itself."""
    torch.manual_seed(7)
    config = AutoConfig.from_pretrained(base)
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = 4, 160, 384
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return _save(_trained(model, steps, 2e-3), base, out)


def untrained(base: Path, out: Path) -> Path:
    """The architecture of `base` with random weights."""
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(base)
    return _save(AutoModelForCausalLM.from_config(config, dtype=torch.float32), base, out)


def scrambled(base: Path, out: Path) -> Path:
    """`base` with its token embeddings in another order: every token means another."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    weight = model.get_input_embeddings().weight
    order = torch.randperm(len(weight), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        weight.copy_(weight[order].clone())
    return _save(model, base, out)


def _trained(model, steps: int, rate: float):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model.train()
    for batch in _batches(steps):
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"trained for {steps} steps, last loss {loss.item():.3f}", flush=True)
    return model.eval()


def _batches(steps: int):
    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "small")
    lines = (FAMILY / "text" / "calibration.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines[1::2]]
    ids = torch.tensor([i for text in texts for i in tokenizer(text, verbose=False).input_ids])
    generator = torch.Generator().manual_seed(11)
    for _ in range(steps):
        starts = torch.randint(len(ids) - _TOKENS, (_BATCH,), generator=generator)
        yield torch.stack([ids[start : start + _TOKENS] for start in starts.tolist()])


def _save(model, base: Path, out: Path) -> Path:
    model.to(torch.bfloat16).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, out / name)
    return out
