"""Who has used the engine in the last minutes, and who of them little: for whom steps are kept short.

    tenant    used lately                       a tenant is light when it has had less than half of an equal share
    acme      41,000 weighed tokens             of what all together have had
    borealis     900   ◄ light
    cobalt    38,000

Use is forgotten by half each `HALF_LIFE`, and a tenant after `MEMORY` without a request. Instead of letting every
number fade, what comes later is written down larger: only their ratios are asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

HALF_LIFE = 30.0  # seconds
MEMORY = 60.0
_REFRESH = 0.25  # seconds for which an answer about all tenants holds
_MAX_EXPONENT = 500.0  # of two, before the numbers are written down anew


class RecentUse:
    def __init__(self, clock: Callable[[], float], is_here: Callable[[str], bool] = lambda tenant_id: False) -> None:
        """`is_here`: whether a tenant has requests now, however long they have been waiting."""
        self._clock = clock
        self._is_here = is_here
        self._epoch = clock()
        self._used: dict[str, float] = {}
        self._seen: OrderedDict[str, float] = OrderedDict()  # when last, the longest ago first
        self._total = 0.0
        self._has_light = False
        self._looked_at = float("-inf")

    def see(self, tenant_id: str) -> None:
        """A request of that tenant has come, or has gone."""
        if tenant_id not in self._used:
            self._used[tenant_id] = 0.0
            self._has_light = self._total > 0
        self._seen[tenant_id] = self._clock()
        self._seen.move_to_end(tenant_id)

    def charge(self, tenant_id: str, tokens: float) -> None:
        """So many weighed tokens were spent on a tenant whose request is here."""
        exponent = (self._clock() - self._epoch) / HALF_LIFE
        if exponent > _MAX_EXPONENT:
            exponent = self._rebase()
        amount = tokens * 2.0**exponent
        self._used[tenant_id] += amount
        self._total += amount

    def is_light(self, tenant_id: str) -> bool:
        return 2.0 * self._used.get(tenant_id, 0.0) * len(self._used) < self._total

    def has_light(self) -> bool:
        """Whether a light tenant is here, or was in the last minute and may come back."""
        now = self._clock()
        if now - self._looked_at >= _REFRESH:
            self._looked_at = now
            self._forget(now)
            self._has_light = len(self._used) > 1 and 2.0 * min(self._used.values()) * len(self._used) < self._total
        return self._has_light

    def _forget(self, now: float) -> None:
        while self._seen and now - next(iter(self._seen.values())) > MEMORY:
            tenant_id, _ = self._seen.popitem(last=False)
            if self._is_here(tenant_id):
                self._seen[tenant_id] = now
            else:
                self._total -= self._used.pop(tenant_id)

    def _rebase(self) -> float:
        now = self._clock()
        scale = 2.0 ** ((self._epoch - now) / HALF_LIFE)
        self._used = {tenant_id: amount * scale for tenant_id, amount in self._used.items()}
        self._total = sum(self._used.values())
        self._epoch = now
        return 0.0
