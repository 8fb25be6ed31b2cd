"""What an administrator may do to tenants, keys and published texts; the admin API and the CLI both do it here.

    key    create ──► usable ──► expires                          `expires_at`
                        │  └───► rotated: a new key takes over, this one goes on for a grace period
                        └──────► revoked: at once, for ever

Every change is read, made and written against what was read, with its audit line: two administrators at once cannot
undo each other's changes unseen. A key is shown once, to whoever made it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar, cast

import msgspec
from msgspec import Meta

from engine.errors import ConflictError, InvalidRequestError, NotFoundError
from gateway.audit_log import Actor, AuditLine, AuditLog, RecordChange
from gateway.auth import hash_api_key, new_api_key
from gateway.published import document_digest
from gateway.store_client import StoreClient
from gateway.tenant_records import (
    CollectionRecord,
    KeyRecord,
    Kind,
    Label,
    PromptRecord,
    RateLimits,
    Record,
    RecordId,
    Role,
    SharePolicy,
    TenantRecord,
    decode_record,
    encode_record,
    is_reserved,
)
from retrieval.documents import Document

R = TypeVar("R", bound=Record)

_ATTEMPTS = 3


class TenantDraft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: RecordId
    name: Label = ""
    cache_group: RecordId | None = None
    limits: RateLimits = RateLimits()
    policy: SharePolicy = SharePolicy()


class TenantPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is given replaces what was there; `limits` and `policy` as wholes."""

    name: Label | msgspec.UnsetType = msgspec.UNSET
    cache_group: RecordId | msgspec.UnsetType | None = msgspec.UNSET
    disabled: bool | msgspec.UnsetType = msgspec.UNSET
    limits: RateLimits | msgspec.UnsetType = msgspec.UNSET
    policy: SharePolicy | msgspec.UnsetType = msgspec.UNSET


class KeyDraft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Label = ""
    role: Role = Role.USER
    expires_in_seconds: Annotated[float, Meta(gt=0, le=100 * 365 * 86_400)] | None = None


class NewKey(msgspec.Struct, frozen=True, kw_only=True):
    """The one time that a key is seen."""

    record: KeyRecord
    api_key: str


