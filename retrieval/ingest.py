"""From an attached file to a searchable one.

    claim ─► parse and split (parser's process) ─► hold the chunks that are there already
                                                  ─► embed and tokenize the rest, some at a time ─► settle

Whatever stops it, somebody takes it up again: a claim is a lease, renewed while the work goes on, and the chunks that
are stored already are found and not embedded again. So a crash costs the batches under way. A file that takes its
gateway or its embedder down with it is given up after `_MAX_ATTEMPTS` without progress; while the embedder is away
nothing is claimed.

The embedder is the slowest part, and never waits for the others: two files are worked on at a time, so that one is
parsed while the other is embedded, and of each file two batches, so that one is tokenized and stored meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath

import msgspec

from retrieval.documents import Document, content_id, render
from retrieval.embedder_client import Embedder
from retrieval.embedder_protocol import EmbedderInfo
from retrieval.errors import FileContentError, FileErrorCode, NotFoundError, UnavailableError
from retrieval.library import Attachment, Job, Library
from retrieval.parser_process import ParserProcess
from retrieval.records import Chunk, CollectionFile, FileError, FileStatus, chunk_id

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3
_LEASE_SECONDS = 15.0
_RENEW_SECONDS = 4.0
_LOOK_SECONDS = 1.0  # for jobs of others that nobody told us of
_NUM_WORKERS = 2
_EMBED_AT_ONCE = 32
_BATCHES_UNDER_WAY = 2  # of one file


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """The served model's tokenizer, as ingestion needs it."""

    name: str  # changes with the tokenizer
    json: bytes
    encode: Callable[[str], bytes]  # a document's text, rendered, to packed token ids


