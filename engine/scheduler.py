"""Who computes what in the next step.

How to think about this loop. A request is a list of tokens, of which the first `num_computed_tokens` have their KV
in place; a step moves that number forward. There is no prefill phase and no decode phase: a request in decode lacks
one token, a fresh one lacks its prompt, a preempted one lacks prompt and output. Each step:

    1. Running requests that lack one token get it: decoding never waits for anybody's prompt.
    2. Prompts get a chunk each, tenants that have had least first, whether they run already or are admitted now
       (`engine/fair_queue.py`): else a tenant's question would wait for every prompt that others have begun. Chunks are
       cut at absolute multiples of `prefill_chunk_size`, so that a prompt is cut alike whatever part of it was cached.
       While a tenant that uses little is here, or was a minute ago, the prompts of those who have many in the engine
       get only as much of a step as takes `fair_step_seconds`: its next question waits for the step under way, and
       shares one, and neither may be long beside what its own prompt takes. Its own requests, and those of who has only
       one, are cut as always.
    3. Nobody overtakes a waiting request that only lacks room, or a long one would wait for ever; running ones go on.
    4. Whenever blocks run out, a request of the tenant that has had most is preempted, its latest: it gives its blocks
       back (full ones stay in the index) and waits again. The first in rank, by (priority, arrival), is never preempted
       for another, and it fits into the pool alone (the engine checks that on arrival), so it always finishes: no
       livelock.

A step may be scheduled before the one before it has ended (`engine/engine.py`). What that one computes counts as in
place, since the device does one after the other; the token that it samples counts as there, and is not known. So a
request may get one step more than it needs, when that token turns out to end it; one that ends in any case gets none.

Work for idle times (`when_idle`: prefilling ahead, speculation) is admitted only while nobody else is here, and the
first who comes throws it out of the batch: it then holds no block, no place and no key that others wait for. What it
has computed stays in the index, and there it goes on.

A request whose next block is being computed by another one, or read from the disk, is parked and comes back when that
block is there; so is a parallel sample whose whole prompt the first of them is computing. A burst of one prompt is
computed once, and reading goes on beside the prefill of the others.

Two alternatives rejected: prefill steps that exclude decoding (every prompt then stalls every stream), and chunks
that fill the budget exactly (the same prompt would be cut elsewhere each time, and its KV differ in the last bits).
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from engine.batch import ScheduledSequence, SchedulerOutput
from engine.errors import InvariantError
from engine.fair_queue import FairQueue
from engine.kv_cache_manager import Admission, KVCacheManager
from engine.prefill_speed import PrefillSpeed
from engine.request import Request, RequestState

_SHORTEST_STEP = 64  # tokens of prompts: below, a step is mostly the reading of the weights
_MAX_WAIT = 3  # steps that those who are cut short get nothing in


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_num_seqs: int  # sequences in a step
    token_budget: int  # new tokens in a step; at least the chunk size
    prefill_chunk_size: int
    cached_token_weight: float = 0.1  # in a tenant's share; a computed token counts 1
    output_token_weight: float = 2.0
    max_model_len: int | None = None  # tokens of a sequence
    fair_step_seconds: float = 0.0  # of others' prompts in a step, beside a tenant that uses little; 0: any


class Scheduler:
    """Owns every request: `queue` (waiting), `parked` (waiting for another's block), `running` (in rank order)."""

    def __init__(
        self,
        limits: SchedulerLimits,
        manager: KVCacheManager,
        prefill_speed: PrefillSpeed | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if limits.token_budget < limits.prefill_chunk_size + limits.max_num_seqs - 1:
            raise ValueError("the token budget does not hold a prefill chunk beside everyone else's decoding")
        self.limits = limits
        self.manager = manager
        self.queue = FairQueue(clock)
        self._prefill_speed = prefill_speed or PrefillSpeed()
        self.parked: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._steps_waited = 0  # in a row: prompts that are cut short, for those that are not

    @property
    def num_waiting(self) -> int:
        return self.queue.num_waiting + len(self.parked)

    @property
    def waiting(self) -> list[Request]:
        """Everyone who is not in the batch, in order of arrival."""
        return sorted(self.queue.requests() + self.parked, key=lambda request: request.arrival)

    @property
    def is_reading(self) -> bool:
        """Whether a parked request waits for the disk."""
        return any(request.awaited_read is not None for request in self.parked)

    def add(self, request: Request) -> None:
        request.state = RequestState.WAITING
        if not request.when_idle:
            self.manager.look_ahead(request)
        if request.policy is not None:
            self.manager.set_policy(request.tenant_id, request.policy)
        self.queue.add(request)

    def finish(self, request: Request) -> None:
        """Out of the scheduler, blocks given back, whatever state it was in."""
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            self.queue.stop(request)
        elif request.state is RequestState.PARKED:
            self.parked.remove(request)
        else:
            self.queue.remove(request)
        request.state = RequestState.FINISHED
        self.manager.free(request)

    # ------------------------------------------------------------------ one step

    def schedule(self) -> SchedulerOutput:
        step = _Step(self.limits.token_budget, self._shared_tokens(), beside_others=self._steps_waited >= _MAX_WAIT)
        self._clear_for_others()
        preemptions = self.num_preemptions
        for request in self.running[:]:
            if self._lacks(request) == 1:
                self._schedule_running(request, step)
        self._unpark()
        for request in sorted((r for r in self.running if self._lacks(r) > 1), key=self._turn):
            if self.num_preemptions == preemptions and step.budget >= self.limits.prefill_chunk_size:
                self._admit_waiting(step, before=request)
            self._schedule_running(request, step)
        if self.num_preemptions == preemptions:  # what was just taken from a running request is not handed out anew
            self._admit_waiting(step)
        self.manager.keep_quotas()
        self._steps_waited = self._steps_waited + 1 if step.cut_waits else 0
        return step.output()

    def _turn(self, request: Request) -> tuple[int, float, int]:
        return request.priority, self.queue.counter(request), request.arrival

    def _lacks(self, request: Request) -> int:
        """Tokens that still have to be given to the device; 0 for a request that ends with the step before."""
        pending, limit = request.num_pending_tokens, self.limits.max_model_len
        if pending and request.num_output_tokens + pending >= request.sampling.max_tokens:
            return 0
        if pending and limit is not None and request.num_tokens + pending >= limit:
            return 0
        return request.num_tokens + pending - request.num_computed_tokens

    def _schedule_running(self, request: Request, step: _Step) -> None:
        if request.state is not RequestState.RUNNING:
            return  # preempted for a request of this very step
        is_cut = self._is_cut(request, step)
        count = self._chunk(request, step, is_cut)
        if not step.holds(count, is_cut=is_cut):
            return
        while not self.manager.allocate_slots(request, count):
            victim = self._victim()
            # The first in rank goes on in any case: rather into others' floors than at the cost of who has had less.
            if self._turn(victim) < self._turn(request) and self.manager.allocate_slots(
                request, count, over_floors=True
            ):
                break
            self._preempt(victim, step)
            if victim is request:
                return
        self._add_to_step(request, count, step, is_cut)

    def _add_to_step(self, request: Request, count: int, step: _Step, is_cut: bool) -> None:
        step.add(request, count, is_cut=is_cut)
        decoding = request.num_computed_tokens >= request.num_prompt_tokens
        self.queue.charge(request, count * (self.limits.output_token_weight if decoding else 1.0))

    def _shared_tokens(self) -> int | None:
        """How many tokens of prompts that are cut short go into a step; None: none is cut."""
        wanted = self.limits.fair_step_seconds * self._prefill_speed.tokens_per_second
        if not wanted or not self.queue.recent.has_light():
            return None
        # Powers of two, so that a speed that varies cuts no prompt elsewhere.
        tokens = _SHORTEST_STEP if wanted < 2 * _SHORTEST_STEP else 1 << (int(wanted).bit_length() - 1)
        return tokens if tokens < self.limits.token_budget else None

    def _is_cut(self, request: Request, step: _Step) -> bool:
        """Whether its prompt gets a part of a short step only."""
        if step.shared is None or self.queue.recent.is_light(request.tenant_id):
            return False
        return not self.queue.is_only_one(request) or any(p.tenant_id == request.tenant_id for p in self.parked)

    def _chunk(self, request: Request, step: _Step, is_cut: bool, start: int | None = None) -> int:
        """New tokens up to the next absolute multiple of the chunk size, or to the end."""
        start = request.num_computed_tokens if start is None else start
        chunk = self.limits.prefill_chunk_size
        if is_cut and step.shared is not None:
            chunk = min(chunk, step.shared)
        return min(request.num_tokens + request.num_pending_tokens, (start // chunk + 1) * chunk) - start

    def _victim(self) -> Request:
        """Not simply who came last: a quiet tenant's request comes last into every flood."""
        others = self.running[1:] or self.running
        return max(others, key=self._turn)

    def _preempt(self, victim: Request, step: _Step) -> None:
        if len(self.running) == 1:
            raise InvariantError(f"I1: request {victim.request_id} does not fit into the pool alone")
        self.running.remove(victim)
        self.queue.stop(victim)
        self.manager.preempt(victim)
        step.drop(victim)
        self.num_preemptions += 1
        self.add(victim)

    # ------------------------------------------------------------------ admission

    def _unpark(self) -> None:
        """Who waited for a block that is there now (or will not be) may be admitted again."""
        still: list[Request] = []
        for request in self.parked:
            if self.manager.is_still_awaiting(request):
                still.append(request)
            else:
                self.add(request)
        self.parked = still

    def _admit_waiting(self, step: _Step, before: Request | None = None) -> None:
        """With `before`: those whose turn comes before that running request's."""
        while step.budget > 0 and len(self.running) < self.limits.max_num_seqs:
            request = self.queue.next(self.manager.num_cached_tokens)
            if request is None or (before is not None and self._turn(before) < self._turn(request)):
                return
            if (request.when_idle and self._has_others()) or not self._admit(request, step):
                return

    def _clear_for_others(self) -> None:
        idle_work = [request for request in self.running if request.when_idle]
        if idle_work and self._has_others():
            for request in idle_work:
                self.running.remove(request)
                self.queue.stop(request)
                self.manager.back_out(request)
                self.add(request)

    def _has_others(self) -> bool:
        """Whether anybody is here who does not wait for idle times."""
        return self.queue.has_demand or any(not request.when_idle for request in (*self.running, *self.parked))

    def _admit(self, request: Request, step: _Step) -> bool:
        """Start a request, or park it; False when it has to wait for room, and everyone else with it."""
        if self.manager.still_lacks_room(request):
            return False
        self.manager.arrange_documents(request)
        prefix = self.manager.plan(request)
        if self.manager.is_awaiting(request, prefix):
            self.queue.remove(request)
            request.state = RequestState.PARKED
            self.parked.append(request)
            return True
        if not self.manager.can_admit(request, prefix, reserve=len(self.running)):
            return False
        is_cut = self._is_cut(request, step)
        start = self.manager.num_ready_tokens(request, prefix)
        if not step.holds(self._chunk(request, step, is_cut, start), is_cut=is_cut):
            return False
        admission = self.manager.admit(request, prefix)
        count = self._chunk(request, step, is_cut)
        if not step.holds(count, is_cut=is_cut) or not self.manager.allocate_slots(request, count):
            self.manager.back_out(request)  # a copy that found no room made the chunk longer
            return False
        self._start(request)
        step.admissions[request] = admission
        self._add_to_step(request, count, step, is_cut)
        return True

    def _start(self, request: Request) -> None:
        self.queue.bypassed_by(request)
        self.queue.start(request)
        request.state = RequestState.RUNNING
        insort(self.running, request, key=lambda r: (r.priority, r.arrival))
        self.queue.charge(request, request.num_computed_tokens * self.limits.cached_token_weight)


class _Step:
    """A step being put together."""

    def __init__(self, budget: int, shared: int | None, *, beside_others: bool) -> None:
        self.budget = budget
        self.shared = shared  # tokens of prompts for all that are cut short
        # Others' prompts have steps to themselves, but only `_MAX_WAIT` in a row while these wait.
        self._beside_others = beside_others
        self._num_prompt_tokens = self._num_cut_tokens = 0
        self._was_refused = False
        self.counts: dict[Request, int] = {}
        self.admissions: dict[Request, Admission] = {}

    def holds(self, count: int, *, is_cut: bool) -> bool:
        """Whether so many tokens of a request still go into it. One alone is decoding, or as good as that."""
        if self.shared is not None and is_cut and count > 1:
            taken = self._num_cut_tokens if self._beside_others else self._num_prompt_tokens
            if taken + count > self.shared:
                self._was_refused = True
                return False
        return count <= self.budget

    @property
    def cut_waits(self) -> bool:
        """Whether prompts that are cut short got nothing, because of others."""
        return self._was_refused and not self._num_cut_tokens

    def add(self, request: Request, count: int, *, is_cut: bool) -> None:
        self.counts[request] = count
        self.budget -= count
        if count > 1:
            self._num_prompt_tokens += count
            self._num_cut_tokens += count if is_cut else 0

    def drop(self, request: Request) -> None:
        self.budget += self.counts.pop(request, 0)
        self.admissions.pop(request, None)

    def output(self) -> SchedulerOutput:
        sequences = [_sequence(request, count) for request, count in self.counts.items()]
        admissions = self.admissions.values()
        return SchedulerOutput(
            sequences,
            copies=[admission.copy for admission in admissions if admission.copy is not None],
            fetches=[fetch for admission in admissions for fetch in admission.fetches],
        )


def _sequence(request: Request, count: int) -> ScheduledSequence:
    """The request's part of a step. From here on it counts as computed."""
    start, end = request.num_computed_tokens, request.num_computed_tokens + count
    sequence = ScheduledSequence(
        request_id=request.request_id,
        token_ids=request.token_ids,
        num_computed=start,
        num_new=count,
        block_table=request.block_table,
        sampling=request.sampling,
        seed=request.seed,
        num_prompt_tokens=request.num_prompt_tokens,
        sample=end == request.num_tokens + request.num_pending_tokens,
        takes_last=end > request.num_tokens,
    )
    request.num_computed_tokens = end
    request.num_pending_tokens += sequence.sample
    return sequence
