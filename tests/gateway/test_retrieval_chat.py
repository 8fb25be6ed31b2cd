"""Chat with retrieval: what is found, where it stands, what is cached of it, and what the answer says about it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Barrier
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from engine.protocol import SegmentKind
from gateway.served_model import num_tokens
from tests.gateway.conftest import four_tenants, new_keys
from tests.gateway.fake_engine import BLOCK_SIZE, MODEL
from tests.gateway.retrieval_gateway import (
    SETTINGS,
    RetrievalGateway,
    cached_tokens,
    flush,
    retrieval,
    retrieval_of,
    running,
)
from tests.retrieval.hashing_embedder import HashingEmbedder

__all__ = ["retrieval"]
pytestmark = pytest.mark.redis

CITIES: dict[str, str | bytes] = {
    "lisbon.txt": "Lisbon is the capital of Portugal. The river Tagus flows through Lisbon into the Atlantic. " * 3,
    "vienna.txt": "Vienna is the capital of Austria. The river Danube flows through Vienna to the Black Sea. " * 3,
    "paris.txt": "Paris is the capital of France. The river Seine flows through Paris to the Channel at Le Havre. " * 3,
    "rome.txt": "Rome is the capital of Italy. The river Tiber flows through Rome into the Tyrrhenian Sea. " * 3,
}
ALL = "Which capital has which river: Lisbon, Vienna, Paris, Rome?"


def documents_of(answer: Any) -> list[dict[str, Any]]:
    documents = retrieval_of(answer)["documents"]
    assert isinstance(documents, list)
    return documents


def by_position(answer: Any) -> list[str]:
    return [each["filename"] for each in sorted(documents_of(answer), key=lambda each: each["position"])]


def test_a_question_is_answered_from_documents_and_says_which(retrieval: RetrievalGateway) -> None:
    with retrieval.client() as client:
        store, ids = retrieval.store_with(client, CITIES)
        question = "The river Danube flows through Vienna to the Black Sea."
        answer = retrieval.ask(client, question, store, max_num_results=2)
    report = retrieval_of(answer)
    assert (report["query"], report["document_order"]) == (question, "cache")
    best = documents_of(answer)[0]
    assert (best["filename"], best["file_id"], best["rank"]) == ("vienna.txt", ids["vienna.txt"], 0)
    assert best["score"] == 1.0
    prompt = retrieval.engine.prompt(retrieval.engine.submitted[-1])
    assert "Vienna is the capital of Austria" in prompt
    assert prompt.index("You answer.") < prompt.index("Vienna is") < prompt.index(question)
    (citation,) = (answer.choices[0].message.model_extra or {})["citations"]
    assert answer.choices[0].message.content == question  # the fake engine says what it was asked
    assert question[citation["start"] : citation["end"]] == citation["text"]
    assert [source["id"] for source in citation["sources"]] == [best["id"]]
    assert citation["sources"][0]["document"]["title"] == "vienna.txt"


def test_a_stream_ends_with_the_same_report(retrieval: RetrievalGateway) -> None:
    with retrieval.client() as client:
        store, _ = retrieval.store_with(client, CITIES)
        whole = retrieval.ask(client, ALL, store)
        chunks = list(
            client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "system", "content": "You answer."}, {"role": "user", "content": ALL}],
                extra_body={"retrieval": {"vector_store_ids": [store]}},
                stream=True,
            )
        )
    with_report = [chunk for chunk in chunks if (chunk.model_extra or {}).get("retrieval")]
    assert with_report == chunks[-1:]
    assert (chunks[-1].model_extra or {})["retrieval"]["documents"] == documents_of(whole)
    streamed = (chunks[-1].choices[0].delta.model_extra or {})["citations"]
    assert streamed == (whole.choices[0].message.model_extra or {})["citations"]


def test_file_search_as_a_tool_is_the_same_retrieval(retrieval: RetrievalGateway) -> None:
    with retrieval.client() as client:
        store, _ = retrieval.store_with(client, CITIES)
        tool = {"type": "file_search", "vector_store_ids": [store], "max_num_results": 1}
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Vienna, Danube?"}]
        answer = client.chat.completions.create(model=MODEL, messages=messages, extra_body={"tools": [tool]})
        assert by_position(answer) == ["vienna.txt"]
        none = client.chat.completions.create(
            model=MODEL, messages=messages, extra_body={"tools": [tool], "tool_choice": "none"}
        )
        assert "retrieval" not in (none.model_extra or {})


def test_another_order_of_the_same_documents_keeps_the_hit(retrieval: RetrievalGateway) -> None:
    """Chunks ordered by score, another way for each question: a full prefill for each (open-webui#19905)."""
    with retrieval.client() as client:
        store, _ = retrieval.store_with(client, CITIES)
        first = retrieval.ask(client, ALL, store)
        other = retrieval.ask(client, "Rome, Italy, Tiber, Tyrrhenian Sea; and Paris, Vienna, Lisbon?", store)
        assert [each["filename"] for each in documents_of(first)] != [each["filename"] for each in documents_of(other)]
        assert by_position(first) == by_position(other)
        documents = [s for s in retrieval.engine.submitted[-1].segments if s.kind is SegmentKind.DOCUMENT]
        assert cached_tokens(other) >= sum(map(len, documents))
        relevance = retrieval.ask(client, "Rome! Rome! Tiber?", store, document_order="relevance")
        assert by_position(relevance) == [each["filename"] for each in documents_of(relevance)]


def test_the_best_document_can_be_kept_next_to_the_question(retrieval: RetrievalGateway) -> None:
    with retrieval.client() as client:
        store, _ = retrieval.store_with(client, CITIES)
        for order in ("cache", "canonical", "relevance"):
            answer = retrieval.ask(client, "Rome and the Tiber?", store, pin_top=1, document_order=order)
            assert by_position(answer)[-1] == "rome.txt" == documents_of(answer)[0]["filename"]


def test_the_note_on_ranks_stands_where_it_breaks_nothing(retrieval: RetrievalGateway) -> None:
    with retrieval.client() as client:
        store, _ = retrieval.store_with(client, CITIES)
        retrieval.ask(client, ALL, store, rank_note=True)
    prompt = retrieval.engine.prompt(retrieval.engine.submitted[-1])
    assert prompt.index("End of documents.") < prompt.index("most relevant first:\n1. ") < prompt.index(ALL)


def test_a_conversation_keeps_its_documents_where_they_were(retrieval: RetrievalGateway) -> None:
    """A second turn that retrieves anew at the head of the prompt computes the whole conversation again."""
    with retrieval.client() as client:
        store, _ = retrieval.store_with(client, CITIES)
        body = {"retrieval": {"vector_store_ids": [store], "max_num_results": 1}}
        messages: list[ChatCompletionMessageParam] = [
            {"role": "system", "content": "You answer."},
            {"role": "user", "content": "The river of Vienna?"},
        ]
        prompts: list[str] = []
        lengths: list[int] = []
        for question in ("The river of Rome?", "And the river of Paris?", "Vienna once more, its river?"):
            answer = client.chat.completions.create(model=MODEL, messages=messages, extra_body=body)
            prompts.append(retrieval.engine.prompt(retrieval.engine.submitted[-1]))
            lengths.append(num_tokens(retrieval.engine.submitted[-1].segments))
            messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
            messages.append({"role": "user", "content": question})
        last = client.chat.completions.create(model=MODEL, messages=messages, extra_body=body)
    prompts.append(retrieval.engine.prompt(retrieval.engine.submitted[-1]))
    assert all(later.startswith(earlier) for earlier, later in pairwise(prompts))
    assert prompts[-1].count("Vienna is the capital") == prompts[0].count("Vienna is the capital"), "it stands already"
    assert [each["position"] for each in documents_of(last)] == [None]
    assert cached_tokens(last) > lengths[-1] - BLOCK_SIZE


def test_a_conversation_that_outgrew_the_context_goes_on_with_this_turns_documents(retrieval: RetrievalGateway) -> None:
    with retrieval.client() as client:
        filler = {f"{i}.txt": f"Subject {i}: " + f"word{i} " * 45 for i in range(40)}
        store, _ = retrieval.store_with(client, dict(filler))
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "word0"}]
        body = {"retrieval": {"vector_store_ids": [store], "max_num_results": 5}}
        for i in range(1, 6):
            answer = client.chat.completions.create(model=MODEL, messages=messages, extra_body=body)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
            messages.append({"role": "user", "content": " ".join(f"word{j}" for j in range(5 * i, 5 * i + 5))})
        answer = client.chat.completions.create(model=MODEL, messages=messages, extra_body=body)
    assert all(each["position"] is not None for each in documents_of(answer))


