"""The embedder: who shares a micro-batch, who goes first, what two workers make of it; and the real model, slow."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from retrieval.embedder import EmbedderServer, Floats, Workers, compute
from retrieval.embedder_client import EmbedderClient
from retrieval.embedder_protocol import (
    Cancel,
    Describe,
    Embed,
    EmbedderInfo,
    EmbedFailure,
    FromEmbedder,
    Rerank,
    Scores,
    Vectors,
)
from retrieval.errors import EmbedderUnavailableError
from retrieval.healthcheck import check


class CountingModel:
    """A text's vector is its length; the batches are kept."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.info = EmbedderInfo(
            incarnation="1", model="m", fingerprint="f" * 32, dimension=1, max_tokens=8, has_reranker=True
        )

    def embed(self, texts: Sequence[str]) -> tuple[Floats, list[int]]:
        if "bad" in texts:
            raise ValueError("cannot embed this")
        self.batches.append(list(texts))
        return np.array([[len(text)] for text in texts], np.float32), [1] * len(texts)

    def rerank(self, query: str, texts: Sequence[str]) -> list[float]:
        return [float(query in text) for text in texts]


def send(server: EmbedderServer, client: bytes, message: Embed | Rerank | Cancel | Describe) -> object:
    return server.receive(client, msgspec.msgpack.encode(message))


def embed(id: int, texts: Sequence[str], urgent: bool) -> Embed:  # noqa: A002
    return Embed(id=id, texts=tuple(texts), urgent=urgent)


def server_of(model: CountingModel, batch_size: int, num_workers: int = 1) -> EmbedderServer:
    return EmbedderServer(model.info, batch_size, num_workers)


def step(server: EmbedderServer, model: CountingModel) -> list[tuple[bytes, FromEmbedder]]:
    batch = server.take()
    assert batch is not None, "there is work"
    return server.settle(batch, compute(model, batch))


def test_requests_share_a_batch_and_urgent_texts_go_first() -> None:
    """A query behind a large upload must wait for one micro-batch, not for the upload."""
    model = CountingModel()
    server = server_of(model, batch_size=4)
    send(server, b"a", embed(1, ["bulk"] * 6, urgent=False))
    send(server, b"b", embed(1, ["query"], urgent=True))
    send(server, b"c", embed(1, ["other"], urgent=True))
    first = step(server, model)
    assert model.batches == [["query", "other", "bulk", "bulk"]]
    assert [(client, type(answer)) for client, answer in first] == [(b"b", Vectors), (b"c", Vectors)]
    ((client, answer),) = step(server, model)
    assert client == b"a"
    assert isinstance(answer, Vectors)
    assert np.frombuffer(answer.data, np.float32).tolist() == [4.0] * 6
    assert server.take() is None


def test_a_cancelled_request_is_not_computed() -> None:
    model = CountingModel()
    server = server_of(model, batch_size=4)
    send(server, b"a", embed(1, ["x"] * 8, urgent=False))
    under_way = server.take()
    assert under_way is not None
    send(server, b"a", Cancel(1))
    assert server.take() is None
    assert server.settle(under_way, compute(model, under_way)) == [], "nobody waits for it"


def test_a_batch_that_fails_fails_its_requests_and_no_others() -> None:
    model = CountingModel()
    server = server_of(model, batch_size=2)
    send(server, b"a", embed(1, ["fine", "bad"], urgent=True))
    send(server, b"b", embed(1, ["fine"], urgent=True))
    ((client, answer),) = step(server, model)
    assert (client, type(answer)) == (b"a", EmbedFailure)
    ((client, answer),) = step(server, model)
    assert (client, type(answer)) == (b"b", Vectors)


def test_workers_share_what_there_is_and_may_end_in_any_order() -> None:
    """Two workers have a batch's size together, come to the end of a request together, and its rows stay in order."""
    model = CountingModel()
    server = server_of(model, batch_size=8, num_workers=2)
    texts = ["x" * length for length in range(1, 12)]
    send(server, b"a", embed(1, texts, urgent=False))
    batches = list(iter(server.take, None))
    assert [len(batch.parts[0].texts) for batch in batches] == [4, 4, 2, 1]
    answers = [answer for batch in reversed(batches) for answer in server.settle(batch, compute(model, batch))]
    ((client, answer),) = answers
    assert client == b"a"
    assert isinstance(answer, Vectors)
    assert np.frombuffer(answer.data, np.float32).tolist() == list(range(1, 12))
    assert len(answer.num_tokens) == 11


def test_a_request_that_fails_in_one_of_two_batches_fails_once() -> None:
    model = CountingModel()
    server = server_of(model, batch_size=4, num_workers=2)
    send(server, b"a", embed(1, ["fine", "bad", "fine", "fine", "never taken", "nor this"], urgent=False))
    first, second = server.take(), server.take()
    assert first is not None
    assert second is not None
    ((_, answer),) = server.settle(first, compute(model, first))
    assert isinstance(answer, EmbedFailure)
    assert server.settle(second, compute(model, second)) == []
    assert server.take() is None


