"""Files, collections and chunks in Redis: the source of truth of everything that can be retrieved.

    attach ──► member: in_progress ──ingest──► hold chunks ──► settle: completed | failed ──► event
      │             └── job in the queue                           (only if still the same generation)
      └───────────────────────────── remove ──► chunks let go ──► event

- Chunks are written before the record that names them: a crash between leaves chunks that the job, taken up again,
  finds and reuses; never a record without its chunks.
- Chunks are counted by holders (one file in one collection is one holder), and go with the last.
- Whatever several gateways could race about is one Lua script: a file that was removed while it was ingested stays
  removed; the ingestion's end finds another generation, or none, and lets go of what it held.
- Each change raises the collection's version and tells the stream. Readers compare versions, so an event is a hint
  to look again, not a fact to replay: losing one costs nothing.

Every method takes the tenant first, and builds its keys from it: an id of another tenant names nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar, cast

import msgspec

from retrieval import keys
from retrieval.errors import NotFoundError
from retrieval.records import (
    Attributes,
    BatchRecord,
    Chunk,
    Chunking,
    CollectionFile,
    CollectionRecord,
    FileRecord,
    FileStatus,
)
from retrieval.redis_commands import RedisCommands, Value

COLLECTION_PREFIX = "vs_"

# Commands in one round trip; more would hold a connection for long.
_AT_ONCE = 500

Record = TypeVar("Record", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Job:
    """The ingestion of one file into one collection."""

    tenant: str
    collection_id: str
    file_id: str

    def __str__(self) -> str:
        return keys.SEPARATOR.join((self.tenant, self.collection_id, self.file_id))

    @classmethod
    def parse(cls, text: str) -> Job:
        return cls(*text.split(keys.SEPARATOR))


@dataclass(frozen=True, slots=True)
class Attachment:
    """What is asked for when a file is added to a collection."""

    file_id: str
    attributes: Attributes
    chunking: Chunking
    replaces: str | None = None


class Library:
    def __init__(self, redis: RedisCommands) -> None:
        self._redis = redis

    # ------------------------------------------------------------ files

    async def add_file(self, tenant: str, filename: str, purpose: str, content: bytes) -> FileRecord:
        """The id is the content's: the same bytes under the same name again are the file that is there already."""
        file_id = _content_id("file", filename.encode(), purpose.encode(), content)
        known = await self._redis.get(keys.file(tenant, file_id))
        if known is not None:
            return msgspec.json.decode(known, type=FileRecord)
        record = FileRecord(
            id=file_id, filename=filename, num_bytes=len(content), created_at=int(time.time()), purpose=purpose
        )
        await self._redis.run_all(
            [
                ("SET", keys.file_bytes(tenant, file_id), content),
                ("SET", keys.file(tenant, file_id), msgspec.json.encode(record)),
                ("ZADD", keys.files(tenant), time.time(), file_id),
            ],
            atomic=True,
        )
        return record

    async def file(self, tenant: str, file_id: str) -> FileRecord:
        return await self._record(keys.file(tenant, file_id), FileRecord, f"No such file: {file_id[:100]!r}.")

    async def file_bytes(self, tenant: str, file_id: str) -> bytes:
        content = await self._redis.get(keys.file_bytes(tenant, file_id))
        if content is None:
            raise NotFoundError(f"No such file: {file_id[:100]!r}.")
        return content

    async def files(self, tenant: str) -> list[FileRecord]:
        """Oldest first."""
        ids = await self._redis.texts("ZRANGE", keys.files(tenant), 0, -1)
        return await self._records([keys.file(tenant, file_id) for file_id in ids], FileRecord)

    async def delete_file(self, tenant: str, file_id: str) -> list[str]:
        """Deletes the file and takes it out of every collection. The ids of the chunks that are gone with it."""
        await self.file(tenant, file_id)
        await self._redis.run_all(
            [
                ("DEL", keys.file(tenant, file_id), keys.file_bytes(tenant, file_id)),
                ("ZREM", keys.files(tenant), file_id),
            ],
            atomic=True,
        )
        gone: list[str] = []
        for collection_id in await self._redis.texts("SMEMBERS", keys.file_collections(tenant, file_id)):
            gone += (await self._remove(Job(tenant, collection_id, file_id)))[1]
        return gone

    async def file_collections(self, tenant: str, file_id: str) -> list[str]:
        return await self._redis.texts("SMEMBERS", keys.file_collections(tenant, file_id))

    # ------------------------------------------------------------ collections

    async def add_collection(
        self, tenant: str, name: str, description: str, metadata: dict[str, str], *, public: bool = False
    ) -> CollectionRecord:
        record = CollectionRecord(
            id=f"{COLLECTION_PREFIX}{secrets.token_hex(12)}",
            name=name,
            description=description,
            created_at=int(time.time()),
            metadata=metadata,
            public=public,
        )
        await self._redis.run_all(
            [
                ("SET", keys.collection(tenant, record.id), msgspec.json.encode(record)),
                ("ZADD", keys.collections(tenant), time.time(), record.id),
                ("SADD", keys.ALL_COLLECTIONS, f"{tenant}{keys.SEPARATOR}{record.id}"),
            ],
            atomic=True,
        )
        return record

    async def collection(self, tenant: str, collection_id: str) -> CollectionRecord:
        message = f"No such vector store: {collection_id[:100]!r}."
        return await self._record(keys.collection(tenant, collection_id), CollectionRecord, message)

    async def collections(self, tenant: str) -> list[CollectionRecord]:
        """Oldest first."""
        ids = await self._redis.texts("ZRANGE", keys.collections(tenant), 0, -1)
        return await self._records([keys.collection(tenant, each) for each in ids], CollectionRecord)

    async def all_collections(self) -> list[tuple[str, str]]:
        """(tenant, collection) of every tenant."""
        names = [name.partition(keys.SEPARATOR) for name in await self._redis.texts("SMEMBERS", keys.ALL_COLLECTIONS)]
        return [(tenant, collection_id) for tenant, _, collection_id in names]

    async def change_collection(self, tenant: str, record: CollectionRecord) -> None:
        key = keys.collection(tenant, record.id)
        if await self._redis.run("SET", key, msgspec.json.encode(record), "XX") is None:
            raise NotFoundError(f"No such vector store: {record.id[:100]!r}.")
        await self._redis.run("INCR", keys.version(tenant, record.id))
        await self._redis.run("XADD", keys.EVENTS, "*", "tenant", tenant, "collection", record.id)

    async def delete_collection(self, tenant: str, collection_id: str) -> list[str]:
        """The ids of the chunks that are gone with it."""
        await self.collection(tenant, collection_id)
        await self._redis.run_all(
            [
                ("DEL", keys.collection(tenant, collection_id), keys.batches(tenant, collection_id)),
                ("ZREM", keys.collections(tenant), collection_id),
                ("SREM", keys.ALL_COLLECTIONS, f"{tenant}{keys.SEPARATOR}{collection_id}"),
            ],
            atomic=True,
        )
        gone: list[str] = []
        for file_id in await self._redis.hash_all(keys.members(tenant, collection_id)):
            gone += (await self._remove(Job(tenant, collection_id, file_id.decode())))[1]
        await self._redis.run("DEL", keys.version(tenant, collection_id))
        return gone

    async def version(self, tenant: str, collection_id: str) -> int:
        """Rises with every change of what can be found in the collection."""
        return int(await self._redis.get(keys.version(tenant, collection_id)) or 0)

    # ------------------------------------------------------------ members

    async def attach(
        self, tenant: str, collection_id: str, wanted: Attachment, *, batch_id: str | None = None, again: bool = False
    ) -> CollectionFile:
        """Makes a file a member and queues its ingestion. A member in the same state is left alone, unless `again`."""
        file = await self.file(tenant, wanted.file_id)
        known = await self.find_member(tenant, collection_id, wanted.file_id)
        if known is not None:
            if _is_ingested_alike(known, wanted) and not again:
                return await self._with_attributes(tenant, collection_id, known, wanted.attributes)
            await self._remove(Job(tenant, collection_id, file.id))
        record = CollectionFile(
            file_id=file.id,
            filename=file.filename,
            created_at=int(time.time()),
            generation=secrets.token_hex(8),
            status=FileStatus.IN_PROGRESS,
            attributes=wanted.attributes,
            chunking=wanted.chunking,
            replaces=wanted.replaces,
            batch_id=batch_id,
        )
        job = Job(tenant, collection_id, file.id)
        done = await self._redis.script(
            "attach_file",
            [
                keys.members(tenant, collection_id),
                keys.JOBS,
                keys.file_collections(tenant, file.id),
                keys.file(tenant, file.id),
                keys.collection(tenant, collection_id),
                keys.ATTEMPTS,
            ],
            [file.id, msgspec.json.encode(record), str(job), collection_id, time.time()],
        )
        if done != 1:
            raise NotFoundError(f"No such vector store: {collection_id[:100]!r}.")
        return record

    async def find_member(self, tenant: str, collection_id: str, file_id: str) -> CollectionFile | None:
        raw = await self._redis.hash_get(keys.members(tenant, collection_id), file_id)
        return None if raw is None else msgspec.json.decode(raw, type=CollectionFile)

    async def member(self, tenant: str, collection_id: str, file_id: str) -> CollectionFile:
        await self.collection(tenant, collection_id)
        member = await self.find_member(tenant, collection_id, file_id)
        if member is None:
            raise NotFoundError(f"No such file in this vector store: {file_id[:100]!r}.")
        return member

    async def members(self, tenant: str, collection_id: str) -> list[CollectionFile]:
        """Oldest first."""
        raw = await self._redis.hash_all(keys.members(tenant, collection_id))
        records = [msgspec.json.decode(record, type=CollectionFile) for record in raw.values()]
        return sorted(records, key=lambda record: (record.created_at, record.file_id))

    async def change_member(
        self, tenant: str, collection_id: str, file_id: str, change: Mapping[str, object]
    ) -> CollectionFile:
        """Fields to new values, however often others are faster."""
        key = keys.members(tenant, collection_id)
        while True:
            raw = await self._redis.hash_get(key, file_id)
            if raw is None:
                raise NotFoundError(f"No such file in this vector store: {file_id[:100]!r}.")
            record = msgspec.structs.replace(msgspec.json.decode(raw, type=CollectionFile), **change)
            done = await self._redis.script(
                "update_file",
                [key, keys.version(tenant, collection_id), keys.EVENTS],
                [file_id, raw, msgspec.json.encode(record), tenant, collection_id],
            )
            if done == 1:
                return record

    async def remove(self, tenant: str, collection_id: str, file_id: str) -> list[str]:
        """Takes a file out of a collection; at once, also while it is being ingested. The chunks that are gone."""
        await self.collection(tenant, collection_id)
        was_member, gone = await self._remove(Job(tenant, collection_id, file_id))
        if not was_member:
            raise NotFoundError(f"No such file in this vector store: {file_id[:100]!r}.")
        return gone

    async def settle(self, job: Job, record: CollectionFile) -> bool:
        """The end of an ingestion. False: the file was removed, cancelled or attached anew meanwhile."""
        done = await self._redis.script(
            "settle_file",
            [
                keys.members(job.tenant, job.collection_id),
                keys.version(job.tenant, job.collection_id),
                keys.EVENTS,
                keys.JOBS,
                keys.ATTEMPTS,
            ],
            [
                job.file_id,
                record.generation,
                msgspec.json.encode(record),
                job.tenant,
                job.collection_id,
                str(job),
                record.replaces or "",
            ],
        )
        return done == 1

    async def let_go(self, tenant: str, collection_id: str, file_id: str) -> list[str]:
        """Lets go of the chunks of a file that is no member (any more). The chunks that are gone."""
        return (await self._remove(Job(tenant, collection_id, file_id), "orphan"))[1]

    # ------------------------------------------------------------ batches

    async def add_batch(self, tenant: str, collection_id: str, attachments: Sequence[Attachment]) -> BatchRecord:
        await self.collection(tenant, collection_id)
        for wanted in attachments:
            await self.file(tenant, wanted.file_id)  # before anything is attached: all or nothing
        ids = tuple(dict.fromkeys(wanted.file_id for wanted in attachments))
        batch = BatchRecord(id=f"vsfb_{secrets.token_hex(12)}", created_at=int(time.time()), file_ids=ids)
        await self.put_batch(tenant, collection_id, batch)
        for wanted in attachments:
            await self.attach(tenant, collection_id, wanted, batch_id=batch.id)
        return batch

    async def put_batch(self, tenant: str, collection_id: str, batch: BatchRecord) -> None:
        await self._redis.run("HSET", keys.batches(tenant, collection_id), batch.id, msgspec.json.encode(batch))

    async def batch(self, tenant: str, collection_id: str, batch_id: str) -> BatchRecord:
        await self.collection(tenant, collection_id)
        raw = await self._redis.hash_get(keys.batches(tenant, collection_id), batch_id)
        if raw is None:
            raise NotFoundError(f"No such file batch: {batch_id[:100]!r}.")
        return msgspec.json.decode(raw, type=BatchRecord)

    # ------------------------------------------------------------ chunks

    async def put_chunks(self, job: Job, chunks: Sequence[Chunk]) -> set[str]:
        """Holds the chunks for this file, storing new ones. A chunk without a vector is held if it is there already.

        The ids of those that are not.
        """
        missing: set[str] = set()
        for start in range(0, len(chunks), _AT_ONCE):
            part = chunks[start : start + _AT_ONCE]
            names = [
                keys.held_chunks(job.tenant, job.collection_id, job.file_id),
                *(keys.chunk(job.tenant, chunk.id) for chunk in part),
            ]
            args: list[Value] = []
            for chunk in part:
                args += [chunk.id, chunk.title, chunk.text, chunk.vector, chunk.tokens, chunk.tokenizer]
            reply = cast("list[bytes]", await self._redis.script("put_chunks", names, args))
            missing.update(chunk_id.decode() for chunk_id in reply)
        return missing

    async def chunks(self, tenant: str, chunk_ids: Iterable[str]) -> list[Chunk]:
        """In the given order; those that are gone by now are left out."""
        ids = list(chunk_ids)
        found: list[Chunk] = []
        for start in range(0, len(ids), _AT_ONCE):
            part = ids[start : start + _AT_ONCE]
            commands = [
                ("HMGET", keys.chunk(tenant, chunk_id), "title", "text", "vector", "tokens", "tokenizer")
                for chunk_id in part
            ]
            replies = cast("list[list[bytes | None]]", await self._redis.run_all(commands))
            found += [chunk for i, reply in zip(part, replies, strict=True) if (chunk := _chunk(i, reply)) is not None]
            await asyncio.sleep(0)
        return found

    # ------------------------------------------------------------ jobs

    async def claim(self, lease_seconds: float) -> tuple[Job, int] | None:
        """The job that waits longest, and which attempt this is. The claim ends by itself, unless renewed."""
        now = time.time()
        args = [now, now + lease_seconds]
        reply = cast("list[bytes | int]", await self._redis.script("claim_job", [keys.JOBS, keys.ATTEMPTS], args))
        if not reply:
            return None
        name, attempt = cast("tuple[bytes, int]", tuple(reply))
        return Job.parse(name.decode()), attempt

    async def renew(self, job: Job, lease_seconds: float) -> None:
        await self._redis.run("ZADD", keys.JOBS, "XX", time.time() + lease_seconds, str(job))

    async def note_progress(self, job: Job) -> None:
        """The attempts so far were not in vain, and do not count against the file."""
        await self._redis.run("HDEL", keys.ATTEMPTS, str(job))

    async def give_back(self, job: Job) -> None:
        """Undoes a claim."""
        commands = [("ZADD", keys.JOBS, "XX", time.time(), str(job)), ("HINCRBY", keys.ATTEMPTS, str(job), -1)]
        await self._redis.run_all(commands)

    async def forget_job(self, job: Job) -> None:
        await self._redis.run_all([("ZREM", keys.JOBS, str(job)), ("HDEL", keys.ATTEMPTS, str(job))])

    # ------------------------------------------------------------ inside

    async def _with_attributes(
        self, tenant: str, collection_id: str, known: CollectionFile, attributes: Attributes
    ) -> CollectionFile:
        if known.attributes == attributes:
            return known
        return await self.change_member(tenant, collection_id, known.file_id, {"attributes": attributes})

    async def _remove(self, job: Job, condition: str = "") -> tuple[bool, list[str]]:
        tenant, collection_id, file_id = job.tenant, job.collection_id, job.file_id
        reply = await self._redis.script(
            "remove_file",
            [
                keys.members(tenant, collection_id),
                keys.version(tenant, collection_id),
                keys.EVENTS,
                keys.held_chunks(tenant, collection_id, file_id),
                keys.file_collections(tenant, file_id),
                keys.JOBS,
            ],
            [file_id, tenant, collection_id, keys.chunk_prefix(tenant), str(job), condition],
        )
        was, gone = cast("tuple[int, list[bytes]]", reply)
        return was == 1, [chunk_id.decode() for chunk_id in gone]

    async def _record(self, key: str, kind: type[Record], not_found: str) -> Record:
        raw = await self._redis.get(key)
        if raw is None:
            raise NotFoundError(not_found)
        return msgspec.json.decode(raw, type=kind)

    async def _records(self, names: Sequence[str], kind: type[Record]) -> list[Record]:
        raw = cast("list[bytes | None]", await self._redis.run_all([("GET", name) for name in names]))
        return [msgspec.json.decode(each, type=kind) for each in raw if each is not None]


def _is_ingested_alike(known: CollectionFile, wanted: Attachment) -> bool:
    return (
        known.status in (FileStatus.IN_PROGRESS, FileStatus.COMPLETED)
        and known.chunking == wanted.chunking
        and wanted.replaces is None
    )


def _chunk(chunk_id: str, fields: Sequence[bytes | None]) -> Chunk | None:
    title, text, vector, tokens, tokenizer = fields
    if title is None or text is None or vector is None:
        return None
    return Chunk(
        id=chunk_id,
        title=title.decode(),
        text=text.decode(),
        vector=vector,
        tokens=tokens or b"",
        tokenizer=(tokenizer or b"").decode(),
    )


def _content_id(prefix: str, *parts: bytes) -> str:
    digest = blake2b(digest_size=12)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return f"{prefix}-{digest.hexdigest()}"
