"""How much a tenant may ask for: reserved when a request is admitted, settled when it ends.

    reserve   prompt + max_tokens set aside in every window at once, or in none      ─┐ `Reservation`
    change    another amount in the place of it, for a prompt that was not known yet  │
    settle    what was really used takes its place; the rest is given back           ◄┘ once, whatever happened

    window               length   counts
    requests_per_minute  60 s     requests that were admitted
    tokens_per_minute    60 s     prompt + output; cached prompt tokens at `cached_token_factor`
    tokens_per_day       24 h     the same; when it is full, that is a quota, and no retry helps

Reserving at admission is what keeps concurrent requests within a limit: counting at the end lets all of them in.
A window begins with the first request in it, so what is left of it, and when it ends, are exact.

What a request holds, its backend keeps: when an answer is lost (the store was too slow, the client left), who settles
need not know whether, and how much, was reserved. What nobody settles, because its gateway died, is given back when its
lease is over.

Two backends, one behaviour (one test suite runs over both): `StoreLimiter` for all gateways together, in Lua;
`LocalLimiter` in this process, while the store is away. `Limiter` asks the first, and the second when it must: then
a tenant may have its limit on each gateway anew, and nobody is refused for lack of a store.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, cast

from engine.errors import QuotaExceededError, RateLimitError, StoreUnavailableError
from gateway.store_client import Argument, Script, StoreClient
from gateway.tenant_records import RateLimits

logger = logging.getLogger(__name__)

MINUTE_MS, DAY_MS = 60_000, 86_400_000
LEASE_MS = 60_000  # after which a request whose gateway died no longer counts as running
RENEW_SECONDS = 15.0
_CONCURRENT = "concurrent"
_RETRY_MS = 1000  # for who waits for another request's end
_MAX_LOCAL_TENANTS = 4096
_MAX_DEBTS = 65536


class Window(NamedTuple):
    name: str
    length_ms: int
    limit: int
    counts: str  # requests or tokens


class Standing(NamedTuple):
    """A window as the last answer showed it."""

    used: int
    reset_ms: int


@dataclass(slots=True)
class Held:
    """A window that a reservation has its part in. How much that is, its backend knows."""

    window: Window
    standing: Standing


@dataclass(slots=True)
class Reservation:
    tenant_id: str
    request_id: str
    held: list[Held]
    backend: Backend
    settled: bool = False
    unanswered: bool = False  # held in this process, and perhaps in the store: its answer did not come


class Backend(Protocol):
    async def reserve(
        self,
        tenant_id: str,
        request_id: str,
        windows: Sequence[Window],
        tokens: int,
        concurrent: int | None,
    ) -> Reservation:
        """The new amounts take the place of what the request has in these windows already.

        Raises `RateLimitError`; then nothing is changed.
        """
        ...

    async def settle(self, reservation: Reservation, requests: int, tokens: int) -> None:
        """What was used in the place of what was reserved. A second call for a reservation changes nothing."""
        ...


def windows_of(limits: RateLimits) -> list[Window]:
    table = (
        ("requests_per_minute", MINUTE_MS, limits.requests_per_minute, "requests"),
        ("tokens_per_minute", MINUTE_MS, limits.tokens_per_minute, "tokens"),
        ("tokens_per_day", DAY_MS, limits.tokens_per_day, "tokens"),
    )
    return [Window(name, length, limit, counts) for name, length, limit, counts in table if limit is not None]


def limit_error(name: str, limits: Sequence[Window], concurrent: int | None, wait_ms: int) -> RateLimitError:
    """The 429 for a window that is full."""
    wait_ms = max(wait_ms, 1)
    if name == _CONCURRENT:
        return RateLimitError(f"{concurrent} requests of this tenant are running, its most.", retry_after_ms=_RETRY_MS)
    window = next(window for window in limits if window.name == name)
    if window.length_ms == DAY_MS:
        return QuotaExceededError(
            f"This tenant's {window.limit} tokens a day are used up; more in {wait_ms // 1000} s.",
            kind="tokens",
            retry_after_ms=wait_ms,
        )
    return RateLimitError(
        f"Rate limit: {window.limit} {window.counts} per minute. Try again in {wait_ms} ms.",
        kind=window.counts,
        retry_after_ms=wait_ms,
    )


class StoreLimiter:
    """The windows of every gateway, in the store. Raises `StoreUnavailableError` besides."""

    def __init__(self, store: StoreClient) -> None:
        self._store = store
        self._reserve, self._settle, self._renew = (Script.load(name) for name in ("reserve", "settle", "renew"))

    async def reserve(
        self,
        tenant_id: str,
        request_id: str,
        windows: Sequence[Window],
        tokens: int,
        concurrent: int | None,
    ) -> Reservation:
        arguments: list[Argument] = [request_id, LEASE_MS, "" if concurrent is None else concurrent]
        for window in windows:
            arguments += (window.name, window.length_ms, window.limit, _amount(window, tokens))
        reply = cast("list[int | bytes]", await self._store.ask(self._reserve, _keys(tenant_id), arguments))
        if not reply[0]:
            if reply[1] == b"ended":
                raise StoreUnavailableError(f"The request {request_id} has ended.")
            raise limit_error(cast(bytes, reply[1]).decode(), windows, concurrent, int(reply[2]))
        held = [
            Held(window, Standing(int(reply[1 + 2 * i]), int(reply[2 + 2 * i]))) for i, window in enumerate(windows)
        ]
        return Reservation(tenant_id, request_id, held, self)

    async def settle(self, reservation: Reservation, requests: int, tokens: int) -> None:
        arguments: list[Argument] = [reservation.request_id]
        for held in reservation.held:
            used = requests if held.window.counts == "requests" else tokens
            arguments += (held.window.name, held.window.length_ms, used)
        reply = cast("list[int]", await self._store.ask(self._settle, _keys(reservation.tenant_id), arguments))
        for i, held in enumerate(reservation.held):
            held.standing = Standing(int(reply[2 * i]), int(reply[2 * i + 1]))

    async def renew(self, tenant_id: str, request_ids: Sequence[str]) -> None:
        """Longer leases for requests that still run."""
        await self._store.ask(self._renew, _keys(tenant_id)[1:], [LEASE_MS, *request_ids])


def _keys(tenant_id: str) -> list[str]:
    return [f"radixgate:{what}:{tenant_id}" for what in ("limits", "running")]


def _amount(window: Window, tokens: int) -> int:
    return 1 if window.counts == "requests" else tokens


class _Part(NamedTuple):
    """Of a window: since when it is open, and how much of it."""

    start: int
    amount: int


@dataclass(slots=True)
class _LocalTenant:
    windows: dict[str, _Part] = field(default_factory=dict[str, _Part])  # by name: what is used
    running: dict[str, dict[str, _Part]] = field(default_factory=dict[str, dict[str, _Part]])  # what each request holds


class LocalLimiter:
    """The same windows in this process. Bounded: tenants with nothing running are forgotten, longest unused first."""

    def __init__(self, clock_ms: Callable[[], int] = lambda: int(time.time() * 1000)) -> None:
        self._clock_ms = clock_ms
        self._tenants: OrderedDict[str, _LocalTenant] = OrderedDict()

    async def reserve(
        self,
        tenant_id: str,
        request_id: str,
        windows: Sequence[Window],
        tokens: int,
        concurrent: int | None,
    ) -> Reservation:
        now, tenant = self._clock_ms(), self._tenant(tenant_id)
        if concurrent is not None and len(tenant.running) >= concurrent:
            raise limit_error(_CONCURRENT, windows, concurrent, _RETRY_MS)
        own = tenant.running.get(request_id, {})
        parts: dict[str, _Part] = {}
        held: list[Held] = []
        full: dict[str, int] = {}  # name → ms to wait
        for window in windows:
            start, used = tenant.windows.get(window.name, (0, 0))
            if now >= start + window.length_ms or now < start:  # the clock may have been set back
                start, used = now, 0
            before = own.get(window.name)
            others = used if before is None or before.start != start else max(0, used - before.amount)
            amount = min(_amount(window, tokens), window.limit)
            reset = start + window.length_ms - now
            if others + amount > window.limit:
                full[window.name] = reset
            parts[window.name] = _Part(start, amount)
            held.append(Held(window, Standing(others + amount, reset)))
        if full:
            name = max(full, key=lambda name: full[name])
            raise limit_error(name, windows, concurrent, full[name])
        for part in held:
            name = part.window.name
            tenant.windows[name] = _Part(parts[name].start, part.standing.used)
        tenant.running[request_id] = own | parts
        return Reservation(tenant_id, request_id, held, self)

    async def settle(self, reservation: Reservation, requests: int, tokens: int) -> None:
        self.settle_now(reservation, requests, tokens)

    def settle_now(self, reservation: Reservation, requests: int, tokens: int) -> None:
        now, tenant = self._clock_ms(), self._tenant(reservation.tenant_id)
        used_of = {h.window.name: requests if h.window.counts == "requests" else tokens for h in reservation.held}
        for name, part in tenant.running.pop(reservation.request_id, {}).items():
            start, used = tenant.windows[name]
            if start == part.start:
                tenant.windows[name] = _Part(start, max(0, used - part.amount + used_of.get(name, 0)))
        for held in reservation.held:
            start, used = tenant.windows.get(held.window.name, (0, 0))
            left = start + held.window.length_ms - now
            held.standing = Standing(used, left) if left > 0 else Standing(0, 0)

    def _tenant(self, tenant_id: str) -> _LocalTenant:
        tenant = self._tenants.setdefault(tenant_id, _LocalTenant())
        self._tenants.move_to_end(tenant_id)
        if len(self._tenants) > _MAX_LOCAL_TENANTS:
            idle = (name for name, other in self._tenants.items() if other is not tenant and not other.running)
            if (oldest := next(idle, None)) is not None:
                del self._tenants[oldest]
        return tenant


class _Debt(NamedTuple):
    """A settlement that the store has not been told yet."""

    reservation: Reservation
    requests: int
    tokens: int


class Limiter:
    """Reserves and settles for one gateway; `run` is its background task."""

    def __init__(self, store: StoreClient) -> None:
        self._store = StoreLimiter(store)
        self._local = LocalLimiter()
        self._active: dict[str, Reservation] = {}
        self._debts: deque[_Debt] = deque(maxlen=_MAX_DEBTS)
        self._in_debt = asyncio.Event()

    async def reserve(self, tenant_id: str, request_id: str, limits: RateLimits, tokens: int) -> Reservation:
        """Raises `RateLimitError`. Without limits this asks nobody."""
        windows = windows_of(limits)
        if not windows and limits.concurrent_requests is None:
            return Reservation(tenant_id, request_id, [], self._local, settled=True)
        arguments = (tenant_id, request_id, windows, tokens, limits.concurrent_requests)
        try:
            reservation = await self._store.reserve(*arguments)
        except asyncio.CancelledError:
            self._give_back(tenant_id, request_id)
            raise
        except StoreUnavailableError as error:
            try:
                reservation = await self._local.reserve(*arguments)
            except RateLimitError:
                if error.asked:
                    self._give_back(tenant_id, request_id)
                raise
            reservation.unanswered = error.asked
        self._active[request_id] = reservation
        return reservation

    async def change(self, reservation: Reservation, tokens: int) -> None:
        """`tokens` in the place of those that were reserved; the request runs on, as the one that it is.

        Raises `RateLimitError`; then everything is as it was. With the store away it is let through: what it uses is
        settled in any case.
        """
        windows = [part.window for part in reservation.held if part.window.counts == "tokens"]
        if reservation.settled or not windows:
            return
        with suppress(StoreUnavailableError):
            changed = await reservation.backend.reserve(
                reservation.tenant_id, reservation.request_id, windows, tokens, None
            )
            reservation.held = [part for part in reservation.held if part.window.counts != "tokens"] + changed.held

    async def settle(self, reservation: Reservation, requests: int, tokens: int) -> None:
        """Never fails: what cannot be settled now is settled when the store is back."""
        if reservation.settled or self._settled_here(reservation, requests, tokens):
            return
        self._close(reservation)
        try:
            await self._store.settle(reservation, requests, tokens)
        except StoreUnavailableError:
            self._owe(_Debt(reservation, requests, tokens))
        except asyncio.CancelledError:
            self._owe(_Debt(reservation, requests, tokens))
            raise

    def settle_later(self, reservation: Reservation, requests: int, tokens: int) -> None:
        """For who cannot wait: what is the store's in the background. Once."""
        if not reservation.settled and not self._settled_here(reservation, requests, tokens):
            self._close(reservation)
            self._owe(_Debt(reservation, requests, tokens))

    def _settled_here(self, reservation: Reservation, requests: int, tokens: int) -> bool:
        """What this process holds itself is settled at once: it must not wait behind what the store has to be told."""
        if reservation.backend is not self._local:
            return False
        self._close(reservation)
        self._local.settle_now(reservation, requests, tokens)
        if reservation.unanswered:
            held = [replace(part) for part in reservation.held]
            self._owe(_Debt(replace(reservation, held=held, backend=self._store), requests, tokens))
        return True

    def _give_back(self, tenant_id: str, request_id: str) -> None:
        """What the store has reserved, or will, when the question that nobody waits for arrives."""
        self._owe(_Debt(Reservation(tenant_id, request_id, [], self._store), 0, 0))

    def _close(self, reservation: Reservation) -> None:
        reservation.settled = True
        self._active.pop(reservation.request_id, None)

    def _owe(self, debt: _Debt) -> None:
        self._debts.append(debt)
        self._in_debt.set()

    async def run(self) -> None:
        """Pays debts and renews leases, until cancelled."""
        renewed_at = time.monotonic()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_SECONDS):
                    await self._in_debt.wait()
            if not await self.pay_debts():
                await asyncio.sleep(0.25)  # the store is away
            if time.monotonic() - renewed_at >= RENEW_SECONDS:
                renewed_at = time.monotonic()
                await self._renew_leases()

    async def pay_debts(self) -> bool:
        """Settles what is owed; False when the store is still away."""
        self._in_debt.clear()
        while self._debts:
            debt = self._debts.popleft()
            try:
                await self._store.settle(debt.reservation, debt.requests, debt.tokens)
            except StoreUnavailableError as error:
                if error.refused:
                    continue  # again and again: it must not hold up the others
                self._debts.appendleft(debt)
                self._in_debt.set()
                return False
        return True

    async def _renew_leases(self) -> None:
        by_tenant: dict[str, list[str]] = {}
        for reservation in self._active.values():
            if reservation.backend is self._store or reservation.unanswered:
                by_tenant.setdefault(reservation.tenant_id, []).append(reservation.request_id)
        with suppress(StoreUnavailableError):
            for tenant_id, request_ids in by_tenant.items():
                await self._store.renew(tenant_id, request_ids)
