"""From a file to a searchable one, over a real store: what is embedded, what is kept, what a crash costs."""

from __future__ import annotations

import asyncio

import pytest

from retrieval.errors import NotFoundError
from retrieval.library import Attachment, Job
from retrieval.records import FileStatus
from tests.retrieval.conftest import CHUNKING, Parts, retrieval_parts
from tests.retrieval.hashing_embedder import HashingEmbedder
from tests.retrieval.real_texts import real_text

pytestmark = pytest.mark.redis


async def test_a_file_becomes_searchable_chunks(parts: Parts) -> None:
    collection = await parts.collection()
    text = real_text("argparse")
    file_id = await parts.add(collection, "argparse.txt", text)
    member = await parts.member(collection, file_id)
    assert member.status is FileStatus.COMPLETED
    chunks = await parts.library.chunks(parts.tenant, member.chunk_ids)
    assert len(chunks) == len(member.chunk_ids) > 3
    assert all(len(chunk.text.encode()) <= CHUNKING.max_tokens for chunk in chunks)
    assert all(chunk.tokens for chunk in chunks)
    assert await parts.search(collection, "argument parser") == ["argparse.txt"] * 5


async def test_the_same_bytes_again_are_a_no_op(parts: Parts) -> None:
    """Uploading a document again gave duplicates in every answer (ragflow#12039)."""
    collection = await parts.collection()
    first = await parts.add(collection, "a.txt", real_text("textwrap"))
    embedded, found = len(parts.embedder.embedded), await parts.search(collection, "wrap", k=50)
    assert await parts.add(collection, "a.txt", real_text("textwrap")) == first
    assert len(parts.embedder.embedded) == embedded + 1  # the query
    assert await parts.search(collection, "wrap", k=50) == found
    assert len(await parts.library.files(parts.tenant)) == 1


async def test_an_edited_document_embeds_only_what_changed(parts: Parts) -> None:
    """Greedy packing from the top shifts every later border when a word is put in."""
    collection = await parts.collection()
    text = real_text("argparse") + "\n\n" + real_text("textwrap") + "\n\n" + real_text("json")
    await parts.add(collection, "v1.txt", text)
    num_chunks = len(parts.embedder.embedded)
    parts.embedder.embedded.clear()
    first_line, _, rest = text.partition("\n")
    collection_2 = await parts.collection()
    await parts.add(collection_2, "v1.txt", f"{first_line} with a few more words\n{rest}")
    assert 0 < len(parts.embedder.embedded) <= num_chunks // 3


async def test_a_replacement_enters_and_the_old_file_leaves(parts: Parts) -> None:
    """A stale version that is still retrieved beside the new one (openrag#657)."""
    collection = await parts.collection()
    old = await parts.add(collection, "old.txt", "The office is in Lisbon.")
    new = await parts.add(collection, "new.txt", "The office is in Porto.", replaces=old)
    assert await parts.search(collection, "office") == ["new.txt"]
    assert [member.file_id for member in await parts.library.members(parts.tenant, collection)] == [new]
    assert len(await parts.keys("chunk:*")) == 1


async def test_deleting_is_immediate_and_leaves_nothing(parts: Parts) -> None:
    """Chunks of a deleted document went on being retrieved (ragflow#6462)."""
    collection = await parts.collection()
    file_id = await parts.add(collection, "a.txt", real_text("textwrap"))
    kept = await parts.add(collection, "b.txt", real_text("json"))
    gone = (await parts.member(collection, file_id)).chunk_ids
    assert sorted(await parts.library.delete_file(parts.tenant, file_id)) == sorted(gone)
    assert set(await parts.search(collection, "wrap text", k=50)) == {"b.txt"}
    await parts.library.delete_collection(parts.tenant, collection)
    await parts.library.delete_file(parts.tenant, kept)
    with pytest.raises(NotFoundError):
        await parts.search(collection, "wrap")
    assert await parts.keys("*") == []


async def test_a_chunk_in_two_collections_stays_until_the_last_is_gone(parts: Parts) -> None:
    one, two = await parts.collection(), await parts.collection()
    file_id = await parts.add(one, "a.txt", "A single passage.")
    num_embedded = len(parts.embedder.embedded)
    await parts.add(two, "a.txt", "A single passage.")
    assert len(parts.embedder.embedded) == num_embedded, "embedded once for both"
    assert await parts.library.remove(parts.tenant, one, file_id) == []
    assert await parts.search(two, "passage") == ["a.txt"]
    assert len(await parts.library.remove(parts.tenant, two, file_id)) == 1
    assert await parts.keys("chunk:*") == []


