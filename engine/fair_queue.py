"""Whose turn it is: the waiting requests of every tenant, and what each tenant has had.

A virtual token counter (VTC; Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024) a tenant: tokens
computed for it, output weighed more, cached tokens less, divided by its weight. The tenant with the lowest counter
is next. Who was away gets no credit for it: on coming back its counter is lifted to the virtual time, the counter of
the tenant that was served last.

    tenant    counter          waiting, by (priority, arrival)
    acme      1,940  ◄ next    [r7] [r9] [r12] …       the first `WINDOW` of one priority are looked at: the one with
    borealis  3,020            [r8]                    most of its prompt in the cache goes first, but nobody is
    cobalt    2,100  at limit  [r3] [r4]               passed over more than `MAX_BYPASSES` times

Priorities are strict, over all tenants: lower goes first, and work for idle times after all of them. Rejected: one
queue in order of arrival (a tenant that floods it is all that is served), and round robin (a tenant with long prompts
gets more than its share).
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable

from engine.protocol import TenantPolicy
from engine.recent_use import RecentUse
from engine.request import Request

WINDOW = 8  # requests of a tenant among which the cache decides
MAX_BYPASSES = 8

_SWEEP_ABOVE = 64


class TenantShare:
    """One tenant's part in the game."""

    __slots__ = ("counter", "num_running", "policy", "tenant_id", "waiting")

    def __init__(self, tenant_id: str, counter: float) -> None:
        self.tenant_id = tenant_id
        self.counter = counter  # weighed tokens
        self.policy = TenantPolicy()
        self.waiting: list[Request] = []
        self.num_running = 0

    @property
    def active(self) -> bool:
        return bool(self.waiting or self.num_running)

    @property
    def may_start(self) -> bool:
        limit = self.policy.max_running
        return bool(self.waiting) and (limit is None or self.num_running < limit)


class FairQueue:
    """Waiting requests in fair order. Every request that was added is started or removed, and later stopped."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_waiting = 0
        self.recent = RecentUse(clock, self._is_here)
        self._shares: dict[str, TenantShare] = {}
        self._virtual_time = 0.0

    def add(self, request: Request) -> None:
        share = self._shares.get(request.tenant_id)
        if share is None:
            share = self._shares[request.tenant_id] = TenantShare(request.tenant_id, self._virtual_time)
        elif not share.active:
            share.counter = max(share.counter, self._virtual_time)
        share.policy = request.policy or share.policy
        if not request.when_idle:
            self.recent.see(request.tenant_id)
        insort(share.waiting, request, key=_place)
        self.num_waiting += 1

    def remove(self, request: Request) -> None:
        """Waits no longer, without having been started."""
        share = self._shares[request.tenant_id]
        share.waiting.remove(request)
        self.num_waiting -= 1
        self._leave(share)

    def start(self, request: Request) -> None:
        share = self._shares[request.tenant_id]
        share.num_running += 1
        share.waiting.remove(request)
        self.num_waiting -= 1
        self._virtual_time = max(self._virtual_time, share.counter)

    def stop(self, request: Request) -> None:
        """Was started and runs no longer."""
        share = self._shares[request.tenant_id]
        share.num_running -= 1
        if not request.when_idle:
            self.recent.see(request.tenant_id)
        self._leave(share)

    def _leave(self, share: TenantShare) -> None:
        """Forget tenants that are away and have had no more than everyone else."""
        if not share.active and len(self._shares) > _SWEEP_ABOVE:
            gone = [s.tenant_id for s in self._shares.values() if not s.active and s.counter <= self._virtual_time]
            if 2 * len(gone) > len(self._shares):
                for tenant_id in gone:
                    del self._shares[tenant_id]

    def charge(self, request: Request, tokens: float) -> None:
        """So many weighed tokens were spent on a request that runs."""
        share = self._shares[request.tenant_id]
        weighed = tokens / share.policy.weight
        share.counter += weighed
        if not request.when_idle:
            self.recent.charge(request.tenant_id, weighed)

    def counter(self, request: Request) -> float:
        """What the request's tenant has had."""
        return self._shares[request.tenant_id].counter

    def _is_here(self, tenant_id: str) -> bool:
        share = self._shares.get(tenant_id)
        return share is not None and share.active

    def is_only_one(self, request: Request) -> bool:
        """Whether its tenant has no other request here."""
        share = self._shares[request.tenant_id]
        return share.num_running + len(share.waiting) <= 1

    def next(self, cached_tokens: Callable[[Request], int]) -> Request | None:
        """Whose turn it is; None when nobody may start. Takes nothing out."""
        ready = [share for share in self._shares.values() if share.may_start]
        if not ready:
            return None
        share = min(ready, key=lambda share: (*_rank(share.waiting[0]), share.counter, share.waiting[0].arrival))
        head = share.waiting[0]
        if len(share.waiting) == 1 or head.num_bypasses >= MAX_BYPASSES:
            return head
        window = [request for request in share.waiting[:WINDOW] if _rank(request) == _rank(head)]
        # On a tie max takes the first: the one that waits longest.
        return max(window, key=lambda request: cached_tokens(request) / request.num_tokens)

    def bypassed_by(self, request: Request) -> None:
        """A request goes before earlier ones of its tenant."""
        for earlier in self._shares[request.tenant_id].waiting[:WINDOW]:
            if _place(earlier) < _place(request):
                earlier.num_bypasses += 1

    @property
    def has_demand(self) -> bool:
        """Whether anybody waits who need not wait for the device to be idle."""
        return any(share.waiting and not share.waiting[0].when_idle for share in self._shares.values())

    def requests(self) -> list[Request]:
        """Everyone who waits, in order of arrival."""
        return sorted((r for share in self._shares.values() for r in share.waiting), key=lambda r: r.arrival)


def _rank(request: Request) -> tuple[bool, int]:
    return request.when_idle, request.priority


def _place(request: Request) -> tuple[bool, int, int]:
    return *_rank(request), request.arrival