def test_deleting_a_file_erases_its_kv_and_says_how_much(retrieval: RetrievalGateway) -> None:
    """One operation: not in the search, not in the cache (ragflow#6462)."""
    with retrieval.client() as client:
        store, ids = retrieval.store_with(client, CITIES)
        first = retrieval.ask(client, ALL, store)
        deleted = client.files.delete(ids["rome.txt"])
        assert (deleted.model_extra or {})["erased_blocks"] > 0
        assert retrieval.engine.erased[-1].owner == "alice"
        rome = next(each["id"] for each in documents_of(first) if each["filename"] == "rome.txt")
        assert retrieval.engine.erased[-1].document_ids == (rome,)
        after = retrieval.ask(client, ALL, store)
        assert "rome.txt" not in by_position(after)
        assert (client.files.with_raw_response.list().http_response.json())["data"][0]["id"] != ids["rome.txt"]


def test_files_that_are_deleted_while_others_ask_are_in_no_answer_that_began_later(store_url: str) -> None:
    """Two gateways, a file deleted through either while both are asked: no error, and nothing that was gone already."""
    flush(store_url)
    keys = new_keys()
    with running(store_url, keys=keys) as one, running(store_url, keys=keys) as two:
        with one.client() as client:
            store, ids = one.store_with(client, CITIES)
        deleted: list[str] = []
        together = Barrier(5)

        def keep_asking(gateway: RetrievalGateway) -> int:
            answers = 0
            with gateway.client() as client:
                together.wait(60)
                while len(deleted) < len(CITIES) - 1:
                    gone = set(deleted)
                    found = {each["filename"] for each in documents_of(gateway.ask(client, ALL, store))}
                    assert not found & gone
                    answers += 1
            return answers

        with ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(keep_asking, gateway) for gateway in (one, two, one, two)]
            together.wait(60)
            for gateway, name in zip((one, two, one), list(ids)[:-1], strict=True):
                with gateway.client() as client:
                    client.files.delete(ids[name])
                deleted.append(name)
            assert all(each.result(60) for each in asking)
        for gateway in (one, two):
            with gateway.client() as client:
                assert by_position(gateway.ask(client, ALL, store)) == [list(ids)[-1]]
            gateway.gateway.wait_until(lambda gateway=gateway: not gateway.engine.running)


