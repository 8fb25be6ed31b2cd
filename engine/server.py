"""The engine's door: one ROUTER socket, one loop, one thread that owns the engine.

    serve():   ┌─► 1. receive   every message that has arrived (waits only when there is nothing to compute)
               │   2. expire    clients that have fallen silent: their requests are aborted
               │   3. probe     health checks that nobody else's step will answer
               │   4. step      engine.step() → deltas and failures, each to the client that asked
               └── 5. idle      blocks move between the tiers; after a while: garbage collection, integrity walk

Contract
- Request ids are a client's own: inside the engine they are `c<client>/<id>`, so two gateways never collide.
- Nothing a client sends, or fails to read, stops or blocks the loop: a malformed message is logged and counted; a
  client whose queue is full has its requests aborted and is told so when it reads again; a client that is gone or
  silent for `SILENCE_LIMIT` has its requests aborted.
- After `stop()`: new requests get `shutting_down`, running ones may go on for `drain_seconds`, the rest fail; then
  `serve` returns.
- `engine.step()` answers for its own failures (they arrive as `Failure`). If it raises all the same, the process ends
  and its supervisor starts another: an engine in an unknown state must not serve.

Rejected: an asyncio server with the engine in a thread. Every block and every queue would need a lock or a hand-over,
and the interpreter lock would still stall the loop for the length of a step.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import socket as unix
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from engine.errors import (
    ConfigError,
    EngineStepError,
    EngineUnavailableError,
    InvalidRequestError,
    RadixgateError,
    ShuttingDownError,
)
from engine.protocol import (
    Abort,
    CacheEvicted,
    CacheVerified,
    CacheView,
    ClientMessage,
    Delta,
    DocumentStats,
    EngineInfo,
    EngineMessage,
    EngineMetrics,
    EngineStats,
    Erase,
    Erased,
    EvictCache,
    Explain,
    Explained,
    ExplainedPart,
    Failure,
    GetCacheView,
    GetDocumentStats,
    GetMetrics,
    GetStats,
    Hello,
    OperatorAnswer,
    Probe,
    ProbeResult,
    SamplingParams,
    Segment,
    SegmentKind,
    Submit,
    VerifyCache,
)
from engine.scoped_tokens import SCOPE_BYTES

logger = logging.getLogger(__name__)

SILENCE_LIMIT = 15.0  # seconds without a message (clients say Hello every 3) before a client counts as gone
REST_AFTER = 5.0  # idle seconds before garbage collection and the integrity walk
EXPIRE_EVERY = 1.0  # seconds
BUSY_PAUSE = 0.002  # seconds between two looks while blocks move in the background
SEND_QUEUE = 16_384  # messages that may wait for one client
RECEIVE_BATCH = 4_096  # messages taken between two steps at most
RESTORE_PATIENCE = 10.0  # seconds that health checks wait for what an earlier life left in the cache
PROBE_ID = "_probe"
PROBE_SCOPE = PROBE_ID.encode().ljust(SCOPE_BYTES, b"-")
TRANSPORT_HEARTBEAT_MS = 3_000
TRANSPORT_TIMEOUT_MS = 10_000


class ServedEngine(Protocol):
    """What the server needs of `LLMEngine`."""

    def add_request(self, submit: Submit) -> None:
        """Raises RequestError or ServiceError if the request cannot be taken."""
        ...

    def abort_request(self, request_id: str) -> bool: ...

    def has_work(self) -> bool: ...

    def step(self) -> list[Delta | Failure]: ...

    def idle(self) -> bool:
        """Background work while there are no requests; True when more is to come soon."""
        ...

    @property
    def is_restoring(self) -> bool:
        """Whether what an earlier life left in the cache is still coming back."""
        ...

    def persist(self) -> None:
        """Begin to bring what only the device holds to the disk, in `idle`."""
        ...

    def erase(self, erase: Erase) -> Erased:
        """Raises a RadixgateError when it cannot be made safe."""
        ...

    def evict(self, evict: EvictCache) -> int: ...

    def verify(self, num_paths: int) -> CacheVerified:
        """Blocks until it is done."""
        ...

    def explain(self, submit: Submit) -> list[ExplainedPart]:
        """Raises RequestError as `add_request` does."""
        ...

    def document_stats(self, query: GetDocumentStats) -> DocumentStats: ...

    def stats(self) -> EngineStats: ...

    def info(self) -> EngineInfo: ...

    def metrics_text(self) -> bytes:
        """Prometheus' text format."""
        ...

    def cache_view(self, query: GetCacheView) -> CacheView: ...

    def check_integrity(self) -> bool:
        """Walks everything, repairs what has drifted; False if there was something to repair."""
        ...


