"""The embedder: who shares a micro-batch, who goes first; and, slow, the real model behind its socket."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from retrieval.embedder import EmbedderServer, Floats
from retrieval.embedder_client import EmbedderClient
from retrieval.embedder_protocol import Cancel, Describe, Embed, EmbedderInfo, EmbedFailure, Rerank, Scores, Vectors
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


def test_requests_share_a_batch_and_urgent_texts_go_first() -> None:
    """A query behind a large upload must wait for one micro-batch, not for the upload."""
    model = CountingModel()
    server = EmbedderServer(model, batch_size=4)
    send(server, b"a", embed(1, ["bulk"] * 6, urgent=False))
    send(server, b"b", embed(1, ["query"], urgent=True))
    send(server, b"c", embed(1, ["other"], urgent=True))
    first = server.step()
    assert model.batches == [["query", "other", "bulk", "bulk"]]
    assert [(client, type(answer)) for client, answer in first] == [(b"b", Vectors), (b"c", Vectors)]
    ((client, answer),) = server.step()
    assert client == b"a"
    assert isinstance(answer, Vectors)
    assert np.frombuffer(answer.data, np.float32).tolist() == [4.0] * 6
    assert not server.has_work()


def test_a_cancelled_request_is_not_computed() -> None:
    model = CountingModel()
    server = EmbedderServer(model, batch_size=4)
    send(server, b"a", embed(1, ["x"] * 8, urgent=False))
    send(server, b"a", Cancel(1))
    assert not server.has_work()


def test_a_batch_that_fails_fails_its_requests_and_no_others() -> None:
    server = EmbedderServer(CountingModel(), batch_size=2)
    send(server, b"a", embed(1, ["fine", "bad"], urgent=True))
    send(server, b"b", embed(1, ["fine"], urgent=True))
    ((client, answer),) = server.step()
    assert (client, type(answer)) == (b"a", EmbedFailure)
    ((client, answer),) = server.step()
    assert (client, type(answer)) == (b"b", Vectors)


def test_reranking_and_describing() -> None:
    model = CountingModel()
    server = EmbedderServer(model, batch_size=2)
    assert send(server, b"a", Describe()) == model.info
    send(server, b"a", Rerank(id=7, query="x", texts=("axb", "ab")))
    assert server.step() == [(b"a", Scores(id=7, scores=(1.0, 0.0)))]
    assert server.receive(b"a", b"no message") is None
    assert not server.has_work()


@pytest.mark.slow
async def test_the_real_model_behind_its_socket(tmp_path: Path) -> None:
    """Near texts are near, long ones are embedded whole; killed, it fails what waits; told to stop, it ends well."""
    endpoint = f"ipc://{tmp_path}/e"
    command = [sys.executable, "-m", "retrieval.embedder", endpoint, "--threads", "1"]
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
