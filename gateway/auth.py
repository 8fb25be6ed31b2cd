"""API keys: `rg-` and 256 random bits, kept as HMAC-SHA256(server secret, key).

A password hash would guard nothing here (256 random bits cannot be guessed) and would cost 200 ms a request, a
denial of service of our own making; the HMAC costs microseconds, and a leaked settings file gives no key away.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from litestar.connection import ASGIConnection
from litestar.datastructures import State
from litestar.handlers.base import BaseRouteHandler

from engine.errors import AuthenticationError, ConfigError, PermissionDeniedError
from gateway.request_context import request_context
from gateway.tenant_records import Role
from gateway.tenants import Caller, TenantDirectory

_PREFIX = "rg-"


def new_api_key() -> str:
    return _PREFIX + secrets.token_urlsafe(32)


def hash_api_key(secret: bytes, key: str) -> str:
    """What the settings hold in place of a key (`key_hashes`)."""
    return hmac.new(secret, key.encode(), hashlib.sha256).hexdigest()


def load_or_create_secret(configured: str, data_dir: Path) -> bytes:
    """The server's secret: from the settings, else from `data_dir/secret`, which is made at the first start."""
    if configured:
        return configured.encode()
    path = data_dir / "secret"
    data_dir.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        _create_secret(path)
    secret = path.read_text().strip()
    if not secret:
        raise ConfigError(f"{path} is empty: delete it, or set security.secret", param="security.secret")
    return secret.encode()


def _create_secret(path: Path) -> None:
    """Written aside and linked into place: of two processes that start together, both read the same whole secret."""
    aside = path.with_name(f".secret.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    finally:
        aside.unlink()


def load_or_create_random(path: Path) -> str:
    """The text of a file that holds something random, in the form of an API key; made, mode 0600, if it is new."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text("utf-8").strip()
    text = new_api_key()
    with os.fdopen(fd, "w") as file:
        file.write(text + "\n")
    return text


def authenticate(tenants: TenantDirectory, authorization: str | None, now: float | None = None) -> Caller:
    """Who an `Authorization` header speaks for. Raises `AuthenticationError`."""
    scheme, _, key = (authorization or "").partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        raise AuthenticationError("No API key: send it as `Authorization: Bearer rg-…`.")
    caller = tenants.find(hash_api_key(tenants.secret, key))
    if caller is None:
        # A short "key" would be shown whole by its last four characters.
        raise AuthenticationError(f"Incorrect API key{f' (it ends in {key[-4:]})' if len(key) >= 16 else ''}.")
    problem = caller.problem(time.time() if now is None else now)
    if problem is not None:
        raise AuthenticationError(f"This API key (it ends in {key[-4:]}) {problem}.")
    return caller


Guard = Callable[[ASGIConnection[Any, Any, Any, State], BaseRouteHandler], None]


def tenant_guard(tenants: TenantDirectory) -> Guard:
    """A litestar guard: it runs before the body is read, and leaves the caller on the request."""

    def require_tenant(connection: ASGIConnection[Any, Any, Any, State], _: BaseRouteHandler) -> None:
        caller = authenticate(tenants, connection.headers.get("authorization"))
        context = request_context(connection.scope)
        context.caller, context.tenant = caller, caller.tenant

    return require_tenant


def role_guard(*roles: Role) -> Guard:
    """Behind `tenant_guard`: only these roles get any further, whatever they ask for."""

    def require_role(connection: ASGIConnection[Any, Any, Any, State], _: BaseRouteHandler) -> None:
        caller = request_context(connection.scope).caller
        assert caller is not None, "tenant_guard runs before"
        if caller.key.role not in roles:
            raise PermissionDeniedError(f"This is for {' and '.join(roles)} keys; this one is a {caller.key.role} key.")

    return require_role