class Ingestor:
    def __init__(
        self,
        library: Library,
        parser: ParserProcess,
        embedder: Embedder,
        tokenizer: Callable[[], Awaitable[ModelTokenizer]],
        on_ingested: Callable[[Job, CollectionFile], None] = lambda job, member: None,
    ) -> None:
        self._library = library
        self._parser = parser
        self._embedder = embedder
        self._tokenizer = tokenizer
        self._on_ingested = on_ingested
        self._wake = asyncio.Event()
        self._workers: list[asyncio.Task[None]] = []
        self._claimed: set[Job] = set()
        self._num_running = 0

    async def start(self) -> None:
        self._workers = [asyncio.create_task(self._work()) for _ in range(_NUM_WORKERS)]
        self._workers.append(asyncio.create_task(self._renew_stale_when_possible()))

    async def close(self) -> None:
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        with suppress(UnavailableError):
            for job in self._claimed:  # for another gateway, or this one when it is back, without waiting for the lease
                await self._library.give_back(job)
        await self._parser.close()

    @property
    def is_working(self) -> bool:
        """Whether this gateway ingests something now."""
        return self._num_running > 0

    def wake(self) -> None:
        """There is a new job: do not wait until the next look."""
        self._wake.set()

    async def renew_stale(self) -> None:
        """Queues what another embedding model has embedded: the embedder was changed in the settings."""
        tag = (await self._embedder.wait_ready()).tag
        for tenant, collection_id in await self._library.all_collections():
            for member in await self._library.members(tenant, collection_id):
                if member.status is FileStatus.COMPLETED and not member.is_of_embedder(tag):
                    wanted = Attachment(member.file_id, member.attributes, member.chunking)
                    await self._library.attach(tenant, collection_id, wanted, again=True)
        self.wake()

    async def _renew_stale_when_possible(self) -> None:
        while True:
            try:
                await self.renew_stale()
            except NotFoundError:  # deleted just now; look again
                continue
            except UnavailableError:
                await asyncio.sleep(_LOOK_SECONDS)
            else:
                return

    async def _work(self) -> None:
        said = False
        while True:
            try:
                if not self._embedder.connected or not await self.run_one():
                    await self._idle()
                said = False
            except UnavailableError as error:
                # The claim runs out by itself, and the job is taken up again.
                if not said:  # once an outage
                    logger.warning("ingestion waits: %s", error)
                said = True
                await asyncio.sleep(_LOOK_SECONDS)

    async def _idle(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                await self._wake.wait()
        self._wake.clear()

    async def run_one(self) -> bool:
        """Claims one job and works it off. False when there is none."""
        claimed = await self._library.claim(_LEASE_SECONDS)
        if claimed is None:
            return False
        job, attempt = claimed
        self._claimed.add(job)
        self._num_running += 1
        renewing = asyncio.create_task(self._renew(job))
        try:
            await self._run(job, attempt)
            self._claimed.discard(job)
        finally:
            renewing.cancel()
            self._num_running -= 1
        return True

    async def _renew(self, job: Job) -> None:
        while True:
            await asyncio.sleep(_RENEW_SECONDS)
            with suppress(UnavailableError):
                await self._library.renew(job, _LEASE_SECONDS)

    async def _run(self, job: Job, attempt: int) -> None:
        member = await self._library.find_member(job.tenant, job.collection_id, job.file_id)
        if member is None or member.status is not FileStatus.IN_PROGRESS:
            await self._library.forget_job(job)
            await self._library.let_go(job.tenant, job.collection_id, job.file_id)
            return
        if attempt > _MAX_ATTEMPTS:
            await self._fail(job, member, "server_error", f"Given up after {_MAX_ATTEMPTS} attempts without progress.")
            return
        started = time.monotonic()
        try:
            done = await self._ingest(job, member)
        except FileContentError as error:
            await self._fail(job, member, error.code, error.message)
            return
        except NotFoundError:  # the file itself was deleted meanwhile
            await self._library.forget_job(job)
            await self._library.let_go(job.tenant, job.collection_id, job.file_id)
            return
        if not await self._library.settle(job, done):
            await self._library.let_go(job.tenant, job.collection_id, job.file_id)
            return
        if done.replaces is not None:
            await self._library.let_go(job.tenant, job.collection_id, done.replaces)
        logger.info("ingested %s: %d chunks in %.1f s", job.file_id, len(done.chunk_ids), time.monotonic() - started)
        self._on_ingested(job, done)

    async def _ingest(self, job: Job, member: CollectionFile) -> CollectionFile:
        content = await self._library.file_bytes(job.tenant, job.file_id)
        tokenizer = await self._tokenizer()
        embedder = await self._embedder.wait_ready()
        texts = await self._parser.split(member.filename, content, member.chunking, tokenizer.json)
        title = PurePath(member.filename).name
        chunks = _without_vectors(texts, title, embedder, tokenizer)
        missing = await self._library.put_chunks(job, chunks)
        new = [chunk for chunk in chunks if chunk.id in missing]
        await self._embed_and_store(job, member, new, tokenizer)
        return msgspec.structs.replace(
            member,
            status=FileStatus.COMPLETED,
            chunk_ids=tuple(chunk.id for chunk in chunks),
            usage_bytes=sum(len(chunk.text.encode()) + 4 * embedder.dimension for chunk in chunks),
        )

    async def _embed_and_store(
        self, job: Job, member: CollectionFile, chunks: Sequence[Chunk], tokenizer: ModelTokenizer
    ) -> None:
        """Stops without an error when the file is gone."""
        under_way: deque[asyncio.Task[list[Chunk]]] = deque()
        try:
            for start in range(0, len(chunks), _EMBED_AT_ONCE):
                if len(under_way) == _BATCHES_UNDER_WAY:
                    await self._store(job, await under_way.popleft())
                if await self._is_gone(job, member):
                    return
                part = chunks[start : start + _EMBED_AT_ONCE]
                under_way.append(asyncio.create_task(self._embedded(part, tokenizer)))
            while under_way:
                await self._store(job, await under_way.popleft())
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _store(self, job: Job, chunks: Sequence[Chunk]) -> None:
        await self._library.put_chunks(job, chunks)
        await self._library.note_progress(job)

    async def _is_gone(self, job: Job, member: CollectionFile) -> bool:
        now = await self._library.find_member(job.tenant, job.collection_id, job.file_id)
        return now is None or now.generation != member.generation or now.status is not FileStatus.IN_PROGRESS

    async def _embedded(self, chunks: Sequence[Chunk], tokenizer: ModelTokenizer) -> list[Chunk]:
        # The title says what a passage out of the middle of a file is about.
        vectors, _ = await self._embedder.embed([f"{chunk.title}\n{chunk.text}" for chunk in chunks], urgent=False)
        tokens = await asyncio.to_thread(lambda: [tokenizer.encode(render(as_document(chunk))) for chunk in chunks])
        return [
            msgspec.structs.replace(chunk, vector=vector.tobytes(), tokens=ids, tokenizer=tokenizer.name)
            for chunk, vector, ids in zip(chunks, vectors, tokens, strict=True)
        ]

    async def _fail(self, job: Job, member: CollectionFile, code: FileErrorCode, message: str) -> None:
        logger.info("ingestion of %s failed: %s", job.file_id, message)
        error = FileError(code=code, message=message)
        # What it was to replace stays.
        failed = msgspec.structs.replace(member, status=FileStatus.FAILED, error=error, replaces=None)
        await self._library.settle(job, failed)


def as_document(chunk: Chunk) -> Document:
    return Document(chunk.document_id, chunk.title, chunk.text)


def _without_vectors(
    texts: Sequence[str], title: str, embedder: EmbedderInfo, tokenizer: ModelTokenizer
) -> list[Chunk]:
    """One chunk for each different text, in order."""
    ids = {chunk_id(embedder.tag, content_id(title, text)): text for text in texts}
    return [
        Chunk(id=each, title=title, text=text, vector=b"", tokens=b"", tokenizer=tokenizer.name)
        for each, text in ids.items()
    ]