def test_kv_of_a_deleted_file_is_erased_once_the_engine_is_back(retrieval: RetrievalGateway) -> None:
    """Lost in an engine's restart, the erasure would leave a deleted document in the persistent tiers."""
    with retrieval.client() as client:
        store, ids = retrieval.store_with(client, CITIES)
        retrieval.ask(client, ALL, store)
        retrieval.engine.reachable = False
        deleted = client.files.delete(ids["rome.txt"])
        assert (deleted.model_extra or {})["erased_blocks"] is None
        retrieval.engine.reachable = True
        retrieval.gateway.wait_until(lambda: bool(retrieval.engine.erased))


def test_a_document_as_a_unit_of_the_cache(retrieval: RetrievalGateway) -> None:
    gateway = retrieval.gateway

    def call(method: str, path: str) -> dict[str, Any]:
        response = gateway.http.request(method, f"/v1/cache/documents/{path}", headers=gateway.headers("alice"))
        assert response.status_code == 200, response.text
        return response.json()

    with retrieval.client() as client:
        store, ids = retrieval.store_with(client, CITIES)
        file = ids["paris.txt"]
        assert call("GET", file)["blocks"] == 0
        document = documents_of(retrieval.ask(client, "The river of Paris?", store, max_num_results=1))[0]["id"]
    cached = call("GET", file)
    assert cached["blocks"] == cached["blocks_by_tier"]["device"] > 0
    assert (cached["document_ids"], cached["pinned"]) == ([document], False)
    assert call("POST", f"{file}/pin")["pinned"] is True
    assert call("GET", document)["pinned"] is True
    assert call("POST", f"{file}/unpin")["pinned"] is False
    assert call("DELETE", document)["erased_blocks"] >= cached["blocks"]
    assert call("GET", file)["blocks"] == 0


def cache_call(retrieval: RetrievalGateway, name: str, method: str, document: str) -> httpx.Response:
    gateway = retrieval.gateway
    return gateway.http.request(method, f"/v1/cache/documents/{document}", headers=gateway.headers(name))


