"""The commands with which a server is run: config, reload, top, backup, restore, support-bundle, bench, password."""

from __future__ import annotations

import argparse
import ast
import getpass
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from engine.errors import ConfigError
from engine.settings import Settings, masked
from gateway.backup import run_backup, run_restore
from gateway.dashboard.login import hash_password
from gateway.supervisor import running_supervisor
from gateway.support_bundle import run_support_bundle
from gateway.top import run_top

ReadSettings = Callable[[argparse.Namespace], Settings]
AddFlags = Callable[[argparse.ArgumentParser], None]


class Subparsers(Protocol):
    """What `add_subparsers` gives; argparse's own name for it is private."""

    def add_parser(self, name: str, *, help: str) -> argparse.ArgumentParser: ...  # noqa: A002


class OperationsCommands:
    """Adds its commands to a command line, whose settings it reads with `read`."""

    def __init__(self, read: ReadSettings, add_flags: AddFlags) -> None:
        self._read = read
        self._add_flags = add_flags

    def add_to(self, commands: Subparsers) -> None:
        config = commands.add_parser("config", help="look at the settings").add_subparsers(required=True)
        self._command(config, "check", "say whether the settings can be used", self._check)
        show = self._command(config, "show", "print the settings, secrets masked", self._show)
        show.add_argument("--effective", action="store_true", help="with defaults, not only what was set")
        self._command(commands, "reload", "let a running server read its settings again", self._reload)
        bench = commands.add_parser("bench", help="run one of the benches of a source checkout")
        bench.add_argument("name", nargs="?", help="without one: which there are")
        bench.add_argument("arguments", nargs=argparse.REMAINDER)
        bench.set_defaults(command=self._bench)
        password = commands.add_parser("password", help="make the hash of an operator's password for the dashboard")
        password.set_defaults(command=self._password)
        top = self._command(commands, "top", "watch a running server", self._top)
        top.add_argument("--once", action="store_true", help="one look, and the end")
        for name, meaning, run in (
            ("backup", "save store, secret and keys to a file", run_backup),
            ("restore", "bring a backup back; the server must be stopped", run_restore),
            ("support-bundle", "collect versions, masked settings and metrics into a file", run_support_bundle),
        ):
            command = self._command(commands, name, meaning, self._with_file(run))
            command.add_argument("file", type=Path)

    def _command(
        self,
        commands: Subparsers,
        name: str,
        meaning: str,
        run: Callable[[argparse.Namespace], int],
    ) -> argparse.ArgumentParser:
        parser = commands.add_parser(name, help=meaning)
        self._add_flags(parser)
        parser.set_defaults(command=run)
        return parser

    def _with_file(self, run: Callable[[Settings, Path], int]) -> Callable[[argparse.Namespace], int]:
        return lambda arguments: run(self._read(arguments), arguments.file)

    # ------------------------------------------------------------ what they do

    def _check(self, arguments: argparse.Namespace) -> int:
        settings = self._read(arguments)
        address = f"{settings.server.host}:{settings.server.port}"
        print(f"the settings can be used: {len(settings.tenants)} tenants, listening on {address}")
        return 0

    def _show(self, arguments: argparse.Namespace) -> int:
        shown, defaults = masked(self._read(arguments)), masked(Settings())
        for key, value in shown.items():
            if arguments.effective or value != defaults[key]:
                print(f"{key} = {json.dumps(value, ensure_ascii=False)}")
        return 0

    def _reload(self, arguments: argparse.Namespace) -> int:
        pid = running_supervisor(self._read(arguments).store.data_dir)
        if pid is None:
            raise ConfigError("no `radixgate serve` runs on this data directory", param="store.data_dir")
        os.kill(pid, signal.SIGHUP)
        print(f"asked {pid} to reload; its log says how it went")
        return 0

    def _bench(self, arguments: argparse.Namespace) -> int:
        benches = _benches()
        if arguments.name is None:
            print("\n".join(f"{name:<10} {meaning}" for name, meaning in benches.items()))
            return 0
        if arguments.name not in benches:
            raise ConfigError(f"there is no bench {arguments.name!r}; there are: {', '.join(benches)}")
        module = f"bench.{arguments.name}"
        return subprocess.run([sys.executable, "-m", module, *arguments.arguments], check=False).returncode

    def _password(self, _: argparse.Namespace) -> int:
        password = getpass.getpass("password: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
        if len(password) < 12:
            raise ConfigError("at least 12 characters: it opens every tenant's figures")
        print(f'operator_password_hash = "{hash_password(password)}"     (into [security])')
        return 0

    def _top(self, arguments: argparse.Namespace) -> int:
        return run_top(self._read(arguments), once=arguments.once)


def _benches() -> dict[str, str]:
    """Those that can be run, with what each says of itself. They come with the source, not with the package."""
    directory = Path.cwd() / "bench"
    if not (directory / "soak.py").is_file():
        raise ConfigError("benches come with the source: run this in its directory")
    found: dict[str, str] = {}
    for path in sorted(directory.glob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0].partition(": ")[2]
    return found
