"""The command `radixgate`: serve, demo, doctor, cache, tenant, key, audit, version, and gateway/operations_cli.py's.

Settings come in the same order everywhere: defaults, the TOML file, the environment, flags. Exit codes: 0 done or
stopped on request, 2 the settings or the model cannot be used, 1 everything else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from engine.errors import ConfigError, RadixgateError
from engine.logging_setup import configure_logging
from engine.settings import Settings, load_settings
from gateway.cache_command import add_cache_command
from gateway.child import print_json_line, print_line
from gateway.demo import run_demo
from gateway.doctor import run_doctor
from gateway.first_run import completed, demo_key_path, operator_password_path
from gateway.isolation_audit import add_audit_command
from gateway.lint_command import add_lint_command
from gateway.operations_cli import OperationsCommands
from gateway.supervisor import Supervisor, local_url
from gateway.tenant_cli import add_tenant_commands

DEFAULT_CONFIG = Path("radixgate.toml")
EXIT_UNUSABLE = 2
# Flags that are settings: flag, key, what it means.
SETTING_FLAGS = (
    ("--host", "server.host", "address to listen on"),
    ("--port", "server.port", "port to listen on"),
    ("--data-dir", "store.data_dir", "where models, store, secret and keys are kept"),
    ("--model", "model.path", '"embedded", a local directory, a .gguf file, or a hub id'),
    ("--device", "engine.device", "auto, cpu, cuda, cuda:N"),
    ("--kv-cache-dtype", "engine.kv_cache_dtype", "auto, bf16, fp16, fp32, fp8, int8"),
    ("--tensor-parallel-size", "engine.tensor_parallel_size", "processes, each with a device and a share of the model"),
)
# The same, for settings that are on or off: the flag alone turns them on.
SWITCH_FLAGS = (("--enforce-eager", "engine.enforce_eager", "on a GPU: decode without captured graphs"),)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except ConfigError as error:
        print(f"radixgate: {error.message}", file=sys.stderr)
        return EXIT_UNUSABLE
    except RadixgateError as error:
        print(f"radixgate: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


# ---------------------------------------------------------------- the command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="radixgate", description="A prefix-caching gateway for RAG chat, with its own paged inference engine."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="start store, engine and gateway")
    _add_setting_flags(serve)
    serve.set_defaults(command=_serve)

    demo = commands.add_parser("demo", help="ask over a few documents, again, and something else; show what was cached")
    _add_setting_flags(demo)
    demo.add_argument("--base-url", help="a running server, with /v1; without it the demo starts one of its own")
    demo.add_argument("--api-key", help="for --base-url; without it the demo key of the data directory")
    demo.add_argument("--json", action="store_true", help="one JSON object a request")
    demo.set_defaults(command=_demo)

    doctor = commands.add_parser("doctor", help="check that this machine can serve, and say what to do if not")
    _add_setting_flags(doctor)
    doctor.add_argument("--json", action="store_true", help="a JSON list of the checks")
    doctor.set_defaults(command=_doctor)

    add_tenant_commands(commands, _add_setting_flags, settings_of)
    add_audit_command(commands)

    cache = commands.add_parser("cache", help="look into the KV cache of a running engine, prove it, or erase from it")
    add_cache_command(cache, _add_setting_flags, settings_of)

    OperationsCommands(settings_of, _add_setting_flags).add_to(commands)
    add_lint_command(commands)
    commands.add_parser("version", help="print the version").set_defaults(command=_version)
    return parser


def _add_setting_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help=f"TOML settings (default: ./{DEFAULT_CONFIG} if it is there)")
    for flag, key, meaning in SETTING_FLAGS:
        parser.add_argument(flag, dest=key, metavar="VALUE", help=f"{meaning} (setting {key})")
    for flag, key, meaning in SWITCH_FLAGS:
        parser.add_argument(flag, dest=key, action="store_const", const="true", help=f"{meaning} (setting {key})")
    parser.add_argument("--set", dest="settings", metavar="KEY=VALUE", action="append", default=[], help="any setting")


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The settings of a command line. Raises ConfigError."""
    overrides: dict[str, object] = {}
    for _, key, _ in SETTING_FLAGS + SWITCH_FLAGS:
        if (value := getattr(arguments, key)) is not None:
            overrides[key] = value
    for assignment in arguments.settings:
        key, _, value = str(assignment).partition("=")
        overrides[key] = value
    config: Path | None = arguments.config
    if config is None and DEFAULT_CONFIG.is_file():
        config = DEFAULT_CONFIG
    return load_settings(config, os.environ, overrides)


# ---------------------------------------------------------------- commands


def _serve(arguments: argparse.Namespace) -> int:
    given = settings_of(arguments)
    configure_logging(given.server)
    configured = bool(given.tenants)
    settings = completed(given)
    print(f"radixgate {_version_text()}: starting; the first start converts the model, which takes a minute or two")

    def on_ready(model: str) -> None:
        print(_banner(settings, model, None if configured else demo_key_path(settings.store.data_dir)), flush=True)

    supervisor = Supervisor(
        settings,
        on_ready=on_ready,
        on_line=print_json_line if settings.server.log_format == "json" else print_line,
        read_settings=lambda: completed(settings_of(arguments)),
    )
    return asyncio.run(supervisor.run())


def _banner(settings: Settings, model: str, demo_key: Path | None) -> str:
    base_url = f"{local_url(settings)}/v1"
    key = f"$(cat '{demo_key}')" if demo_key is not None else "YOUR-API-KEY"
    question = json.dumps({"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]})
    return "\n".join(
        [
            "",
            f"radixgate is ready at {base_url}, serving {model}",
            "",
            f"  curl {base_url}/chat/completions \\",
            f'    -H "Authorization: Bearer {key}" \\',
            "    -H 'Content-Type: application/json' \\",
            f"    -d '{question}'",
            "",
            f"dashboard {local_url(settings)}/dashboard     {_dashboard_login(settings)}",
            "",
            "Ctrl-C drains and stops.",
        ]
    )


def _dashboard_login(settings: Settings) -> str:
    path = operator_password_path(settings.store.data_dir)
    return f"operator: $(cat '{path}'), tenants: their API key" if path.exists() else "by password, or by API key"


def _demo(arguments: argparse.Namespace) -> int:
    return run_demo(
        settings_of(arguments), base_url=arguments.base_url, api_key=arguments.api_key, as_json=arguments.json
    )


def _doctor(arguments: argparse.Namespace) -> int:
    return run_doctor(settings_of(arguments), as_json=arguments.json)


def _version(_: argparse.Namespace) -> int:
    print(f"radixgate {_version_text()}")
    return 0


def _version_text() -> str:
    try:
        return metadata.version("radixgate")
    except metadata.PackageNotFoundError:
        return "(not installed)"
