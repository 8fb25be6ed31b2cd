from __future__ import annotations

import asyncio
from dataclasses import dataclass

import httpx

from engine.protocol import ProbeResult
from gateway.drain import Drain
from gateway.health import Readiness, ReadinessProbe
from gateway.served_model import ServedModels
from tests.gateway.conftest import RunningGateway
from tests.gateway.fake_engine import MODEL, FakeEngine


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def probe(engine: FakeEngine, clock: Clock | None = None, store_problem: str | None = None) -> ReadinessProbe:
    return ReadinessProbe(engine, Drain(), lambda: store_problem, ServedModels(engine).current, clock or Clock())


async def test_concurrent_askers_share_one_decode_step() -> None:
    """A hundred balancers must not cost the device a hundred steps."""
    engine = FakeEngine()
    engine.probe_gate.clear()
    readiness = probe(engine)
    asking = [asyncio.create_task(readiness.check()) for _ in range(20)]
    await asyncio.sleep(0)
    engine.probe_gate.set()
    assert await asyncio.gather(*asking) == [Readiness(status="ok", model=MODEL)] * 20
    assert engine.num_probes == 1


async def test_an_asker_that_leaves_does_not_take_the_probe_along() -> None:
    engine = FakeEngine()
    engine.probe_gate.clear()
    readiness = probe(engine)
    first, second = asyncio.create_task(readiness.check()), asyncio.create_task(readiness.check())
    await asyncio.sleep(0)
    first.cancel()
    engine.probe_gate.set()
    assert (await second).status == "ok"
    assert engine.num_probes == 1


async def test_a_result_is_good_for_a_second_and_no_longer() -> None:
    """Health that is remembered for ever says 200 over a dead device (vllm#36960)."""
    engine, clock = FakeEngine(), Clock()
    readiness = probe(engine, clock)
    assert (await readiness.check()).status == "ok"
    engine.probe_result = ProbeResult(probe_id="", ok=False, message="device lost")
    assert (await readiness.check()).status == "ok"
    clock.now += 1.5
    assert await readiness.check() == Readiness(
        status="unavailable", reason="the engine's decode step failed: device lost"
    )
    engine.probe_result = ProbeResult(probe_id="", ok=True)
    clock.now += 1.5
    assert (await readiness.check()).status == "ok"


async def test_it_is_not_ready_before_the_prompt_builder_is() -> None:
    """The first request after a start waited a second for it, behind a /readyz that said ok."""
    built, clock = asyncio.Event(), Clock()
    readiness = ReadinessProbe(FakeEngine(), Drain(), lambda: None, built.wait, clock)
    asking = asyncio.create_task(readiness.check())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not asking.done()
    built.set()
    assert (await asking).status == "ok"


async def test_an_engine_that_is_away_is_named() -> None:
    assert await probe(FakeEngine(reachable=False)).check() == Readiness(status="unavailable", reason="no engine")


async def test_without_its_store_the_gateway_is_degraded_and_ready() -> None:
    report = await probe(FakeEngine(), store_problem="connection refused").check()
    assert (report.status, report.http_status, report.reason) == ("degraded", 200, "connection refused")


def test_over_http(gateway: RunningGateway) -> None:
    assert httpx.get(f"{gateway.url}/livez").json() == {"status": "ok"}
    assert httpx.get(f"{gateway.url}/readyz").json() == {"status": "ok", "reason": None, "model": MODEL}
