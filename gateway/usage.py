"""What was used: counts a tenant, key, model and minute. Recorded in memory at once, in the store soon after.

    a request ends ──► UsageRecorder.add ──► rows in memory ──every 200 ms, one script call──► store
                                             └── kept while the store is away, written when it is back

    radixgate:usage:HOUR:TENANT       hash: MINUTE ␟ KEY ␟ MODEL ␟ COUNT → n     HOUR: hours since 1970
    radixgate:usage-tenants:HOUR      set of tenants with usage in that hour

A batch carries its own mark, so that one whose answer was lost is not counted twice. A gateway that is killed loses
at most the last 200 ms; one that is stopped, nothing.

Counts, in this order of meaning:
    requests      attempts that the engine took on, without repeats (see `retries`)
    retries       attempts by which a client repeated one that counts already (it had left before the answer's end)
    aborted       requests whose client left
    failed        requests that the engine had begun with and that ended with an error
    device, host, disk, cold, …   prompt tokens by class, as in `PromptAccount`
    output        output tokens
    saved_us      microseconds of prefill that the cache saved, at the speed measured on this engine
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple, cast

import msgspec

from engine.errors import StoreUnavailableError
from engine.protocol import PromptAccount
from gateway.store_client import Argument, Command, Script, StoreClient

PROMPT_CLASSES = PromptAccount.__struct_fields__
CACHED_CLASSES = ("device", "host", "disk")
COUNTS = ("requests", "retries", "aborted", "failed", *PROMPT_CLASSES, "output", "saved_us")

FLUSH_SECONDS = 0.2
_SEPARATOR = "\x1f"
_MAX_ROWS = 100_000  # while the store is away; beyond, minutes are joined
_MAX_KEYS = 256  # hashes in a batch


class Bucket(NamedTuple):
    """What a row of usage is about."""

    tenant_id: str
    key_id: str
    model: str
    minute: int  # since 1970


class UsageRow(NamedTuple):
    bucket: Bucket
    counts: Counter[str]  # names of COUNTS


class UsageRecorder:
    def __init__(self, store: StoreClient, retention_days: int) -> None:
        self._store = store
        self._retention = retention_days * 86_400
        self._script = Script.load("record_usage")
        self._rows: dict[Bucket, Counter[str]] = {}
        self._batch: tuple[str, dict[Bucket, Counter[str]]] | None = None  # under way, or to be tried again
        self._flushing = asyncio.Lock()

    def add(self, bucket: Bucket, counts: Counter[str]) -> None:
        if bucket not in self._rows and len(self._rows) >= _MAX_ROWS:
            bucket = bucket._replace(minute=bucket.minute // 60 * 60)
        self._rows.setdefault(bucket, Counter()).update(counts)

    async def run(self) -> None:
        """Writes what has come together, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            with suppress(StoreUnavailableError):
                await self.flush()

    async def flush(self) -> None:
        """Raises `StoreUnavailableError`; nothing is lost then."""
        async with self._flushing:
            while self._batch is not None or self._rows:
                if self._batch is None:
                    self._batch = (uuid.uuid4().hex, self._take())
                mark, rows = self._batch
                await self._write(mark, rows)
                self._batch = None

    def _take(self) -> dict[Bucket, Counter[str]]:
        taken = list(self._rows)[:_MAX_KEYS]
        return {bucket: self._rows.pop(bucket) for bucket in taken}

    async def _write(self, mark: str, rows: dict[Bucket, Counter[str]]) -> None:
        by_hash: dict[tuple[int, str], list[Argument]] = {}
        for bucket, counts in rows.items():
            hour, minute = divmod(bucket.minute, 60)
            fields = by_hash.setdefault((hour, bucket.tenant_id), [])
            for name, count in counts.items():
                if count:
                    fields += (_SEPARATOR.join((str(minute), bucket.key_id, bucket.model, name)), count)
        keys = [f"radixgate:usage-batch:{mark}"]
        arguments: list[Argument] = [self._retention]
        for (hour, tenant_id), fields in by_hash.items():
            keys += (_hash_key(hour, tenant_id), _set_key(hour))
            arguments += (tenant_id, len(fields) // 2, *fields)
        await self._store.run(self._script, keys, arguments)


class UsageReader:
    """Rows of a time span. Reads whole hours of active tenants only."""

    def __init__(self, store: StoreClient) -> None:
        self._store = store

    async def rows(self, start: int, end: int, tenant_ids: Iterable[str] | None) -> list[UsageRow]:
        """Of the minutes that begin in [start, end), Unix seconds; of every tenant for None."""
        first, last = -(-start // 60), -(-end // 60)
        hours = range(first // 60, -(-last // 60))
        places = await self._places(hours, tenant_ids)
        rows: list[UsageRow] = []
        for at in range(0, len(places), _MAX_KEYS):
            part = places[at : at + _MAX_KEYS]
            answers = await self._store.fetch(*(("HGETALL", _hash_key(hour, tenant)) for hour, tenant in part))
            for (hour, tenant), answer in zip(part, answers, strict=True):
                rows += _rows_of(hour, tenant, cast("list[bytes]", answer))
        return [row for row in rows if first <= row.bucket.minute < last]

    async def _places(self, hours: range, tenant_ids: Iterable[str] | None) -> list[tuple[int, str]]:
        if tenant_ids is not None:
            return [(hour, tenant) for tenant in tenant_ids for hour in hours]
        if not hours:
            return []
        commands: list[Command] = [("SMEMBERS", _set_key(hour)) for hour in hours]
        answers = await self._store.fetch(*commands)
        return [
            (hour, member.decode())
            for hour, answer in zip(hours, answers, strict=True)
            for member in sorted(cast("Iterable[bytes]", answer))
        ]


def _rows_of(hour: int, tenant_id: str, answer: list[bytes]) -> list[UsageRow]:
    rows: dict[Bucket, Counter[str]] = {}
    for name, count in zip(answer[::2], answer[1::2], strict=True):
        minute, key_id, model, what = name.decode().split(_SEPARATOR)
        bucket = Bucket(tenant_id, key_id, model, hour * 60 + int(minute))
        rows.setdefault(bucket, Counter())[what] += int(count)
    return [UsageRow(bucket, counts) for bucket, counts in rows.items()]


def counts_of_account(account: PromptAccount) -> Counter[str]:
    return Counter(msgspec.structs.asdict(account))


def this_minute() -> int:
    return int(time.time()) // 60


def _hash_key(hour: int, tenant_id: str) -> str:
    return f"radixgate:usage:{hour}:{tenant_id}"


def _set_key(hour: int) -> str:
    return f"radixgate:usage-tenants:{hour}"
