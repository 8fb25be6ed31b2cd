"""One suite over both backends of the limits; the store's is a real store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import closing, suppress
from typing import Any, TypeVar, cast

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from engine.errors import QuotaExceededError, RateLimitError, StoreUnavailableError
from gateway.rate_limits import (
    DAY_MS,
    MINUTE_MS,
    Backend,
    Limiter,
    LocalLimiter,
    Reservation,
    StoreLimiter,
    Window,
    windows_of,
)
from gateway.store_client import StoreClient
from gateway.tenant_records import RateLimits
from tests.gateway.store_server import StoreServer
from tests.store_proxy import StoreProxy

T = TypeVar("T")

REQUESTS = Window("requests_per_minute", MINUTE_MS, 3, "requests")
TOKENS = Window("tokens_per_minute", MINUTE_MS, 100, "tokens")
DAY = Window("tokens_per_day", DAY_MS, 150, "tokens")


async def open_store(url: str) -> StoreClient:
    store = StoreClient(url, timeout=10)
    await store.probe(("PING",))
    return store


@pytest.fixture(params=["store", pytest.param("local")])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    if request.param == "local":
        yield LocalLimiter()
        return
    store = await open_store(request.getfixturevalue("empty_store_url"))
    try:
        yield StoreLimiter(store)
    finally:
        await store.close()


@pytest.fixture
async def impatient_store(store_server: StoreServer) -> AsyncIterator[StoreClient]:
    """To an empty store that may be frozen."""
    store_server.command("FLUSHALL")
    store = StoreClient(store_server.url, timeout=0.05)
    await store.probe(("PING",))
    try:
        yield store
    finally:
        await store.close()


def used(reservation: Reservation) -> list[int]:
    return [held.standing.used for held in reservation.held]


async def test_what_is_reserved_is_replaced_by_what_was_used(backend: Backend) -> None:
    first = await backend.reserve("t", "r1", [REQUESTS, TOKENS], 60, None)
    assert used(first) == [1, 60]
    await backend.settle(first, 1, 25)
    assert used(first) == [1, 25]
    second = await backend.reserve("t", "r2", [REQUESTS, TOKENS], 75, None)
    assert used(second) == [2, 100]


async def test_a_request_that_did_nothing_gives_everything_back(backend: Backend) -> None:
    reservation = await backend.reserve("t", "r1", [REQUESTS, TOKENS, DAY], 60, 1)
    await backend.settle(reservation, 0, 0)
    assert used(reservation) == [0, 0, 0]
    await backend.reserve("t", "r2", [REQUESTS, TOKENS, DAY], 100, 1)


async def test_settling_twice_counts_once(backend: Backend) -> None:
    """An answer that was lost makes the gateway settle again: the second time must not give tokens away."""
    reservation = await backend.reserve("t", "r1", [TOKENS], 60, None)
    other = await backend.reserve("t", "r2", [TOKENS], 30, None)
    await backend.settle(reservation, 1, 10)
    await backend.settle(reservation, 1, 10)
    await backend.settle(other, 1, 30)
    assert used(other) == [40]


async def test_a_refusal_takes_nothing_from_any_window(backend: Backend) -> None:
    """litellm#41610: a request that one limit refused was counted by the others all the same."""
    await backend.reserve("t", "r1", [REQUESTS, TOKENS], 90, None)
    for i in range(5):
        with pytest.raises(RateLimitError) as caught:
            await backend.reserve("t", f"refused{i}", [REQUESTS, TOKENS], 20, None)
        assert caught.value.kind == "tokens"
    assert used(await backend.reserve("t", "r2", [REQUESTS, TOKENS], 10, None)) == [2, 100]


async def test_tenants_do_not_share_windows(backend: Backend) -> None:
    await backend.reserve("a", "r1", [TOKENS], 100, 1)
    assert used(await backend.reserve("b", "r2", [TOKENS], 100, 1)) == [100]


async def test_concurrent_requests_end_with_their_settlement(backend: Backend) -> None:
    first = await backend.reserve("t", "r1", [], 1, 2)
    await backend.reserve("t", "r2", [], 1, 2)
    with pytest.raises(RateLimitError, match="2 requests of this tenant are running"):
        await backend.reserve("t", "r3", [], 1, 2)
    await backend.settle(first, 1, 1)
    await backend.reserve("t", "r3", [], 1, 2)


