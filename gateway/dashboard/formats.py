"""Numbers as a reader wants to see them; missing ones as a dash."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

NONE = "–"


def count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.1f}%"


def seconds(value: float | None) -> str:
    if value is None:
        return NONE
    if value < 1:
        return f"{1000 * value:.0f} ms"
    return f"{value:.1f} s" if value < 600 else f"{value / 60:,.0f} min"


def money(value: float) -> str:
    return f"{value:,.4f}" if value < 1 else f"{value:,.2f}"


def clock(unix: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(unix)) + " UTC"


FILTERS: Mapping[str, Callable[..., str]] = MappingProxyType(
    {"count": count, "percent": percent, "seconds": seconds, "money": money, "clock": clock}
)
