"""Charts and tables out of the history that `gateway/history.py` wrote."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import msgspec

from gateway.history import (
    EVERYONE,
    TENANT_SUMS,
    TTFT_EDGES_MS,
    MissExample,
    document_key,
    examples_key,
    hour_key,
    minute_key,
    tenants_key,
)
from gateway.request_record import HitClass
from gateway.store_client import StoreClient

_MAX_MINUTES = 6 * 60  # of a span that is read by the minute; longer ones by the hour
MISS_REASONS = ("cold", "diverged", "evicted", "disabled")


class Span(NamedTuple):
    """A time range a user can choose."""

    name: str
    minutes: int


SPANS = (Span("15m", 15), Span("1h", 60), Span("6h", 360), Span("24h", 1440), Span("7d", 10_080))
DEFAULT_SPAN = SPANS[1]


def span_of(name: str) -> Span:
    return next((span for span in SPANS if span.name == name), DEFAULT_SPAN)


@dataclass(slots=True)
class Sums:
    """Sums over some time, and what follows from them."""

    counts: Counter[str] = field(default_factory=Counter[str])

    @property
    def requests(self) -> int:
        return self.counts["requests"]

    @property
    def prompt(self) -> int:
        return self.counts["prompt"]

    @property
    def cached(self) -> int:
        return self.counts["cached"]

    @property
    def output(self) -> int:
        return self.counts["output"]

    @property
    def seconds_saved(self) -> float:
        return self.counts["saved_us"] / 1e6

    @property
    def hit_rate(self) -> float | None:
        return self.cached / self.prompt if self.prompt else None

    def by_class(self) -> dict[str, int]:
        return {name.removeprefix("class."): n for name, n in self.counts.items() if name.startswith("class.")}

    def outcomes(self) -> dict[str, int]:
        return {name.removeprefix("outcome."): n for name, n in self.counts.items() if name.startswith("outcome.")}

    def causes(self) -> dict[str, int]:
        """Requests in which a common cause of misses was found, by its code."""
        return {name.removeprefix("cause."): n for name, n in self.counts.items() if name.startswith("cause.")}

    def ttft_count(self, group: HitClass) -> int:
        return self.counts[f"ttft.{group}.n"]

    def ttft_mean(self, group: HitClass) -> float | None:
        count = self.ttft_count(group)
        return self.counts[f"ttft.{group}.us"] / 1e6 / count if count else None

    def ttft_quantile(self, group: HitClass, quantile: float) -> float | None:
        """Seconds, interpolated inside the bucket; a value beyond the last edge is given as that edge."""
        total = self.ttft_count(group)
        if not total:
            return None
        rank, seen, low = quantile * total, 0, 0.0
        for edge in TTFT_EDGES_MS:
            count = self.counts[f"ttft.{group}.le.{edge}"]
            if count and seen + count >= rank:
                return (low + (edge - low) * (rank - seen) / count) / 1000
            seen, low = seen + count, float(edge)
        return low / 1000


class Point(NamedTuple):
    time: int  # Unix seconds, of the bucket's begin
    sums: Sums


class TenantRow(NamedTuple):
    tenant_id: str
    sums: Sums


class TenantPage(NamedTuple):
    rows: list[TenantRow]
    num_rows: int  # on all pages
    page: int
    num_pages: int


class DocumentRow(NamedTuple):
    document_id: str
    num_requests: int
    num_tokens: int
    num_cached_tokens: int


class HistoryReader:
    """Every method raises `StoreUnavailableError`."""

    def __init__(self, store: StoreClient) -> None:
        self._store = store

    async def series(self, who: str | None, span: Span, now: float | None = None) -> list[Point]:
        """One point a minute, or an hour for long spans, without gaps; `who` None: everyone together."""
        now = time.time() if now is None else now
        step, key = (60, minute_key) if span.minutes <= _MAX_MINUTES else (3600, hour_key)
        last = int(now) // step
        buckets = range(last - math.ceil(span.minutes * 60 / step) + 1, last + 1)
        answers = await self._store.fetch(*(("HGETALL", key(bucket, who or EVERYONE)) for bucket in buckets))
        return [Point(bucket * step, Sums(_counts(answer))) for bucket, answer in zip(buckets, answers, strict=True)]

    async def tenants(self, span: Span, search: str, page: int, page_rows: int, now: float | None = None) -> TenantPage:
        """Who was active, most prompt tokens first, in whole hours; of those whose id contains `search`, one page.

        The store adds up the hours; only the page's own tenants are read in full.
        """
        now = time.time() if now is None else now
        last = int(now) // 3600
        hours = range(last - math.ceil(span.minutes / 60), last + 1)
        keys = [tenants_key(hour, "prompt") for hour in hours]
        union = (await self._store.fetch(("ZUNION", len(keys), *keys)))[0]
        names = [name.decode() for name in reversed(cast("Sequence[bytes]", union))]
        found = [name for name in names if search.lower() in name.lower()]
        num_pages = max(1, -(-len(found) // page_rows))
        page = min(max(page, 1), num_pages)
        shown = found[(page - 1) * page_rows : page * page_rows]
        return TenantPage(await self._tenant_rows(hours, shown), len(found), page, num_pages)

    async def _tenant_rows(self, hours: range, names: Sequence[str]) -> list[TenantRow]:
        if not names:
            return []
        places = [(hour, what) for hour in hours for what in TENANT_SUMS]
        answers = await self._store.fetch(*(("ZMSCORE", tenants_key(hour, what), *names) for hour, what in places))
        sums = [Sums() for _ in names]
        for (_, what), answer in zip(places, answers, strict=True):
            for tenant, score in zip(sums, cast("Sequence[bytes | None]", answer), strict=True):
                tenant.counts[what] += 0 if score is None else int(float(score))
        return [TenantRow(name, tenant) for name, tenant in zip(names, sums, strict=True)]

    async def documents(self, who: str | None, count: int, now: float | None = None) -> list[DocumentRow]:
        """Of today and yesterday, most used first."""
        today = int(time.time() if now is None else now) // 86_400
        places = [(day, what) for day in (today - 1, today) for what in ("n", "tokens", "cached")]
        keys = [document_key(day, who or EVERYONE, what) for day, what in places]
        answers = await self._store.fetch(*(("ZREVRANGE", key, 0, 4 * count, "WITHSCORES") for key in keys))
        found: dict[str, Counter[str]] = {}
        for (_, what), answer in zip(places, answers, strict=True):
            for document, number in _counts(answer).items():
                found.setdefault(document, Counter())[what] += number
        rows = [DocumentRow(name, c["n"], c["tokens"], c["cached"]) for name, c in found.items()]
        return sorted(rows, key=lambda row: (-row.num_requests, row.document_id))[:count]

    async def examples(self, who: str | None, count: int) -> dict[str, list[MissExample]]:
        """The latest misses by reason."""
        keys = [examples_key(who or EVERYONE, reason) for reason in MISS_REASONS]
        answers = await self._store.fetch(*(("LRANGE", key, 0, count - 1) for key in keys))
        decode = msgspec.json.Decoder(MissExample).decode
        return {
            reason: [decode(row) for row in cast("Sequence[bytes]", answer)]
            for reason, answer in zip(MISS_REASONS, answers, strict=True)
        }


def total(points: Iterable[Point]) -> Sums:
    counts: Counter[str] = Counter()
    for point in points:
        counts.update(point.sums.counts)
    return Sums(counts)


def _counts(answer: object) -> Counter[str]:
    pairs = cast("Mapping[bytes, bytes] | Sequence[bytes]", answer)
    items = pairs.items() if isinstance(pairs, Mapping) else zip(pairs[::2], pairs[1::2], strict=True)
    return Counter({name.decode(): int(float(count)) for name, count in items})
