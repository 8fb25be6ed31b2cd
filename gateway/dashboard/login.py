"""Logging in: by an API key, or by the operator's password.

A key is 256 random bits and costs a microsecond to check. A password is worth guessing, so it is kept as an argon2
hash; that costs a tenth of a second of a core, so passwords are checked one at a time, in a thread, and an address has
few attempts.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from argon2 import PasswordHasher
from argon2.exceptions import Argon2Error, InvalidHashError

from gateway.auth import hash_api_key
from gateway.dashboard.session import SESSION_SECONDS, Session, View
from gateway.tenant_records import Role
from gateway.tenants import Caller, TenantDirectory

ATTEMPTS = 10
ATTEMPT_WINDOW = 60.0  # seconds
_MAX_ADDRESSES = 10_000


class LoginThrottle:
    """At most `ATTEMPTS` an address and window. Used from one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._attempts: OrderedDict[str, deque[float]] = OrderedDict()

    def allows(self, address: str) -> bool:
        """Counts an attempt."""
        now = self._clock()
        times = self._attempts.setdefault(address, deque(maxlen=ATTEMPTS))
        self._attempts.move_to_end(address)
        while len(self._attempts) > _MAX_ADDRESSES:
            self._attempts.popitem(last=False)
        if len(times) == ATTEMPTS and now - times[0] < ATTEMPT_WINDOW:
            return False
        times.append(now)
        return True


class Login:
    def __init__(self, tenants: TenantDirectory, password_hash: str) -> None:
        self._tenants = tenants
        self._password_hash = password_hash
        self._one_at_a_time = asyncio.Semaphore(1)
        self.throttle = LoginThrottle()

    @property
    def takes_password(self) -> bool:
        return bool(self._password_hash)

    async def log_in(self, credential: str) -> Session | None:
        """The session of a key, which sees what its role may see, or of the operator's password."""
        until = int(time.time()) + SESSION_SECONDS
        key_hash = hash_api_key(self._tenants.secret, credential)
        caller = self._tenants.find(key_hash)
        if caller is not None and caller.problem(time.time()) is None:
            return Session(role=_view_of(caller), tenant_id=caller.tenant.id, stands_on=key_hash, until=until)
        if self._password_hash and await self._is_password(credential):
            return Session(role="operator", tenant_id="", stands_on=self._password_mark(), until=until)
        return None

    def still_holds(self, session: Session) -> bool:
        """Whether the key is still valid, of this tenant and of this role, or the password still the same."""
        if not session.tenant_id:
            return bool(self._password_hash) and session.stands_on == self._password_mark()
        caller = self._tenants.find(session.stands_on)
        if caller is None or caller.problem(time.time()) is not None:
            return False
        return (caller.tenant.id, _view_of(caller)) == (session.tenant_id, session.role)

    async def _is_password(self, password: str) -> bool:
        async with self._one_at_a_time:
            return await asyncio.to_thread(_verify, self._password_hash, password)

    def _password_mark(self) -> str:
        return hashlib.sha256(self._password_hash.encode()).hexdigest()


def hash_password(password: str, salt: bytes | None = None) -> str:
    """What `security.operator_password_hash` holds; the salt is random if none is given."""
    return PasswordHasher().hash(password, salt=salt)


def _view_of(caller: Caller) -> View:
    return "operator" if caller.key.role is Role.OPERATOR else "tenant"


def _verify(password_hash: str, password: str) -> bool:
    try:
        return PasswordHasher().verify(password_hash, password)
    except (Argon2Error, InvalidHashError):
        return False
