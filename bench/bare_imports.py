"""Lets a bench import the engine where only torch, Triton and transformers are installed. Imported before the engine.

`bench/stand_ins` goes to the end of the search path: what is installed is found first, so that a stand-in is taken only
where nothing else is there. A bench that runs an engine in its own process sends and stores nothing: there a message
need only be a record, and a key only a digest. A bench's figures name the stand-ins that they were measured with.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_DIRECTORY = Path(__file__).parent / "stand_ins"

sys.path.append(str(_DIRECTORY))


def stand_ins() -> list[str]:
    """The names of those that are taken."""
    specs = {path.stem: importlib.util.find_spec(path.stem) for path in sorted(_DIRECTORY.glob("*.py"))}
    return [
        name for name, spec in specs.items() if spec and spec.origin and Path(spec.origin).is_relative_to(_DIRECTORY)
    ]