def ask_about(retrieval: RetrievalGateway, name: str) -> None:
    """With a document of the client's own, which no collection holds."""
    with retrieval.client(name) as client:
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What does it say?"}],
            extra_body={"documents": [{"id": "handbook", "text": "The handbook says nothing. " * 40}]},
        )


def test_a_document_of_a_cache_group_is_counted_and_erased_for_the_group(retrieval: RetrievalGateway) -> None:
    """Its blocks belong to the group's account, so an erasure in the tenant's name found none of them."""
    for name in ("carol", "alice"):
        ask_about(retrieval, name)
    blocks = cache_call(retrieval, "carol", "GET", "handbook").json()["blocks"]
    assert blocks > 0
    assert cache_call(retrieval, "dave", "GET", "handbook").json()["blocks"] == blocks
    assert cache_call(retrieval, "carol", "DELETE", "handbook").json()["erased_blocks"] >= blocks
    assert cache_call(retrieval, "carol", "GET", "handbook").status_code == 404
    assert cache_call(retrieval, "alice", "GET", "handbook").json()["blocks"] > 0


def test_what_is_public_is_counted_and_erased_for_the_operator_alone(retrieval: RetrievalGateway) -> None:
    root = retrieval.gateway.headers("root")
    text = {"documents": [{"id": "handbook", "text": "The handbook says nothing. " * 40}]}
    published = retrieval.gateway.http.put("/admin/v1/collections/c", json=text, headers=root)
    assert published.status_code == 200, published.text
    ask_about(retrieval, "alice")
    assert retrieval.engine.submitted[-1].segments[0].owner == "public"
    assert cache_call(retrieval, "root", "GET", "handbook").json()["blocks"] > 0
    assert cache_call(retrieval, "alice", "DELETE", "handbook").status_code == 404
    assert cache_call(retrieval, "root", "DELETE", "handbook").json()["erased_blocks"] > 0
    assert cache_call(retrieval, "root", "GET", "handbook").status_code == 404


def test_a_first_question_finds_its_document_warm(store_url: str) -> None:
    """Prefilled when it was ingested, behind the system prompt that this tenant's questions have."""
    flush(store_url)
    ahead = msgspec.structs.replace(SETTINGS.retrieval, prefill_tokens_per_minute=100_000)
    with (
        running(store_url, msgspec.structs.replace(SETTINGS, retrieval=ahead)) as retrieval,
        retrieval.client() as client,
    ):
        empty, _ = retrieval.store_with(client, {})
        retrieval.ask(client, "Anything?", empty)
        store, _ = retrieval.store_with(client, CITIES)
        retrieval.gateway.wait_until(lambda: sum(s.when_idle for s in retrieval.engine.submitted) >= len(CITIES))
        retrieval.gateway.wait_until(lambda: not retrieval.engine.running)
        assert all(s.sampling.max_tokens == 1 for s in retrieval.engine.submitted if s.when_idle)
        answer = retrieval.ask(client, "The river of Paris?", store, max_num_results=1)
        document = next(s for s in retrieval.engine.submitted[-1].segments if s.kind is SegmentKind.DOCUMENT)
        assert cached_tokens(answer) >= 0.8 * len(document)


def test_nothing_is_prefilled_ahead_while_an_upload_is_embedded(store_url: str) -> None:
    """The engine was idle, but not the cores: prefilling the first files slowed down the ingestion of the others."""
    flush(store_url)
    ahead = msgspec.structs.replace(SETTINGS.retrieval, prefill_tokens_per_minute=100_000)
    with (
        running(store_url, msgspec.structs.replace(SETTINGS, retrieval=ahead)) as retrieval,
        retrieval.client() as client,
    ):

        def num_prefilled() -> int:
            return sum(submit.when_idle for submit in retrieval.engine.submitted)

        empty, _ = retrieval.store_with(client, {})
        retrieval.ask(client, "Anything?", empty)
        retrieval.gateway.on_loop(lambda: retrieval.embedder.hold(after=1))
        names = ("rome.txt", "paris.txt")
        ids = [client.files.create(file=(name, str(CITIES[name]).encode()), purpose="assistants").id for name in names]
        store = client.vector_stores.create()
        client.vector_stores.file_batches.create(store.id, file_ids=ids)
        retrieval.gateway.wait_until(lambda: client.vector_stores.retrieve(store.id).file_counts.completed == 1)
        assert retrieval.embedder.held.is_set()
        assert num_prefilled() == 0
        retrieval.gateway.on_loop(retrieval.embedder.release)
        retrieval.gateway.wait_until(lambda: num_prefilled() >= len(names))