async def test_concurrent_reservations_never_pass_the_limit(backend: Backend) -> None:
    """litellm#18730: limits that are counted at the end let all of them in."""
    results = await asyncio.gather(
        *(backend.reserve("t", f"r{i}", [TOKENS], 30, None) for i in range(50)), return_exceptions=True
    )
    admitted = [result for result in results if isinstance(result, Reservation)]
    assert len(admitted) == 3
    assert all(isinstance(result, RateLimitError) for result in results if result not in admitted)


async def test_a_request_larger_than_its_window_has_it_to_itself(backend: Backend) -> None:
    """Else a client whose max_tokens is above the limit would be refused for ever."""
    large = await backend.reserve("t", "r1", [TOKENS], 5000, None)
    assert used(large) == [100]
    with pytest.raises(RateLimitError):
        await backend.reserve("t", "r2", [TOKENS], 1, None)
    await backend.settle(large, 1, 40)
    await backend.reserve("t", "r2", [TOKENS], 60, None)


async def test_a_full_day_is_a_quota_and_a_full_minute_a_limit(backend: Backend) -> None:
    await backend.settle(await backend.reserve("t", "r1", [DAY], 150, None), 1, 150)
    with pytest.raises(QuotaExceededError) as quota:
        await backend.reserve("t", "r2", [TOKENS, DAY], 1, None)
    assert 0 < quota.value.retry_after_ms <= DAY_MS
    await backend.reserve("u", "r3", [TOKENS], 100, None)
    with pytest.raises(RateLimitError) as limit:
        await backend.reserve("u", "r4", [TOKENS], 1, None)
    assert not isinstance(limit.value, QuotaExceededError)
    assert 0 < limit.value.retry_after_ms <= MINUTE_MS


async def test_a_window_ends_and_owes_the_next_one_nothing(backend: Backend) -> None:
    """A request that is settled after its window's end must not lower what the next window has used."""
    short = Window("tokens_per_minute", 50, 100, "tokens")
    late = await backend.reserve("t", "r1", [short], 90, None)
    await asyncio.sleep(0.06)
    fresh = await backend.reserve("t", "r2", [short], 100, None)
    assert used(fresh) == [100]
    await backend.settle(late, 1, 0)
    await asyncio.sleep(0.06)
    assert used(await backend.reserve("t", "r3", [short], 7, None)) == [7]


async def test_what_a_request_holds_is_no_obstacle_to_its_own_larger_amount(backend: Backend) -> None:
    """A request that needs the whole window would be refused for ever, behind the part of it that it has itself."""
    await backend.reserve("t", "r1", [TOKENS], 30, 1)
    large = await backend.reserve("t", "r1", [TOKENS], 5000, None)
    assert used(large) == [100]
    await backend.settle(large, 1, 40)
    assert used(large) == [40]


async def test_a_larger_amount_that_others_leave_no_room_for_changes_nothing(backend: Backend) -> None:
    await backend.reserve("t", "r1", [TOKENS, DAY], 30, None)
    other = await backend.reserve("t", "r2", [TOKENS, DAY], 60, None)
    with pytest.raises(RateLimitError):
        await backend.reserve("t", "r1", [TOKENS, DAY], 41, None)
    assert used(await backend.reserve("t", "r1", [TOKENS, DAY], 40, None)) == [100, 100]
    await backend.settle(other, 1, 0)
    assert used(other) == [40, 40]


async def test_an_amount_that_is_changed_in_the_next_window_is_all_in_that_one(backend: Backend) -> None:
    short = Window("tokens_per_minute", 50, 100, "tokens")
    await backend.reserve("t", "r1", [short], 90, None)
    await asyncio.sleep(0.06)
    other = await backend.reserve("t", "r2", [short], 20, None)
    window = short._replace(length_ms=MINUTE_MS)  # the next one, and it does not end here
    late = await backend.reserve("t", "r1", [window], 70, None)
    assert used(late) == [90]
    await backend.settle(late, 1, 50)
    other.held[0].window = window
    await backend.settle(other, 1, 20)
    assert used(other) == [70]


