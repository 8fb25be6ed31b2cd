"""`radixgate top`: a running server at a glance, again every two seconds. Rates are between two looks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from engine.settings import Settings
from gateway.server_client import Samples, ServerClient

PAUSE = 2.0
_CLEAR = "\x1b[2J\x1b[H"
_CACHED = ("device", "host", "disk")


def run_top(settings: Settings, *, once: bool) -> int:
    """Until interrupted; one look with `once`, whose rates are since the server's start."""
    client = ServerClient(settings)
    earlier: tuple[float, Samples] | None = None
    while True:
        now, gateway = time.monotonic(), client.samples("/metrics")
        lines = [f"radixgate at {client.url}", "", *_lines(gateway, client.samples("/metrics/engine"), earlier, now)]
        print("\n".join(lines) if once else _CLEAR + "\n".join(lines), flush=True)
        if once:
            return 0
        earlier = (now, gateway)
        time.sleep(PAUSE)


def _lines(gateway: Samples, engine: Samples, earlier: tuple[float, Samples] | None, now: float) -> Iterator[str]:
    running, waiting = (engine[_plain("radixgate_engine_requests_now", state=s)] for s in ("running", "waiting"))
    active, cached, free = (engine[_plain("radixgate_engine_blocks", state=s)] for s in ("active", "cached", "free"))
    speed = engine[_plain("radixgate_engine_prefill_tokens_per_second")]
    yield f"engine    {running:.0f} running, {waiting:.0f} waiting, prefill {speed:,.0f} tokens/s"
    yield f"blocks    {active:,.0f} active, {cached:,.0f} cached, {free:,.0f} free"
    store = "up" if gateway[_plain("radixgate_store_up")] else "away"
    yield f"store     {store}"
    yield ""
    yield f"{'tenant':<24}{'requests':>10}{'prompt':>12}{'cached':>9}{'output':>10}"
    seconds = now - earlier[0] if earlier is not None else 0.0
    sums = _by_tenant(gateway)
    if earlier is not None:
        for tenant, counts in _by_tenant(earlier[1]).items():
            sums[tenant].subtract(counts)
    for tenant, counts in sorted(sums.items(), key=lambda item: -item[1]["prompt"]):
        rate = f"{100 * counts['cached'] / counts['prompt']:.0f}%" if counts["prompt"] else "–"
        shown = [_rate(counts[name], seconds) for name in ("requests", "prompt", "output")]
        yield f"{tenant:<24}{shown[0]:>10}{shown[1]:>12}{rate:>9}{shown[2]:>10}"


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:,.1f}/s" if seconds else f"{count:,}"


def _by_tenant(samples: Samples) -> dict[str, Counter[str]]:
    sums: dict[str, Counter[str]] = {}
    for (name, labels), value in samples.items():
        found = dict(labels)
        counts = sums.setdefault(found["tenant"], Counter()) if "tenant" in found else Counter[str]()
        if name == "radixgate_requests_total":
            counts["requests"] += int(value)
        elif name == "radixgate_output_tokens_total":
            counts["output"] += int(value)
        elif name == "radixgate_prompt_tokens_total":
            counts["prompt"] += int(value)
            counts["cached"] += int(value) if found["class"] in _CACHED else 0
    return sums


def _plain(name: str, **labels: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    return name, tuple(sorted(labels.items()))