def test_what_a_pinned_collection_holds_is_kept_warm_and_on_disk(store_url: str) -> None:
    """Also a file that comes later: the collection is pinned, not what it held that day."""
    flush(store_url)
    ahead = msgspec.structs.replace(SETTINGS.retrieval, prefill_tokens_per_minute=100_000)
    with (
        running(store_url, msgspec.structs.replace(SETTINGS, retrieval=ahead)) as retrieval,
        retrieval.client() as client,
    ):
        gateway = retrieval.gateway

        def call(method: str, path: str) -> dict[str, Any]:
            response = gateway.http.request(method, f"/v1/cache/documents/{path}", headers=gateway.headers("alice"))
            assert response.status_code == 200, response.text
            return response.json()

        def pinned_documents() -> set[str]:
            last = [submit.segments[-1] for submit in retrieval.engine.submitted if submit.when_idle]
            return {segment.document_id or "" for segment in last if segment.pinned}

        store, ids = retrieval.store_with(client, {"rome.txt": CITIES["rome.txt"]})
        retrieval.ask(client, "Anything?", store)
        gateway.wait_until(lambda: any(submit.when_idle for submit in retrieval.engine.submitted))
        assert pinned_documents() == set()
        assert call("GET", ids["rome.txt"])["pinned"] is False
        assert call("POST", f"{store}/pin")["pinned"] is True
        (rome,) = call("GET", ids["rome.txt"])["document_ids"]
        gateway.wait_until(lambda: pinned_documents() == {rome})
        paris = client.vector_stores.files.upload_and_poll(
            vector_store_id=store, file=("paris.txt", str(CITIES["paris.txt"]).encode())
        )
        assert call("GET", paris.id)["pinned"] is True
        assert call("POST", f"{store}/warm")["pinned"] is True
        gateway.wait_until(lambda: len(pinned_documents()) == 2)
        assert call("POST", f"{store}/unpin")["pinned"] is False
        assert call("GET", paris.id)["pinned"] is False
        foreign = gateway.http.post(f"/v1/cache/documents/{store}/pin", headers=gateway.headers("bob"))
        assert foreign.status_code == 404


def test_a_rewritten_query_is_what_is_searched(retrieval: RetrievalGateway) -> None:
    with retrieval.client() as client:
        store, _ = retrieval.store_with(client, CITIES)
        answer = retrieval.ask(client, "Vienna?", store, rewrite_query=True, max_num_results=1)
    rewriting = retrieval.engine.submitted[0]
    assert rewriting.request_id.startswith("rewrite-")
    assert rewriting.sampling.temperature == 0
    assert retrieval_of(answer)["query"] == "user: Vienna?"  # what the fake engine says to the rewriting prompt


RERANKED = {"ranker": "rerank", "score_threshold": 0.9}


def test_the_best_candidate_is_prefilled_while_the_reranker_decides(store_url: str) -> None:
    """The reranker answers only when the guess was made. The guess is for an idle engine, and is taken back."""
    flush(store_url)
    embedder = HashingEmbedder(has_reranker=True)
    with running(store_url, embedder=embedder) as retrieval, retrieval.client() as client:
        store, _ = retrieval.store_with(client, CITIES)

        async def until_guessed() -> None:
            for _ in range(4000):
                if any(submit.when_idle for submit in retrieval.engine.submitted):
                    return
                await asyncio.sleep(0.005)
            raise AssertionError("nothing was guessed")

        embedder.before_rerank = until_guessed
        answer = retrieval.ask(client, "river Danube Vienna Black Sea", store, ranking_options=RERANKED)
        assert [(each["filename"], each["score"]) for each in documents_of(answer)] == [("vienna.txt", 1.0)]
        (guess,) = [submit for submit in retrieval.engine.submitted if submit.when_idle]
        assert guess.segments == retrieval.engine.submitted[-1].segments[: len(guess.segments)]
        assert guess.segments[-1].kind is SegmentKind.DOCUMENT
        assert (guess.sampling.max_tokens, guess.counted) == (1, False)
        retrieval.gateway.wait_until(lambda: not retrieval.engine.running)
        embedder.before_rerank = long_enough_to_guess
        known = len(retrieval.engine.submitted)
        body = {"use_cache": False, "retrieval": {"vector_store_ids": [store], "ranking_options": RERANKED}}
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Danube?"}]
        client.chat.completions.create(model=MODEL, messages=messages, extra_body=body)
        assert [submit.use_cache for submit in retrieval.engine.submitted[known:]] == [False]


