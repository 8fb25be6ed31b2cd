"""`radixgate audit isolation`: can one tenant tell, from outside, what another has asked? Against a live server.

    a round   a fresh random prompt P     A asks P (cold) ─► A asks P (warm) ─► B asks P (exposed)
              another one, Q                                                     B asks Q (fresh)

    verdict   exposed against fresh: B's times to first token must look drawn from one distribution, and every visible
              field must be the same                                             else: LEAK
              cold against warm: A's must not, or the test could not have seen a leak      else: INCONCLUSIVE

Two-sample Kolmogorov-Smirnov, with the p-value of its limit distribution; the order of exposed and fresh alternates,
so that a machine that grows slower hits both. Every number in headers, usage and cache report is tested in the same way
(a prompt's token count varies, with or without a leak); words are compared as sets.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
import urllib.request
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from engine.errors import InvalidRequestError, ServiceError
from gateway.commands import Commands

P_LEAK = 0.01  # below: B's times differ with A's traffic
P_CONTROL = 0.05  # above: the cache itself cannot be seen in A's times
EXIT_LEAK, EXIT_INCONCLUSIVE = 3, 4

_WORDS = ("harbour", "letter", "winter", "copper", "garden", "signal", "meadow", "engine", "marble", "lantern")
_VARYING_HEADERS = frozenset({"date", "x-request-id"})
_TIMEOUT = 300.0


@dataclass(frozen=True, slots=True)
class Observation:
    """What a client sees of one streamed answer."""

    ttft_s: float
    fields: Mapping[str, float | str]


@dataclass(slots=True)
class Observations:
    cold: list[Observation] = field(default_factory=list[Observation])
    warm: list[Observation] = field(default_factory=list[Observation])
    exposed: list[Observation] = field(default_factory=list[Observation])
    fresh: list[Observation] = field(default_factory=list[Observation])


@dataclass(frozen=True, slots=True)
class Verdict:
    p_times: float  # exposed against fresh
    p_control: float  # cold against warm
    differing_fields: tuple[str, ...]  # of B, between exposed and fresh
    control_fields: tuple[str, ...]  # of A, between cold and warm

    @property
    def name(self) -> str:
        if self.p_times < P_LEAK or self.differing_fields:
            return "LEAK"
        return "INCONCLUSIVE" if self.p_control > P_CONTROL and not self.control_fields else "ISOLATED"

    @property
    def exit_code(self) -> int:
        return {"LEAK": EXIT_LEAK, "INCONCLUSIVE": EXIT_INCONCLUSIVE}.get(self.name, 0)


def add_audit_command(commands: Commands) -> None:
    audit = commands.add_parser("audit", help="look at a live server as its tenants do")
    isolation = audit.add_subparsers(required=True, metavar="WHAT").add_parser(
        "isolation", help="can one tenant tell what another has asked?"
    )
    isolation.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    isolation.add_argument("--key-a", required=True, help="an API key of one tenant")
    isolation.add_argument("--key-b", required=True, help="an API key of another tenant, in another cache group")
    isolation.add_argument("--model", help="default: the one that is served")
    isolation.add_argument("--rounds", type=int, default=30)
    isolation.add_argument("--words", type=int, default=400, help="length of the prompts")
    isolation.add_argument("--json", action="store_true", help="one JSON line")
    isolation.set_defaults(command=_audit_isolation)


def _audit_isolation(arguments: argparse.Namespace) -> int:
    if arguments.key_a == arguments.key_b:
        raise InvalidRequestError("The two keys are one: give keys of two tenants.")
    a = Client(arguments.base_url, arguments.key_a, arguments.model)
    b = Client(arguments.base_url, arguments.key_b, arguments.model)
    seen = observe(a, b, arguments.rounds, arguments.words, random.SystemRandom())
    verdict = judge(seen)
    print(_as_json(seen, verdict) if arguments.json else _as_text(seen, verdict))
    return verdict.exit_code


# ---------------------------------------------------------------- observing


class Client:
    def __init__(self, base_url: str, api_key: str, model: str | None) -> None:
        self._base_url = base_url.rstrip("/")
        self._headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
        self.model = model or str(self._get("models")["data"][0]["id"])

    def _get(self, path: str) -> Any:
        request = urllib.request.Request(f"{self._base_url}/{path}", headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
                return json.loads(response.read())
        except OSError as error:
            raise ServiceError(f"{self._base_url}: {error}") from error

    def ask(self, prompt: str) -> Observation:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_report": True,
        }
        request = urllib.request.Request(
            f"{self._base_url}/chat/completions", data=json.dumps(body).encode(), headers=self._headers
        )
        start = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
                first = response.readline()
                ttft = time.perf_counter() - start
                lines = [first, *response.readlines()]
                headers = {name.lower(): value for name, value in response.headers.items()}
        except OSError as error:
            raise ServiceError(f"{self._base_url}: {error}") from error
        return Observation(ttft, dict(_visible(headers, lines)))


def _visible(headers: Mapping[str, str], lines: Sequence[bytes]) -> Iterator[tuple[str, float | str]]:
    for name, value in headers.items():
        if name == "x-radixgate-cache":
            for pair in value.split(", "):
                kind, _, count = pair.partition("=")
                yield f"header {name} {kind}", float(count)
        elif name not in _VARYING_HEADERS:
            yield f"header {name}", float(value) if value.isdigit() else value
    for line in lines:
        if line.startswith(b"data: {"):
            chunk = cast("dict[str, object]", json.loads(line[6:]))
            for name in ("usage", "cache_report", "error"):
                yield from _scalars(name, chunk.get(name))


def _scalars(path: str, value: object) -> Iterator[tuple[str, float | str]]:
    if isinstance(value, dict):
        for name, inner in cast("dict[str, object]", value).items():
            yield from _scalars(f"{path}.{name}", inner)
    elif isinstance(value, list):
        for i, inner in enumerate(cast("list[object]", value)):
            yield from _scalars(f"{path}[{i}]", inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)
    elif value is not None:
        yield path, str(value)


def observe(a: Client, b: Client, rounds: int, words: int, chance: random.Random) -> Observations:
    seen = Observations()
    b.ask(_prompt(chance, words))  # connections, caches of code
    for i in range(rounds):
        shared, fresh = _prompt(chance, words), _prompt(chance, words)
        seen.cold.append(a.ask(shared))
        seen.warm.append(a.ask(shared))
        if i % 2:
            seen.fresh.append(b.ask(fresh))
        seen.exposed.append(b.ask(shared))
        if not i % 2:
            seen.fresh.append(b.ask(fresh))
    return seen


def _prompt(chance: random.Random, words: int) -> str:
    """Nobody has asked it before. Words of equal length, so that every prompt has as many characters."""
    return " ".join(f"{chance.choice(_WORDS):<7}{chance.randrange(10**6):06d}" for _ in range(words))


# ---------------------------------------------------------------- judging


def judge(seen: Observations) -> Verdict:
    return Verdict(
        p_times=ks_p_value([o.ttft_s for o in seen.exposed], [o.ttft_s for o in seen.fresh]),
        p_control=ks_p_value([o.ttft_s for o in seen.cold], [o.ttft_s for o in seen.warm]),
        differing_fields=_differing(seen.exposed, seen.fresh),
        control_fields=_differing(seen.cold, seen.warm),
    )


def _differing(one: Sequence[Observation], other: Sequence[Observation]) -> tuple[str, ...]:
    """Fields that are there, or are distributed, otherwise in one group than in the other."""
    names = {name for observation in (*one, *other) for name in observation.fields}
    return tuple(sorted(name for name in names if _differs(name, one, other, P_LEAK / len(names))))


def _differs(name: str, one: Sequence[Observation], other: Sequence[Observation], p_least: float) -> bool:
    # A field that is not there counts as a value below every other.
    a, b = ([o.fields.get(name, -1.0) for o in group] for group in (one, other))
    if any(isinstance(value, str) for value in (*a, *b)):
        words = [{str(value) for value in group} for group in (a, b)]
        return words[0].isdisjoint(words[1])
    return ks_p_value([float(value) for value in a], [float(value) for value in b]) < p_least


def ks_p_value(one: Sequence[float], other: Sequence[float]) -> float:
    """That a difference as large as this one comes from a single distribution (asymptotic)."""
    a, b = sorted(one), sorted(other)
    distance = max(abs(bisect_right(a, x) / len(a) - bisect_right(b, x) / len(b)) for x in (*a, *b))
    size = math.sqrt(len(a) * len(b) / (len(a) + len(b)))
    lam = (size + 0.12 + 0.11 / size) * distance
    if lam < 0.3:  # the series converges too slowly there, and the value is 1 to five digits
        return 1.0
    total = 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * lam) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, total))


def _median(observations: Sequence[Observation]) -> float:
    times = sorted(o.ttft_s for o in observations)
    return times[len(times) // 2]


def _as_json(seen: Observations, verdict: Verdict) -> str:
    return json.dumps(
        {
            "verdict": verdict.name,
            "rounds": len(seen.cold),
            "p_ttft_exposed_vs_fresh": verdict.p_times,
            "p_ttft_control": verdict.p_control,
            "differing_fields": verdict.differing_fields,
            "control_fields": verdict.control_fields,
            **{f"ttft_{name}_s": _median(getattr(seen, name)) for name in ("cold", "warm", "exposed", "fresh")},
        }
    )


def _as_text(seen: Observations, verdict: Verdict) -> str:
    rows = [
        ("A, first time", seen.cold),
        ("A, again", seen.warm),
        ("B, what A had asked", seen.exposed),
        ("B, what nobody had", seen.fresh),
    ]
    lines = [f"{name:<22} median time to first token {_median(o) * 1000:9.1f} ms" for name, o in rows]
    fields = ", ".join(verdict.differing_fields) or "none"
    control = ", ".join(verdict.control_fields) or "none"
    return "\n".join(
        [
            *lines,
            "",
            f"B exposed against fresh   p = {verdict.p_times:.4f}   differing fields: {fields}",
            f"A cold against warm       p = {verdict.p_control:.4g}   differing fields: {control}   (the control)",
            f"verdict: {verdict.name}",
        ]
    )