async def test_a_crash_in_the_middle_costs_what_was_under_way(parts: Parts, store_url: str) -> None:
    """What was embedded before the crash is found and not embedded again."""
    collection = await parts.collection()
    text = "\n\n".join(f"Paragraph {i} speaks of subject {i * 7919}. " + "word " * 60 for i in range(200))
    file = await parts.library.add_file(parts.tenant, "long.txt", "assistants", text.encode())
    await parts.library.attach(parts.tenant, collection, Attachment(file.id, {}, CHUNKING))
    parts.embedder.hold(after=2)  # the third batch begins when the first is stored; then the process is killed
    running = asyncio.create_task(parts.ingestor.run_one())
    await parts.embedder.held.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    parts.embedder.release()
    before = len(parts.embedder.embedded)
    stored = len(await parts.keys("chunk:*"))
    assert stored > 0
    assert (await parts.member(collection, file.id)).status is FileStatus.IN_PROGRESS
    await parts.redis.zadd("rg:retrieval:jobs", {str(Job(parts.tenant, collection, file.id)): 0})  # the claim runs out
    async with retrieval_parts(store_url, parts.tenant, parts.embedder) as restarted:
        await restarted.ingest_all()
        member = await restarted.member(collection, file.id)
        assert member.status is FileStatus.COMPLETED
        assert len(parts.embedder.embedded) - before == len(member.chunk_ids) - stored
        assert len(await restarted.search(collection, "subject", k=50)) == 50


async def test_a_file_that_is_removed_while_it_is_ingested_stays_removed(parts: Parts) -> None:
    collection = await parts.collection()
    file = await parts.library.add_file(parts.tenant, "a.txt", "assistants", real_text("json").encode())
    await parts.library.attach(parts.tenant, collection, Attachment(file.id, {}, CHUNKING))
    parts.embedder.hold(after=0)
    running = asyncio.create_task(parts.ingestor.run_one())
    await parts.embedder.held.wait()
    await parts.library.remove(parts.tenant, collection, file.id)
    parts.embedder.release()
    await running
    assert await parts.library.members(parts.tenant, collection) == []
    assert await parts.keys("chunk:*") == []
    assert await parts.search(collection, "json") == []


async def test_an_embedder_that_fails_is_tried_again_and_at_last_given_up(parts: Parts) -> None:
    """A file that takes its worker down with it must not do so for ever."""
    collection = await parts.collection()
    file = await parts.library.add_file(parts.tenant, "a.txt", "assistants", b"text")
    await parts.library.attach(parts.tenant, collection, Attachment(file.id, {}, CHUNKING))
    parts.embedder.failures = 10
    for _ in range(3):
        with pytest.raises(Exception, match="started anew"):
            await parts.ingestor.run_one()
        await parts.redis.zadd("rg:retrieval:jobs", {str(Job(parts.tenant, collection, file.id)): 0})
    await parts.ingestor.run_one()
    member = await parts.member(collection, file.id)
    assert member.status is FileStatus.FAILED
    assert member.error is not None
    assert member.error.code == "server_error"
    assert not await parts.ingestor.run_one()


async def test_attributes_change_without_ingesting_again(parts: Parts) -> None:
    collection = await parts.collection()
    file_id = await parts.add(collection, "a.txt", "Some passage.", {"year": 1990.0})
    num_embedded = len(parts.embedder.embedded)
    await parts.add(collection, "a.txt", "Some passage.", {"year": 1991.0})
    assert (await parts.member(collection, file_id)).attributes == {"year": 1991.0}
    assert len(parts.embedder.embedded) == num_embedded


async def test_another_tenant_finds_nothing_under_these_ids(parts: Parts) -> None:
    """Files and collections that were readable across tenants by their ids (rag_api#301)."""
    collection = await parts.collection()
    file_id = await parts.add(collection, "a.txt", "Some passage.")
    for attempt in (
        parts.library.file("other", file_id),
        parts.library.file_bytes("other", file_id),
        parts.library.collection("other", collection),
        parts.library.member("other", collection, file_id),
        parts.library.remove("other", collection, file_id),
        parts.library.delete_file("other", file_id),
        parts.library.delete_collection("other", collection),
        parts.library.attach("other", collection, Attachment(file_id, {}, CHUNKING)),
        parts.indexes.current(("other", collection)),
    ):
        with pytest.raises(NotFoundError):
            await attempt
    assert await parts.search(collection, "passage") == ["a.txt"]


async def test_another_embedder_means_ingesting_again(parts: Parts, store_url: str) -> None:
    """Vectors of two models cannot be compared: searched together, they give nonsense that looks like results."""
    collection = await parts.collection()
    await parts.add(collection, "a.txt", "Some passage.")
    async with retrieval_parts(store_url, parts.tenant, HashingEmbedder(fingerprint="hashing2-and-more")) as changed:
        assert await changed.search(collection, "passage") == [], "not compared"
        await changed.ingestor.renew_stale()
        await changed.ingest_all()
        assert await changed.search(collection, "passage") == ["a.txt"]
        assert len(await changed.keys("chunk:*")) == 1, "the old vectors are gone"
        await changed.ingestor.renew_stale()
        assert not await changed.ingestor.run_one()


async def test_a_gateway_that_stops_gives_its_work_back(parts: Parts, store_url: str) -> None:
    """Waiting for a dead claim to run out is for crashes; three restarts must not count as three failures."""
    collection = await parts.collection()
    file_id = await parts.attach_only(collection, "a.txt", "Some passage.")
    for _ in range(4):
        async with retrieval_parts(store_url, parts.tenant, parts.embedder) as stopped:
            parts.embedder.hold(after=0)
            await stopped.ingestor.start()
            await parts.embedder.held.wait()
        parts.embedder.release()
    await parts.ingest_all()
    assert (await parts.member(collection, file_id)).status is FileStatus.COMPLETED
