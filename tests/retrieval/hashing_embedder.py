"""An embedding model with behaviour and without weights: a text is the sum of its words' random directions.

Texts that share words are near each other. What it embedded is kept, so that a test can say what was embedded again;
`hold(after)` stops it in the middle of an ingestion, and `held` says that it got there.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from retrieval.embedder_client import Floats
from retrieval.embedder_protocol import EmbedderInfo
from retrieval.errors import EmbedderUnavailableError

DIMENSION = 64


class HashingEmbedder:
    def __init__(self, *, has_reranker: bool = False, fingerprint: str = "hashing1-and-more") -> None:
        self.embedded: list[str] = []
        self.before_rerank: Callable[[], Awaitable[None]] | None = None
        self.failures = 0  # so many of the next calls fail
        self.held = asyncio.Event()
        self._gate = asyncio.Event()
        self._free_calls: int | None = None
        self._info = EmbedderInfo(
            incarnation="1",
            model="hashing",
            fingerprint=fingerprint,
            dimension=DIMENSION,
            max_tokens=256,
            has_reranker=has_reranker,
        )

    @property
    def info(self) -> EmbedderInfo | None:
        return self._info

    @property
    def connected(self) -> bool:
        return True

    async def wait_ready(self) -> EmbedderInfo:
        return self._info

    async def start(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """Nothing to let go of."""

    async def embed(self, texts: Sequence[str], *, urgent: bool) -> tuple[Floats, tuple[int, ...]]:
        if not urgent:
            await self._pass_gate()
        if self.failures:
            self.failures -= 1
            raise EmbedderUnavailableError("the embedder was started anew")
        self.embedded += texts
        return np.stack([_vector(text) for text in texts]), tuple(len(words(text)) for text in texts)

    def hold(self, after: int) -> None:
        """So many more batches of an ingestion go through, then they wait for `release`."""
        self._free_calls = after
        self._gate.clear()
        self.held.clear()

    def release(self) -> None:
        self._free_calls = None
        self._gate.set()

    async def _pass_gate(self) -> None:
        if self._free_calls is None:
            return
        if self._free_calls == 0:
            self.held.set()
            await self._gate.wait()
            return
        self._free_calls -= 1

    async def rerank(self, query: str, texts: Sequence[str]) -> tuple[float, ...]:
        """The share of the query's words that a text has."""
        if self.before_rerank is not None:
            await self.before_rerank()
        wanted = set(words(query))
        return tuple(len(wanted & set(words(text))) / len(wanted) for text in texts)


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _vector(text: str) -> Floats:
    total: Floats = np.zeros(DIMENSION, np.float32)
    for word in words(text):
        total += np.random.default_rng(zlib.crc32(word.encode())).standard_normal(DIMENSION, np.float32)
    return total / np.maximum(np.linalg.norm(total), np.float32(1e-6))
