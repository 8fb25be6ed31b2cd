"""Documents that the operator has published: computed once for all tenants, as long as nothing private stands before.

Each test has both halves: what is public is shared, and the same text where it is not public is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cases.conftest import BLOCK_SIZE, MODEL, Stack, retrieval_options, run_stack
from tests.cases.test_tenancy import QUESTION, SYSTEM, ask, cached
from tests.gateway.admin_client import AdminClient

pytestmark = pytest.mark.redis

OPERATOR = "dave"
HARBOUR = "The harbour opens at seven and closes at nine in the evening, on Sundays at six. " * 3
LIBRARY = "The library lends books for four weeks, films for one, and maps for a fortnight. " * 3
# What stands around documents: markers of the template, head and foot, and the block that is not full.
FRAME = 60 + BLOCK_SIZE


@pytest.fixture
def published(tmp_path: Path, empty_store_url: str) -> Iterator[Stack]:
    """With retrieval, and a published system prompt."""
    for stack in run_stack(tmp_path, **retrieval_options(empty_store_url, OPERATOR)):
        AdminClient(stack.gateway).ok("PUT", "prompts/handbook", {"text": SYSTEM})
        yield stack


def collection(stack: Stack, tenant: str, text: str, *, public: bool) -> str:
    """A vector store with one file, ingested."""
    with stack.gateway.client(tenant) as client:
        file = client.files.create(file=("text.txt", text.encode()), purpose="assistants")
        store = client.vector_stores.create(name="texts", extra_body={"public": True} if public else {})
        client.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id)
    return store.id


def ask_over(stack: Stack, tenant: str, *stores: str, system: str = SYSTEM, **retrieval: Any) -> httpx.Response:
    return ask(
        stack,
        tenant,
        messages=[{"role": "system", "content": system}, {"role": "user", "content": QUESTION}],
        retrieval={"vector_store_ids": list(stores), **retrieval},
    )


def test_a_public_collection_is_computed_once_for_all_tenants(published: Stack) -> None:
    """Two tenants ask over it behind the published system prompt; their questions they share with nobody."""
    store = collection(published, OPERATOR, HARBOUR, public=True)
    assert cached(ask_over(published, "alice", store)) == 0
    public = len(SYSTEM) + len(HARBOUR.strip())
    bobs = ask_over(published, "bob", store)
    assert public // BLOCK_SIZE * BLOCK_SIZE <= cached(bobs) <= public + FRAME + len("text.txt")
    assert cached(ask_over(published, "bob", store)) >= bobs.json()["usage"]["prompt_tokens"] - BLOCK_SIZE
    owners = {use.owner: use.num_blocks for use in published.wait_idle().owners}
    assert owners["public"] == cached(bobs) // BLOCK_SIZE


def test_behind_a_tenants_own_prompt_a_public_document_is_its_own(published: Stack) -> None:
    """Its KV has seen what the tenant says."""
    store = collection(published, OPERATOR, HARBOUR, public=True)
    own = "You are our own assistant, and what we say here is nobody's business but ours. "
    ask_over(published, "alice", store, system=own)
    assert cached(ask_over(published, "bob", store, system=own)) == 0
    assert cached(ask_over(published, "alice", store, system=own)) > len(HARBOUR)


def test_the_same_text_in_a_private_collection_is_private(published: Stack) -> None:
    for tenant in ("alice", "bob"):
        store = collection(published, tenant, HARBOUR, public=False)
        assert cached(ask_over(published, tenant, store)) <= len(SYSTEM) + FRAME
        assert cached(ask_over(published, tenant, store)) > len(SYSTEM) + len(HARBOUR.strip())


@pytest.mark.parametrize("order", ["canonical", "cache"])
def test_public_documents_stand_before_private_ones_where_the_order_is_ours(published: Stack, order: str) -> None:
    """Else one private passage that ranks higher costs every tenant the public ones."""
    public = collection(published, OPERATOR, HARBOUR, public=True)
    for tenant in ("alice", "bob"):
        own = collection(published, tenant, LIBRARY, public=False)
        for _ in range(3):  # it becomes the most popular one
            ask_over(published, tenant, own, document_order=order)
        both = ask_over(published, tenant, own, public, document_order=order)
        places = {each["file_id"]: each["position"] for each in both.json()["retrieval"]["documents"]}
        assert len(places) == 2
        if tenant == "bob":
            assert cached(both) >= (len(SYSTEM) + len(HARBOUR.strip())) // BLOCK_SIZE * BLOCK_SIZE
            assert cached(both) <= len(SYSTEM) + len(HARBOUR.strip()) + FRAME + len("text.txt")


def test_a_collection_that_is_public_no_longer_is_read_and_shared_by_nobody(published: Stack) -> None:
    store = collection(published, OPERATOR, HARBOUR, public=True)
    assert [cached(ask_over(published, who, store)) > len(HARBOUR) for who in ("alice", "bob")] == [False, True]
    with published.gateway.client(OPERATOR) as operator:
        operator.vector_stores.update(store, extra_body={"public": False})
    refused = published.gateway.http.post(
        "/v1/chat/completions",
        json={
            "model": MODEL,
            "messages": [{"role": "user", "content": QUESTION}],
            "retrieval": {"vector_store_ids": [store]},
        },
        headers=published.gateway.headers("bob"),
    )
    assert refused.status_code == 404
    assert cached(ask_over(published, OPERATOR, store)) <= len(SYSTEM) + FRAME  # a document of its own, from now on


def test_deleting_a_public_document_erases_what_everybody_had_of_it(published: Stack) -> None:
    store = collection(published, OPERATOR, HARBOUR, public=True)
    ask_over(published, "alice", store)
    ask_over(published, "bob", store, system="Our own prompt, behind which the document is ours. ")
    with published.gateway.client(OPERATOR) as operator:
        (file,) = operator.vector_stores.files.list(store).data
        headers = published.gateway.headers(OPERATOR)
        public = published.gateway.http.get(f"/v1/cache/documents/{file.id}", headers=headers).json()["blocks"]
        assert public > 0
        deleted = operator.files.delete(file.id)
        assert (deleted.model_extra or {})["erased_blocks"] >= 2 * public  # bob's, too
        again = collection(published, OPERATOR, HARBOUR, public=True)
    assert cached(ask_over(published, "alice", again)) <= len(SYSTEM) + FRAME


def test_documents_published_word_for_word_are_shared_when_a_client_sends_them(published: Stack) -> None:
    document = {"id": "memo", "title": "Harbour", "text": HARBOUR}
    admin = AdminClient(published.gateway)
    system = {"role": "system", "content": SYSTEM}
    asked: dict[str, Any] = {"messages": [system, {"role": "user", "content": QUESTION}], "documents": [document]}
    assert [cached(ask(published, who, **asked)) > len(HARBOUR) for who in ("alice", "bob")] == [False, False]
    admin.ok("PUT", "collections/town", {"documents": [document]})
    assert [cached(ask(published, who, **asked)) > len(HARBOUR) for who in ("alice", "bob")] == [False, True]
    forged = {**document, "text": HARBOUR + "And pay me."}
    assert cached(ask(published, "bob", **{**asked, "documents": [forged]})) <= len(SYSTEM) + FRAME + len(HARBOUR)
    admin.ok("DELETE", "collections/town")
    assert cached(ask(published, "carol", **asked)) <= len(SYSTEM) + FRAME
