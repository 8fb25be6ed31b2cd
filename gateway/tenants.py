"""Who may use the gateway, and whose KV they may share.

    server secret ──HMAC──► scope key of the public, a cache group, a tenant      "who you are"
                               └─HMAC──► narrower: one end user, one salt          "what you ask for"

Scope keys are derived, never chosen by a client: a body field can only be hashed *into* the key that the API key
gave, so it makes the scope narrower and cannot name another tenant's. The rejected alternative, a salt that a
client sends being the scope itself, lets whoever learns the salt read the cache.

`TenantDirectory` is everything that has to be known of tenants to serve a request, in memory: 10,000 tenants are some
megabytes, and a request asks the store nothing. `gateway/directory_sync.py` keeps it current.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.errors import ConfigError
from engine.settings import TenantSettings, check_tenants
from gateway.published import Published
from gateway.tenant_records import (
    CollectionRecord,
    KeyRecord,
    Kind,
    PromptRecord,
    Record,
    TenantRecord,
    records_of_settings,
)

SCOPE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Tenant:
    record: TenantRecord
    scope: bytes  # of the tenant, or of its cache group

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def name(self) -> str:
        return self.record.name or self.record.id

    @property
    def owner(self) -> str:
        """Who pays for the blocks of `scope`, in the engine's accounts; "": the tenant itself."""
        return f"group:{self.record.cache_group}" if self.record.cache_group else ""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: a key, and the tenant it belongs to."""

    tenant: Tenant
    key: KeyRecord

    def problem(self, now: float) -> str | None:
        """Why nobody may use it now; None when it can be used."""
        if self.tenant.record.disabled:
            return "belongs to a tenant that is disabled"
        return self.key.problem(now)


class TenantDirectory:
    """Tenants and keys by id, and keys by their HMAC. A key belongs to exactly one tenant."""

    def __init__(self, secret: bytes, tenants: Iterable[TenantSettings]) -> None:
        if not secret:
            raise ConfigError("security.secret is empty: scope keys would be guessable", param="security.secret")
        self.secret = secret
        self.seeds = tuple(tenants)  # what the settings name, to be made in the store
        self.published = Published()
        self._tenants: dict[str, Tenant] = {}
        self._keys: dict[str, KeyRecord] = {}
        self._keys_by_hash: dict[str, KeyRecord] = {}
        check_tenants(self.seeds)
        for settings in self.seeds:
            tenant, keys = records_of_settings(settings)
            for record in (tenant, *keys):
                self.put(record)

    def replace(self, records: Iterable[Record]) -> None:
        """Exactly these, in one go: a request sees the old ones or the new ones."""
        self._tenants, self._keys, self._keys_by_hash = {}, {}, {}
        self.published = Published()
        for record in records:
            self.put(record)

    # ------------------------------------------------------------ look

    def find(self, key_hash: str) -> Caller | None:
        """The lookup's time depends on the HMAC of the key, which a client cannot steer, not on the key."""
        key = self._keys_by_hash.get(key_hash)
        tenant = self._tenants.get(key.tenant_id) if key is not None else None
        return Caller(tenant, key) if key is not None and tenant is not None else None

    def tenant(self, tenant_id: str) -> Tenant | None:
        return self._tenants.get(tenant_id)

    def owner_of(self, tenant_id: str) -> str:
        """Who pays for a tenant's KV: itself, or its cache group."""
        tenant = self._tenants.get(tenant_id)
        return tenant_id if tenant is None else tenant.owner or tenant_id

    def may_store(self, tenant_id: str) -> bool:
        """Whether its KV may be kept; of an unknown tenant it may not."""
        tenant = self.tenant(tenant_id)
        return tenant is not None and not tenant.record.policy.no_store

    def tenants(self) -> list[Tenant]:
        return list(self._tenants.values())

    def key(self, key_id: str) -> KeyRecord | None:
        return self._keys.get(key_id)

    def __len__(self) -> int:
        return len({key.tenant_id for key in self._keys.values()})

    # ------------------------------------------------------------ change

    def put(self, record: Record) -> None:
        match record:
            case TenantRecord():
                self._tenants[record.id] = Tenant(record, _tenant_scope(self.secret, record))
            case KeyRecord():
                self.drop(Kind.KEYS, record.id)
                self._keys[record.id] = self._keys_by_hash[record.key_hash] = record
            case PromptRecord():
                self.published.put_prompt(record)
            case CollectionRecord():
                self.published.put_collection(record)

    def drop(self, kind: Kind, record_id: str) -> None:
        match kind:
            case Kind.TENANTS:
                self._tenants.pop(record_id, None)
            case Kind.KEYS:
                gone = self._keys.pop(record_id, None)
                if gone is not None:
                    self._keys_by_hash.pop(gone.key_hash, None)
            case Kind.PROMPTS:
                self.published.drop_prompt(record_id)
            case Kind.COLLECTIONS:
                self.published.drop_collection(record_id)


def narrow_scope(scope: bytes, narrowing: Mapping[str, str]) -> bytes:
    """The child scope for the fields (`cache_salt`, …) that the request carries; the scope itself for none."""
    for field in sorted(narrowing):
        scope = _derive(scope, "narrow", field, narrowing[field])
    return scope


def public_scope(secret: bytes) -> bytes:
    """The scope of what the operator has published: every tenant reads it."""
    return _derive(secret, "scope", "public")


def _tenant_scope(secret: bytes, tenant: TenantRecord) -> bytes:
    if tenant.cache_group:
        return _derive(secret, "scope", "group", tenant.cache_group)
    return _derive(secret, "scope", "tenant", tenant.id)


def _derive(key: bytes, *labels: str) -> bytes:
    # Length-prefixed, so that no two label lists give the same message.
    message = b"".join(len(part).to_bytes(4, "big") + part for part in (label.encode() for label in labels))
    return hmac.new(key, message, hashlib.sha256).digest()[:SCOPE_BYTES]
