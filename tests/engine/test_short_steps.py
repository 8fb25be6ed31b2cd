"""Beside a tenant that uses little, others' prompts get short steps; nobody else's are cut."""

from __future__ import annotations

import random

import pytest

from engine.protocol import SamplingParams, Segment, SegmentKind, Submit, TenantPolicy
from engine.settings import EngineSettings
from tests.engine.harness import SCOPE_A
from tests.engine.timed_device import TimedDevice, timed_engine


class Load:
    def __init__(self, fair_step_ms: int = 60) -> None:
        self.engine, self.device = timed_engine(32768, EngineSettings(fair_step_ms=fair_step_ms))
        self._rng = random.Random(1)
        self._count = 0
        self.tenants: dict[str, str] = {}

    def submit(self, tenant: str, num_tokens: int, max_tokens: int = 1, priority: int = 0) -> str:
        self._count += 1
        name = f"{tenant}-{self._count}"
        tokens = [self._rng.randrange(200) for _ in range(num_tokens)]
        self.engine.add_request(
            Submit(
                request_id=name,
                tenant_id=tenant,
                segments=(Segment.of(SegmentKind.QUESTION, tokens, SCOPE_A),),
                sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
                policy=TenantPolicy(),
                priority=priority,
            )
        )
        return name

    def run(self) -> list[dict[str, int]]:
        """What each step since the last call has computed of prompts."""
        while self.engine.has_work():
            self.engine.step()
        steps = self.device.prompt_tokens()
        self.device.outputs.clear()
        return [step for step in steps if step]

    def begin(self, *, with_quiet: bool) -> None:
        """A noisy tenant has been here, and perhaps a quiet one: the speed is known."""
        if with_quiet:
            self.submit("quiet", 60)
        self.submit("noisy", 2000)
        self.run()


def totals(steps: list[dict[str, int]]) -> list[int]:
    return [sum(step.values()) for step in steps]


def test_while_a_quiet_tenant_is_away_for_a_moment_the_noisy_ones_steps_are_short() -> None:
    load = Load()
    load.begin(with_quiet=True)
    for _ in range(3):
        load.submit("noisy", 400)
    *steps, last = totals(load.run())
    assert max(steps) == 64
    assert last == 400, "the last one is its only one"


def test_without_a_quiet_tenant_steps_are_as_long_as_ever() -> None:
    load = Load()
    load.begin(with_quiet=False)
    for _ in range(3):
        load.submit("noisy", 400)
    assert max(totals(load.run())) > 512


def test_a_minute_later_nobody_waits_for_the_quiet_tenant_any_more() -> None:
    load = Load()
    load.begin(with_quiet=True)
    load.device.now += 61
    for _ in range(3):
        load.submit("noisy", 400)
    assert max(totals(load.run())[1:]) > 300


def test_the_quiet_tenants_own_prompt_is_not_cut_short_and_has_its_step_to_itself() -> None:
    load = Load()
    load.begin(with_quiet=True)
    for _ in range(3):
        load.submit("noisy", 400)
    load.engine.step()
    load.device.outputs.clear()
    quiet = load.submit("quiet", 300)
    assert load.run()[0] == {quiet: 300}


def test_who_has_one_request_only_is_not_cut_short() -> None:
    """It costs the quiet tenant one step, once, and would cost this one a third of its speed."""
    load = Load()
    load.begin(with_quiet=True)
    load.submit("noisy", 1500)
    assert totals(load.run()) == [512, 512, 476]


def test_equal_tenants_are_not_cut_short() -> None:
    load = Load()
    for _ in range(4):
        for tenant in ("a", "b", "c"):
            load.submit(tenant, 400)
    load.run()
    for _ in range(4):
        for tenant in ("a", "b", "c"):
            load.submit(tenant, 400)
    assert max(totals(load.run())) > 512


def test_decoding_takes_nothing_of_a_short_step() -> None:
    load = Load()
    load.begin(with_quiet=True)
    for _ in range(6):
        load.submit("noisy", 20, max_tokens=40)
    load.engine.step()
    load.engine.step()
    for _ in range(2):
        load.submit("noisy", 400)
    load.device.outputs.clear()
    load.engine.step()
    (output,) = load.device.outputs
    assert sorted(s.num_new for s in output.sequences)[-1] == 64


def test_a_tenant_that_is_cut_short_is_not_starved_by_those_that_are_not() -> None:
    load = Load()
    load.begin(with_quiet=True)
    noisy = [load.submit("noisy", 400) for _ in range(4)]
    for round_ in range(400):
        for tenant in range(4):
            load.submit(f"single-{round_ % 5}-{tenant}", 200)
        load.engine.step()
        scheduler = load.engine.scheduler
        if not {request.request_id for request in scheduler.running + scheduler.waiting} & set(noisy):
            return
    raise AssertionError("the noisy tenant's prompts are not done")


@pytest.mark.parametrize("num_tokens", [12, 60, 65, 300])
def test_tenants_that_ask_once_each_do_not_starve_one_that_asks_much(num_tokens: int) -> None:
    """There is a new one in every step, and none is cut short."""
    load = Load()
    load.begin(with_quiet=True)
    noisy = [load.submit("noisy", 400) for _ in range(4)]
    for number in range(150):
        load.submit(f"once-{number}", num_tokens)
        load.engine.step()
        scheduler = load.engine.scheduler
        if not {request.request_id for request in scheduler.running + scheduler.waiting} & set(noisy):
            return
    raise AssertionError("the noisy tenant's prompts are not done")


def test_a_device_that_is_very_slow_is_served_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than one token in the time that a step should take."""
    monkeypatch.setattr(TimedDevice, "TOKEN_SECONDS", 0.1)
    load = Load()
    load.begin(with_quiet=True)
    for _ in range(3):
        load.submit("noisy", 200)
    load.run()
    assert load.engine.stats().num_integrity_failures == 0


def test_requests_that_wait_for_another_of_their_tenant_count_as_here() -> None:
    """A burst over one document is one request that computes and many that wait for it."""
    load = Load()
    load.begin(with_quiet=True)
    tokens = [7] * 600
    for number in range(3):
        load.engine.add_request(
            Submit(
                request_id=f"burst-{number}",
                tenant_id="noisy",
                segments=(Segment.of(SegmentKind.QUESTION, tokens, SCOPE_A),),
                sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
                policy=TenantPolicy(),
            )
        )
    assert max(totals(load.run())[:4]) == 64


@pytest.mark.parametrize("off", ["fair_step_ms", "speed"])
def test_nothing_is_cut_short_when_it_is_turned_off_or_the_device_is_fast(
    off: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if off == "speed":
        monkeypatch.setattr(TimedDevice, "TOKEN_SECONDS", 0.00001)
        monkeypatch.setattr(TimedDevice, "STEP_SECONDS", 0.001)
    load = Load(0 if off == "fair_step_ms" else 60)
    load.begin(with_quiet=True)
    for _ in range(3):
        load.submit("noisy", 400)
    assert max(totals(load.run())) > 512
