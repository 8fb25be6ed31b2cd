"""The targets of the GPU path (docs/kernels.md), and whether a run's figures meet them.

A row is met when all that it asks for was measured and is good enough, missed when something that was measured is not,
and otherwise not measured: a case that is absent is never taken for a good one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal, cast

Verdict = Literal["met", "missed", "not measured"]
Figures = Mapping[str, object]

DECODE_BATCHES = (1, 4, 8, 12, 16, 32, 64)
PREFILLS = {"8k on nothing": (8192, 0), "8k on 24k": (8192, 24576), "200 on 6k": (200, 6144)}  # (new, cached)
_TARGET_PREFILLS = ("8k on nothing", "8k on 24k")
_MOVES = ("store", "copy", "gather", "scatter")


@dataclass(frozen=True)
class Condition:
    """One number that is asked for; `value` is None where it was not measured."""

    name: str
    value: float | None
    is_met: Callable[[float], bool]
    text: Callable[[float], str]

    def __str__(self) -> str:
        return f"{self.name} {'?' if self.value is None else self.text(self.value)}".strip()


@dataclass(frozen=True)
class Row:
    measure: str
    target: str
    figure: str
    verdict: Verdict


def rows(kernels: Figures, engine: Figures) -> list[Row]:
    """A row for each row of the table of targets."""
    shares = _by_case(kernels, "decode_copy_share")
    decode = [_least(f"batch {batch}", shares.get(str(batch)), 0.85) for batch in DECODE_BATCHES]
    flash = _by_case(kernels, "prefill_share_of_flash")
    prefill = [_least(name, flash.get(name), 0.9) for name in _TARGET_PREFILLS]
    shared = [Condition("", _number(kernels, "shared_prefix_speedup"), lambda value: value >= 5, "{:.1f} ×".format)]
    moves = [_least(name, _number(kernels, f"{name}_share"), 0.9) for name in _MOVES]
    host, device = _number(engine, "host_ms"), _number(engine, "device_ms")
    step = [
        _least("kernels", _number(engine, "device_share"), 0.9),
        Condition("host", host, lambda value: device is not None and value < device, "{:.1f} ms".format),
        Condition("of the device's", device, lambda _: True, "{:.1f} ms".format),
    ]
    warm = [Condition("", _number(engine, "warm_share"), lambda value: value <= 1 / 8, "{:.3f}".format)]
    return [
        _row(
            "decode, 16k context, batch 1 to 64",
            "≥ 85% of the copy bandwidth; never below 70% between 8 and 16",
            decode,
        ),
        _row("prefill, 8k new on 0 and on 24k cached", "≥ 90% of contiguous flash attention's rate", prefill),
        _row("shared prefix, 4k × 32 sequences", "≥ 5 × our own plain decode", shared),
        _row("store_kv, copies", "≥ 90% of the copy bandwidth", moves),
        _row("engine step, 32 sequences, 8B", "≥ 90% the kernels' own; the host done before the device", step),
        _row("first token, 6k cached + 200 new, 8B", "≤ 1/8 of cold", warm),
    ]


def warnings(kernels: Figures, engine: Figures) -> list[str]:
    """What was wrong in results: beside it a figure says little."""
    failed = [f"kernels, {name}" for name in _by_case(kernels, "checks_failed")]
    failed += ["the engine's answers"] if "check" in _by_case(engine, "sections_failed") else []
    return [f"WRONG RESULTS: {name}" for name in failed]


def to_json(found: Iterable[Row]) -> list[dict[str, str]]:
    return [asdict(row) for row in found]


def to_text(found: Iterable[Row]) -> str:
    table = [("measure", "figure", "target", ""), *((r.measure, r.figure, r.target, r.verdict.upper()) for r in found)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)) for row in table)


def _row(measure: str, target: str, conditions: list[Condition]) -> Row:
    verdict: Verdict = "met"
    if any(each.value is None for each in conditions):
        verdict = "not measured"
    if any(each.value is not None and not each.is_met(each.value) for each in conditions):
        verdict = "missed"
    return Row(measure, target, ", ".join(map(str, conditions)), verdict)


def _least(name: str, value: object, least: float) -> Condition:
    return Condition(name, _as_number(value), lambda value: value >= least, "{:.1%}".format)


def _number(figures: Figures, name: str) -> float | None:
    return _as_number(figures.get(name))


def _as_number(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
        return None
    return float(value)


def _by_case(figures: Figures, name: str) -> Mapping[str, object]:
    found = figures.get(name)
    return cast(Mapping[str, object], found) if isinstance(found, Mapping) else {}
