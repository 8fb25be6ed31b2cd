"""What the store keeps of tenants, keys and published texts: one JSON text a record, in one hash a kind.

    radixgate:tenants      id → TenantRecord
    radixgate:keys         id → KeyRecord         never the key: its HMAC, and its last four characters
    radixgate:prompts      id → PromptRecord      system prompts that the operator has published
    radixgate:collections  id → CollectionRecord  digests of documents that the operator has published

Whole records in few hashes, and not a Redis key each: a gateway takes all of them over with one command, and a
change compares the record's whole text with what its author had read (`gateway/lua/put_records.lua`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from engine.protocol import MAX_WEIGHT, MIN_WEIGHT, TenantPolicy
from engine.settings import RESERVED_OWNERS, TenantSettings

Count = Annotated[int, Meta(ge=1, le=2**53)]
NotNegative = Annotated[int, Meta(ge=0, le=2**53)]
RecordId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Label = Annotated[str, Meta(max_length=200)]


class Role(StrEnum):
    USER = "user"  # may use /v1 for its tenant
    TENANT_ADMIN = "tenant-admin"  # and manage the tenant's keys, and read its reports
    OPERATOR = "operator"  # and everything else


class RateLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """None: no limit. The three windows count independently of each other."""

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    tokens_per_day: Count | None = None
    concurrent_requests: Count | None = None


class SharePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant's share of the engine; `engine/fair_queue.py` and `engine/eviction.py` say what the words mean."""

    weight: Annotated[float, Meta(ge=MIN_WEIGHT, le=MAX_WEIGHT)] = 1.0
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    max_running: Count | None = None
    kv_floor_tokens: NotNegative = 0
    kv_quota_tokens: NotNegative | None = None
    no_store: bool = False


class TenantRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str = ""
    cache_group: str = ""
    disabled: bool = False
    created_at: int = 0  # Unix seconds; 0: made by the settings
    limits: RateLimits = RateLimits()
    policy: SharePolicy = SharePolicy()

    def policy_for_engine(self) -> TenantPolicy:
        """Blocks of a cache group are nobody's own: its tenants have neither floors nor quotas."""
        pays_alone = not self.cache_group
        return TenantPolicy(
            weight=self.policy.weight,
            max_running=self.policy.max_running,
            kv_floor_tokens=self.policy.kv_floor_tokens if pays_alone else 0,
            kv_quota_tokens=self.policy.kv_quota_tokens if pays_alone else None,
        )


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    tenant_id: str
    key_hash: str
    role: Role = Role.USER
    name: str = ""
    last_four: str = ""
    created_at: int = 0
    expires_at: float | None = None  # Unix seconds
    revoked_at: float | None = None
    rotated_to: str | None = None  # the key that took its place; this one goes on until `expires_at`

    def problem(self, now: float) -> str | None:
        """Why it cannot be used; None when it can."""
        if self.revoked_at is not None:
            return "has been revoked"
        if self.expires_at is not None and now >= self.expires_at:
            return "has expired"
        return None


class PromptRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    text: str
    created_at: int = 0


class CollectionRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    documents: tuple[str, ...]  # `document_digest` of each
    created_at: int = 0


Record = TenantRecord | KeyRecord | PromptRecord | CollectionRecord


class Kind(StrEnum):
    """The hashes; the value is the name in the store and in the change log."""

    TENANTS = "tenants"
    KEYS = "keys"
    PROMPTS = "prompts"
    COLLECTIONS = "collections"

    @property
    def store_key(self) -> str:
        return f"radixgate:{self.value}"


RECORD_TYPES: dict[Kind, type[Record]] = {
    Kind.TENANTS: TenantRecord,
    Kind.KEYS: KeyRecord,
    Kind.PROMPTS: PromptRecord,
    Kind.COLLECTIONS: CollectionRecord,
}


def decode_record(kind: Kind, text: bytes) -> Record:
    return msgspec.json.decode(text, type=RECORD_TYPES[kind])


def encode_record(record: Record) -> bytes:
    return msgspec.json.encode(record)


def is_reserved(tenant_id: str) -> bool:
    return tenant_id in RESERVED_OWNERS


def records_of_settings(settings: TenantSettings) -> tuple[TenantRecord, list[KeyRecord]]:
    """A tenant of the settings file and its keys. A key's id comes from its hash: the same at every start."""
    tenant = TenantRecord(
        id=settings.id,
        name=settings.name,
        cache_group=settings.cache_group,
        limits=RateLimits(
            requests_per_minute=settings.requests_per_minute,
            tokens_per_minute=settings.tokens_per_minute,
            tokens_per_day=settings.tokens_per_day,
            concurrent_requests=settings.concurrent_requests,
        ),
        policy=SharePolicy(
            weight=settings.weight,
            priority=settings.priority,
            max_running=settings.max_running,
            kv_floor_tokens=settings.kv_floor_tokens,
            kv_quota_tokens=settings.kv_quota_tokens,
            no_store=settings.no_store,
        ),
    )
    by_role = {
        Role.USER: settings.key_hashes,
        Role.TENANT_ADMIN: settings.admin_key_hashes,
        Role.OPERATOR: settings.operator_key_hashes,
    }
    keys = [
        KeyRecord(id=f"key_{key_hash[:16]}", tenant_id=settings.id, key_hash=key_hash, role=role, name="settings")
        for role, hashes in by_role.items()
        for key_hash in hashes
    ]
    return tenant, keys
