"""The recording and alert rules as the Prometheus operator's custom resource."""

from __future__ import annotations

import textwrap
from pathlib import Path

FOLDER = Path(__file__).parent
RULES = FOLDER / "prometheus" / "kvxfer.rules.yaml"
RESOURCE = FOLDER / "kustomize" / "components" / "monitoring" / "prometheusrule.yaml"
_HEAD = """\
# Written by `make dashboards` from deploy/prometheus/kvxfer.rules.yaml; a test compares.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: kvxfer
  labels:
    app.kubernetes.io/name: kvxfer
spec:
"""


def render() -> str:
    """The resource's text: the file of rules, as it is, below ``spec``."""
    lines = RULES.read_text(encoding="utf-8").splitlines(keepends=True)
    groups = "".join(lines[next(n for n, line in enumerate(lines) if line.startswith("groups:")) :])
    return _HEAD + textwrap.indent(groups, "  ")
