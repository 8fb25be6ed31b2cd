"""Fairness between tenants: the virtual token counter, weights, priorities, limits, and order inside a tenant."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.fair_queue import MAX_BYPASSES, FairQueue
from engine.protocol import SamplingParams, Segment, SegmentKind, Submit, TenantPolicy
from engine.request import Request
from tests.engine.harness import SCOPE_A, SCOPE_B, Harness


class Arrivals:
    def __init__(self) -> None:
        self.count = 0

    def request(self, tenant: str, policy: TenantPolicy | None = None, priority: int = 0, length: int = 4) -> Request:
        self.count += 1
        submit = Submit(
            request_id=f"r{self.count}",
            tenant_id=tenant,
            segments=(Segment.of(SegmentKind.QUESTION, [1] * length, SCOPE_A),),
            sampling=SamplingParams(max_tokens=1),
            policy=policy or TenantPolicy(),
            priority=priority,
        )
        return Request(submit, 4, self.count, 0)


def nothing_cached(request: Request) -> int:
    return 0


def serve(queue: FairQueue, tokens: float = 10) -> str:
    """Start the next request, charge it, let it end; its tenant."""
    request = queue.next(nothing_cached)
    assert request is not None
    queue.bypassed_by(request)
    queue.start(request)
    queue.charge(request, tokens)
    queue.stop(request)
    return request.tenant_id


def test_a_flood_of_one_tenant_does_not_hold_up_another() -> None:
    queue, arrivals = FairQueue(), Arrivals()
    for _ in range(20):
        queue.add(arrivals.request("noisy"))
    for _ in range(3):
        queue.add(arrivals.request("quiet"))
    assert Counter(serve(queue) for _ in range(6)) == {"noisy": 3, "quiet": 3}


def test_weights_share_tokens_not_requests() -> None:
    queue, arrivals = FairQueue(), Arrivals()
    for _ in range(60):
        queue.add(arrivals.request("double", TenantPolicy(weight=2.0)))
        queue.add(arrivals.request("single"))
    assert Counter(serve(queue) for _ in range(30)) == {"double": 20, "single": 10}


def test_who_was_away_gets_no_credit_for_it() -> None:
    queue, arrivals = FairQueue(), Arrivals()
    queue.add(arrivals.request("late"))
    serve(queue, 1)
    for _ in range(50):
        queue.add(arrivals.request("busy"))
    for _ in range(30):
        serve(queue)
    for _ in range(20):
        queue.add(arrivals.request("late"))
    served = Counter(serve(queue) for _ in range(10))
    assert 4 <= served["late"] <= 6


def test_priorities_are_strict_over_all_tenants() -> None:
    queue, arrivals = FairQueue(), Arrivals()
    queue.add(arrivals.request("a", priority=100))
    queue.add(arrivals.request("b", priority=0))
    queue.add(arrivals.request("b", priority=-1))
    order = [queue.next(nothing_cached)]
    while order[-1] is not None:
        queue.start(order[-1])
        order.append(queue.next(nothing_cached))
    assert [request.priority for request in order if request] == [-1, 0, 100]


def test_a_tenant_at_its_limit_waits_and_others_go_on() -> None:
    queue, arrivals = FairQueue(), Arrivals()
    policy = TenantPolicy(max_running=1)
    first = arrivals.request("limited", policy)
    for request in (first, arrivals.request("limited", policy), arrivals.request("other")):
        queue.add(request)
    queue.start(first)
    following = queue.next(nothing_cached)
    assert following is not None
    assert following.tenant_id == "other"
    queue.start(following)
    assert queue.next(nothing_cached) is None
    queue.stop(first)
    assert queue.next(nothing_cached) is not None


def test_the_best_cached_request_of_a_tenant_goes_first_and_nobody_is_passed_over_for_ever() -> None:
    queue, arrivals = FairQueue(), Arrivals()
    cold = arrivals.request("t")
    queue.add(cold)
    served: list[Request] = []
    for _ in range(2 * MAX_BYPASSES):
        queue.add(arrivals.request("t"))
        request = queue.next(lambda r: 0 if r is cold else 3)
        assert request is not None
        queue.bypassed_by(request)
        queue.start(request)
        served.append(request)
    assert served.index(cold) == MAX_BYPASSES


def test_tenants_that_are_away_are_forgotten() -> None:
    """10,000 tenants may come and go; what they leave behind is bounded."""
    queue, arrivals = FairQueue(), Arrivals()
    for number in range(10_000):
        queue.add(arrivals.request(f"t{number}"))
        serve(queue, 0)
    assert len(queue._shares) < 200


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_through_the_engine_a_quiet_tenant_is_served_beside_a_flood(weight: float) -> None:
    harness = Harness(num_blocks=256, block_size=4, max_num_seqs=2, token_budget=32, chunk=16)
    for number in range(40):
        harness.submit([number, 1, 2, 3, 4, 5, 6, 7], 4, tenant="noisy", scope=SCOPE_A)
    for number in range(4):
        harness.submit(
            [number, 1, 2, 3, 4, 5, 6, 7],
            4,
            tenant="quiet",
            scope=SCOPE_B,
            name=f"quiet{number}",
            policy=TenantPolicy(weight=weight),
        )
    while not all(f"quiet{number}" in harness.finished for number in range(4)):
        harness.step()
    assert len(harness.finished) <= 4 + (8 if weight == 1.0 else 6)
    harness.run()
    assert len(harness.finished) == 44
