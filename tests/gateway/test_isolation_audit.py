"""The audit of a server: quiet where nothing leaks, and not blind. Times here are made, not measured."""

from __future__ import annotations

import random

import pytest

from gateway.isolation_audit import Client, Observation, Observations, judge, ks_p_value, observe
from tests.cases.conftest import Stack, stack

__all__ = ["stack"]


def made(chance: random.Random, mean: float, cached: float, tokens: float = 100.0) -> Observation:
    return Observation(chance.gauss(mean, 0.05), {"usage.cached": cached, "usage.prompt": tokens + chance.randrange(9)})


def observations(exposed_mean: float = 1.0, exposed_cached: float = 0.0, warm_mean: float = 0.1) -> Observations:
    chance = random.Random(1)
    return Observations(
        cold=[made(chance, 1.0, 0) for _ in range(30)],
        warm=[made(chance, warm_mean, 96 if warm_mean < 1 else 0) for _ in range(30)],
        exposed=[made(chance, exposed_mean, exposed_cached) for _ in range(30)],
        fresh=[made(chance, 1.0, 0) for _ in range(30)],
    )


def test_verdicts() -> None:
    assert judge(observations()).name == "ISOLATED"
    assert judge(observations(exposed_mean=0.9)).name == "LEAK"
    leak = judge(observations(exposed_cached=96))
    assert (leak.name, leak.differing_fields) == ("LEAK", ("usage.cached",))
    # A server without a cache leaks nothing, and this audit could not have seen it leak.
    assert judge(observations(warm_mean=1.0)).name == "INCONCLUSIVE"
    assert len({judge(o).exit_code for o in (observations(), observations(0.9), observations(warm_mean=1.0))}) == 3


@pytest.mark.parametrize(
    ("shift", "size", "expected"),
    # From the two-sample test's asymptotic distribution: D = 0.5 of 20 and 20, D = 0.2 of 40 and 40.
    [(10, 20, 0.0082), (8, 40, 0.3633)],
)
def test_p_values(shift: int, size: int, expected: float) -> None:
    one, other = list(range(size)), [x + shift for x in range(size)]
    assert ks_p_value(one, other) == pytest.approx(expected, rel=0.08)
    assert ks_p_value(one, one) == 1.0


def test_against_a_server_no_field_leaks_and_the_control_sees_the_cache(stack: Stack) -> None:
    clients = [Client(f"{stack.gateway.url}/v1", stack.gateway.keys[name], None) for name in ("alice", "bob")]
    verdict = judge(observe(clients[0], clients[1], rounds=8, words=20, chance=random.Random(2)))
    assert verdict.differing_fields == ()
    assert "usage.prompt_tokens_details.cached_tokens" in verdict.control_fields
    # One tenant twice is what a leak looks like.
    leak = judge(observe(clients[0], clients[0], rounds=8, words=20, chance=random.Random(3)))
    assert leak.name == "LEAK"