class TenantAdmin:
    """Raises `NotFoundError`, `ConflictError`, `StoreUnavailableError`. `after_change` is awaited after each change."""

    def __init__(
        self,
        store: StoreClient,
        secret: bytes,
        after_change: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._secret = secret
        self._after_change = after_change
        self._clock = clock
        self.log = AuditLog(store)

    # ------------------------------------------------------------ tenants

    async def tenants(self) -> list[TenantRecord]:
        (answer,) = await self._store.fetch(("HVALS", Kind.TENANTS.store_key))
        records = [msgspec.json.decode(text, type=TenantRecord) for text in cast("list[bytes]", answer)]
        return sorted(records, key=lambda record: record.id)

    async def tenant(self, tenant_id: str) -> TenantRecord:
        return (await self._read(Kind.TENANTS, tenant_id, TenantRecord))[0]

    async def create_tenant(self, actor: Actor, draft: TenantDraft) -> TenantRecord:
        if is_reserved(draft.id):
            raise InvalidRequestError(f"`{draft.id}` is a reserved name.", param="id")
        record = TenantRecord(
            id=draft.id,
            name=draft.name,
            cache_group=draft.cache_group or "",
            created_at=int(self._clock()),
            limits=draft.limits,
            policy=draft.policy,
        )
        await self._create(actor, "tenant.create", Kind.TENANTS, record, record.id)
        return record

    async def update_tenant(self, actor: Actor, tenant_id: str, patch: TenantPatch) -> TenantRecord:
        given = {
            name: value for name in patch.__struct_fields__ if (value := getattr(patch, name)) is not msgspec.UNSET
        }
        details = cast("dict[str, object]", msgspec.to_builtins(given))
        if "cache_group" in given:
            given["cache_group"] = given["cache_group"] or ""
        return await self._update(
            AuditLine(actor=actor, action="tenant.update", target=tenant_id, tenant_id=tenant_id, details=details),
            Kind.TENANTS,
            tenant_id,
            TenantRecord,
            lambda record: msgspec.structs.replace(record, **given),
        )

    # ------------------------------------------------------------ keys

    async def keys(self, tenant_id: str) -> list[KeyRecord]:
        (answer,) = await self._store.fetch(("HVALS", Kind.KEYS.store_key))
        records = [msgspec.json.decode(text, type=KeyRecord) for text in cast("list[bytes]", answer)]
        return sorted((r for r in records if r.tenant_id == tenant_id), key=lambda r: (r.created_at, r.id))

    async def key(self, tenant_id: str, key_id: str) -> KeyRecord:
        record, _ = await self._read(Kind.KEYS, key_id, KeyRecord)
        if record.tenant_id != tenant_id:
            raise _not_found(Kind.KEYS, key_id)
        return record

    async def create_key(self, actor: Actor, tenant_id: str, draft: KeyDraft) -> NewKey:
        await self.tenant(tenant_id)
        new = self._new_key(tenant_id, draft.role, draft.name, draft.expires_in_seconds)
        details: dict[str, object] = {"role": new.record.role.value, "expires_at": new.record.expires_at}
        await self._create(actor, "key.create", Kind.KEYS, new.record, tenant_id, details)
        return new

    async def rotate_key(self, actor: Actor, tenant_id: str, key_id: str, grace_seconds: float) -> NewKey:
        """A new key in this one's place; this one works for `grace_seconds` more, and no longer than it would have."""
        old, before = await self._read_key(tenant_id, key_id)
        now = self._clock()
        if (problem := old.problem(now)) is not None or old.rotated_to is not None:
            raise ConflictError(f"Key `{key_id}` {problem or 'has been rotated already'}.")
        lifetime = None if old.expires_at is None else old.expires_at - now
        new = self._new_key(tenant_id, old.role, old.name, lifetime)
        end = min(now + grace_seconds, old.expires_at or now + grace_seconds)
        ended = msgspec.structs.replace(old, expires_at=end, rotated_to=new.record.id)
        line = AuditLine(
            actor=actor,
            action="key.rotate",
            target=key_id,
            tenant_id=tenant_id,
            details={"new_key": new.record.id, "grace_seconds": grace_seconds},
        )
        changes = [
            RecordChange(Kind.KEYS, key_id, before, encode_record(ended)),
            RecordChange(Kind.KEYS, new.record.id, b"", encode_record(new.record)),
        ]
        if not await self.log.write(line, changes):
            raise ConflictError(f"Key `{key_id}` was changed by somebody else meanwhile; look at it again.")
        await self._after_change()
        return new

    async def revoke_key(self, actor: Actor, tenant_id: str, key_id: str) -> KeyRecord:
        """At once and for ever; again is no error."""
        await self.key(tenant_id, key_id)
        return await self._update(
            AuditLine(actor=actor, action="key.revoke", target=key_id, tenant_id=tenant_id),
            Kind.KEYS,
            key_id,
            KeyRecord,
            lambda key: key if key.revoked_at is not None else msgspec.structs.replace(key, revoked_at=self._clock()),
        )

    async def _read_key(self, tenant_id: str, key_id: str) -> tuple[KeyRecord, bytes]:
        record, text = await self._read(Kind.KEYS, key_id, KeyRecord)
        if record.tenant_id != tenant_id:
            raise _not_found(Kind.KEYS, key_id)
        return record, text

    def _new_key(self, tenant_id: str, role: Role, name: str, lifetime: float | None) -> NewKey:
        api_key, now = new_api_key(), self._clock()
        record = KeyRecord(
            id=f"key_{secrets.token_hex(8)}",
            tenant_id=tenant_id,
            key_hash=hash_api_key(self._secret, api_key),
            role=role,
            name=name,
            last_four=api_key[-4:],
            created_at=int(now),
            expires_at=None if lifetime is None else now + lifetime,
        )
        return NewKey(record=record, api_key=api_key)

    # ------------------------------------------------------------ published texts

    async def publish_prompt(self, actor: Actor, prompt_id: str, text: str) -> PromptRecord:
        record = PromptRecord(id=prompt_id, text=text, created_at=int(self._clock()))
        await self._put(actor, "prompt.publish", Kind.PROMPTS, prompt_id, record)
        return record

    async def publish_collection(self, actor: Actor, collection_id: str, documents: list[Document]) -> CollectionRecord:
        digests = tuple(document_digest(document) for document in documents)
        record = CollectionRecord(id=collection_id, documents=digests, created_at=int(self._clock()))
        await self._put(actor, "collection.publish", Kind.COLLECTIONS, collection_id, record)
        return record

    async def withdraw(self, actor: Actor, kind: Kind, record_id: str) -> None:
        if await self._text(kind, record_id) == b"":
            raise _not_found(kind, record_id)
        await self._put(actor, f"{kind.value.removesuffix('s')}.withdraw", kind, record_id, None)

    # ------------------------------------------------------------ read, change, write

    async def _put(self, actor: Actor, action: str, kind: Kind, record_id: str, record: Record | None) -> None:
        line = AuditLine(actor=actor, action=action, target=record_id, tenant_id=None)
        after = b"" if record is None else encode_record(record)
        for _ in range(_ATTEMPTS):
            before = await self._text(kind, record_id)
            if await self.log.write(line, [RecordChange(kind, record_id, before, after)]):
                await self._after_change()
                return
        raise _changed_meanwhile(kind, record_id)

    async def _create(
        self,
        actor: Actor,
        action: str,
        kind: Kind,
        record: Record,
        tenant_id: str,
        details: dict[str, object] | None = None,
    ) -> None:
        line = AuditLine(actor=actor, action=action, target=record.id, tenant_id=tenant_id, details=details or {})
        if not await self.log.write(line, [RecordChange(kind, record.id, b"", encode_record(record))]):
            raise ConflictError(f"{kind.value.removesuffix('s').capitalize()} `{record.id}` is there already.")
        await self._after_change()

    async def _update(
        self, line: AuditLine, kind: Kind, record_id: str, record_type: type[R], change: Callable[[R], R]
    ) -> R:
        for _ in range(_ATTEMPTS):
            record, before = await self._read(kind, record_id, record_type)
            changed = change(record)
            if changed == record:
                return record
            if await self.log.write(line, [RecordChange(kind, record_id, before, encode_record(changed))]):
                await self._after_change()
                return changed
        raise _changed_meanwhile(kind, record_id)

    async def _read(self, kind: Kind, record_id: str, record_type: type[R]) -> tuple[R, bytes]:
        text = await self._text(kind, record_id)
        if not text:
            raise _not_found(kind, record_id)
        record = decode_record(kind, text)
        assert isinstance(record, record_type), "one kind, one type"
        return record, text

    async def _text(self, kind: Kind, record_id: str) -> bytes:
        (answer,) = await self._store.fetch(("HGET", kind.store_key, record_id))
        return cast("bytes | None", answer) or b""


def _not_found(kind: Kind, record_id: str) -> NotFoundError:
    return NotFoundError(f"There is no {kind.value.removesuffix('s')} `{record_id[:64]}`.")


def _changed_meanwhile(kind: Kind, record_id: str) -> ConflictError:
    return ConflictError(f"The {kind.value.removesuffix('s')} `{record_id}` is being changed by somebody else.")
