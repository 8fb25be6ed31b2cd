"""The audit log: an append-only stream, one line for each change of a tenant, key or published text.

    radixgate:audit     stream: {line: JSON of AuditLine}; never trimmed

It is also how gateways learn of changes (`directory_sync.py`): a change and its line are written by one script, so
what is not in the log cannot take effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec

from gateway.store_client import Script, StoreClient
from gateway.tenant_records import Kind

AUDIT_KEY = "radixgate:audit"
_PAGE = 200


class Actor(msgspec.Struct, frozen=True, kw_only=True):
    """Who changes something."""

    name: str  # a key's id, `cli:USER`, or `settings`
    tenant_id: str | None = None
    request_id: str | None = None


class AuditLine(msgspec.Struct, frozen=True, kw_only=True):
    actor: Actor
    action: str  # as in `key.revoke`
    target: str  # the id of what was changed
    tenant_id: str | None  # whose it is; None: the operator's
    details: dict[str, object] = {}
    changed: tuple[tuple[Kind, str], ...] = ()


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    id: str  # of the stream; sorts by time
    time: float  # Unix seconds
    line: AuditLine


class RecordChange(msgspec.Struct, frozen=True):
    """A record's text before and after; empty: not there."""

    kind: Kind
    record_id: str
    before: bytes
    after: bytes


class AuditLog:
    def __init__(self, store: StoreClient) -> None:
        self._store = store
        self._put = Script.load("put_records")

    async def write(self, line: AuditLine, changes: Sequence[RecordChange]) -> bool:
        """Changes and line, or neither: False when a record is not (any more) as it was `before`."""
        line = msgspec.structs.replace(line, changed=tuple((change.kind, change.record_id) for change in changes))
        keys = [AUDIT_KEY, *(change.kind.store_key for change in changes)]
        arguments: list[str | bytes | int] = [msgspec.json.encode(line)]
        for change in changes:
            arguments += (change.record_id, change.before, change.after)
        return await self._store.run(self._put, keys, arguments) is not None

    async def latest_id(self) -> str:
        (answer,) = await self._store.fetch(("XREVRANGE", AUDIT_KEY, "+", "-", "COUNT", 1))
        entries = _entries(answer)
        return entries[0].id if entries else "0-0"

    async def page(self, tenant_id: str | None, limit: int, before: str | None) -> tuple[list[AuditEntry], bool]:
        """The newest entries (older than `before`), newest first; of one tenant, or all; and if there are more."""
        found: list[AuditEntry] = []
        end = f"({before}" if before else "+"
        while len(found) <= limit:
            (answer,) = await self._store.fetch(("XREVRANGE", AUDIT_KEY, end, "-", "COUNT", _PAGE))
            entries = _entries(answer)
            found += [entry for entry in entries if tenant_id is None or entry.line.tenant_id == tenant_id]
            if len(entries) < _PAGE:
                break
            end = f"({entries[-1].id}"
        return found[:limit], len(found) > limit


def entries_of_xread(answer: object) -> list[AuditEntry]:
    """Of one stream."""
    streams = cast("list[list[object]] | None", answer)
    return _entries(streams[0][1]) if streams else []


def _entries(answer: object) -> list[AuditEntry]:
    entries: list[AuditEntry] = []
    for raw_id, fields in cast("list[tuple[bytes, list[bytes]]]", answer or []):
        entry_id = raw_id.decode()
        line = msgspec.json.decode(fields[1], type=AuditLine)
        entries.append(AuditEntry(id=entry_id, time=int(entry_id.partition("-")[0]) / 1000, line=line))
    return entries
