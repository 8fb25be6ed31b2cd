"""Where subcommands are added: what `argparse` returns for it has no public name."""

from __future__ import annotations

import argparse
from typing import Protocol


class Commands(Protocol):
    def add_parser(self, name: str, *, help: str) -> argparse.ArgumentParser: ...  # noqa: A002  argparse's word
