"""Prometheus' rules and Grafana's dashboards name metrics that exist, and rate counters first."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import yaml

from tests.deploy.compose_file import ROOT, Table, table

RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
_NAME = re.compile(r"\bradixgate_\w+")
_HISTOGRAM = re.compile(r"_(bucket|sum|count)$")


def documented() -> dict[str, str]:
    """Metric → its row in the documentation, which a test compares with what is exported."""
    text = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    return {match[1]: match[2] for match in re.finditer(r"^\| `(radixgate_\w+)` \| ([^|]*)", text, re.MULTILINE)}


def rule_expressions() -> dict[str, str]:
    groups = cast("list[Table]", table(yaml.safe_load(RULES.read_text("utf-8")))["groups"])
    rules = [rule for group in groups for rule in cast("list[Table]", group["rules"])]
    return {str(rule.get("alert") or rule.get("record")): str(rule["expr"]) for rule in rules}


def panel_expressions(path: Path) -> Iterator[tuple[str, str]]:
    board = table(json.loads(path.read_text("utf-8")))
    for panel in cast("list[Table]", board["panels"]):
        for target in cast("list[Table]", panel["targets"]):
            yield f"{path.stem}: {panel['title']}", str(target["expr"])


def all_expressions() -> dict[str, str]:
    found = rule_expressions()
    for path in DASHBOARDS:
        for i, (where, expression) in enumerate(panel_expressions(path)):
            found[f"{where} #{i}"] = expression
    return found


EXPRESSIONS = all_expressions()


@pytest.mark.parametrize("where", sorted(EXPRESSIONS))
def test_every_metric_that_is_named_exists(where: str) -> None:
    """A panel over a metric that is gone is empty, and an alert over one never fires."""
    names = _NAME.findall(EXPRESSIONS[where])
    known = documented()
    for name in names:
        base = _HISTOGRAM.sub("", name)
        assert name in known or known.get(base, "").startswith("histogram"), name
    assert names or "radixgate:" in EXPRESSIONS[where]


@pytest.mark.parametrize("where", sorted(EXPRESSIONS))
def test_counters_are_rated_before_anything_else(where: str) -> None:
    """production-stack: ratios of lifetime counters and averages of quantiles look right and are wrong."""
    expression = EXPRESSIONS[where]
    for match in _NAME.finditer(expression):
        name = match[0]
        if name.endswith("_total") or _HISTOGRAM.search(name):
            assert expression[: match.start()].endswith(("rate(", "increase(")), f"{name} without rate"
    if "histogram_quantile" in expression:
        assert re.search(r"histogram_quantile\([\d.]+, sum by \(le[,)]", expression), "buckets are summed by le first"
    assert "avg(" not in expression


def test_alerts_say_what_to_do_and_cover_what_can_go_wrong() -> None:
    groups = cast("list[Table]", table(yaml.safe_load(RULES.read_text("utf-8")))["groups"])
    alerts = [rule for group in groups for rule in cast("list[Table]", group["rules"]) if "alert" in rule]
    names = {str(rule["alert"]) for rule in alerts}
    for part in ("HitRate", "EvictionStorm", "QuotaPressure", "IndexLags", "EngineStuck", "StoreDown"):
        assert any(part in name for name in names), part
    for rule in alerts:
        assert set(table(rule["annotations"])) == {"summary", "description"}
        assert table(rule["labels"])["severity"] in ("info", "warning", "critical")
        assert "for" in rule


def test_dashboards_are_provisioned_and_have_their_source() -> None:
    assert [path.stem for path in DASHBOARDS] == ["engine", "operator", "tenant"]
    source = table(yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text()))
    (datasource,) = cast("list[Table]", source["datasources"])
    ids: set[str] = set()
    for path in DASHBOARDS:
        board = table(json.loads(path.read_text("utf-8")))
        ids.add(str(board["uid"]))
        for panel in cast("list[Table]", board["panels"]):
            assert table(panel["datasource"])["uid"] == datasource["uid"]
    assert len(ids) == 3


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_prometheus_can_read_every_panel_of_the_dashboards(tmp_path: Path) -> None:
    """Grafana shows a query that cannot be parsed as an empty panel."""
    rules = [
        {"record": f"panel:n{i}", "expr": expression.replace("$__rate_interval", "5m").replace("$tenant", "acme")}
        for i, expression in enumerate(EXPRESSIONS.values())
    ]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_accepts_rules_and_configuration_and_the_rules_do_what_they_should() -> None:
    for command in (
        ["promtool", "check", "rules", "rules.yml"],
        ["promtool", "check", "config", "--syntax-only", "prometheus.yml"],
        ["promtool", "test", "rules", "rules_test.yml"],
    ):
        done = subprocess.run(command, cwd=RULES.parent, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
