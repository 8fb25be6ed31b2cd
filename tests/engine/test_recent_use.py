"""Who has used little of the engine lately."""

from __future__ import annotations

import pytest

from engine.recent_use import HALF_LIFE, MEMORY, RecentUse


class Recent(RecentUse):
    """A request comes and is computed at once."""

    def charge(self, tenant_id: str, tokens: float) -> None:
        self.see(tenant_id)
        super().charge(tenant_id, tokens)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_who_has_had_less_than_half_of_an_equal_share_is_light() -> None:
    recent = Recent(Clock())
    for tenant, tokens in (("a", 600.0), ("b", 100.0), ("c", 500.0)):
        recent.charge(tenant, tokens)
    assert [recent.is_light(tenant) for tenant in "abc"] == [False, True, False]
    assert recent.has_light()


def test_one_tenant_alone_and_equal_ones_are_not_light() -> None:
    clock = Clock()
    recent = Recent(clock)
    recent.charge("a", 600.0)
    assert not recent.has_light()
    recent.charge("b", 500.0)
    clock.now += 1
    assert not recent.has_light()


def test_a_tenant_is_light_from_its_first_request_on() -> None:
    recent = Recent(Clock())
    recent.charge("a", 600.0)
    assert not recent.has_light()
    recent.see("new")
    assert recent.has_light()
    assert recent.is_light("new")


def test_who_has_not_been_here_for_a_minute_is_forgotten() -> None:
    clock = Clock()
    recent = Recent(clock)
    recent.see("quiet")
    recent.charge("noisy", 600.0)
    clock.now += MEMORY - 1
    recent.charge("noisy", 600.0)
    assert recent.has_light()
    clock.now += 2
    assert not recent.has_light()
    assert not recent.is_light("noisy")


def test_who_waits_for_long_is_still_here() -> None:
    clock = Clock()
    recent = Recent(clock, lambda tenant_id: tenant_id == "waits")
    recent.charge("waits", 600.0)
    recent.charge("little", 10.0)
    clock.now += MEMORY + 1
    recent.charge("little", 10.0)
    assert recent.has_light()
    assert recent.is_light("little")
    assert not recent.is_light("waits")


def test_use_fades_however_long_the_engine_runs() -> None:
    clock = Clock()
    recent = Recent(clock)
    recent.charge("was busy", 1000.0)
    recent.charge("is busy", 10.0)
    for _ in range(2000):  # more doublings than a float holds
        clock.now += HALF_LIFE
        recent.see("was busy")
        recent.charge("is busy", 10.0)
    assert recent.is_light("was busy")
    assert recent.has_light()
    recent.charge("was busy", 20.0)
    clock.now += 1
    assert not recent.has_light()


@pytest.mark.parametrize("seconds", [0.0, 10.0])
def test_an_answer_about_all_holds_for_a_moment_only(seconds: float) -> None:
    clock = Clock()
    recent = Recent(clock)
    recent.charge("a", 100.0)
    recent.see("b")
    assert recent.has_light()
    recent.charge("b", 100.0)
    clock.now += seconds
    assert recent.has_light() == (seconds == 0.0)