async def test_who_settles_need_not_know_what_was_reserved(backend: Backend) -> None:
    """The answer to a reservation can be lost, and what was reserved has to come back all the same."""
    await backend.reserve("t", "lost", [REQUESTS, TOKENS, DAY], 60, 1)
    await backend.settle(Reservation("t", "lost", [], backend), 0, 0)
    assert used(await backend.reserve("t", "r2", [REQUESTS, TOKENS, DAY], 100, 1)) == [1, 100, 100]
    for _ in range(2):
        await backend.settle(Reservation("t", "never reserved", [], backend), 0, 0)
    with pytest.raises(RateLimitError):
        await backend.reserve("t", "r3", [TOKENS], 1, None)


async def test_two_gateways_at_once_never_pass_a_limit(empty_store_url: str) -> None:
    """Tokens and concurrency, reserved and settled over two connections at the same time."""
    stores = [await open_store(empty_store_url) for _ in range(2)]
    gateways = [Limiter(store) for store in stores]
    limits = RateLimits(tokens_per_day=1000, concurrent_requests=7)
    running = most = spent = 0

    async def request(number: int) -> None:
        nonlocal running, most, spent
        gateway, amount = gateways[number % 2], 10 + number % 30
        try:
            reservation = await gateway.reserve("t", f"r{number}", limits, amount)
        except RateLimitError:
            return
        running += 1
        most = max(most, running)
        assert used(reservation)[0] <= 1000
        await asyncio.sleep(0)
        running -= 1  # before the store is told: never fewer than it counts
        spent += amount // 2
        await gateway.settle(reservation, 1, amount // 2)

    for batch in range(10):
        await asyncio.gather(*(request(40 * batch + i) for i in range(40)))
    assert 2 <= most <= 7
    assert 500 < spent <= 1000
    last = await gateways[0].reserve("t", "last", RateLimits(tokens_per_day=10**6), 0)
    assert used(last) == [spent]
    for store in stores:
        await store.close()


def test_only_the_limits_that_are_set_are_windows() -> None:
    assert windows_of(RateLimits()) == []
    names = [window.name for window in windows_of(RateLimits(tokens_per_day=5, requests_per_minute=1))]
    assert names == ["requests_per_minute", "tokens_per_day"]


# ---------------------------------------------------------------- against a model


class LimitsMachine(RuleBasedStateMachine):
    """Any interleaving of reserve, change, settle and repeated settle against plain arithmetic."""

    WINDOWS = (REQUESTS._replace(limit=6), TOKENS, DAY)
    CONCURRENT = 4

    def __init__(self, backend: Backend, runner: asyncio.Runner) -> None:
        super().__init__()
        self.backend = backend
        self.runner = runner
        self.running: dict[str, tuple[Reservation, list[int]]] = {}
        self.ended: list[Reservation] = []
        self.used = [0, 0, 0]
        self.over = 0
        self.count = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @rule(tokens=st.integers(1, 120))
    def reserve(self, tokens: int) -> None:
        self.count += 1
        amounts = [min(amount, w.limit) for amount, w in zip((1, tokens, tokens), self.WINDOWS, strict=True)]
        fits = all(u + a <= w.limit for u, a, w in zip(self.used, amounts, self.WINDOWS, strict=True))
        name = f"r{self.count}"
        call = self.backend.reserve("t", name, self.WINDOWS, tokens, self.CONCURRENT)
        if len(self.running) >= self.CONCURRENT or not fits:
            with pytest.raises(RateLimitError):
                self.run(call)
            return
        reservation = self.run(call)
        self.used = [u + a for u, a in zip(self.used, amounts, strict=True)]
        self.running[name] = (reservation, amounts)
        assert used(reservation) == self.used

    @precondition(lambda self: self.running)
    @rule(data=st.data(), share=st.floats(0, 1), requests=st.sampled_from([0, 1]))
    def settle(self, data: st.DataObject, share: float, requests: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        reservation, amounts = self.running.pop(name)
        tokens = int(amounts[1] * share)
        self.run(self.backend.settle(reservation, requests, tokens))
        for i, really in enumerate((requests, tokens, tokens)):
            self.used[i] += really - amounts[i]
        assert used(reservation) == self.used
        self.ended.append(reservation)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(1, 120))
    def change(self, data: st.DataObject, tokens: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        reservation, amounts = self.running[name]
        windows = self.WINDOWS[1:]
        others = [u - a for u, a in zip(self.used[1:], amounts[1:], strict=True)]
        wanted = [min(tokens, w.limit) for w in windows]
        call = self.backend.reserve("t", name, windows, tokens, None)
        if not all(o + a <= w.limit for o, a, w in zip(others, wanted, windows, strict=True)):
            with pytest.raises(RateLimitError):
                self.run(call)
            return
        reservation.held[1:] = self.run(call).held
        self.used[1:] = [o + a for o, a in zip(others, wanted, strict=True)]
        self.running[name] = (reservation, [amounts[0], *wanted])
        assert used(reservation)[1:] == self.used[1:]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """By who does not know what was reserved."""
        name = data.draw(st.sampled_from(sorted(self.running)))
        reservation, amounts = self.running.pop(name)
        self.run(self.backend.settle(Reservation("t", name, [], self.backend), 0, 0))
        self.used = [u - a for u, a in zip(self.used, amounts, strict=True)]
        self.ended.append(reservation)

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), tokens=st.integers(0, 100))
    def settle_again(self, data: st.DataObject, tokens: int) -> None:
        reservation = data.draw(st.sampled_from(self.ended))
        self.run(self.backend.settle(reservation, 1, tokens))
        assert used(reservation) == self.used

    @invariant()
    def within_limits(self) -> None:
        assert all(0 <= u <= w.limit for u, w in zip(self.used, self.WINDOWS, strict=True))


