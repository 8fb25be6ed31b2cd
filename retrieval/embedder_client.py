"""The embedder as a gateway sees it: awaitable, and never waited for in vain.

    embed(texts) ──► Embed(id) ──zmq──► the process ──► Vectors(id) ──► the future of that id

No answer for `_SILENCE` seconds although a `Describe` has been sent fails whatever waits: the process is gone, or
stuck (one whose worker is stuck ends by itself). zmq connects again by itself when another is started in its place;
what the old one was asked fails then.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

import msgspec
import numpy as np
import zmq
import zmq.asyncio
from numpy.typing import NDArray

from retrieval.embedder_protocol import (
    Cancel,
    Describe,
    Embed,
    EmbedderInfo,
    EmbedFailure,
    FromEmbedder,
    Rerank,
    Scores,
    ToEmbedder,
    Vectors,
)
from retrieval.errors import EmbedderUnavailableError

_HEARTBEAT = 2.0
_SILENCE = 60.0  # long, for a machine that has no time for the embedder; it answers a `Describe` also while it computes
_START_SECONDS = 120.0

Floats = NDArray[np.float32]
Answer = TypeVar("Answer", Vectors, Scores)


class Embedder(Protocol):
    """What the rest of this package asks of an embedding model."""

    @property
    def info(self) -> EmbedderInfo | None: ...
    @property
    def connected(self) -> bool: ...
    async def wait_ready(self) -> EmbedderInfo: ...
    async def embed(self, texts: Sequence[str], *, urgent: bool) -> tuple[Floats, tuple[int, ...]]: ...
    async def rerank(self, query: str, texts: Sequence[str]) -> tuple[float, ...]: ...
    async def start(self) -> None: ...
    async def close(self) -> None: ...


class EmbedderClient:
    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Vectors | Scores]] = {}
        self._ready = asyncio.Event()
        self._info: EmbedderInfo | None = None
        self._heard_at = 0.0

    @property
    def info(self) -> EmbedderInfo | None:
        """None until the embedder has been reached for the first time."""
        return self._info

    @property
    def connected(self) -> bool:
        """Whether it has been heard lately."""
        return self._info is not None and asyncio.get_running_loop().time() - self._heard_at < _SILENCE / 2

    async def start(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(self._endpoint)
        self._heard_at = asyncio.get_running_loop().time()
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._beat())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_all("The embedder's connection was closed.")
        if self._socket is not None:
            self._socket.close()
        self._context.term()

    async def wait_ready(self) -> EmbedderInfo:
        with suppress(TimeoutError):
            async with asyncio.timeout(_START_SECONDS):
                await self._ready.wait()
        if self._info is None:
            raise EmbedderUnavailableError("The embedder has not started.")
        return self._info

    async def embed(self, texts: Sequence[str], *, urgent: bool) -> tuple[Floats, tuple[int, ...]]:
        """Normalised vectors, [len(texts), dimension], and the tokens of each text."""
        info = await self.wait_ready()
        if not texts:
            return np.zeros((0, info.dimension), np.float32), ()
        request = Embed(id=next(self._ids), texts=tuple(texts), urgent=urgent)
        answer = await self._ask(request, Vectors)
        return np.frombuffer(answer.data, np.float32).reshape(len(texts), -1), answer.num_tokens

    async def rerank(self, query: str, texts: Sequence[str]) -> tuple[float, ...]:
        request = Rerank(id=next(self._ids), query=query, texts=tuple(texts))
        return (await self._ask(request, Scores)).scores

    async def _ask(self, request: Embed | Rerank, kind: type[Answer]) -> Answer:
        future: asyncio.Future[Vectors | Scores] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = future
        try:
            await self._send(request)
            answer = await future
        except asyncio.CancelledError:
            with suppress(EmbedderUnavailableError):
                await self._send(Cancel(request.id))
            raise
        finally:
            self._waiting.pop(request.id, None)
        assert isinstance(answer, kind), "an id has one kind of answer"
        return answer

    async def _send(self, message: ToEmbedder) -> None:
        if self._socket is None or self._socket.closed:
            raise EmbedderUnavailableError("The embedder is not connected.")
        try:
            await self._socket.send(msgspec.msgpack.encode(message), flags=zmq.NOBLOCK)
        except zmq.Again as error:
            raise EmbedderUnavailableError("The embedder takes no more requests.") from error

    async def _receive(self) -> None:
        assert self._socket is not None, "started"
        decoder = msgspec.msgpack.Decoder(FromEmbedder)
        while True:
            message = decoder.decode(await self._socket.recv())
            self._heard_at = asyncio.get_running_loop().time()
            if isinstance(message, EmbedderInfo):
                self._meet(message)
                continue
            future = self._waiting.get(message.id)
            if future is None or future.done():
                continue
            if isinstance(message, EmbedFailure):
                future.set_exception(EmbedderUnavailableError(f"The embedder failed: {message.message}"))
            else:
                future.set_result(message)

    def _meet(self, info: EmbedderInfo) -> None:
        if self._info is not None and self._info.incarnation != info.incarnation:
            self._fail_all("The embedder was started anew.")
        self._info = info
        self._ready.set()

    async def _beat(self) -> None:
        while True:
            with suppress(EmbedderUnavailableError):
                await self._send(Describe())
            await asyncio.sleep(_HEARTBEAT)
            if asyncio.get_running_loop().time() - self._heard_at > _SILENCE:
                self._fail_all("The embedder does not answer.")

    def _fail_all(self, message: str) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EmbedderUnavailableError(message))
