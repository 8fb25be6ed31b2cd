"""Two gateways over one store against a dumb model: any order of uploads, ingestions, removals, deletions, searches."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import AsyncExitStack

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from retrieval.errors import NotFoundError
from retrieval.library import Attachment
from tests.retrieval.conftest import CHUNKING, Parts, retrieval_parts
from tests.retrieval.hashing_embedder import HashingEmbedder

pytestmark = pytest.mark.redis

NAMES = ("ships", "trains", "birds")
GATEWAYS = st.sampled_from((0, 1))
COLLECTIONS = st.sampled_from((0, 1))
FILES = st.sampled_from(NAMES)


class LibraryMachine(RuleBasedStateMachine):
    """`members` says, for each collection, which files are in it and whether they have been ingested."""

    store_url = ""

    @initialize()
    def start(self) -> None:
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        embedder, tenant = HashingEmbedder(), f"m-{uuid.uuid4().hex[:8]}"
        self.gateways: list[Parts] = [
            self.runner.run(self.stack.enter_async_context(retrieval_parts(self.store_url, tenant, embedder)))
            for _ in range(2)
        ]
        self.collections: list[str | None] = [self.runner.run(self.gateways[0].collection()) for _ in range(2)]
        self.members: list[dict[str, bool]] = [{}, {}]
        self.files: dict[str, str] = {}

    @rule(gateway=GATEWAYS, collection=COLLECTIONS, name=FILES)
    def upload(self, gateway: int, collection: int, name: str) -> None:
        parts, collection_id = self.gateways[gateway], self.collections[collection]
        if collection_id is None:
            return
        text = f"A passage on {name}."
        self.files[name] = self.runner.run(parts.attach_only(collection_id, f"{name}.txt", text))
        self.members[collection].setdefault(name, False)

    @rule(gateway=GATEWAYS)
    def ingest(self, gateway: int) -> None:
        self.runner.run(self.gateways[gateway].ingest_all())
        for members in self.members:
            members.update(dict.fromkeys(members, True))

    @rule(gateway=GATEWAYS)
    def crash_in_the_middle(self, gateway: int) -> None:
        self.runner.run(self._crash(self.gateways[gateway]))

    async def _crash(self, parts: Parts) -> None:
        parts.embedder.hold(after=0)
        running = asyncio.create_task(parts.ingestor.run_one())
        held = asyncio.create_task(parts.embedder.held.wait())
        await asyncio.wait([running, held], return_when=asyncio.FIRST_COMPLETED)
        finished = running.done()
        for task in (running, held):
            task.cancel()
        await asyncio.gather(running, held, return_exceptions=True)
        parts.embedder.release()
        if not finished:  # its claim runs out; that it is given up after some crashes is another test's matter
            await parts.commands.run("DEL", "rg:retrieval:attempts")
            for job in await parts.commands.texts("ZRANGE", "rg:retrieval:jobs", 0, -1):
                await parts.commands.run("ZADD", "rg:retrieval:jobs", 0, job)
        elif running.result():  # nothing to embed: the job is done
            await self._note_what_is_done(parts)

    async def _note_what_is_done(self, parts: Parts) -> None:
        for collection_id, members in zip(self.collections, self.members, strict=True):
            if collection_id is not None:
                for member in await parts.library.members(parts.tenant, collection_id):
                    members[member.filename.removesuffix(".txt")] = member.status == "completed"

    @rule(gateway=GATEWAYS, collection=COLLECTIONS, name=FILES)
    def detach(self, gateway: int, collection: int, name: str) -> None:
        parts, collection_id = self.gateways[gateway], self.collections[collection]
        if collection_id is None or name not in self.files:
            return
        removal = parts.library.remove(parts.tenant, collection_id, self.files[name])
        if name in self.members[collection]:
            self.runner.run(removal)
            del self.members[collection][name]
        else:
            with pytest.raises(NotFoundError):
                self.runner.run(removal)

    @rule(gateway=GATEWAYS, name=FILES)
    def delete_file(self, gateway: int, name: str) -> None:
        if name not in self.files:
            return
        parts = self.gateways[gateway]
        self.runner.run(parts.library.delete_file(parts.tenant, self.files.pop(name)))
        for members in self.members:
            members.pop(name, None)

    @rule(gateway=GATEWAYS, collection=COLLECTIONS)
    @precondition(lambda self: None not in self.collections)
    def delete_collection(self, gateway: int, collection: int) -> None:
        parts, collection_id = self.gateways[gateway], self.collections[collection]
        assert collection_id is not None
        self.runner.run(parts.library.delete_collection(parts.tenant, collection_id))
        self.collections[collection] = None
        self.members[collection].clear()

    @rule(name=FILES)
    def attach_a_deleted_file(self, name: str) -> None:
        if name in self.files or self.collections[0] is None:
            return
        parts = self.gateways[0]
        wanted = Attachment("file-0", {}, CHUNKING)
        with pytest.raises(NotFoundError):
            self.runner.run(parts.library.attach(parts.tenant, self.collections[0], wanted))

    @invariant()
    def both_gateways_find_what_is_there_and_nothing_else(self) -> None:
        for parts in self.gateways:
            for collection_id, members in zip(self.collections, self.members, strict=True):
                if collection_id is not None:
                    found = self.runner.run(parts.search(collection_id, "a passage", k=50))
                    assert sorted(found) == sorted(f"{name}.txt" for name, ingested in members.items() if ingested)

    @invariant()
    def no_chunk_is_left_without_a_member(self) -> None:
        parts = self.gateways[0]
        if not any(self.members):
            assert self.runner.run(parts.keys("chunk:*")) == []

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.run(self.stack.aclose())
            self.runner.close()


def test_any_order_of_operations(store_url: str) -> None:
    LibraryMachine.store_url = store_url
    run_state_machine_as_test(
        LibraryMachine,
        settings=settings(max_examples=12, stateful_step_count=20, deadline=None),
    )