MACHINE_SETTINGS = settings(
    max_examples=30,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def run_machine(factory: Callable[[], LimitsMachine]) -> None:
    # The annotation asks for a class; what is done with it is to call it.
    run_state_machine_as_test(cast("type[LimitsMachine]", factory), settings=MACHINE_SETTINGS)


def test_the_local_limits_follow_the_model() -> None:
    with asyncio.Runner() as runner:
        run_machine(lambda: LimitsMachine(LocalLimiter(), runner))


def test_the_stores_limits_follow_the_model(store_server: StoreServer) -> None:
    with asyncio.Runner() as runner:
        store = runner.run(open_store(store_server.url))

        def machine() -> LimitsMachine:
            store_server.command("FLUSHALL")
            return LimitsMachine(StoreLimiter(store), runner)

        run_machine(machine)
        runner.run(store.close())


# ---------------------------------------------------------------- the limiter of a gateway


async def test_without_the_store_the_limits_are_local_and_nobody_is_refused_for_it() -> None:
    """litellm#35273: Redis down, and every request was a 429 or waited."""
    limiter = Limiter(StoreClient("unix:///nowhere/s.sock"))
    limits = RateLimits(requests_per_minute=2)
    for i in range(2):
        await limiter.settle(await limiter.reserve("t", f"r{i}", limits, 10), 1, 10)
    with pytest.raises(RateLimitError):
        await limiter.reserve("t", "r2", limits, 10)


@pytest.mark.parametrize("with_store", [True, False])
async def test_a_changed_amount_is_the_same_request(empty_store_url: str, with_store: bool) -> None:
    """Neither a second request of the minute, nor a second one at a time."""
    store = await open_store(empty_store_url) if with_store else StoreClient(None)
    limiter = Limiter(store)
    limits = RateLimits(requests_per_minute=1, tokens_per_minute=100, concurrent_requests=1)
    reservation = await limiter.reserve("t", "r1", limits, 30)
    await limiter.change(reservation, 80)
    assert used(reservation) == [1, 80]
    await limiter.settle(reservation, 1, 50)
    assert used(reservation) == [1, 50]
    await store.close()


async def test_an_amount_that_cannot_be_changed_for_lack_of_a_store_is_settled_all_the_same(
    store_server: StoreServer,
    impatient_store: StoreClient,
) -> None:
    limiter, limits = Limiter(impatient_store), RateLimits(tokens_per_day=100)
    reservation = await limiter.reserve("t", "r1", limits, 10)
    store_server.freeze()
    try:
        with pytest.raises(StoreUnavailableError):
            await impatient_store.probe(("PING",))
        await limiter.change(reservation, 90)
        await limiter.settle(reservation, 1, 60)
    finally:
        store_server.thaw()
    await impatient_store.probe(("PING",))
    assert await limiter.pay_debts()
    assert used(await limiter.reserve("t", "r2", limits, 40)) == [100]


async def test_a_reservation_whose_answer_is_lost_is_settled_as_what_was_used(
    store_server: StoreServer, impatient_store: StoreClient
) -> None:
    """The store carries out what was under way when it stopped, long after the gateway has given up on it."""
    limiter, limits = (
        Limiter(impatient_store),
        RateLimits(requests_per_minute=5, tokens_per_day=100, concurrent_requests=1),
    )
    await limiter.settle(await limiter.reserve("t", "r1", limits, 10), 1, 10)
    store_server.freeze()
    try:
        lost = await limiter.reserve("t", "lost", limits, 90)
        assert used(lost) == [1, 90]  # of this gateway's own limits
    finally:
        store_server.thaw()
    await impatient_store.probe(("PING",))
    assert held_in(store_server) == {"lost"}
    await limiter.settle(lost, 1, 50)
    assert await limiter.pay_debts()
    assert held_in(store_server) == set()
    assert used(await limiter.reserve("t", "r2", limits, 30)) == [3, 90]


async def test_a_changed_amount_whose_answer_is_lost_is_settled_as_what_it_became(
    store_server: StoreServer, impatient_store: StoreClient
) -> None:
    limiter, limits = Limiter(impatient_store), RateLimits(tokens_per_minute=100, tokens_per_day=100)
    reservation = await limiter.reserve("t", "r1", limits, 10)
    store_server.freeze()
    try:
        await limiter.change(reservation, 90)
    finally:
        store_server.thaw()
    await impatient_store.probe(("PING",))
    await limiter.settle(reservation, 1, 60)
    assert used(reservation) == [60, 60]


async def test_a_client_that_leaves_while_it_is_admitted_leaves_no_charge(empty_store_url: str) -> None:
    store = await open_store(empty_store_url)
    limiter, limits = Limiter(store), RateLimits(tokens_per_day=100, concurrent_requests=1)
    for steps in range(8):  # it may leave at any moment
        leaving = asyncio.create_task(limiter.reserve("t", f"left{steps}", limits, 100))
        for _ in range(steps):
            await asyncio.sleep(0)
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await limiter.settle(await leaving, 0, 0)
        assert await limiter.pay_debts()
        assert used(await limiter.reserve("t", f"r{steps}", limits, 100)) == [100]
        await limiter.settle(Reservation("t", f"r{steps}", [], StoreLimiter(store)), 0, 0)
    await store.close()


def held_in(store_server: StoreServer) -> set[str]:
    """Requests that the store knows of, running or ended before they came."""
    names = cast("list[bytes]", store_server.command("HKEYS", "radixgate:limits:t"))
    return {name.decode().removeprefix("held:") for name in names if name.startswith(b"held:")}


async def test_a_reservation_that_arrives_after_its_settlement_charges_nobody(store_server: StoreServer) -> None:
    """What the network held back may come on its old connection when everything else is long over."""
    store_server.command("FLUSHALL")
    with closing(StoreProxy(store_server.url)) as network:
        store = StoreClient(network.url, timeout=0.2)
        await store.probe(("PING",))
        limiter, limits = Limiter(store), RateLimits(concurrent_requests=1, tokens_per_day=100)
        await limiter.settle(await limiter.reserve("t", "r0", limits, 0), 1, 0)
        network.holds = True
        lost = await limiter.reserve("t", "lost", limits, 90)
        network.holds = False
        await store.probe(("PING",))
        await limiter.settle(lost, 1, 50)
        assert await limiter.pay_debts()
        network.deliver()
        await asyncio.sleep(0.3)
        assert held_in(store_server) == {"lost"}, "its end"
        assert used(await limiter.reserve("t", "r2", limits, 100)) == [100]
        await store.close()


@pytest.mark.parametrize("asked", [True, False], ids=["asked in the outage", "settled in the outage"])
async def test_an_outage_holds_up_no_request_that_ends_in_it(
    store_server: StoreServer, impatient_store: StoreClient, asked: bool
) -> None:
    """What the store has to be told waits for the store; what is counted here must not wait behind it."""
    limiter, limits = Limiter(impatient_store), RateLimits(concurrent_requests=1, tokens_per_day=100)
    before = None if asked else await limiter.reserve("t", "before", limits, 10)
    store_server.freeze()
    running = asyncio.create_task(limiter.run())
    try:
        if before is not None:
            await limiter.settle(before, 1, 10)
        for i in range(3):
            reservation = await limiter.reserve("t", f"r{i}", limits, 90)
            limiter.settle_later(reservation, 1, 1)  # its client left
            await asyncio.sleep(0.1)
    finally:
        store_server.thaw()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_what_a_dead_gateway_holds_is_given_back_with_its_lease(
    empty_store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else max_tokens of every request that ran stay charged to its tenant's day."""
    monkeypatch.setattr("gateway.rate_limits.LEASE_MS", 50)
    store = await open_store(empty_store_url)
    limiter = StoreLimiter(store)
    slow = await limiter.reserve("t", "dead", [TOKENS, DAY], 90, 1)
    await asyncio.sleep(0.1)
    assert used(await limiter.reserve("t", "next", [TOKENS, DAY], 20, 1)) == [20, 20]
    # It was not dead, but away for long: what it has used counts all the same.
    await limiter.settle(slow, 1, 60)
    assert used(slow) == [80, 80]
    await store.close()


async def test_a_clock_that_is_set_back_closes_no_window() -> None:
    now = 10_000_000
    limiter = LocalLimiter(lambda: now)
    await limiter.settle(await limiter.reserve("t", "r1", [TOKENS], 100, None), 1, 100)
    now -= 3_600_000
    assert used(await limiter.reserve("t", "r2", [TOKENS], 100, None)) == [100]


async def test_a_settlement_that_the_store_refuses_holds_up_no_other(store_server: StoreServer) -> None:
    store_server.command("FLUSHALL")
    store = await open_store(store_server.url)
    limiter, limits = Limiter(store), RateLimits(tokens_per_day=100)
    odd, other = [await limiter.reserve(tenant, "r", limits, 100) for tenant in ("odd", "t")]
    store_server.command("SET", "radixgate:limits:odd", "not a hash")
    limiter.settle_later(odd, 1, 10)
    limiter.settle_later(other, 1, 10)
    assert await limiter.pay_debts()
    assert used(await limiter.reserve("t", "r2", limits, 90)) == [100]
    await store.close()


async def test_as_many_tenants_are_remembered_as_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.rate_limits._MAX_LOCAL_TENANTS", 10)
    limiter = LocalLimiter()
    await limiter.reserve("running", "r", [DAY], 150, None)
    for number in range(9):
        await limiter.settle(await limiter.reserve(f"t{number}", "r", [DAY], 150, None), 1, 150)
    for number in range(9):
        with pytest.raises(QuotaExceededError):
            await limiter.reserve(f"t{number}", "r", [DAY], 1, None)
    await limiter.reserve("new", "r", [DAY], 1, None)
    await limiter.reserve("t0", "r", [DAY], 1, None)  # used longest ago: forgotten
    with pytest.raises(QuotaExceededError):
        await limiter.reserve("running", "another", [DAY], 1, None)


async def test_what_could_not_be_settled_is_settled_when_the_store_is_back(
    store_server: StoreServer, impatient_store: StoreClient
) -> None:
    """A settlement that is lost leaves max_tokens charged, and the request running, for ever."""
    limiter, limits = Limiter(impatient_store), RateLimits(tokens_per_day=100, concurrent_requests=1)
    reservation = await limiter.reserve("t", "r1", limits, 100)
    store_server.freeze()
    try:
        await limiter.settle(reservation, 1, 30)
    finally:
        store_server.thaw()
    await impatient_store.probe(("PING",))
    assert await limiter.pay_debts()
    assert used(await limiter.reserve("t", "r2", limits, 70)) == [100]


async def test_a_lease_of_a_dead_gateway_ends_and_a_renewed_one_does_not(
    empty_store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that was killed must not hold its tenants' concurrency for ever."""
    monkeypatch.setattr("gateway.rate_limits.LEASE_MS", 1000)
    store = await open_store(empty_store_url)
    limiter = StoreLimiter(store)
    await limiter.reserve("t", "dead", [], 1, 1)
    with pytest.raises(RateLimitError):
        await limiter.reserve("t", "next", [], 1, 1)
    await asyncio.sleep(1.1)
    await limiter.reserve("t", "next", [], 1, 1)
    monkeypatch.setattr("gateway.rate_limits.LEASE_MS", 60_000)
    await limiter.renew("t", ["next", "settled long ago"])
    await asyncio.sleep(1.1)
    with pytest.raises(RateLimitError):
        await limiter.reserve("t", "third", [], 1, 1)
    await store.close()
