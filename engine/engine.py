"""The engine: `step()` = schedule → execute → postprocess.

    add_request ─► Scheduler.waiting ─► schedule ─► ModelRunner.launch ─► wait ─► postprocess ─► Delta | Failure
                                           ▲              │ raises                   │
                                           │              ▼                          │ cache_blocks, append, stop?
                                           └──────── recover ◄───────────────────────┘ InvariantError

On a device that runs ahead, a step is prepared while the one before it runs:

    host      schedule 1, launch │ schedule 2, launch │ wait 1, postprocess │ schedule 3, launch │ wait 2, …
    device                       └── 1 ───────────────────► 2 ─────────────────────────────────► 3

Step 2 takes the tokens of step 1 from where they are, on the device. What step 1 tells is acted upon one step later: a
request that it ended has had a part in step 2, whose token is thrown away; its blocks go back at once, for whoever gets
them writes to them in step 3 at the earliest. Only what a step that has ended computed is indexed. On a CPU nothing
runs ahead (`launch` returns when all is done) and the same loop waits for each step before it schedules the next.

What can go wrong, and what then:
    the step raises          its requests end with `EngineStepError`; what they computed in it was never indexed
    a row has no finite      that request ends, and what it computed is not indexed
      logits
    our bookkeeping fails    the cache is dropped: a new pool and index; every request starts over, keeping the text
                             it has (at most MAX_RESETS times, then it ends with an error). The process lives.

One thread owns all of this. Nothing here blocks, and nothing is read from outside.

With tiers below (`engine/tiers/`) a step also carries out what was noted for it: offloads of blocks that leave, fetches
of blocks that come back. A step without sequences is right when requests wait for the disk, or only blocks move.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from engine.batch import ScheduledSequence, SchedulerOutput, StepResult, TokenLogprobs, TransferReport
from engine.document_stats import document_uses
from engine.erasure import Selection
from engine.errors import (
    EngineStepError,
    InvalidRequestError,
    InvariantError,
    OverloadedError,
    RadixgateError,
)
from engine.in_flight import PendingStep, StepInFlight
from engine.kv_cache_manager import KVCacheManager
from engine.output_stream import OutputRules, OutputStream
from engine.prefill_speed import PrefillSpeed
from engine.protocol import (
    CacheVerified,
    Delta,
    DocumentStats,
    EngineInfo,
    EngineStats,
    Erase,
    Erased,
    EvictCache,
    ExplainedPart,
    Failure,
    GetDocumentStats,
    Submit,
)
from engine.request import Request, RequestState
from engine.request_checks import check_request
from engine.scheduler import Scheduler, SchedulerLimits
from engine.settings import EngineSettings
from engine.tiers.tier_stats import index_stats, tier_evictions, tier_stats
from engine.tiers.tiered_cache import TieredCache
from engine.verification import Verification

logger = logging.getLogger(__name__)

MAX_RESETS = 2  # times a request is computed again because the cache was dropped
DISK_WAIT = 0.005  # seconds that a step with nothing to compute waits for the disk


class Runner(Protocol):
    """The device. Steps run in the order in which they are launched."""

    @property
    def runs_ahead(self) -> bool:
        """Whether `launch` returns before the step is done."""
        ...

    def launch(self, output: SchedulerOutput) -> PendingStep: ...

    def execute(self, output: SchedulerOutput) -> StepResult:
        """`launch`, and wait."""
        ...

    def transfer_report(self) -> TransferReport:
        """What has become of the offloads and fetches of the steps so far; after a failed step, of that one, too."""
        ...

    def is_same_block(self, block_id: int, payload: memoryview) -> bool:
        """Whether a block's content and a payload agree within the dtype's tolerance."""
        ...


@dataclass(slots=True)
class Counters:
    """Since the engine's start; `EngineStats` under the same names."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_evicted_blocks: int = 0
    num_step_failures: int = 0
    num_integrity_failures: int = 0
    num_requests_finished: int = 0
    num_requests_aborted: int = 0
    num_requests_failed: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0


