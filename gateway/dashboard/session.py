"""Who looks at the dashboard: a signed cookie, and a token in every form.

    radixgate_session   payload.signature    who, until when, and what the login stands on; HttpOnly, SameSite=Strict
    radixgate_form      random               every form carries its HMAC: a foreign page can send our cookies, not that

The cookie is signed and not stored, so that every gateway worker reads it and a store that is away logs nobody out.
What the login stands on (a key, the operator's password) is checked at each request: a revoked key or a changed
password ends its sessions at once.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import time
from typing import Literal

import msgspec

SESSION_COOKIE = "radixgate_session"
FORM_COOKIE = "radixgate_form"
SESSION_SECONDS = 12 * 3600

View = Literal["operator", "tenant"]  # everyone's figures, or one tenant's


class Session(msgspec.Struct, frozen=True, kw_only=True):
    role: View
    tenant_id: str  # "": an operator who logged in by password
    stands_on: str  # the hash of a key, or of the password's hash
    until: int  # Unix seconds


class SessionSigner:
    """Signs and reads cookies; the keys are derived from the server's secret."""

    def __init__(self, secret: bytes) -> None:
        self._session_key = hmac.new(secret, b"dashboard session", hashlib.sha256).digest()
        self._form_key = hmac.new(secret, b"dashboard form", hashlib.sha256).digest()

    def sign(self, session: Session) -> str:
        payload = msgspec.json.encode(session)
        return f"{_text(payload)}.{_text(self._mac(payload))}"

    def read(self, cookie: str | None, now: float | None = None) -> Session | None:
        """None for anything that we did not sign, or whose time is over."""
        payload_text, _, mac_text = (cookie or "").partition(".")
        try:
            payload, mac = _bytes(payload_text), _bytes(mac_text)
        except (binascii.Error, ValueError):
            return None
        if not hmac.compare_digest(mac, self._mac(payload)):
            return None
        session = msgspec.json.decode(payload, type=Session)
        return session if (time.time() if now is None else now) < session.until else None

    def _mac(self, payload: bytes) -> bytes:
        return hmac.new(self._session_key, payload, hashlib.sha256).digest()

    def form_token(self, form_cookie: str) -> str:
        return hmac.new(self._form_key, form_cookie.encode(), hashlib.sha256).hexdigest()

    def is_form_token(self, form_cookie: str | None, token: str) -> bool:
        return bool(form_cookie) and hmac.compare_digest(self.form_token(form_cookie).encode(), token.encode())


def new_form_cookie() -> str:
    return secrets.token_urlsafe(24)


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
