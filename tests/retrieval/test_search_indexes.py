"""Two gateways over one store: what one changes, the other finds; what one deletes, the other does not."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from retrieval.errors import StoreUnavailableError
from retrieval.filters import compile_filter
from tests.retrieval.conftest import Parts, retrieval_parts
from tests.retrieval.real_texts import real_text

pytestmark = pytest.mark.redis


async def test_a_deletion_on_one_gateway_is_seen_by_the_next_search_on_another(parts: Parts, store_url: str) -> None:
    """An event may be late; the version that a search asks for is not."""
    collection = await parts.collection()
    file_id = await parts.add(collection, "a.txt", real_text("textwrap"))
    async with retrieval_parts(store_url, parts.tenant, parts.embedder) as other:
        assert await other.search(collection, "wrap", k=1) == ["a.txt"]
        await parts.library.remove(parts.tenant, collection, file_id)
        assert await other.search(collection, "wrap", k=1) == []
        await parts.add(collection, "b.txt", real_text("json"))
        assert await other.search(collection, "json", k=1) == ["b.txt"]


async def test_a_gateway_that_starts_fills_its_indexes_and_follows(parts: Parts, store_url: str) -> None:
    collection = await parts.collection()
    await parts.add(collection, "a.txt", "First passage.")
    async with retrieval_parts(store_url, parts.tenant, parts.embedder) as other:
        await other.indexes.start()
        await _until_loaded(other, collection, 1)
        await parts.add(collection, "b.txt", "Second passage.")
        await _until_loaded(other, collection, 2)


async def _until_loaded(parts: Parts, collection: str, num_passages: int) -> None:
    for _ in range(500):
        if parts.indexes.num_passages((parts.tenant, collection)) == num_passages:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the change was never taken in")


async def test_without_redis_a_loaded_collection_is_still_searched(
    parts: Parts, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis is never on a request's critical path."""
    collection = await parts.collection()
    await parts.add(collection, "a.txt", "First passage.")
    async with retrieval_parts(store_url, parts.tenant, parts.embedder) as other:
        assert await other.search(collection, "passage") == ["a.txt"]
        monkeypatch.setattr(other.commands, "_commands", Redis.from_url("unix:///nowhere/at/all"))
        assert await other.search(collection, "passage") == ["a.txt"]
        with pytest.raises(StoreUnavailableError):
            await other.search("vs_unknown", "passage")


async def test_filters_select_files_by_their_attributes(parts: Parts) -> None:
    collection = await parts.collection()
    await parts.add(collection, "old.txt", "A passage on ships.", {"year": 1990.0, "kind": "book"})
    await parts.add(collection, "new.txt", "A passage on trains.", {"year": 2020.0, "kind": "book"})
    await parts.add(collection, "none.txt", "A passage on birds.")
    vectors, _ = await parts.embedder.embed(["passage"], urgent=True)

    async def names(raw: object) -> set[str]:
        name = (parts.tenant, collection)
        found = await parts.indexes.search(name, vectors[0], "passage", 10, keep=compile_filter(raw))
        return {each.passage.filename for each in found}

    assert await names({"type": "gte", "key": "year", "value": 2000}) == {"new.txt"}
    assert await names({"type": "eq", "key": "kind", "value": "book"}) == {"old.txt", "new.txt"}
    assert await names({"type": "eq", "key": "kind", "value": "film"}) == set()
    assert await names({"type": "ne", "key": "kind", "value": "book"}) == {"none.txt"}


async def test_the_same_text_in_two_files_is_one_hit(parts: Parts) -> None:
    collection = await parts.collection()
    await parts.add(collection, "a.txt", "The very same passage.")
    await parts.add(collection, "b.txt", "The very same passage.")
    await parts.add(collection, "c.txt", "Another passage.")
    assert len(await parts.search(collection, "passage")) == 2


async def test_two_gateways_share_the_work_and_nothing_is_done_twice(parts: Parts, store_url: str) -> None:
    collection = await parts.collection()
    names = ["json", "textwrap", "argparse", "csv"]
    async with retrieval_parts(store_url, parts.tenant, parts.embedder) as other:
        for name in names:
            await parts.attach_only(collection, f"{name}.txt", real_text(name))
        await asyncio.gather(parts.ingest_all(), other.ingest_all())
        assert len(parts.embedder.embedded) == len(set(parts.embedder.embedded))
        assert set(await parts.search(collection, "json wrap argument", k=50)) <= {f"{name}.txt" for name in names}
        assert await other.search(collection, "csv", k=50) == await parts.search(collection, "csv", k=50)
