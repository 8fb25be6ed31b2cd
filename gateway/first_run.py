"""What a first start makes for itself, so that `radixgate serve` works with no settings at all.

    data_dir/secret     the server's secret        (gateway/auth.py)
    data_dir/demo.key   the API key of tenant `demo`, only while the settings name no tenant
    data_dir/operator.password   for the dashboard, only while the settings have no hash of one

All are random, of mode 0600, and kept: the same key works after a restart.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from engine.settings import Settings, TenantSettings
from gateway.auth import hash_api_key, load_or_create_random, load_or_create_secret
from gateway.dashboard.login import hash_password

DEMO_TENANT = "demo"


def demo_key_path(data_dir: Path) -> Path:
    return data_dir / "demo.key"


def completed(settings: Settings) -> Settings:
    """With all that a first start makes."""
    return with_operator_password(with_demo_tenant(settings))


def with_demo_tenant(settings: Settings) -> Settings:
    """The settings themselves if they name tenants; else with the tenant `demo`, whose key is made on the first run."""
    if settings.tenants:
        return settings
    data_dir = settings.store.data_dir
    secret = load_or_create_secret(settings.security.secret, data_dir)
    key = load_or_create_random(demo_key_path(data_dir))
    tenant = TenantSettings(id=DEMO_TENANT, name="Demo", key_hashes=(hash_api_key(secret, key),))
    return msgspec.structs.replace(settings, tenants=(tenant,))


def operator_password_path(data_dir: Path) -> Path:
    return data_dir / "operator.password"


def with_operator_password(settings: Settings) -> Settings:
    """The settings themselves if they have the hash of an operator's password; else with one, made on the first run."""
    if settings.security.operator_password_hash:
        return settings
    data_dir = settings.store.data_dir
    secret = load_or_create_secret(settings.security.secret, data_dir)
    password = load_or_create_random(operator_password_path(data_dir))
    # The same hash at each start: sessions end when the password changes, not when the server restarts.
    hashed = hash_password(password, salt=hashlib.sha256(b"operator password" + secret).digest()[:16])
    security = msgspec.structs.replace(settings.security, operator_password_hash=hashed)
    return msgspec.structs.replace(settings, security=security)
