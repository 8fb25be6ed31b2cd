"""What the dashboard's charts are drawn from: sums by minute and by hour, in the store, with an end.

    a request ends ─► HistoryWriter.request_finished ─► sums in memory ──every second, one pipeline──► store
                                                        └── at most MAX_CELLS while the store is away

    radixgate:h:m:MINUTE:WHO    hash: field → sum         WHO: a tenant's id, or `*` for all of them together
    radixgate:h:h:HOUR:WHO      the same by hour
    radixgate:h:t:HOUR:WHAT     sorted set: tenant → requests, prompt, cached or output tokens: who was active
    radixgate:h:x:WHO:REASON    list: the latest misses for a reason, as JSON
    radixgate:h:d:DAY:WHO:WHAT  sorted set: document → requests, tokens or cached tokens; the top ones are kept

Sums of everything are written beside those of each tenant, so that the operator's page reads as many keys with a
thousand tenants as with one. Charts are no bills: whoever wants to know what a tenant has to pay reads its usage.
Nothing here is on a request's way: a request only adds to numbers in memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple, Protocol

import msgspec

from engine.errors import StoreUnavailableError
from gateway.request_record import RequestRecord, hit_class, miss_reason
from gateway.store_client import Command, StoreClient

EVERYONE = "*"
TENANT_SUMS = ("requests", "prompt", "cached", "output")
FLUSH_SECONDS = 1.0
MAX_CELLS = 200_000
EXAMPLES = 20  # kept for each tenant and reason
MAX_DOCUMENTS = 1_000  # of one tenant and day: ids are the clients' to choose, and could be without end
TTFT_EDGES_MS = (25, 50, 100, 200, 400, 800, 1_600, 3_200, 6_400, 12_800)
_MINUTE_TTL = 2 * 86_400

logger = logging.getLogger(__name__)


class Cell(NamedTuple):
    key: str
    field: str


class MissExample(msgspec.Struct, frozen=True, kw_only=True):
    """Where one prompt left the beaten path; ids and numbers, no text."""

    time: float
    request_id: str
    tenant_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    segment: str
    document_id: str | None
    token: int
    token_in_segment: int
    causes: tuple[str, ...] = ()


class LossCounter(Protocol):
    def history_dropped(self, count: int) -> None: ...


class HistoryWriter:
    """Observes finished requests. `run` writes until it is cancelled, and what is left once more then."""

    def __init__(self, store: StoreClient, retention_days: int, losses: LossCounter) -> None:
        self._store = store
        self._ttls = {"m": _MINUTE_TTL, "h": retention_days * 86_400, "t": retention_days * 86_400, "d": 8 * 86_400}
        self._losses = losses
        self._sums: Counter[Cell] = Counter()
        self._ranks: Counter[Cell] = Counter()  # of sorted sets: tenants, documents
        self._examples: dict[tuple[str, str], deque[MissExample]] = {}

    def request_finished(self, record: RequestRecord) -> None:
        if record.tenant_id is None or not record.model or not self._store.configured:
            return
        if len(self._sums) + len(self._ranks) >= MAX_CELLS:
            self._losses.history_dropped(1)
            return
        fields = Counter(dict(fields_of(record)))
        for who in (record.tenant_id, EVERYONE):
            for key in (minute_key(int(record.time) // 60, who), hour_key(int(record.time) // 3600, who)):
                self._add(key, fields)
            self._add_documents(record, who)
            self._add_example(record, who)
        for what in TENANT_SUMS:
            self._ranks[Cell(tenants_key(int(record.time) // 3600, what), record.tenant_id)] += fields[what]

    def _add(self, key: str, fields: dict[str, int]) -> None:
        for name, value in fields.items():
            if value:
                self._sums[Cell(key, name)] += value

    def _add_documents(self, record: RequestRecord, who: str) -> None:
        day = int(record.time) // 86_400
        for share in record.documents:
            counts = {"n": 1, "tokens": share.num_tokens, "cached": share.num_cached_tokens}
            for what, count in counts.items():
                self._ranks[Cell(document_key(day, who, what), share.document_id)] += count

    def _add_example(self, record: RequestRecord, who: str) -> None:
        if record.account is None or record.miss is None:
            return
        example = MissExample(
            time=record.time,
            request_id=record.request_id,
            tenant_id=record.tenant_id or "",
            num_prompt_tokens=record.account.num_prompt_tokens,
            num_cached_tokens=record.account.num_cached_tokens,
            segment=record.miss.segment.value,
            document_id=record.miss.document_id,
            token=record.miss.token,
            token_in_segment=record.miss.token_in_segment,
            causes=record.causes,
        )
        place = (who, miss_reason(record.account))
        self._examples.setdefault(place, deque(maxlen=EXAMPLES)).append(example)

    # ------------------------------------------------------------ to the store

    async def run(self) -> None:
        try:
            while True:
                await asyncio.sleep(FLUSH_SECONDS)
                await self.flush()
        finally:
            await self.flush()

    async def flush(self) -> None:
        """Writes what has come together; keeps it if the store is away."""
        sums, self._sums = self._sums, Counter()
        ranks, self._ranks = self._ranks, Counter()
        examples, self._examples = self._examples, {}
        if not sums:
            return
        try:
            await self._store.fetch(*_sum_commands(sums, self._ttls), *_rank_commands(ranks, self._ttls))
            await self._store.fetch(*_example_commands(examples, self._ttls["d"]))
        except StoreUnavailableError:
            # What was half written may be counted twice: a chart bears that, a bill would not.
            self._sums.update(sums)
            self._ranks.update(ranks)
            self._examples = {**examples, **self._examples}


def _sum_commands(sums: Counter[Cell], ttls: dict[str, int]) -> Iterator[Command]:
    for cell, value in sums.items():
        yield ("HINCRBY", cell.key, cell.field, value)
    for key in {cell.key for cell in sums}:
        yield ("EXPIRE", key, ttls[key.split(":")[2]])


def _rank_commands(ranks: Counter[Cell], ttls: dict[str, int]) -> Iterator[Command]:
    for cell, value in ranks.items():
        yield ("ZINCRBY", cell.key, value, cell.field)
    for key in {cell.key for cell in ranks}:
        kind = key.split(":")[2]
        if kind == "d":
            yield ("ZREMRANGEBYRANK", key, 0, -MAX_DOCUMENTS - 1)
        yield ("EXPIRE", key, ttls[kind])


def _example_commands(examples: dict[tuple[str, str], deque[MissExample]], ttl: int) -> Iterator[Command]:
    for (who, reason), rows in examples.items():
        key = examples_key(who, reason)
        yield ("LPUSH", key, *(msgspec.json.encode(row) for row in rows))
        yield ("LTRIM", key, 0, EXAMPLES - 1)
        yield ("EXPIRE", key, ttl)


def fields_of(record: RequestRecord) -> Iterator[tuple[str, int]]:
    """What one request adds. Times in milliseconds or microseconds, so that every sum is of whole numbers."""
    yield "requests", 1
    yield f"outcome.{record.outcome}", 1
    if (used := record.used) is not None:
        yield "prompt", used.account.num_prompt_tokens
        yield "cached", used.account.num_cached_tokens
        yield "output", used.num_output_tokens
        for name, count in msgspec.structs.asdict(used.account).items():
            yield f"class.{name}", count
        yield "saved_us", round(used.seconds_saved * 1e6)
    for code in record.causes:
        yield f"cause.{code}", 1
    if record.account is not None and record.time_to_first_token is not None:
        group = hit_class(record.account)
        yield f"ttft.{group}.n", 1
        yield f"ttft.{group}.us", round(record.time_to_first_token * 1e6)
        yield f"ttft.{group}.le.{ttft_edge(record.time_to_first_token)}", 1


def ttft_edge(seconds: float) -> str:
    return next((str(edge) for edge in TTFT_EDGES_MS if seconds * 1000 <= edge), "inf")


def minute_key(minute: int, who: str) -> str:
    return f"radixgate:h:m:{minute}:{who}"


def hour_key(hour: int, who: str) -> str:
    return f"radixgate:h:h:{hour}:{who}"


def tenants_key(hour: int, what: str) -> str:
    return f"radixgate:h:t:{hour}:{what}"


def examples_key(who: str, reason: str) -> str:
    return f"radixgate:h:x:{who}:{reason}"


def document_key(day: int, who: str, what: str) -> str:
    return f"radixgate:h:d:{day}:{who}:{what}"


async def watch_store(store: StoreClient, pause: float = 0.5, report: Callable[[], None] = lambda: None) -> None:
    """Asks the store for a sign of life, so that it is known to be away before a request needs it, and back."""
    while True:
        with suppress(StoreUnavailableError):
            await store.probe(("PING",))
        report()
        await asyncio.sleep(pause)
