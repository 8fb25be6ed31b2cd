"""The gateway's end of the wire to one engine. asyncio; no torch.

    generate(submit) ──Submit──►  engine          one _Stream a request: what has arrived and was not taken yet,
      async for delta ◄──Delta──                  merged into one delta, so a slow reader costs no memory but its text
      closed early    ──Abort──►                  a normal end sends nothing

    tasks     receive     messages → streams, probes, stats
              watch       zmq's connection events → connected, or everything fails
              heartbeat   Hello every 3 s

How an engine is found dead, fastest first:
1. its process ends: the connection closes, `watch` sees it at once;
2. its machine or process freezes: zmq's own heartbeat, answered by its I/O thread and not by the engine's loop, gives
   up after 10 s;
3. its loop hangs while its I/O thread lives: a Hello unanswered for `stall_seconds`. This limit is long, because a
   step of a large prefill on a slow device is seconds in which the loop answers nothing and is well.
Then every request of it fails with EngineUnavailableError, and new ones do so at once until it is back. An engine that
came back with a new incarnation knows nothing of earlier requests: they fail too.

Rejected: resending requests after a reconnect. The client may have been shown half an answer already.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import suppress

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from engine.errors import EngineUnavailableError, InvalidRequestError, RadixgateError, from_wire
from engine.protocol import (
    PROTOCOL_VERSION,
    Abort,
    CacheView,
    ClientMessage,
    Delta,
    DocumentStats,
    DrawnToken,
    EngineInfo,
    EngineMessage,
    EngineMetrics,
    EngineStats,
    Erase,
    Erased,
    Failure,
    GetCacheView,
    GetDocumentStats,
    GetMetrics,
    GetStats,
    Hello,
    Probe,
    ProbeResult,
    Submit,
)

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 3.0
STALL_SECONDS = 60.0
_QUESTION_SECONDS = 30.0  # it is answered between two steps

_Answer = EngineStats | Erased | DocumentStats | EngineMetrics | CacheView
TRANSPORT_HEARTBEAT_MS = 3_000
TRANSPORT_TIMEOUT_MS = 10_000
RECONNECT_MS = 200
# What the engine sent before its connection closed may still lie in our queue: it is read before requests are failed.
LAST_WORDS_SECONDS = 0.05
QUEUE = 16_384  # messages


class _Stream:
    """What one request has received and nobody has taken yet: at most one delta, or its end."""

    __slots__ = ("_arrived", "_error", "_last", "_texts", "_tokens", "ended")

    def __init__(self) -> None:
        self._arrived = asyncio.Event()
        self._texts: list[str] = []
        self._tokens: list[DrawnToken] = []
        self._last: Delta | None = None
        self._error: RadixgateError | None = None
        self.ended = False  # the engine is done with the request: there is nothing left to abort

    def feed(self, delta: Delta) -> None:
        if self.ended:
            return
        self._texts.append(delta.text)
        self._tokens += delta.tokens
        if self._last is not None and delta.account is None:
            delta = with_account_of(self._last, delta)
        self._last = delta
        self.ended = delta.finish_reason is not None
        self._arrived.set()

    def fail(self, error: RadixgateError) -> None:
        if self.ended:
            return
        self.ended = True
        self._error = error
        self._arrived.set()

    async def take(self) -> Delta:
        """Everything that has arrived, as one delta. Text that came before an error is given out first."""
        await self._arrived.wait()
        if self._last is None:
            assert self._error is not None, "a stream is woken by a delta or an error"
            raise self._error
        delta = msgspec.structs.replace(self._last, text="".join(self._texts), tokens=tuple(self._tokens))
        self._last = None
        self._texts.clear()
        self._tokens.clear()
        if self._error is None:
            self._arrived.clear()
        return delta


class EngineClient:
    """One engine, as the gateway sees it. Belongs to one event loop: from `start` to `close`."""

    def __init__(
        self, endpoint: str, *, heartbeat_seconds: float = HEARTBEAT_SECONDS, stall_seconds: float = STALL_SECONDS
    ) -> None:
        self.endpoint = endpoint
        self._heartbeat_seconds = heartbeat_seconds
        self._stall_seconds = stall_seconds
        self._info: EngineInfo | None = None
        self._link_up = False  # the transport is connected
        self._ready = asyncio.Event()  # and the engine has answered on it
        self._unanswered_since: float | None = None
        self._streams: dict[str, _Stream] = {}
        self._probes: dict[str, asyncio.Future[ProbeResult]] = {}
        self._questions: dict[str, asyncio.Future[_Answer]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder = msgspec.msgpack.Decoder(EngineMessage)
        self._context: zmq.asyncio.Context | None = None
        self._open_socket: zmq.asyncio.Socket | None = None
        self._monitor: zmq.asyncio.Socket | None = None

    @property
    def info(self) -> EngineInfo | None:
        """The engine as it introduced itself last; None until it has been reached for the first time."""
        return self._info

    @property
    def connected(self) -> bool:
        return self._ready.is_set()

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Begins to connect, and goes on trying: `wait_ready` tells when the engine has answered."""
        self._context = zmq.asyncio.Context()
        socket = self._open_socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        socket.setsockopt(zmq.SNDHWM, QUEUE)
        socket.setsockopt(zmq.RCVHWM, QUEUE)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, TRANSPORT_HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, TRANSPORT_TIMEOUT_MS)
        events = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED
        self._monitor = socket.get_monitor_socket(events)
        socket.connect(self.endpoint)
        self._tasks = [
            asyncio.create_task(self._watch(self._monitor), name="engine-watch"),
            asyncio.create_task(self._receive(), name="engine-receive"),
            asyncio.create_task(self._heartbeat(), name="engine-heartbeat"),
        ]

    async def close(self) -> None:
        """Aborts what is running and disconnects."""
        if self._open_socket is None or self._context is None or self._monitor is None:
            return
        if self.connected and self._streams:
            with suppress(zmq.Again):
                await self._send(Abort(tuple(self._streams)))
        self._lose("the connection to the engine was closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # In this order: zmq writes a last event to the monitor, and blocks for ever if nobody holds its other end.
        self._open_socket.disable_monitor()
        self._monitor.close(linger=0)
        self._open_socket.close(linger=500)
        self._open_socket = self._monitor = None
        await asyncio.to_thread(self._context.term)

    async def wait_ready(self, timeout: float) -> EngineInfo:
        """The engine's info once it answers. Raises EngineUnavailableError after `timeout` seconds."""
        try:
            await asyncio.wait_for(self._ready.wait(), timeout)
        except TimeoutError as error:
            raise EngineUnavailableError(f"no engine answered within {timeout:.0f} s") from error
        assert self._info is not None, "ready means that the engine has introduced itself"
        return self._info

    # ------------------------------------------------------------ asking

    async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        """The deltas of one request; the last one carries the finish reason.

        Raises the typed error of a failure. Closed or cancelled before its end, it aborts the request.
        """
        self._require_engine()
        if submit.request_id in self._streams:
            raise InvalidRequestError(f"a request with id {submit.request_id} is already running", param="request_id")
        stream = self._streams[submit.request_id] = _Stream()
        try:
            await self._ask(submit)
            while True:
                delta = await stream.take()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            del self._streams[submit.request_id]
            if not stream.ended:
                self._abort(submit.request_id)

    async def probe(self, timeout: float) -> ProbeResult:
        """One real decode step. Raises EngineUnavailableError when none is answered within `timeout` seconds."""
        self._require_engine()
        probe_id = uuid.uuid4().hex
        answer = self._probes[probe_id] = asyncio.get_running_loop().create_future()
        try:
            await self._ask(Probe(probe_id))
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError as error:
            raise EngineUnavailableError(f"the engine computed nothing within {timeout:.1f} s") from error
        finally:
            del self._probes[probe_id]

    async def stats(self, timeout: float = 10.0) -> EngineStats:
        query_id = uuid.uuid4().hex
        answer = await self._question(query_id, GetStats(query_id), timeout)
        assert isinstance(answer, EngineStats), "an id has one kind of answer"
        return answer

    async def erase(self, request: Erase) -> Erased:
        """Raises EngineUnavailableError; what was to be erased may then be gone, or not."""
        answer = await self._question(request.erase_id, request)
        assert isinstance(answer, Erased), "an id has one kind of answer"
        return answer

    async def document_stats(self, request: GetDocumentStats) -> DocumentStats:
        answer = await self._question(request.query_id, request)
        assert isinstance(answer, DocumentStats), "an id has one kind of answer"
        return answer

    async def metrics_text(self, timeout: float) -> bytes:
        """The engine's metrics in Prometheus' text format. Raises EngineUnavailableError."""
        query = GetMetrics(uuid.uuid4().hex)
        answer = await self._question(query.query_id, query, timeout)
        assert isinstance(answer, EngineMetrics), "an id has one kind of answer"
        return answer.text

    async def cache_view(self, owner: str | None, tenant_id: str | None, max_nodes: int, timeout: float) -> CacheView:
        """The cache as it is now; of one owner, and one tenant's requests, if given. Raises EngineUnavailableError."""
        query = GetCacheView(query_id=uuid.uuid4().hex, owner=owner, tenant_id=tenant_id, max_nodes=max_nodes)
        answer = await self._question(query.query_id, query, timeout)
        assert isinstance(answer, CacheView), "an id has one kind of answer"
        return answer

    async def _question(self, question_id: str, message: ClientMessage, timeout: float = _QUESTION_SECONDS) -> _Answer:
        """Answers are found by the question's id: their order says nothing once one of them is lost."""
        self._require_engine()
        assert question_id not in self._questions, "the answer would go to one of two"
        answer = self._questions[question_id] = asyncio.get_running_loop().create_future()
        try:
            await self._ask(message)
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError as error:
            raise EngineUnavailableError(f"the engine gave no answer within {timeout:.1f} s") from error
        finally:
            del self._questions[question_id]

    def _require_engine(self) -> None:
        if not self.connected:
            raise EngineUnavailableError("the engine is not available; it may be starting or restarting")

    async def _ask(self, message: ClientMessage) -> None:
        try:
            await self._send(message)
        except zmq.Again as error:
            raise EngineUnavailableError("the engine takes no messages") from error

    def _send(self, message: ClientMessage) -> asyncio.Future[zmq.MessageTracker | None]:
        """Sent, or refused with `zmq.Again`, before this returns; the future only says which."""
        assert self._open_socket is not None, "the client was started"
        return asyncio.ensure_future(self._open_socket.send(self._encode(message), zmq.NOBLOCK))

    def _abort(self, request_id: str) -> None:
        """Never waits: it runs while its task is being cancelled."""
        if self.connected and self._open_socket is not None:
            self._send(Abort((request_id,))).add_done_callback(_note_lost_abort)

    # ------------------------------------------------------------ the tasks

    async def _receive(self) -> None:
        assert self._open_socket is not None, "the client was started"
        while True:
            payload = b"".join(await self._open_socket.recv_multipart())
            self._unanswered_since = None
            try:
                message = self._decoder.decode(payload)
            except msgspec.DecodeError as error:
                logger.error("cannot read a message of %d bytes from the engine: %s", len(payload), error)
                continue
            self._dispatch(message)

    def _dispatch(self, message: EngineMessage) -> None:
        match message:
            case Delta():
                self._feed(message)
            case Failure():
                if (stream := self._streams.get(message.request_id)) is not None:
                    stream.fail(from_wire(message.code, message.message, message.param))
            case ProbeResult():
                answer = self._probes.get(message.probe_id)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case EngineStats():
                self._answer(message.query_id, message)
            case Erased():
                self._answer(message.erase_id, message)
            case DocumentStats() | EngineMetrics() | CacheView():
                self._answer(message.query_id, message)
            case EngineInfo():
                self._greet(message)

    def _answer(self, question_id: str, answer: _Answer) -> None:
        waiting = self._questions.get(question_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _feed(self, delta: Delta) -> None:
        stream = self._streams.get(delta.request_id)
        if stream is not None:
            stream.feed(delta)
        elif delta.finish_reason is None:
            # Given up while the engine did not answer, or sent into a connection that had just closed: zmq delivers it
            # to the next engine. (IMMEDIATE=1 would prevent that, but drops the dead engine's last words.)
            self._abort(delta.request_id)

    def _greet(self, info: EngineInfo) -> None:
        if info.protocol_version != PROTOCOL_VERSION:
            logger.error("the engine speaks protocol %d, we speak %d", info.protocol_version, PROTOCOL_VERSION)
            return
        if self._info is not None and self._info.incarnation != info.incarnation:
            self._lose("the engine was restarted")
        if not self.connected:
            logger.info("engine %s serves %s on %s", info.incarnation, info.model, info.device)
        self._info = info
        self._ready.set()

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            frames: list[bytes] = await monitor.recv_multipart()
            event = parse_monitor_message(frames)["event"]
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._link_up = True
                await self._hello()
            elif event == zmq.Event.DISCONNECTED:
                self._link_up = False
                self._ready.clear()
                await asyncio.sleep(LAST_WORDS_SECONDS)
                self._lose("the connection to the engine was lost")

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_seconds)
            since = self._unanswered_since
            if since is not None and time.monotonic() - since > self._stall_seconds:
                self._lose(f"the engine has not answered for {self._stall_seconds:.0f} s")
            if self._link_up:
                await self._hello()

    async def _hello(self) -> None:
        with suppress(zmq.Again):
            await self._send(Hello())
            if self._unanswered_since is None:
                self._unanswered_since = time.monotonic()

    def _lose(self, why: str) -> None:
        """Everything under way fails; nothing waits for an engine that will not answer."""
        self._ready.clear()
        self._unanswered_since = None
        if self._streams or self._probes:
            logger.warning("%s: %d requests fail", why, len(self._streams))
        for stream in self._streams.values():
            stream.fail(EngineUnavailableError(why))
        for answer in [*self._probes.values(), *self._questions.values()]:
            if not answer.done():
                answer.set_exception(EngineUnavailableError(why))


def with_account_of(first: Delta, later: Delta) -> Delta:
    """`later` with what only a request's first delta carries."""
    return msgspec.structs.replace(
        later,
        account=first.account,
        document_order=first.document_order,
        queue_seconds=first.queue_seconds,
        seconds_saved=first.seconds_saved,
    )


def _note_lost_abort(sent: asyncio.Future[zmq.MessageTracker | None]) -> None:
    if not sent.cancelled() and sent.exception() is not None:
        logger.warning("an abort could not be sent: %s", sent.exception())