def test_reranking_and_describing() -> None:
    model = CountingModel()
    server = server_of(model, batch_size=4, num_workers=2)
    assert send(server, b"a", Describe()) == model.info
    send(server, b"b", embed(1, ["text"], urgent=True))
    send(server, b"a", Rerank(id=7, query="x", texts=("axb", "ab", "xx")))
    assert step(server, model) == [], "one worker has two of the texts"
    assert step(server, model) == [(b"a", Scores(id=7, scores=(1.0, 0.0, 1.0)))]
    ((client, _),) = step(server, model)
    assert client == b"b"
    assert server.receive(b"a", b"no message") is None
    assert server.take() is None


def test_what_needs_no_model_is_answered_at_once() -> None:
    model = CountingModel()
    model.info = msgspec.structs.replace(model.info, has_reranker=False)
    server = server_of(model, batch_size=4)
    assert isinstance(send(server, b"a", Rerank(id=1, query="x", texts=("a",))), EmbedFailure)
    assert send(server, b"a", embed(2, [], urgent=True)) == Vectors(id=2, data=b"", num_tokens=())
    assert server.take() is None


class StuckModel(CountingModel):
    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self._error = error

    def embed(self, texts: Sequence[str]) -> tuple[Floats, list[int]]:
        if self._error is not None:
            raise self._error
        time.sleep(60)
        return super().embed(texts)


@pytest.mark.parametrize(("error", "raised"), [(None, TimeoutError), (MemoryError("none left"), MemoryError)])
def test_a_worker_that_is_stuck_or_lost_ends_the_process(error: Exception | None, raised: type[Exception]) -> None:
    """The loop goes on answering heartbeats: nobody else would notice."""
    model = StuckModel(error)
    server = server_of(model, batch_size=1)
    send(server, b"a", embed(1, ["text"], urgent=False))
    workers = Workers([model], stuck_seconds=0.1)
    batch = server.take()
    assert batch is not None
    workers.start(batch)
    assert not workers.is_one_idle
    time.sleep(0.3)
    with pytest.raises(raised):
        list(workers.computed())


@pytest.mark.slow
async def test_the_real_model_behind_its_socket(tmp_path: Path) -> None:
    """Near texts are near, long ones are embedded whole; killed, it fails what waits; told to stop, it ends well."""
    endpoint = f"ipc://{tmp_path}/e"
    command = [sys.executable, "-m", "retrieval.embedder", endpoint, "--threads", "2"]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = await asyncio.create_subprocess_exec(*command, env=environ, stderr=asyncio.subprocess.DEVNULL)
    client = EmbedderClient(endpoint)
    await client.start()
    try:
        info = await client.wait_ready()
        assert (info.model, info.dimension) == ("all-minilm-l6-v2", 384)
        texts = ["How do I wrap text?", "Wrapping of paragraphs into lines", "The weather in Lisbon"]
        vectors, num_tokens = await client.embed(texts, urgent=True)
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]
        assert num_tokens[0] == 6
        end = "The weather in Lisbon is fine. " * 40
        (short, long), counts = await client.embed(["Cats. " * 120, "Cats. " * 120 + end], urgent=True)
        assert counts[1] > info.max_tokens
        assert short @ long < 0.95, "what lies beyond the model's window counts too"
        full = "Cats. " * (info.max_tokens // 2)  # two tokens each
        (one, rest), counts = await client.embed([full, full + texts[2]], urgent=True)
        assert counts[0] == info.max_tokens < counts[1]
        assert one @ rest > 0.98, "a window of a few tokens weighs as much as they do"
        alone = [(await client.embed([text], urgent=True))[0][0] for text in texts]
        many, counts = await client.embed(texts * 30, urgent=False)  # in many batches, on both workers
        assert np.allclose(many, alone * 30, atol=1e-5)
        assert counts == num_tokens * 30
        waiting = asyncio.create_task(client.embed(["word " * 2000] * 64, urgent=False))
        await asyncio.sleep(0.2)
        process.kill()
        await process.wait()
        process = await asyncio.create_subprocess_exec(*command, env=environ, stderr=asyncio.subprocess.DEVNULL)
        with pytest.raises(EmbedderUnavailableError):
            await waiting
        assert await embed_when_back(client, "again") == 1
        assert await check(endpoint)
        process.terminate()
        assert await process.wait() == 0, "a container's process 1 has to handle the signal that ends it"
    finally:
        await client.close()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_the_health_check_fails_where_nobody_answers(tmp_path: Path) -> None:
    assert not await check(f"ipc://{tmp_path}/nobody", seconds=0.1)


async def embed_when_back(client: EmbedderClient, text: str) -> int:
    """Until the new process answers, which may take long on a loaded machine, a request is refused, not kept."""
    async with asyncio.timeout(240):
        while True:
            try:
                return len((await client.embed([text], urgent=True))[0])
            except EmbedderUnavailableError:
                await asyncio.sleep(0.2)