class _Sent(Enum):
    YES = auto()
    FULL = auto()  # the client's queue is at its limit
    GONE = auto()  # no such client is connected


@dataclass(slots=True)
class _Client:
    identity: bytes
    number: int
    last_seen: float
    requests: dict[str, str] = field(default_factory=dict[str, str])  # the client's id → the engine's
    owed: list[Failure] = field(default_factory=list[Failure])  # could not be sent: the client's queue was full

    def engine_id(self, request_id: str) -> str:
        return f"c{self.number}/{request_id}"


@dataclass(slots=True)
class ServerCounters:
    """What went wrong on the wire since the start."""

    num_malformed: int = 0
    num_expired_clients: int = 0
    num_slow_clients: int = 0


class EngineServer:
    """Serves one engine until `stop()`. Every method but `stop` belongs to the thread that calls `serve`."""

    def __init__(
        self,
        engine: ServedEngine,
        endpoint: str,
        *,
        drain_seconds: float = 30.0,
        persist_when_idle: bool = False,
        silence_limit: float = SILENCE_LIMIT,
        send_queue: int = SEND_QUEUE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        refuse_second_engine(endpoint)
        self.engine = engine
        self.counters = ServerCounters()
        self._drain_seconds = drain_seconds
        self._persist_when_idle = persist_when_idle
        self._pause = BUSY_PAUSE
        self._silence_limit = silence_limit
        self._clock = clock
        self._clients: dict[bytes, _Client] = {}
        self._num_clients = 0
        self._owners: dict[str, tuple[_Client, str]] = {}  # the engine's request id → who asked, and under which id
        self._probes: list[tuple[bytes, str]] = []  # (identity, probe id) that wait for a decode step
        self._probe_running = False
        self._stop_requests = 0
        self._closed = False
        self._drain_deadline: float | None = None
        self._last_work = self._started = clock()
        self._rested = False
        self._next_expiry = 0.0
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder = msgspec.msgpack.Decoder(ClientMessage)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._bind(endpoint, send_queue)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)

    def _bind(self, endpoint: str, send_queue: int) -> None:
        socket = self._socket
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a client that is gone is an error, not silence
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client that reconnects takes its identity back
        socket.setsockopt(zmq.SNDHWM, send_queue)
        socket.setsockopt(zmq.RCVHWM, send_queue)
        socket.setsockopt(zmq.LINGER, 1_000)
        # Kept up by zmq's own thread, so a step of many seconds does not look like a dead machine.
        socket.setsockopt(zmq.HEARTBEAT_IVL, TRANSPORT_HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, TRANSPORT_TIMEOUT_MS)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            self._close_pipe()
            raise ConfigError(f"the engine cannot listen on {endpoint}: {error}", param="engine.endpoint") from error
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    # ------------------------------------------------------------ the loop

    def serve(self) -> None:
        """Runs until a stop has been asked for and drained. Closes the socket."""
        try:
            while not self._drained():
                self._receive(wait=0.0 if self.engine.has_work() else self._pause)
                self._expire_clients()
                self._start_probe()
                if self.engine.has_work():
                    self._step()
                else:
                    self._idle()
            self._fail_all(ShuttingDownError("the engine is shutting down"))
        finally:
            self._context.destroy(linger=1_000)
            self._close_pipe()

    def stop(self) -> None:
        """Asks `serve` to drain and return; a second call ends the drain at once. Fit for signal handlers."""
        self._stop_requests += 1
        if not self._closed:
            with contextlib.suppress(BlockingIOError):  # a full pipe wakes the loop just as well
                os.write(self._wake_write, b"\0")

    def _drained(self) -> bool:
        if not self._stop_requests:
            return False
        if self._drain_deadline is None:
            self._drain_deadline = self._clock() + self._drain_seconds
            logger.info("draining %d requests for up to %.0f s", len(self._owners), self._drain_seconds)
        return not self._owners or self._stop_requests > 1 or self._clock() >= self._drain_deadline

    def _step(self) -> None:
        self._last_work = self._clock()
        self._rested = False
        computed_before = self.engine.stats().num_computed_tokens if self._probes else 0
        outputs = self.engine.step()
        for output in outputs:
            self._deliver(output)
        if self._probes or self._probe_running:
            self._settle_probes(outputs, self.engine.stats().num_computed_tokens > computed_before)

    def _idle(self) -> None:
        self._pause = BUSY_PAUSE if self.engine.idle() else EXPIRE_EVERY
        self._rest()

    def _rest(self) -> None:
        """Work that scans everything is done here or not at all: nothing may scan the tree on the step."""
        if self._rested or self._clock() - self._last_work < REST_AFTER:
            return
        self._rested = True
        gc.collect()
        self.engine.check_integrity()
        if self._persist_when_idle:
            self.engine.persist()

    # ------------------------------------------------------------ in

    def _receive(self, *, wait: float) -> None:
        """Take what has arrived, after waiting up to `wait` seconds for the first."""
        ready = dict(self._poller.poll(int(wait * 1_000)))
        if self._wake_read in ready:
            os.read(self._wake_read, 512)
        for _ in range(RECEIVE_BATCH):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(frames[0], frames[1:])

    def _handle(self, identity: bytes, frames: list[bytes]) -> None:
        client = self._client(identity)
        payload = b"".join(frames)
        try:
            message = self._decoder.decode(payload)
        except msgspec.DecodeError as error:
            self._handle_malformed(client, payload, str(error))
            return
        match message:
            case Hello():
                self._flush_owed(client)
                self._send(client, self.engine.info())
            case Submit():
                self._submit(client, message)
            case Abort():
                for request_id in message.request_ids:
                    self._abort(client, request_id)
            case Probe():
                self._probes.append((identity, message.probe_id))
            case GetStats():
                self._send(client, msgspec.structs.replace(self.engine.stats(), query_id=message.query_id))
            case GetMetrics():
                self._send(client, EngineMetrics(query_id=message.query_id, text=self.engine.metrics_text()))
            case GetCacheView():
                self._send(client, self.engine.cache_view(message))
            case GetDocumentStats():
                self._send(client, self.engine.document_stats(message))
            case Erase() | EvictCache() | VerifyCache() | Explain():
                self._send(client, self._call(message))

    def _call(self, call: Erase | EvictCache | VerifyCache | Explain) -> OperatorAnswer:
        """What an operator asks of the cache: rare, answered at once, by the id of the call."""
        try:
            match call:
                case Erase():
                    return self.engine.erase(call)
                case EvictCache():
                    return CacheEvicted(call_id=call.call_id, num_blocks=self.engine.evict(call))
                case VerifyCache():
                    done = self.engine.verify(call.num_recomputed)
                    return msgspec.structs.replace(done, call_id=call.call_id)
                case Explain():
                    return Explained(call_id=call.call_id, parts=tuple(self.engine.explain(call.submit)))
        except RadixgateError as error:
            return _failure(_call_id(call), error)
        except Exception as error:  # as in `_submit`
            logger.exception("a call of the operator's cannot be answered")
            return _failure(_call_id(call), _not_understood(error))

    def _handle_malformed(self, client: _Client, payload: bytes, why: str) -> None:
        self.counters.num_malformed += 1
        logger.warning("malformed message of %d bytes from client %d: %s", len(payload), client.number, why)
        # A Submit that does not decode still has someone waiting for it.
        if (request_id := _request_id_of(payload)) is not None and request_id not in client.requests:
            error = InvalidRequestError(f"the engine cannot read this request: {why}")
            self._send(client, _failure(request_id, error))

    def _client(self, identity: bytes) -> _Client:
        client = self._clients.get(identity)
        if client is None:
            self._num_clients += 1
            client = self._clients[identity] = _Client(identity, self._num_clients, self._clock())
            logger.info("client %d connected", client.number)
        client.last_seen = self._clock()
        return client

    def _submit(self, client: _Client, submit: Submit) -> None:
        request_id = submit.request_id
        if request_id in client.requests:
            # To answer would end the first request of this name, which is running.
            self.counters.num_malformed += 1
            logger.warning("client %d submitted %s twice: the second is dropped", client.number, request_id)
            return
        if self._stop_requests:
            self._send(client, _failure(request_id, ShuttingDownError("the engine is shutting down")))
            return
        engine_id = client.engine_id(request_id)
        try:
            leader = client.engine_id(submit.sibling_of) if submit.sibling_of else ""
            self.engine.add_request(msgspec.structs.replace(submit, request_id=engine_id, sibling_of=leader))
        except RadixgateError as error:
            self._send(client, _failure(request_id, error))
            return
        except Exception as error:  # what a client sends must not end the engine
            logger.exception("a request of client %d is not what the engine understands", client.number)
            self._send(client, _failure(request_id, _not_understood(error)))
            return
        client.requests[request_id] = engine_id
        self._owners[engine_id] = (client, request_id)

    # ------------------------------------------------------------ out

    def _deliver(self, output: Delta | Failure) -> None:
        owner = self._owners.get(output.request_id)
        if owner is None:  # a probe, or a request that was aborted while this step computed it
            return
        client, request_id = owner
        if isinstance(output, Failure) or output.finish_reason is not None:
            self._forget(client, request_id)
        self._send(client, msgspec.structs.replace(output, request_id=request_id))

    def _send(self, client: _Client, message: EngineMessage | OperatorAnswer) -> None:
        if client.owed:
            self._flush_owed(client)
        if client.owed:
            self._owe(client, message)
            return
        match self._try_send(client.identity, message):
            case _Sent.YES:
                pass
            case _Sent.FULL:
                self._punish_slow(client, message)
            case _Sent.GONE:
                self._drop_client(client, "is gone")

    def _try_send(self, identity: bytes, message: EngineMessage | OperatorAnswer) -> _Sent:
        try:
            self._socket.send_multipart([identity, self._encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            return _Sent.FULL
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return _Sent.GONE
        return _Sent.YES

    def _punish_slow(self, client: _Client, message: EngineMessage | OperatorAnswer) -> None:
        """The message is lost, so whatever it belonged to can only fail; the client learns it when it reads again."""
        self.counters.num_slow_clients += 1
        logger.warning("client %d does not read: its %d requests are aborted", client.number, len(client.requests))
        lost = set(client.requests)
        if isinstance(message, (Delta, Failure)):
            lost.add(message.request_id)
        for request_id in lost:
            self._abort(client, request_id)
            client.owed.append(_not_read(request_id))

    def _owe(self, client: _Client, message: EngineMessage | OperatorAnswer) -> None:
        """It cannot be sent yet. The end of a request is kept; a text with a hole in it ends as an error; any other
        answer is lost, and whoever waits for it asks again (answers are found by the question's id)."""
        if isinstance(message, Delta):
            self._abort(client, message.request_id)
            message = _not_read(message.request_id)
        if isinstance(message, Failure):
            client.owed.append(message)

    def _flush_owed(self, client: _Client) -> None:
        while client.owed and self._try_send(client.identity, client.owed[0]) is _Sent.YES:
            client.owed.pop(0)

    # ------------------------------------------------------------ ends

    def _abort(self, client: _Client, request_id: str) -> None:
        engine_id = self._forget(client, request_id)
        if engine_id is not None:
            self.engine.abort_request(engine_id)

    def _forget(self, client: _Client, request_id: str) -> str | None:
        engine_id = client.requests.pop(request_id, None)
        if engine_id is not None:
            del self._owners[engine_id]
        return engine_id

    def _drop_client(self, client: _Client, why: str) -> None:
        logger.info("client %d %s: its %d requests are aborted", client.number, why, len(client.requests))
        for request_id in list(client.requests):
            self._abort(client, request_id)
        self._clients.pop(client.identity, None)

    def _expire_clients(self) -> None:
        now = self._clock()
        if now < self._next_expiry:
            return
        self._next_expiry = now + EXPIRE_EVERY
        for client in list(self._clients.values()):
            if now - client.last_seen > self._silence_limit:
                self._expire(client)

    def _expire(self, client: _Client) -> None:
        """A gateway that only slept (a suspended machine, a stuck loop) must not wait for ever for what ends here."""
        self.counters.num_expired_clients += 1
        lost = list(client.requests)
        self._drop_client(client, f"was silent for {self._silence_limit:.0f} s")
        error = EngineUnavailableError("the engine heard nothing of this gateway for too long")
        for request_id in lost:
            self._try_send(client.identity, _failure(request_id, error))

    def _fail_all(self, error: RadixgateError) -> None:
        for engine_id, (client, request_id) in list(self._owners.items()):
            self._forget(client, request_id)
            self.engine.abort_request(engine_id)
            self._send(client, _failure(request_id, error))

    # ------------------------------------------------------------ health

    def _start_probe(self) -> None:
        """A probe is answered by the next step that computes tokens, in the middle of a long prefill, too. Only an idle
        engine needs a request of its own for that. None is answered while an earlier life's cache comes back: ready
        means at full speed."""
        if not self._probes or self._probe_running or self.engine.has_work() or self._is_restoring():
            return
        try:
            self.engine.add_request(_probe_request())
        except RadixgateError as error:
            self._answer_probes(ok=False, message=error.message)
        else:
            self._probe_running = True

    def _is_restoring(self) -> bool:
        return self.engine.is_restoring and self._clock() - self._started < RESTORE_PATIENCE

    def _settle_probes(self, outputs: list[Delta | Failure], has_computed: bool) -> None:
        if any(output.request_id == PROBE_ID and _is_last(output) for output in outputs):
            self._probe_running = False
        failure = next((out for out in outputs if isinstance(out, Failure) and out.code == EngineStepError.code), None)
        if failure is not None:
            self._answer_probes(ok=False, message=failure.message)
        elif has_computed and not self._is_restoring():
            self._answer_probes(ok=True)

    def _answer_probes(self, *, ok: bool, message: str = "") -> None:
        probes, self._probes = self._probes, []
        for identity, probe_id in probes:
            client = self._clients.get(identity)
            if client is not None:
                self._send(client, ProbeResult(probe_id=probe_id, ok=ok, message=message))

    def _close_pipe(self) -> None:
        self._closed = True
        os.close(self._wake_read)
        os.close(self._wake_write)


def _is_last(output: Delta | Failure) -> bool:
    return isinstance(output, Failure) or output.finish_reason is not None


def _failure(request_id: str, error: RadixgateError) -> Failure:
    return Failure(request_id=request_id, code=error.code, message=error.message, param=error.param)


def _not_understood(error: Exception) -> InvalidRequestError:
    return InvalidRequestError(f"the engine cannot take this request: {type(error).__name__}: {error}")


def _call_id(call: Erase | EvictCache | VerifyCache | Explain) -> str:
    return call.erase_id if isinstance(call, Erase) else call.call_id


def _not_read(request_id: str) -> Failure:
    return _failure(request_id, EngineStepError("the gateway did not read its answers fast enough"))


def _probe_request() -> Submit:
    return Submit(
        request_id=PROBE_ID,
        tenant_id=PROBE_ID,
        segments=(Segment.of(SegmentKind.QUESTION, [0], PROBE_SCOPE),),
        sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        use_cache=False,
        counted=False,
    )


class _Named(msgspec.Struct):
    request_id: str


def _request_id_of(payload: bytes) -> str | None:
    try:
        return msgspec.msgpack.decode(payload, type=_Named).request_id
    except msgspec.DecodeError:
        return None


def refuse_second_engine(endpoint: str) -> None:
    """zmq unlinks a Unix socket before it binds, and would take it from a living engine without a word."""
    path = Path(endpoint.removeprefix("ipc://"))
    if not endpoint.startswith("ipc:///") or not path.exists():
        return
    with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return  # left behind by an engine that was killed
    raise ConfigError(f"another engine already listens on {endpoint}", param="engine.endpoint")
