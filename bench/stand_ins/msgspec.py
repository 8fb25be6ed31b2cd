"""For msgspec, where it is not installed: a `Struct` is a dataclass. `bench.bare_imports` says when it is taken.

Only what importing the engine and running it in one process asks for. Nothing is encoded, decoded or converted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import dataclass_transform


@dataclass_transform(field_specifiers=(field,))
class Struct:
    def __init_subclass__(cls, *, frozen: bool = False, kw_only: bool = False, tag: str | None = None) -> None:
        """`frozen` finds slips, which is the tests' business; here it would make each object three times as slow."""
        for name in cls.__annotations__:
            default = vars(cls).get(name)
            if isinstance(default, (dict, list)):  # msgspec gives each object its own
                setattr(cls, name, field(default_factory=default.copy))
        dataclass(kw_only=kw_only, unsafe_hash=frozen)(cls)


class Meta:
    """What a value's type does not say."""

    def __init__(self, **limits: object) -> None:
        self.limits = limits


__all__ = ["Meta", "Struct", "field"]
