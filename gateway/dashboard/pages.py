"""What each page shows, gathered from history and engine; the templates only lay it out.

Either source may be away: then its part of the page says so, and the rest is there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import TypeVar

from engine.errors import EngineUnavailableError, StoreUnavailableError
from engine.protocol import CacheView
from engine.settings import UsageSettings
from gateway.cache_report import ADVICE
from gateway.dashboard.drawings import draw_blocks, draw_holders, draw_tree, owner_colors
from gateway.engine_port import Engine
from gateway.history_reader import MISS_REASONS, HistoryReader, Point, Span, Sums, total
from gateway.request_record import HIT_CLASSES, HitClass
from gateway.usage import CACHED_CLASSES

Value = TypeVar("Value")
Context = dict[str, object]

PAGE_ROWS = 50
_VIEW_SECONDS = 1.0  # how long a view of the engine is good for: many open dashboards cost it one a second
_ENGINE_TIMEOUT = 3.0
_TREE_NODES = 200
_NUM_EXAMPLES = 3

MEANINGS = {
    "device": "found in the engine's device memory",
    "host": "found in host memory, copied up",
    "disk": "found on the disk, copied up",
    "cold": "nothing under this prefix was ever seen",
    "diverged": "other prompts went another way from here",
    "evicted": "it was there and had to make room",
    "partial_block": "the tail that fills no whole block, and the last token, which is always computed",
    "disabled": "caching was off for the request",
}


@dataclass(frozen=True, slots=True)
class Savings:
    tokens: int
    seconds: float
    money: float
    price: float
    cached_price: float
    currency: str


class Pages:
    def __init__(
        self, engine: Engine, history: HistoryReader, usage: UsageSettings, owner_of: Callable[[str], str]
    ) -> None:
        """`owner_of`: a tenant → the owner of its KV."""
        self._engine = engine
        self._owner_of = owner_of
        self._history = history
        self._usage = usage
        self._views: dict[str | None, tuple[float, CacheView]] = {}

    # ------------------------------------------------------------ overview

    async def overview(self, who: str | None, span: Span) -> Context:
        points = await _or_none(self._history.series(who, span))
        if points is None:
            return {"history_away": True}
        sums = total(points)
        examples = await _or_none(self._history.examples(who, _NUM_EXAMPLES)) or {}
        return {
            "sums": sums,
            "savings": self._savings(sums),
            "hit_chart": _hit_chart(points),
            "ttft_chart": _ttft_chart(points),
            "ttft_rows": [_ttft_row(sums, group) for group in HIT_CLASSES],
            "slowest": max(sums.ttft_quantile(group, 0.95) or 0.0 for group in HIT_CLASSES),
            "hit_speed": _hit_speed(sums),
            "token_chart": _token_chart(points),
            "classes": _class_rows(sums),
            "causes": _cause_rows(sums),
            "examples": {reason: examples.get(reason, []) for reason in MISS_REASONS},
            "documents": await _or_none(self._history.documents(who, 10)) or [],
        }

    def _savings(self, sums: Sums) -> Savings:
        usage = self._usage
        difference = usage.price_per_million_tokens - usage.price_per_million_cached_tokens
        return Savings(
            tokens=sums.cached,
            seconds=sums.seconds_saved,
            money=sums.cached * difference / 1e6,
            price=usage.price_per_million_tokens,
            cached_price=usage.price_per_million_cached_tokens,
            currency=usage.currency,
        )

    # ------------------------------------------------------------ cache, live

    async def cache(self, who: str | None) -> Context:
        view = await _or_none(self._view(who))
        if view is None:
            return {"engine_away": True}
        colors = owner_colors(view)
        return {
            "view": view,
            "colors": colors,
            "tree": draw_tree(view.nodes, colors),
            "holders": draw_holders(view, colors),
            "map": draw_blocks(view),
            "counts": {name: view.block_map.count(name[0].encode()) for name in ("free", "cached", "active")},
        }

    async def live(self, who: str | None) -> Context:
        view = await _or_none(self._view(who))
        return {"engine_away": True} if view is None else {"requests": view.requests, "view": view}

    async def _view(self, who: str | None) -> CacheView:
        now = time.monotonic()
        taken, view = self._views.get(who, (0.0, None))
        if view is None or now - taken > _VIEW_SECONDS:
            owner = None if who is None else self._owner_of(who)
            view = await self._engine.cache_view(owner, who, _TREE_NODES, _ENGINE_TIMEOUT)
            # Only what is fresh is kept: as many views as there are viewers in a second.
            self._views = {name: kept for name, kept in self._views.items() if now - kept[0] <= _VIEW_SECONDS}
            self._views[who] = (now, view)
        return view

    # ------------------------------------------------------------ tenants

    async def tenants(self, span: Span, search: str, page: int) -> Context:
        found = await _or_none(self._history.tenants(span, search, page, PAGE_ROWS))
        return {"history_away": True} if found is None else {"search": search, **found._asdict()}


async def _or_none(answer: Awaitable[Value]) -> Value | None:
    """None when whoever was to answer is away."""
    try:
        return await answer
    except (StoreUnavailableError, EngineUnavailableError):
        return None


# ---------------------------------------------------------------- charts: columns for the chart library, as JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """How the values of a chart are to be read. `stacked`: so many of the first series lie on top of each other."""

    unit: str = ""
    top: float | None = None
    stacked: int = 0


def _chart(points: list[Point], scale: _Scale, series: dict[str, Callable[[Sums], float | None]]) -> str:
    columns = [[point.time for point in points], *([of(point.sums) for point in points] for of in series.values())]
    return json.dumps({"names": list(series), "columns": columns, **asdict(scale)})


def _hit_chart(points: list[Point]) -> str:
    return _chart(points, _Scale(unit="%", top=100), {"hit rate, %": _hit_percent})


def _ttft_chart(points: list[Point]) -> str:
    return _chart(
        points,
        _Scale(unit="ms"),
        {
            "hits, ms": lambda sums: _milliseconds(sums.ttft_mean("hit")),
            "misses, ms": lambda sums: _milliseconds(sums.ttft_mean("miss")),
            "partial, ms": lambda sums: _milliseconds(sums.ttft_mean("partial")),
        },
    )


def _token_chart(points: list[Point]) -> str:
    return _chart(
        points,
        _Scale(stacked=2),
        {
            "prompt, cached": lambda sums: sums.cached,
            "prompt, computed": lambda sums: sums.prompt - sums.cached,
            "output": lambda sums: sums.output,
        },
    )


def _hit_percent(sums: Sums) -> float | None:
    return None if sums.hit_rate is None else round(100 * sums.hit_rate, 2)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


def _hit_speed(sums: Sums) -> float | None:
    """The median time to a hit's first token, as a part of a miss's."""
    hit, miss = sums.ttft_quantile("hit", 0.5), sums.ttft_quantile("miss", 0.5)
    return hit / miss if hit is not None and miss else None


def _ttft_row(sums: Sums, group: HitClass) -> dict[str, object]:
    return {
        "group": group,
        "count": sums.ttft_count(group),
        "mean": sums.ttft_mean(group),
        "p50": sums.ttft_quantile(group, 0.5),
        "p95": sums.ttft_quantile(group, 0.95),
    }


def _cause_rows(sums: Sums) -> list[dict[str, object]]:
    rows = sorted(sums.causes().items(), key=lambda row: (-row[1], row[0]))
    return [{"code": code, "requests": count, "advice": ADVICE[code]} for code, count in rows if code in ADVICE]


def _class_rows(sums: Sums) -> list[dict[str, object]]:
    """Every class that a prompt token can have: they sum to the prompts."""
    classes = sums.by_class()
    rows: list[dict[str, object]] = []
    for name, meaning in MEANINGS.items():
        count = classes.get(name, 0)
        share = count / sums.prompt if sums.prompt else 0.0
        cached = name in CACHED_CLASSES
        rows.append({"name": name, "tokens": count, "share": share, "cached": cached, "meaning": meaning})
    return rows
