"""The engine with a clock around it: what its metrics need, taken from outside.

    add_request ──────────────────────► step()                                                  Delta with the account
      arrived at ─┐                       schedule │ execute │ postprocess                        + queue_seconds
                  └── queue_seconds ─────────────► │◄ first  │                                    + seconds_saved
                                          StepClock┘  step of a request

`StepClock` stands in the runner's place, so the three phases are known without a line in the engine's own code: what
lies before the runner is scheduling, what lies after it is postprocessing. Rejected: timers inside `LLMEngine.step`,
which would bury what it does under what it takes.

On a device that runs ahead, one call of `step` launches a step and waits for the one before: the phases are the call's,
and "execute" is how long the host was held up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from engine.batch import SchedulerOutput, StepResult, TransferReport
from engine.cache_view import build_cache_view
from engine.engine import LLMEngine, Runner
from engine.in_flight import PendingStep
from engine.metrics import EngineMetricsRegistry, StepTimes
from engine.protocol import (
    CacheVerified,
    CacheView,
    Delta,
    DocumentStats,
    EngineInfo,
    EngineStats,
    Erase,
    Erased,
    EvictCache,
    ExplainedPart,
    Failure,
    GetCacheView,
    GetDocumentStats,
    Submit,
)

Clock = Callable[[], float]


class StepClock:
    """A runner that remembers what one call of `step` asked of it, and when."""

    def __init__(self, runner: Runner, clock: Clock) -> None:
        self._runner = runner
        self._clock = clock
        self.forget()

    def forget(self) -> None:
        """A new call begins."""
        self.begin: float | None = None  # when the runner was first asked for something
        self.end: float | None = None  # when a step was seen to have ended
        self.launched: SchedulerOutput | None = None
        self.ended: SchedulerOutput | None = None

    @property
    def runs_ahead(self) -> bool:
        return self._runner.runs_ahead

    def launch(self, output: SchedulerOutput) -> PendingStep:
        self._begin()
        pending = self._runner.launch(output)
        if not output.sequences:  # nobody waits for it
            return pending
        self.launched = output
        return _TimedStep(partial(self._wait, pending, output))

    def _wait(self, pending: PendingStep, output: SchedulerOutput) -> StepResult:
        self._begin()
        result = pending.wait()
        self.end = self._clock()
        self.ended = output
        return result

    def _begin(self) -> float:
        if self.begin is None:
            self.begin = self._clock()
        return self.begin

    def execute(self, output: SchedulerOutput) -> StepResult:
        return self._runner.execute(output)

    def transfer_report(self) -> TransferReport:
        return self._runner.transfer_report()

    def is_same_block(self, block_id: int, payload: memoryview) -> bool:
        return self._runner.is_same_block(block_id, payload)


@dataclass(slots=True, frozen=True)
class _TimedStep:
    wait: Callable[[], StepResult]


class MeasuredEngine:
    """What `EngineServer` serves. Everything it adds is looked at, nothing is changed."""

    def __init__(self, engine: LLMEngine, clock: Clock = time.perf_counter, *, owner_labels: int = 100) -> None:
        self._engine = engine
        self._clock = clock
        self._runner = StepClock(engine.runner, clock)
        engine.runner = self._runner
        self._arrivals: dict[str, float] = {}
        self._queued: dict[str, float] = {}  # seconds until the first step, of requests whose account is still to come
        self._metrics = EngineMetricsRegistry(engine, owner_labels)

    def add_request(self, submit: Submit) -> None:
        arrived_at = self._clock()
        self._engine.add_request(submit)
        self._arrivals[submit.request_id] = arrived_at

    def abort_request(self, request_id: str) -> bool:
        self._forget(request_id)
        return self._engine.abort_request(request_id)

    def has_work(self) -> bool:
        return self._engine.has_work()

    def idle(self) -> bool:
        return self._engine.idle()

    @property
    def is_restoring(self) -> bool:
        return self._engine.is_restoring

    def persist(self) -> None:
        self._engine.persist()

    def erase(self, erase: Erase) -> Erased:
        return self._engine.erase(erase)

    def evict(self, evict: EvictCache) -> int:
        return self._engine.evict(evict)

    def verify(self, num_paths: int) -> CacheVerified:
        return self._engine.verify(num_paths)

    def explain(self, submit: Submit) -> list[ExplainedPart]:
        return self._engine.explain(submit)

    def document_stats(self, query: GetDocumentStats) -> DocumentStats:
        return self._engine.document_stats(query)

    def step(self) -> list[Delta | Failure]:
        self._runner.forget()
        start = self._clock()
        outputs = self._engine.step()
        end = self._clock()
        if self._runner.launched is not None:
            self._observe_queue(self._runner.launched, self._runner.begin or start)
        if self._runner.ended is not None:
            self._observe_step(self._runner.ended, start, end)
        return [self._annotated(output) for output in outputs]

    def _observe_queue(self, launched: SchedulerOutput, at: float) -> None:
        for sequence in launched.sequences:
            if (arrival := self._arrivals.pop(sequence.request_id, None)) is not None:
                seconds = self._queued[sequence.request_id] = at - arrival
                self._metrics.observe_queue(seconds)

    def _observe_step(self, ended: SchedulerOutput, start: float, end: float) -> None:
        began, done = self._runner.begin or start, self._runner.end or end
        times = StepTimes(began - start, done - began, end - done)
        self._metrics.observe_step(times, len(ended.sequences), *ended.num_prefill_and_decode())

    def _annotated(self, output: Delta | Failure) -> Delta | Failure:
        if isinstance(output, Failure):
            self._forget(output.request_id)
            return output
        if output.account is None:
            return output
        return msgspec.structs.replace(
            output,
            queue_seconds=self._queued.pop(output.request_id, None),
            seconds_saved=self._engine.prefill_speed.seconds_for(output.account.num_cached_tokens),
        )

    def _forget(self, request_id: str) -> None:
        self._arrivals.pop(request_id, None)
        self._queued.pop(request_id, None)

    # ------------------------------------------------------------ look

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def info(self) -> EngineInfo:
        return self._engine.info()

    def metrics_text(self) -> bytes:
        return self._metrics.text()

    def cache_view(self, query: GetCacheView) -> CacheView:
        return build_cache_view(self._engine, query)

    def check_integrity(self) -> bool:
        return self._engine.check_integrity()
