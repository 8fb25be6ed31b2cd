"""Who may use the gateway, and whose KV they may share.

    server secret ──HMAC──► scope key of a tenant, or of its cache group        "who you are"
                               └─HMAC──► narrower: one end user, one salt       "what you ask for"

Scope keys are derived, never chosen by a client: a body field can only be hashed *into* the key that the API key
gave, so it makes the scope narrower and cannot name another tenant's. The rejected alternative, a salt that a
client sends being the scope itself, lets whoever learns the salt read the cache.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.errors import ConfigError
from engine.settings import TenantSettings

SCOPE_BYTES = 16
_KEY_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Tenant:
    id: str
    name: str
    scope: bytes  # of the tenant, or of its cache group


class TenantDirectory:
    """Tenants by the HMAC of their API keys. Immutable; a key belongs to exactly one tenant."""

    def __init__(self, secret: bytes, tenants: Iterable[TenantSettings]) -> None:
        if not secret:
            raise ConfigError("security.secret is empty: scope keys would be guessable", param="security.secret")
        self.secret = secret
        self._by_key_hash: dict[str, Tenant] = {}
        seen: set[str] = set()
        for i, settings in enumerate(tenants):
            if not settings.id or settings.id in seen:
                raise ConfigError(f"tenants[{i}].id is empty or used twice: {settings.id!r}", param=f"tenants[{i}].id")
            seen.add(settings.id)
            self._add(settings, f"tenants[{i}]")

    def find(self, key_hash: str) -> Tenant | None:
        """The lookup's time depends on the HMAC of the key, which a client cannot steer, not on the key."""
        return self._by_key_hash.get(key_hash)

    def __len__(self) -> int:
        return len(set(self._by_key_hash.values()))

    def _add(self, settings: TenantSettings, path: str) -> None:
        tenant = Tenant(settings.id, settings.name or settings.id, _tenant_scope(self.secret, settings))
        for j, key_hash in enumerate(settings.key_hashes):
            if not _KEY_HASH.fullmatch(key_hash):
                raise ConfigError(
                    f"{path}.key_hashes[{j}] is not 64 lower-case hex digits; `radixgate key` prints one",
                    param=f"{path}.key_hashes[{j}]",
                )
            if self._by_key_hash.setdefault(key_hash, tenant) is not tenant:
                raise ConfigError(f"{path}.key_hashes[{j}] is another tenant's too", param=f"{path}.key_hashes[{j}]")


def narrow_scope(scope: bytes, narrowing: Mapping[str, str]) -> bytes:
    """The child scope for the fields (`cache_salt`, …) that the request carries; the scope itself for none."""
    for field in sorted(narrowing):
        scope = _derive(scope, "narrow", field, narrowing[field])
    return scope


def _tenant_scope(secret: bytes, settings: TenantSettings) -> bytes:
    if settings.cache_group:
        return _derive(secret, "scope", "group", settings.cache_group)
    return _derive(secret, "scope", "tenant", settings.id)


def _derive(key: bytes, *labels: str) -> bytes:
    # Length-prefixed, so that no two label lists give the same message.
    message = b"".join(len(part).to_bytes(4, "big") + part for part in (label.encode() for label in labels))
    return hmac.new(key, message, hashlib.sha256).digest()[:SCOPE_BYTES]
