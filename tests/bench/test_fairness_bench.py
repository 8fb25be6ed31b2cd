"""The noisy neighbour at the default settings, on a device whose clock is its own: the same figures every time."""

from __future__ import annotations

import pytest

from bench.fairness import FLOOR_TOKENS, NOISY_CLIENTS, POOL_TOKENS, Load, Quiet, figures
from engine.settings import EngineSettings
from tests.engine.timed_device import timed_engine

QUESTIONS = 24


def run(clients: int, floor: int, fair_step_ms: int = 60) -> Quiet:
    engine, device = timed_engine(POOL_TOKENS, EngineSettings(fair_step_ms=fair_step_ms), max_model_len=1024)
    return Load(engine, clients, floor, seed=5, clock=device.clock).run(QUESTIONS)


def test_a_neighbour_of_ten_times_the_load_costs_little_and_without_floors_everything() -> None:
    alone = run(0, 0)
    seen = {"alone": alone, "with_floor": run(NOISY_CLIENTS, FLOOR_TOKENS), "without_floor": run(NOISY_CLIENTS, 0)}
    results = figures(seen)
    assert results["hit_rate_drop_points"] <= 2
    assert results["ttft_p50_ratio"] <= 1.5
    assert results["hit_rate_drop_points_without_floors"] > 50
    assert results["ttft_p50_ratio_without_floors"] > 3


@pytest.mark.parametrize("clients", [10, 30, 60])
def test_a_floor_holds_however_many_requests_run_beside_it(clients: int) -> None:
    """Running requests took what nobody held for the moment: the quiet tenant's, once nothing else was left."""
    alone, beside = run(0, 0), run(clients, FLOOR_TOKENS, fair_step_ms=0)
    assert beside.hit_rate == pytest.approx(alone.hit_rate, abs=0.02)
