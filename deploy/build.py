"""Write everything generated in this folder and in docs/metrics.md: `make dashboards`."""

from __future__ import annotations

import re
from pathlib import Path

import dashboards
import prometheus_rule

from kvstore_xfer import metrics

ROOT = Path(__file__).parents[1]
_BETWEEN = re.compile(r"(?<=<!-- table -->\n).*(?=<!-- end of table -->)", re.DOTALL)


def generated() -> dict[Path, str]:
    """Every generated file and its content."""
    page = ROOT / "docs" / "metrics.md"
    text = page.read_text(encoding="utf-8")
    files = {page: _BETWEEN.sub(lambda _: metrics.table() + "\n", text)}
    files[prometheus_rule.RESOURCE] = prometheus_rule.render()
    for uid, content in dashboards.render().items():
        files[ROOT / "deploy" / "grafana" / f"{uid}.json"] = content
    return files


if __name__ == "__main__":
    for path, content in generated().items():
        path.write_text(content, encoding="utf-8")