async def long_enough_to_guess() -> None:
    await asyncio.sleep(0.2)


def test_who_leaves_nothing_in_the_cache_leaves_no_guesses_there_either(store_url: str) -> None:
    """sglang#38069: a tenant that opted out still left entries. Not by prefilling ahead, rewriting, or guessing."""
    flush(store_url)
    ahead = msgspec.structs.replace(SETTINGS.retrieval, prefill_tokens_per_minute=100_000)
    settings = msgspec.structs.replace(SETTINGS, retrieval=ahead)
    keys = new_keys()
    tenants = [msgspec.structs.replace(each, no_store=each.id == "alice") for each in four_tenants(keys)]
    embedder = HashingEmbedder(has_reranker=True)
    embedder.before_rerank = long_enough_to_guess
    with running(store_url, settings, embedder=embedder, keys=keys, tenants=tenants) as retrieval:
        for tenant in ("alice", "bob"):
            with retrieval.client(tenant) as client:
                empty, _ = retrieval.store_with(client, {})
                retrieval.ask(client, "Anything?", empty)
                store, _ = retrieval.store_with(client, CITIES)
                retrieval.ask(client, "Danube?", store, rewrite_query=True, ranking_options=RERANKED)
        retrieval.gateway.wait_until(lambda: sum(s.when_idle for s in retrieval.engine.submitted) >= len(CITIES))
        stored = {submit.tenant_id for submit in retrieval.engine.submitted if submit.use_cache}
        assert stored == {"bob"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"retrieval": {}}, "retrieval.vector_store_ids"),
        ({"retrieval": {"vector_store_ids": []}}, "retrieval.vector_store_ids"),
        ({"retrieval": {"vector_store_ids": ["vs_1"], "document_order": "best"}}, "retrieval.document_order"),
        ({"retrieval": {"vector_store_ids": ["vs_1"], "surprise": 1}}, "retrieval.surprise"),
        ({"retrieval": {"vector_store_ids": ["vs_1"], "filters": {"type": "eq"}}}, "retrieval.filters.key"),
        ({"retrieval": {"vector_store_ids": ["vs_1"]}, "documents": [{"text": "a"}]}, "documents"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].vector_store_ids"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"document_order": "cache"}, "document_order"),
    ],
)
def test_a_bad_field_is_named(retrieval: RetrievalGateway, body: dict[str, object], param: str) -> None:
    with retrieval.client() as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}], extra_body=body)
    assert caught.value.param == param


def test_a_clients_own_documents_stay_as_given_unless_it_asks(retrieval: RetrievalGateway) -> None:
    documents = [{"id": name, "text": f"Document {name} speaks of {name * 30}."} for name in "dbac"]
    with retrieval.client() as client:
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Which?"}]
        for order, expected in (("given", "dbac"), ("canonical", "abcd")):
            client.chat.completions.create(
                model=MODEL, messages=messages, extra_body={"documents": documents, "document_order": order}
            )
            sent = retrieval.engine.submitted[-1].segments
            assert "".join(s.document_id or "" for s in sent if s.kind is SegmentKind.DOCUMENT) == expected
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, extra_body={"documents": documents, "document_order": "cache"}
        )
    assert cached_tokens(answer) > 0


def test_two_gateways_answer_alike(store_url: str) -> None:
    """What one has taken in, the other finds; what one has deleted, the other does not give out."""
    flush(store_url)
    keys = new_keys()
    with running(store_url, keys=keys) as one, running(store_url, keys=keys) as two:
        with one.client() as client:
            store, ids = one.store_with(client, CITIES)
        with two.client() as client:
            assert "rome.txt" in by_position(two.ask(client, ALL, store))
            client.files.delete(ids["rome.txt"])
        with one.client() as client:
            assert "rome.txt" not in by_position(one.ask(client, ALL, store))
