"""compose.yaml against the specification, against our promises, and its commands as plain processes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft201909Validator

from engine.settings import load_settings
from gateway.store import find_store_binary
from gateway.supervisor import free_port
from tests.deploy.compose_file import (
    ROOT,
    SECRETS,
    MissingSecretError,
    Table,
    compose,
    environment,
    services,
    strings,
    table,
)
from tests.engine.tiny_models import write_tiny_model

LIMIT = 120.0  # seconds
OURS = ("gateway", "engine", "engine-gpu")


def specification() -> dict[str, object]:
    """The compose specification's schema, as the last docker-compose in Python shipped it."""
    try:
        files = metadata.files("docker-compose") or []
    except metadata.PackageNotFoundError:
        pytest.skip("the schema comes with `pip install --no-deps docker-compose==1.29.2`")
    (schema,) = [file for file in files if file.name == "compose_spec.json"]
    return table(json.loads(Path(str(schema.locate())).read_text("utf-8")))


def test_it_follows_the_compose_specification() -> None:
    document = compose()
    del document["name"]  # younger than this schema
    errors = [
        error.message for error in Draft201909Validator(specification()).iter_errors(json.loads(json.dumps(document)))
    ]
    assert errors == []


@pytest.mark.parametrize("name", sorted(SECRETS))
def test_it_does_not_start_without_its_secrets(name: str) -> None:
    """A default password is everybody's password."""
    with pytest.raises(MissingSecretError, match=name):
        compose({key: value for key, value in SECRETS.items() if key != name})
    example = (ROOT / ".env.example").read_text("utf-8")
    assert re.search(rf"^{name}=$", example, re.MULTILINE)


def test_what_it_refers_to_exists() -> None:
    document = compose()
    volumes, networks = set(table(document["volumes"])), set(table(document["networks"]))
    for name, service in services().items():
        for mount in strings(service.get("volumes", [])):
            source = mount.split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in volumes, (name, mount)
        wanted = service.get("networks", [])
        assert set(strings(wanted) if isinstance(wanted, list) else table(wanted)) <= networks
        for other, how in table(service.get("depends_on", {})).items():
            target = services()[other]
            if table(how)["condition"] == "service_healthy":
                assert "healthcheck" in target, f"{name} would wait for {other} for ever"


def test_every_service_is_confined() -> None:
    """Not root, read-only, no capabilities, a memory limit."""
    dockerfile = (ROOT / "Dockerfile").read_text("utf-8")
    assert re.findall(r"^USER (\w+)$", dockerfile, re.MULTILINE)[-1] == "radixgate"
    for name, service in services().items():
        assert service["read_only"] is True, name
        assert strings(service["cap_drop"]) == ["ALL"], name
        if name in ("prometheus-owner", "demo"):  # they end at once
            continue
        assert "no-new-privileges:true" in strings(service["security_opt"])
        assert "memory" in table(table(table(service["deploy"])["resources"])["limits"]), name
        assert service.get("user", "10001:10001") not in ("0", "0:0", "root"), name


