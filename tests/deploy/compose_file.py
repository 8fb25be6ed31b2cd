"""compose.yaml as compose reads it: merge keys, then `${NAME:-default}` and `${NAME:?message}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import yaml

ROOT = Path(__file__).parents[2]
SECRETS = {"RADIXGATE_SECRET": "a-secret", "REDIS_PASSWORD": "a-password", "GRAFANA_PASSWORD": "another"}
Table = dict[str, object]

_VARIABLE = re.compile(r"\$\$|\$\{(\w+)(?::([-?])([^}]*))?\}")


class MissingSecretError(Exception):
    """A variable that has to be set is not."""


def compose(environ: Mapping[str, str] = SECRETS) -> Table:
    text = (ROOT / "compose.yaml").read_text("utf-8")
    return table(_interpolated(yaml.safe_load(text), environ))


def table(value: object) -> Table:
    assert isinstance(value, dict), value
    return cast("Table", value)


def services() -> dict[str, Table]:
    return {name: table(service) for name, service in table(compose()["services"]).items()}


def strings(value: object) -> list[str]:
    assert isinstance(value, list), value
    return [str(item) for item in cast("list[object]", value)]


def environment(service: Table) -> dict[str, str]:
    return {name: str(value) for name, value in table(service.get("environment", {})).items()}


def _interpolated(value: object, environ: Mapping[str, str]) -> object:
    if isinstance(value, str):
        return _VARIABLE.sub(lambda match: _replacement(match, environ), value)
    if isinstance(value, list):
        return [_interpolated(item, environ) for item in cast("list[object]", value)]
    if isinstance(value, dict):
        return {name: _interpolated(item, environ) for name, item in cast("Table", value).items()}
    return value


def _replacement(match: re.Match[str], environ: Mapping[str, str]) -> str:
    name, kind, rest = match.groups()
    if name is None:
        return "$"
    if environ.get(name):
        return environ[name]
    if kind == "?":
        raise MissingSecretError(rest)
    return rest or ""
