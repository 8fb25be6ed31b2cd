"""The processes that compute one model together, a share each. Rank 0 is the engine; the others do what it does.

    rank 0    schedule ─► send(output) ─► launch ──┬── sums over all ranks ──┬─► sample ─► tokens to all ranks
    rank 1                receive() ────► launch ──┘   in each layer         └─► tokens from rank 0

Only rank 0 schedules, and only rank 0 has requests: a rank knows blocks, tokens and positions of the step (`wire`), and
its KV tensor holds its own heads of every block. All ranks have the same number of blocks.

A rank that dies takes the engine with it, with a line that names it: no step can be computed without its share, and
the sums of the others would wait for it for ever. A thread of rank 0 waits for the ends of the others, and does nothing
else. For the same reason a step that raises on rank 0 ends the engine: the others are in the middle of it.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore  # torch.distributed has them without saying so

from engine.batch import ScheduledSequence, SchedulerOutput

T = TypeVar("T")

logger = logging.getLogger(__name__)

EXIT_RANK_LOST = 1
_START = timedelta(minutes=30)  # until every rank has loaded its share
_IDLE = timedelta(days=3650)  # an engine may wait for its next request for as long as it likes
_STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class RankGroup:
    """This process's place among the ranks."""

    rank: int
    size: int
    steps: dist.ProcessGroup  # by which steps are told, on the host

    @classmethod
    def join(cls, rank: int, size: int, store: Store, device: torch.device) -> RankGroup:
        """Returns when all ranks are here."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_START)
        steps = dist.new_group(backend="gloo", timeout=_IDLE)
        assert isinstance(steps, dist.ProcessGroup), "every rank is a member of it"
        return cls(rank, size, steps)

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(part)
        return part

    def side_by_side(self, part: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim=-1)

    def share_tokens(self, tokens: torch.Tensor) -> None:
        """Rank 0's into every rank's."""
        dist.broadcast(tokens, 0)

    def smallest(self, number: int) -> int:
        """Of all ranks' numbers."""
        held = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(held, dist.ReduceOp.MIN, group=self.steps)
        return int(held)

    def together(self, output: SchedulerOutput, launch: Callable[[SchedulerOutput], T]) -> T:
        """Launch a step on this rank; on rank 0, on all of them."""
        if self.rank:
            return launch(output)
        self.send(output)
        try:
            return launch(output)
        except Exception as error:
            logger.critical("a step failed on rank 0 while the other ranks compute it: the engine ends", exc_info=error)
            raise SystemExit(EXIT_RANK_LOST) from error

    def send(self, output: SchedulerOutput | None) -> None:
        """From rank 0 to the others; None: there will be no more steps."""
        payload = bytearray(pickle.dumps(None if output is None else wire(output)))
        dist.broadcast(torch.tensor(len(payload)), 0, group=self.steps)
        dist.broadcast(torch.frombuffer(payload, dtype=torch.uint8), 0, group=self.steps)

    def receive(self) -> SchedulerOutput | None:
        """Waits for what rank 0 sends next. It is rank 0's own memory that is read: a process of this very engine."""
        length = torch.tensor(0)
        dist.broadcast(length, 0, group=self.steps)
        payload = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(payload, 0, group=self.steps)
        output: SchedulerOutput | None = pickle.loads(payload.numpy().tobytes())
        return None if output is None else _unwired(output)


def wire(output: SchedulerOutput) -> SchedulerOutput:
    """What a rank needs of a step: of each sequence's tokens only the new ones."""
    return replace(output, sequences=[_trimmed(sequence) for sequence in output.sequences])


def _trimmed(sequence: ScheduledSequence) -> ScheduledSequence:
    return replace(sequence, token_ids=sequence.token_ids[sequence.num_computed : sequence.end])


def _unwired(output: SchedulerOutput) -> SchedulerOutput:
    return replace(output, sequences=[_padded(sequence) for sequence in output.sequences])


def _padded(sequence: ScheduledSequence) -> ScheduledSequence:
    """The new tokens in their places again; what stands before them is not looked at."""
    return replace(
        sequence,
        token_ids=[0] * sequence.num_computed + sequence.token_ids,
        block_table=array("i", sequence.block_table),
    )


class RankProcesses:
    """The other ranks, as children of rank 0."""

    def __init__(self, size: int, port: int, environ: Mapping[str, str]) -> None:
        self._stopping = False
        self._children = {
            rank: subprocess.Popen(
                [sys.executable, "-m", "engine.rank_worker", "--rank", str(rank), "--port", str(port)],
                env={**os.environ, **environ},
            )
            for rank in range(1, size)
        }
        for rank, child in self._children.items():
            threading.Thread(target=self._watch, args=(rank, child), name=f"rank-{rank}", daemon=True).start()

    @property
    def pids(self) -> dict[int, int]:
        return {rank: child.pid for rank, child in self._children.items()}

    def _watch(self, rank: int, child: subprocess.Popen[bytes]) -> None:
        code = child.wait()
        if self._stopping:
            return
        message = f"rank {rank} (process {child.pid}) ended with code {code}: the engine cannot go on without its share"
        logger.critical(message)
        print(f"engine: {message}", file=sys.stderr, flush=True)
        self._kill_others(rank)
        os._exit(EXIT_RANK_LOST)  # the main thread may be waiting for that rank inside a sum, for ever

    def _kill_others(self, lost: int) -> None:
        for rank, child in self._children.items():
            if rank != lost and child.poll() is None:
                child.kill()

    def stop(self, group: RankGroup) -> None:
        """Tell the ranks that no step follows, and wait for their end."""
        self._stopping = True
        if all(child.poll() is None for child in self._children.values()):
            group.send(None)
        for child in self._children.values():
            try:
                child.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        dist.destroy_process_group()


def start_ranks(size: int, device: torch.device, environ: Mapping[str, str]) -> tuple[RankGroup, RankProcesses]:
    """Become rank 0 of `size`; the others are started, and stopped at this process's exit."""
    store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False, timeout=_START)
    processes = RankProcesses(size, store.port, environ)
    group = RankGroup.join(0, size, store, device)
    atexit.register(processes.stop, group)
    return group, processes


def join_ranks(rank: int, size: int, port: int, device: torch.device) -> RankGroup:
    """Become one of the others."""
    store = TCPStore("127.0.0.1", port, size, is_master=False, timeout=_START)
    return RankGroup.join(rank, size, store, device)