class LLMEngine:
    """Requests in, deltas out, one step at a time."""

    def __init__(
        self, info: EngineInfo, settings: EngineSettings, runner: Runner, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._info = info
        self._clock = clock
        self.settings = settings
        self.runner = runner
        self._output_rules = OutputRules(info)
        self._counters = Counters()
        self.prefill_speed = PrefillSpeed()
        self._requests: dict[str, Request] = {}
        self._streams: dict[str, OutputStream] = {}
        self._arrivals = 0
        self._broken: Exception | None = None  # found between steps
        self._in_flight: deque[StepInFlight] = deque()
        self._max_in_flight = int(runner.runs_ahead and settings.async_scheduling)  # while the next one is prepared
        self._last_end = 0.0  # when the last step ended
        self.tiers: TieredCache | None = None
        self.scheduler = self._new_scheduler()

    def _new_scheduler(self) -> Scheduler:
        settings = self.settings
        manager = KVCacheManager(
            num_blocks=self._info.num_blocks,
            block_size=self._info.block_size,
            root_key=bytes.fromhex(self._info.fingerprint),
            ghost_entries=settings.ghost_entries,
            policy=settings.eviction_policy,
            caching=settings.enable_prefix_caching,
            tiers=self.tiers,
        )
        limits = SchedulerLimits(
            max_num_seqs=settings.max_num_seqs,
            token_budget=settings.max_num_batched_tokens,
            prefill_chunk_size=settings.prefill_chunk_size,
            cached_token_weight=settings.cached_token_weight,
            output_token_weight=settings.output_token_weight,
            max_model_len=self._info.max_model_len,
            fair_step_seconds=settings.fair_step_ms / 1e3,
        )
        return Scheduler(limits, manager, self.prefill_speed, self._clock)

    def attach_tiers(self, tiers: TieredCache) -> None:
        """From now on what leaves the device goes there. Before the first request."""
        self.tiers = tiers
        tiers.gate.prefill = self.prefill_speed
        self.forget_everything()

    # ------------------------------------------------------------------ requests

    def add_request(self, submit: Submit) -> None:
        """Queue a request. Raises a `RadixgateError` that says what is wrong with it; then nothing has changed."""
        if submit.request_id in self._requests:
            raise InvalidRequestError(f"request id {submit.request_id!r} is in use", param="request_id")
        if self.scheduler.num_waiting >= self.settings.max_waiting:
            raise OverloadedError(f"{self.settings.max_waiting} requests are waiting already; try again later")
        request = Request(submit, self._info.block_size, self._arrivals, secrets.randbits(63))
        check_request(request, self._info)
        request.leader = self._leader_of(request, submit)
        stream = OutputStream(request, self._output_rules)
        self._arrivals += 1
        self._requests[request.request_id] = request
        self._streams[request.request_id] = stream
        self.scheduler.add(request)

    def _leader_of(self, request: Request, submit: Submit) -> Request | None:
        """The request whose prompt this one shares; None when it has ended: then this one is like any other."""
        leader = self._requests.get(submit.sibling_of) if submit.sibling_of else None
        if leader is None:
            return None
        same = (leader.tenant_id, leader.submitted_segments) == (request.tenant_id, request.submitted_segments)
        if not same or (leader.chooses_order, leader.pin_top) != (request.chooses_order, request.pin_top):
            raise InvalidRequestError("a sibling must have the very same prompt", param="sibling_of")
        return leader

    def abort_request(self, request_id: str) -> bool:
        """End a request at once and give its blocks back; False when there is none of that id."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request)
        self._counters_of(request).num_requests_aborted += 1
        return True

    def _end(self, request: Request) -> None:
        del self._requests[request.request_id], self._streams[request.request_id]
        try:
            self.scheduler.finish(request)
        except Exception as error:  # noqa: BLE001  the request is gone all the same; the cache goes before the next step
            self._broken = error

    def has_work(self) -> bool:
        return bool(self._requests or self._in_flight)

    # ------------------------------------------------------------------ one step

    def step(self) -> list[Delta | Failure]:
        """Compute the next tokens of every request that can be served now."""
        if self._broken is not None:
            return self._reset_cache(self._broken)
        try:
            output = self._schedule()
        except Exception as error:  # noqa: BLE001  a bug of ours, whatever its type: the requests must not pay for it
            return self._reset_cache(error)
        if not output.sequences and not self._in_flight:
            return self._step_without_sequences(output)
        messages = self._launch(output)
        if len(self._in_flight) > self._max_in_flight or not output.sequences:
            messages += self._postprocess(self._in_flight.popleft())
        return messages

    def _schedule(self) -> SchedulerOutput:
        if self.tiers is None:
            return self.scheduler.schedule()
        self.tiers.poll()
        output = self.scheduler.schedule()
        self.tiers.begin_step(output)
        return output

    def _launch(self, output: SchedulerOutput) -> list[Delta | Failure]:
        """Give a step to the device; failures when it does not take it."""
        if output.is_empty:
            return []
        requests = [self._requests[sequence.request_id] for sequence in output.sequences]
        self._counters.num_steps += bool(requests)
        launched_at = self._clock()
        try:
            pending = self.runner.launch(output)
        except Exception as error:  # noqa: BLE001  whatever it was, the other requests go on
            return self._fail_step(output, requests, error)
        if requests:
            self._in_flight.append(StepInFlight(output, requests, pending, launched_at))
        else:
            self._settle_transfers()
        return []

    def _settle_transfers(self) -> None:
        if self.tiers is None:
            return
        try:
            self.tiers.settle(self.runner.transfer_report())
        except Exception as error:  # noqa: BLE001  the step itself is done; the cache goes before the next one
            self._broken = error

    def _step_without_sequences(self, output: SchedulerOutput) -> list[Delta | Failure]:
        """With nothing in flight, either."""
        if not output.is_empty:
            return self._launch(output)
        if self.scheduler.is_reading and self.tiers is not None:
            self._settle_transfers()
            self.tiers.wait(DISK_WAIT)
            return []
        # The oldest request can always go on (engine/scheduler.py), so an empty step is a bug, not a wait.
        stalled = f"I10: {len(self._requests)} requests are here and none of them can go on"
        return self._reset_cache(InvariantError(stalled)) if self._requests else []

    def _postprocess(self, step: StepInFlight) -> list[Delta | Failure]:
        """Wait for the oldest step in flight, and act upon what came out of it."""
        try:
            result = step.pending.wait()
        except Exception as error:  # noqa: BLE001  as in `_launch`
            return self._fail_step(step.output, step.requests, error)
        self._note_end(step)
        self._counters.num_step_failures += bool(result.without_logits)
        messages: list[Delta | Failure] = []
        try:
            for index, (sequence, request) in enumerate(step.with_requests()):
                if self._requests.get(request.request_id) is not request:
                    continue  # it ended while this step ran
                if index in result.without_logits:
                    messages.append(self._fail_row(request))
                else:
                    self._advance(request, sequence, result.token_ids[index], result.logprobs.get(index), messages)
        except Exception as error:  # noqa: BLE001
            return messages + self._reset_cache(error)
        return messages

    def _note_end(self, step: StepInFlight) -> None:
        """Its own time begins with its launch or with the end of the step before it, whichever is later."""
        now = self._clock()
        seconds, self._last_end = now - max(step.launched_at, self._last_end), now
        self._counters.num_computed_tokens += step.num_tokens
        self.prefill_speed.observe(*step.output.num_prefill_and_decode(), seconds)
        self._settle_transfers()

    def _advance(
        self,
        request: Request,
        sequence: ScheduledSequence,
        token_id: int | None,
        logprobs: TokenLogprobs | None,
        messages: list[Delta | Failure],
    ) -> None:
        request.num_pending_tokens -= sequence.sample
        if request.state is RequestState.RUNNING:  # else it was preempted while the step ran, and holds no block
            self.scheduler.manager.cache_blocks(request, sequence.end)
        if token_id is None:
            return
        try:
            delta = self._push(request, token_id, logprobs)
        except Exception:
            logger.exception("the output of request %s cannot be made; it ends", request.request_id)
            messages.append(self._fail(request, EngineStepError("this request's output could not be made into text")))
            return
        if delta is not None:
            messages.append(delta)

    def _push(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> Delta | None:
        request.append_output(token_id)
        counters = self._counters_of(request)
        counters.num_output_tokens += 1
        if request.num_output_tokens == 1 and request.account is not None and not request.shares_account:
            counters.num_prompt_tokens += request.num_prompt_tokens
            counters.num_cached_tokens += request.account.num_cached_tokens
        delta = self._streams[request.request_id].push(token_id, logprobs)
        if delta is not None and delta.finish_reason is not None:
            self._end(request)
            counters.num_requests_finished += 1
        return delta

    def _counters_of(self, request: Request) -> Counters:
        """A probe's go nowhere: the sum of all usage equals the sum of all metrics (I9)."""
        return self._counters if request.counted else Counters()

    # ------------------------------------------------------------------ recovery

    def _fail(self, request: Request, error: RadixgateError) -> Failure:
        self._end(request)
        self._counters_of(request).num_requests_failed += 1
        return Failure(request_id=request.request_id, code=error.code, message=error.message, param=error.param)

    def _fail_step(self, output: SchedulerOutput, requests: list[Request], error: Exception) -> list[Delta | Failure]:
        logger.error("a step failed; its %d requests end", len(requests), exc_info=error)
        self._counters.num_step_failures += 1
        if self.tiers is not None:
            self.tiers.fail_step(output)
        self._settle_transfers()
        failure = EngineStepError(f"the step that computed this request failed ({type(error).__name__})")
        living = [request for request in requests if self._requests.get(request.request_id) is request]
        return [self._fail(request, failure) for request in living]

    def _fail_row(self, request: Request) -> Failure:
        logger.error("request %s: its logits are not finite", request.request_id)
        return self._fail(request, EngineStepError("the model's output for this request is not a number"))

    def _reset_cache(self, error: Exception) -> list[Delta | Failure]:
        """Our bookkeeping cannot be trusted any more: drop all of it and compute again what is under way."""
        logger.error("the cache is dropped: %s", error, exc_info=error)
        self._counters.num_integrity_failures += 1
        self._broken = None
        self._in_flight.clear()  # what it computes lies in blocks of a table that is not trusted
        self._keep_counts()
        if self.tiers is not None:
            for request in self._requests.values():
                self.scheduler.manager.drop_swapped(request)
            self.tiers.distrust()
        self.scheduler = self._new_scheduler()
        failures: list[Delta | Failure] = []
        for request in list(self._requests.values()):
            request.forget_blocks()
            self.scheduler.add(request)
            request.num_resets += 1
            if request.num_resets > MAX_RESETS:
                failures.append(self._fail(request, EngineStepError("the engine lost this request's cache repeatedly")))
        return failures

    def check_integrity(self) -> bool:
        """Walk pool, index and tables; drop the cache when they disagree (nothing is lost but time)."""
        try:
            self.scheduler.manager.check_integrity(self.scheduler.running)
        except Exception as error:  # noqa: BLE001
            self._reset_cache(error)
            return False
        return True

    def forget_everything(self) -> None:
        """An empty cache and counts from zero, as if nothing had ever been asked. Only without requests."""
        if self.has_work():
            raise InvariantError(f"I10: {len(self._requests)} requests would lose their blocks")
        self._counters = Counters()
        self.scheduler = self._new_scheduler()

    # ------------------------------------------------------------------ between requests

    def idle(self) -> bool:
        """Work in the background, when no request is here; True when more is to come soon."""
        try:
            if self.tiers is not None:
                self._move_blocks()
            self.scheduler.manager.keep_quotas()
        except Exception as error:  # noqa: BLE001
            self._broken = error
        if self._broken is not None:
            self._reset_cache(self._broken)
        if self.tiers is None:
            return False
        return self.tiers.is_busy or self.scheduler.manager.is_persisting or self.is_restoring

    @property
    def is_restoring(self) -> bool:
        """Whether what an earlier life left is still coming back."""
        return self.tiers is not None and (self.tiers.is_restoring or self.scheduler.manager.is_promoting)

    def _move_blocks(self) -> None:
        assert self.tiers is not None
        self.tiers.poll()
        if not self.tiers.is_busy:
            self.scheduler.manager.continue_to_persist()
            self._promote()
        self._carry_out_offloads()
        self._settle_transfers()
        self.tiers.finish_erasures()

    def _promote(self) -> None:
        """One path that an earlier life has left in host memory goes on to the device."""
        assert self.tiers is not None
        manager = self.scheduler.manager
        promotion = manager.begin_promotion()
        if promotion is None:
            return
        output = SchedulerOutput(fetches=promotion.fetches)
        self.tiers.begin_step(output)
        try:
            self.runner.launch(output)
        except Exception as error:  # noqa: BLE001  whatever it was: the path stays where it is
            self._fail_step(output, [], error)
            manager.end_promotion(promotion, arrived=False)
        else:
            manager.end_promotion(promotion, arrived=True)
            self._settle_transfers()

    def persist(self) -> None:
        """Bring what the device holds to the disk, a part at a time, while `idle` is called."""
        self.scheduler.manager.begin_to_persist()

    def close(self, seconds: float = 10.0) -> None:
        """Persist what can be persisted in that time, and let go of files and threads."""
        if self.tiers is None:
            return
        deadline = time.monotonic() + seconds
        self.persist()
        while self.idle() and time.monotonic() < deadline:
            self.tiers.wait(DISK_WAIT)
        self.tiers.close()

    def erase(self, erase: Erase) -> Erased:
        """Take KV out of every tier; what running requests hold is gone when they end.

        The disk's part may follow: while Redis is away it is not known what is there. It is noted in a file, so that
        it will be done, whatever happens meanwhile.
        """
        selection = Selection.of(erase)
        for request in self._requests.values():
            if request.is_concerned(selection):
                self.scheduler.manager.stop_indexing(request)
        done = self.scheduler.manager.erase(selection)
        num_by_tier = {"device": done.device, "host": done.host, "disk": done.disk}
        return Erased(erase_id=erase.erase_id, num_blocks=sum(num_by_tier.values()), num_by_tier=num_by_tier)

    def evict(self, evict: EvictCache) -> int:
        """Let go of cached blocks in one tier; how many went."""
        if evict.tier == "device":
            return self.scheduler.manager.evict(evict.num_blocks)
        return 0 if self.tiers is None else self.tiers.evict(evict.tier, evict.num_blocks)

    def verify(self, num_paths: int) -> CacheVerified:
        """Prove what lies on disk (`engine/verification.py`). Blocks until it is done."""
        if self.tiers is None or self.tiers.disk is None:
            return CacheVerified(call_id="", num_read=0, num_unreadable=0, num_recomputed=0, num_different=0)
        chunk = self.settings.prefill_chunk_size
        run = Verification(self.scheduler.manager, self.runner, self.tiers.disk, chunk, self._carry_out_offloads)
        return run.run("", num_paths)

    def _carry_out_offloads(self) -> None:
        """Nothing may be written into blocks whose old content still has to leave."""
        assert self.tiers is not None
        output = SchedulerOutput()
        self.tiers.begin_step(output)
        if not output.is_empty:
            self._step_without_sequences(output)

    def explain(self, submit: Submit) -> list[ExplainedPart]:
        """Where each part of a prompt would come from now. Raises as `add_request` does."""
        request = Request(submit, self._info.block_size, self._arrivals, 0)
        check_request(request, self._info)
        return self.scheduler.manager.explain(request)

    def document_stats(self, query: GetDocumentStats) -> DocumentStats:
        """What every tier holds of each document that a tenant may ask about."""
        selection = Selection(scopes=frozenset(query.scopes), document_ids=frozenset(query.document_ids))
        runs = {"device": self.scheduler.manager.index.document_runs(selection)}
        if self.tiers is not None:
            runs |= self.tiers.document_runs(selection)
        uses = document_uses(runs, self._info.block_size, self._info.block_bytes)
        return DocumentStats(query_id=query.query_id, documents=uses)

    # ------------------------------------------------------------------ look

    def _keep_counts(self) -> None:
        """Carry the counts of a scheduler and index that are about to be replaced."""
        self._counters.num_preemptions += self.scheduler.num_preemptions
        self._counters.num_evicted_blocks += self.scheduler.manager.index.num_evicted_blocks

    def info(self) -> EngineInfo:
        return self._info

    def stats(self) -> EngineStats:
        manager = self.scheduler.manager
        blocks = manager.counts()
        counters = replace(
            self._counters,
            num_preemptions=self._counters.num_preemptions + self.scheduler.num_preemptions,
            num_evicted_blocks=self._counters.num_evicted_blocks + manager.index.num_evicted_blocks,
        )
        return EngineStats(
            incarnation=self._info.incarnation,
            num_blocks=self._info.num_blocks,
            num_free_blocks=blocks.free,
            num_cached_blocks=blocks.cached,
            num_active_blocks=blocks.active,
            num_waiting=self.scheduler.num_waiting,
            num_running=len(self.scheduler.running),
            tiers=() if self.tiers is None else tier_stats(self.tiers),
            index=None if self.tiers is None else index_stats(self.tiers),
            prefill_tokens_per_second=self.prefill_speed.tokens_per_second,
            owners=manager.index.order.uses(),
            ledger=manager.index.order.ledger.lines("device")
            + (() if self.tiers is None else tier_evictions(self.tiers)),
            **{name: getattr(counters, name) for name in Counters.__dataclass_fields__},
        )


def new_incarnation() -> str:
    """Names one life of an engine: what an earlier one promised is void."""
    return f"{int(time.time()):x}-{secrets.token_hex(4)}"
