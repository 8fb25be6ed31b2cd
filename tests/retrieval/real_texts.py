"""Real English of some length that every Python carries: the documentation inside its own modules."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType


def real_text(module_name: str) -> str:
    """The docstrings of a module of the standard library and of what it defines, as paragraphs."""
    module = importlib.import_module(module_name)
    docs = [inspect.getdoc(module) or "", *(_documented(module))]
    return "\n\n".join(doc for doc in docs if doc)


def _documented(module: ModuleType) -> list[str]:
    parts: list[str] = []
    for name, value in sorted(vars(module).items()):
        if getattr(value, "__module__", None) == module.__name__ and (doc := inspect.getdoc(value)):
            parts.append(f"{name}: {doc}")
    return parts
