"""What a first start makes for itself, so that `radixgate serve` works with no settings at all.

    data_dir/secret     the server's secret        (gateway/auth.py)
    data_dir/demo.key   the API key of tenant `demo`, only while the settings name no tenant

Both are random, of mode 0600, and kept: the same key works after a restart.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from engine.settings import Settings, TenantSettings
from gateway.auth import hash_api_key, load_or_create_secret, new_api_key

DEMO_TENANT = "demo"


def demo_key_path(data_dir: Path) -> Path:
    return data_dir / "demo.key"


def with_demo_tenant(settings: Settings) -> Settings:
    """The settings themselves if they name tenants; else with the tenant `demo`, whose key is made on the first run."""
    if settings.tenants:
        return settings
    data_dir = settings.store.data_dir
    secret = load_or_create_secret(settings.security.secret, data_dir)
    key = _load_or_create_key(demo_key_path(data_dir))
    tenant = TenantSettings(id=DEMO_TENANT, name="Demo", key_hashes=(hash_api_key(secret, key),))
    return msgspec.structs.replace(settings, tenants=(tenant,))


def _load_or_create_key(path: Path) -> str:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text("utf-8").strip()
    key = new_api_key()
    with os.fdopen(fd, "w") as file:
        file.write(key + "\n")
    return key