def test_ports_are_on_loopback_and_engine_and_store_have_none() -> None:
    """The engine's port has no password: it must not be reachable from outside."""
    published = {name: strings(service["ports"]) for name, service in services().items() if "ports" in service}
    assert set(published) == {"gateway", "grafana"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert table(table(compose()["networks"])["backend"])["internal"] is True
    for name in ("engine", "engine-gpu", "embedder", "redis", "prometheus"):
        wanted = services()[name]["networks"]
        assert list(table(wanted) if isinstance(wanted, dict) else strings(wanted)) == ["backend"]


def test_our_services_have_settings_that_can_be_used() -> None:
    """A misspelt variable would end the container at its start."""
    for name in OURS:
        settings = load_settings(None, environment(services()[name]))
        assert settings.store.url == "redis://:a-password@redis:6379/0"
    assert load_settings(None, environment(services()["gateway"])).engine.endpoint == "tcp://engine:5555"


def test_secrets_reach_only_who_needs_them() -> None:
    holders = {
        secret: {
            name for name, service in services().items() if any(secret in v for v in environment(service).values())
        }
        for secret in SECRETS.values()
    }
    assert holders["a-secret"] == {"gateway"}
    assert holders["another"] == {"grafana"}


def test_dockerfile_targets_are_those_that_compose_builds() -> None:
    stages = set(re.findall(r"^FROM .* AS ([\w-]+)$", (ROOT / "Dockerfile").read_text("utf-8"), re.MULTILINE))
    targets = {str(table(service["build"])["target"]) for service in services().values() if "build" in service}
    assert targets == {"cpu", "cuda"} <= stages


# ---------------------------------------------------------------- the same commands, as plain processes


@contextmanager
def process(command: list[str], environ: dict[str, str], log: Path) -> Generator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        running = subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            yield running
        finally:
            running.terminate()
            running.wait(60)


def plain_command(service: Table) -> list[str]:
    command = strings(service["command"])
    return [sys.executable, *command[1:]] if command[0] == "python" else command


def plain_environ(service: Table, places: dict[str, str], **more: str) -> dict[str, str]:
    """The service's environment with addresses of this machine for the names of the network."""
    environ = environment(service)
    for name, place in places.items():
        environ = {key: value.replace(name, place) for key, value in environ.items()}
    return {"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", **environ, **more}


def wait_for(url: str, processes: list[subprocess.Popen[bytes]], logs: Path) -> dict[str, object]:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        if any(running.poll() is not None for running in processes):
            break
        try:
            with urllib.request.urlopen(url, timeout=15) as answer:
                return table(json.loads(answer.read()))
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise AssertionError("\n".join(f"== {log.name}\n{log.read_text(errors='replace')}" for log in logs.glob("*.log")))


@pytest.mark.slow
@pytest.mark.redis
def test_its_commands_make_a_service_as_plain_processes(tmp_path: Path) -> None:
    """Commands, settings and health checks of the file itself, with the addresses replaced and a tiny model."""
    found = services()
    store_port, engine_port, gateway_port = free_port(), free_port(), free_port()
    places = {
        "@redis:6379": f"@127.0.0.1:{store_port}",
        "//0.0.0.0:5555": f"//127.0.0.1:{engine_port}",
        "//engine:5555": f"//127.0.0.1:{engine_port}",
        "//embedder:5556": f"//127.0.0.1:{free_port()}",
    }
    write_tiny_model("llama", tmp_path / "model")
    for name in ("redis", "engine", "gateway"):
        (tmp_path / name).mkdir()
    shell = strings(found["redis"]["command"])[-1].replace("redis-server", shlex.quote(str(find_store_binary())), 1)
    shell = shell.replace("--dir /data", f"--dir {tmp_path / 'redis'}")
    store = ["sh", "-c", f"{shell} --port {store_port} --bind 127.0.0.1"]
    engine_environ = plain_environ(
        found["engine"],
        places,
        RADIXGATE_STORE__DATA_DIR=str(tmp_path / "engine"),
        RADIXGATE_MODEL__PATH=str(tmp_path / "model"),
        RADIXGATE_ENGINE__KV_CACHE_MEMORY="16MiB",
        RADIXGATE_ENGINE__THREADS="1",
    )
    gateway_environ = plain_environ(
        found["gateway"],
        places,
        RADIXGATE_STORE__DATA_DIR=str(tmp_path / "gateway"),
        RADIXGATE_SERVER__PORT=str(gateway_port),
    )
    with ExitStack() as stack:
        started = [
            stack.enter_context(process(command, environ, tmp_path / f"{name}.log"))
            for name, command, environ in (
                ("redis", store, plain_environ(found["redis"], {})),
                ("engine", plain_command(found["engine"]), engine_environ),
                ("gateway", plain_command(found["gateway"]), gateway_environ),
            )
        ]
        ready = wait_for(f"http://127.0.0.1:{gateway_port}/readyz", started, tmp_path)
        assert ready["status"] == "ok"
        check = strings(table(found["engine"]["healthcheck"])["test"])[1:]
        subprocess.run([sys.executable, *check[1:]], env=engine_environ, cwd=ROOT, check=True, timeout=60)
        key = (tmp_path / "gateway" / "demo.key").read_text().strip()
        assert [ask(gateway_port, key, str(ready["model"])) > 0 for _ in range(2)] == [False, True]


def ask(port: int, key: str, model: str) -> int:
    """The cached tokens of a question's answer."""
    body = {"model": model, "messages": [{"role": "user", "content": "a question " * 6}], "max_tokens": 2}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"authorization": f"Bearer {key}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        usage = table(table(json.loads(answer.read()))["usage"])
    return int(str(table(usage["prompt_tokens_details"])["cached_tokens"]))


def test_the_systemd_unit_starts_what_there_is() -> None:
    unit = (ROOT / "deploy" / "radixgate.service").read_text("utf-8")
    commands = re.findall(r"^Exec(?:Start|StartPre)=/opt/radixgate/bin/radixgate (\w+)", unit, re.MULTILINE)
    assert commands == ["config", "serve"]
    assert "ExecReload=/bin/kill -HUP $MAINPID" in unit


def test_the_yaml_of_deploy_can_be_read() -> None:
    files = sorted((ROOT / "deploy").rglob("*.yml"))
    assert len(files) >= 5
    for file in files:
        assert yaml.safe_load(file.read_text("utf-8"))
