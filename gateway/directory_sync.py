"""Keeps a gateway's directory of tenants and keys like the store's.

    start    load everything ─► write what the settings name and the store lacks ─► serve
    then     every 200 ms: what has been appended to the audit log? ─► take the named records over

A revoked key is refused by every gateway within that time. The store is asked, and not subscribed to: what was said
while a subscriber was away would be lost, and a log is read from where one stopped. While the store is away, the
directory stays as it is.

The settings only add: what they name is made once, and what was changed or revoked later stays so. `radixgate:epoch`
names one life of the store's data: another one (it was emptied, or restored from a copy) means to load everything.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable
from typing import cast

from engine.errors import StoreUnavailableError
from gateway.audit_log import AUDIT_KEY, Actor, AuditLine, AuditLog, RecordChange, entries_of_xread
from gateway.store_client import Command, StoreClient
from gateway.tenant_records import (
    Kind,
    Record,
    TenantRecord,
    decode_record,
    encode_record,
    records_of_settings,
)
from gateway.tenants import TenantDirectory

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
START_SECONDS = 5.0  # that a start waits for the store before it serves what the settings name
_EPOCH_KEY = "radixgate:epoch"
_MAX_ENTRIES = 500  # of the log, in one poll
_MAX_COMMANDS = 256


class DirectorySync:
    def __init__(self, store: StoreClient, directory: TenantDirectory) -> None:
        self._store = store
        self._directory = directory
        self._log = AuditLog(store)
        self._epoch: bytes | None = None
        self._position = "0-0"
        self._polling = asyncio.Lock()

    async def start(self) -> None:
        """Loads, if the store answers soon."""
        try:
            async with asyncio.timeout(START_SECONDS):
                await self.poll()
        except (StoreUnavailableError, TimeoutError):
            if self._store.configured:
                logger.warning("the store is away at start: only the tenants of the settings are known")

    async def run(self) -> None:
        while self._store.configured:
            await asyncio.sleep(POLL_SECONDS)
            try:
                await self.poll()
            except StoreUnavailableError as error:
                logger.debug("no news from the store: %s", error)

    async def poll(self) -> None:
        """Takes over what has changed. Raises `StoreUnavailableError`."""
        async with self._polling:
            # Not `fetch`: these answers are what closes the circuit after the store was away.
            epoch, news = await self._store.probe(
                ("GET", _EPOCH_KEY), ("XREAD", "COUNT", _MAX_ENTRIES, "STREAMS", AUDIT_KEY, self._position)
            )
            if epoch is None or epoch != self._epoch:
                await self._load()
                return
            entries = entries_of_xread(news)
            changed = dict.fromkeys(place for entry in entries for place in entry.line.changed)
            await self._take_over(changed)
            if entries:
                self._position = entries[-1].id

    async def _load(self) -> None:
        await self._store.fetch(("SET", _EPOCH_KEY, secrets.token_hex(8), "NX"))
        epoch, *_ = await self._store.fetch(("GET", _EPOCH_KEY))
        # What is appended while this reads is read again by the next poll.
        position = await self._log.latest_id()
        known = await self._read_all()
        await self._seed(known)
        records = await self._read_all()
        self._directory.replace(records.values())
        self._epoch, self._position = cast(bytes, epoch), position
        logger.info("%d tenants and keys are known", len(records))

    async def _read_all(self) -> dict[tuple[Kind, str], Record]:
        answers = await self._store.fetch(*(("HGETALL", kind.store_key) for kind in Kind))
        records: dict[tuple[Kind, str], Record] = {}
        for kind, answer in zip(Kind, answers, strict=True):
            for record_id, text in _pairs(answer):
                records[kind, record_id.decode()] = decode_record(kind, text)
        return records

    async def _seed(self, known: dict[tuple[Kind, str], Record]) -> None:
        for settings in self._directory.seeds:
            tenant, keys = records_of_settings(settings)
            for record in (tenant, *keys):
                kind = Kind.TENANTS if isinstance(record, TenantRecord) else Kind.KEYS
                if (kind, record.id) not in known:
                    # Another gateway may be faster: then there is nothing left to do.
                    await self._log.write(
                        AuditLine(
                            actor=Actor(name="settings"),
                            action=f"{kind.value.removesuffix('s')}.create",
                            target=record.id,
                            tenant_id=tenant.id,
                        ),
                        [RecordChange(kind, record.id, b"", encode_record(record))],
                    )

    async def _take_over(self, places: Iterable[tuple[Kind, str]]) -> None:
        wanted = list(places)
        for at in range(0, len(wanted), _MAX_COMMANDS):
            part = wanted[at : at + _MAX_COMMANDS]
            commands: list[Command] = [("HGET", kind.store_key, record_id) for kind, record_id in part]
            for (kind, record_id), text in zip(part, await self._store.fetch(*commands), strict=True):
                if text is None:
                    self._directory.drop(kind, record_id)
                else:
                    self._directory.put(decode_record(kind, cast(bytes, text)))


def _pairs(answer: object) -> Iterable[tuple[bytes, bytes]]:
    flat = cast("list[bytes]", answer)
    return zip(flat[::2], flat[1::2], strict=True)
