"""What the Grafana dashboard and the alert rules in docs/monitoring ask for, and whether a server has it."""

import json
import re
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

MONITORING = Path(__file__).parents[2] / "docs" / "monitoring"
SELECTOR = re.compile(r"\b((?:vllm:|http_|process_)\w+)(?:\{([^}]*)\})?")


def dashboard():
    return json.loads((MONITORING / "grafana.json").read_text())


def queries():
    """Every PromQL expression with its title and the labels its legend shows."""
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"], re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
    for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"], re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])


def missing_series(exposition):
    """What the queries select and the text of /metrics does not have, as (title, metric, label, value)."""
    samples = [sample for family in text_string_to_metric_families(exposition) for sample in family.samples]
    missing = []
    for title, query, legend in queries():
        for name, matchers in SELECTOR.findall(query):
            wanted = [(label, value) for label, value in re.findall(r'(\w+)=~?"([^"]*)"', matchers)]
            wanted += [(label, ".*") for label in legend]
            wanted = [(label, ".+" if value in ("$model", "5xx") else value) for label, value in wanted]
            for label, value in wanted or [("", "")]:
                mine = (sample for sample in samples if sample.name == name)
                if not any(re.fullmatch(value, sample.labels.get(label, "")) for sample in mine):
                    missing.append((title, name, label, value))
    return missing
