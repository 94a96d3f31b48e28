"""One real SGLang engine behind the tier, asked through its API and watched through /metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml
from prometheus_client.parser import text_string_to_metric_families
from sglang_cpu.server import Reply, ServerError, SglangServer, eventually

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PAGE = 16
NEW_TOKENS = 4


def write_manifest(
    file: Path,
    store: str,
    models: Mapping[str, Path],
    pairs: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """A family manifest with the given members and pairs."""
    content = {
        "family": "tests",
        "store": store,
        "models": {name: {"path": str(path)} for name, path in models.items()},
        "pairs": [dict(pair) for pair in pairs],
    }
    file.write_text(yaml.safe_dump(content))
    return file


def extra_config(manifest: Path, **further: Any) -> dict[str, Any]:
    return {
        "backend_name": "kvxfer",
        "module_path": "kvxfer_sglang.hicache",
        "class_name": "KvxferStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "prefetch_threshold": PAGE,
        "family": str(manifest),
        **further,
    }


@dataclass(frozen=True)
class Asked:
    """A reply and what the counters say of its lookup: blocks by (outcome, reason)."""

    reply: Reply
    blocks: Counter

    def of(self, *outcomes: str) -> int:
        return sum(n for (outcome, _), n in self.blocks.items() if outcome in outcomes)


class TierEngine:
    """A running server; asks one thing at a time, so that counters can be told apart."""

    def __init__(self, server: SglangServer, page_size: int = PAGE) -> None:
        self.server = server
        self._page_size = page_size

    def ask(self, prompt: Sequence[int], new_tokens: int = NEW_TOKENS, **request: Any) -> Asked:
        before = self.lookups()
        reply = self.server.generate(list(prompt), max_new_tokens=new_tokens, **request)
        return Asked(reply, self.lookups() - before)

    def ask_and_store(self, prompt: Sequence[int], **request: Any) -> Asked:
        """Ask; return when the pages the engine computed, or converted, are in the store."""
        before = self.written()
        asked = self.ask(prompt, **request)
        self._wait_until_stored(before, [asked.reply], asked.of("converted"))
        return asked

    def store_all(self, prompts: Sequence[Sequence[int]], **request: Any) -> list[Reply]:
        """Have all prompts computed at once; return when their pages are in the store."""
        before, known = self.written(), self.lookups()
        replies = self.server.generate_all(prompts, max_new_tokens=1, **request)
        converted = (self.lookups() - known)["converted", "none"]
        self._wait_until_stored(before, replies, converted)
        return replies

    def _wait_until_stored(self, before: int, replies: Sequence[Reply], converted: int) -> None:
        pages = converted + sum(
            (reply.prompt_tokens - reply.in_any_tier) // self._page_size for reply in replies
        )
        eventually(lambda: self.written() - before >= pages, 60)

    def fresh(self, prompt: Sequence[int], **request: Any) -> Asked:
        """Ask with nothing left in the engine's own tiers."""
        self.server.flush_cache()
        return self.ask(prompt, **request)

    def lookups(self) -> Counter:
        """Blocks looked up so far under whatever name, by (outcome, reason)."""
        blocks = Counter()
        for labels, value in self.samples("kvxfer_lookup_blocks_total"):
            blocks[labels["outcome"], labels["reason"]] += int(value)
        return blocks

    def written(self, *kinds: str) -> int:
        """Blocks handed to the store, whatever became of them."""
        rows = self.samples("kvxfer_written_blocks_total")
        return int(sum(value for labels, value in rows if not kinds or labels["kind"] in kinds))

    def refused(self) -> set[str]:
        rows = self.samples("kvxfer_conversion_refused")
        return {labels["reason"] for labels, value in rows if value}

    def errors(self) -> int:
        return int(sum(value for _, value in self.samples("kvxfer_errors_total")))

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        text = self.server.call("GET", "/metrics")
        return [
            (sample.labels, sample.value)
            for metric in text_string_to_metric_families(text)
            for sample in metric.samples
            if sample.name == name
        ]

    def assert_serves_its_own_pages(self, prompts: Sequence[Sequence[int]]) -> None:
        """Store, flush, ask again: all whole pages from storage, the radix cache's own answers."""
        self.store_all(prompts)
        own = [self.server.generate(list(prompt), max_new_tokens=NEW_TOKENS) for prompt in prompts]
        self.server.flush_cache()
        before = self.lookups()
        for prompt, expected in zip(prompts, own, strict=True):
            whole = len(prompt) // self._page_size * self._page_size
            assert expected.cached["device"] == whole
            again = self.server.generate(list(prompt), max_new_tokens=NEW_TOKENS)
            assert again.from_storage == whole
            assert again.token_ids == expected.token_ids
        pages = sum(len(prompt) // self._page_size for prompt in prompts)
        assert self.lookups() - before == {("native", "none"): pages}

    def attach(self, manifest: Path, **further: Any) -> None:
        """Attach storage under another manifest, with the engine's own tiers empty."""
        eventually(self._detached, 30)
        self.server.flush_cache()
        self.server.attach_storage(extra_config(manifest, **further))

    def _detached(self) -> bool:
        """SGLang refuses while the last page of an answer is still on its way."""
        try:
            self.server.detach_storage()
        except ServerError as error:
            if "not idle" not in str(error):
                raise
            return False
        return True
