"""Files, vector stores, search and embeddings as the unchanged `openai` SDK sees them."""

from __future__ import annotations

import base64
import socket
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from tests.gateway.retrieval_gateway import RetrievalGateway, retrieval
from tests.retrieval.real_texts import real_text

__all__ = ["retrieval"]
pytestmark = pytest.mark.redis


def test_the_whole_path(retrieval: RetrievalGateway) -> None:
    """Store, upload, poll, search, delete, search again: nothing of it needs more than the SDK."""
    with retrieval.client() as client:
        store = client.vector_stores.create(name="python", metadata={"team": "docs"})
        assert (store.status, store.file_counts.total) == ("completed", 0)
        file = client.files.create(file=("json.txt", real_text("json").encode()), purpose="assistants")
        member = client.vector_stores.files.create_and_poll(
            file.id, vector_store_id=store.id, attributes={"year": 2001, "kind": "module"}
        )
        assert (member.status, member.last_error, member.attributes) == (
            "completed",
            None,
            {"year": 2001, "kind": "module"},
        )
        assert member.usage_bytes > 0
        other = client.files.create(file=("csv.txt", real_text("csv").encode()), purpose="assistants")
        client.vector_stores.files.create_and_poll(other.id, vector_store_id=store.id, attributes={"year": 2003})
        assert client.vector_stores.retrieve(store.id).file_counts.completed == 2
        query = "serialize obj as a JSON formatted stream"
        hits = client.vector_stores.search(store.id, query=query)
        assert hits.data[0].filename == "json.txt"
        assert 0 < hits.data[0].score <= 1
        assert hits.data[0].content[0].text
        only = client.vector_stores.search(
            store.id, query="JSON", filters={"type": "eq", "key": "year", "value": 2003}, max_num_results=3
        )
        assert {hit.filename for hit in only.data} == {"csv.txt"}
        assert len(only.data) <= 3
        texts = client.vector_stores.files.content(file.id, vector_store_id=store.id)
        assert "JSON" in "".join(part.text or "" for part in texts.data)
        assert client.files.content(file.id).read() == real_text("json").encode()
        assert client.vector_stores.files.delete(file.id, vector_store_id=store.id).deleted
        after = client.vector_stores.search(
            store.id, query="serialize obj as a JSON formatted stream", max_num_results=50
        )
        assert {hit.filename for hit in after.data} == {"csv.txt"}
        assert client.vector_stores.delete(store.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.vector_stores.search(store.id, query="JSON")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/usr/share/common-licenses/GPL-3", "patent licenses"),
        ("/usr/share/doc/bc/bc.html", "precision"),
        ("/usr/share/doc/shared-mime-info/shared-mime-info-spec.pdf", "MIME types"),
    ],
)
def test_real_files(retrieval: RetrievalGateway, name: str, words: str) -> None:
    path = Path(name)
    if not path.exists():
        pytest.skip(f"{name} is not on this machine")
    with retrieval.client() as client:
        store_id, _ = retrieval.store_with(client, {path.name: path.read_bytes()})
        hits = client.vector_stores.search(store_id, query=words)
    assert len(hits.data) == 10
    assert any(word.lower() in hits.data[0].content[0].text.lower() for word in words.split())


@pytest.mark.parametrize(
    ("name", "content", "code", "says"),
    [
        ("a.txt", b"\xfd\x81" * 100, "invalid_file", "UTF"),
        ("a.bin", b"a\x00b" * 100, "unsupported_file", "binary"),
        ("a.docx", b"PK\x03\x04rest", "unsupported_file", ".docx"),
        ("a.pdf", b"%PDF-1.4\nnothing of a PDF follows", "invalid_file", "PDF"),
        ("a.txt", b" \n \n", "invalid_file", "no text"),
    ],
)
def test_a_wrong_file_fails_with_a_reason(
    retrieval: RetrievalGateway, name: str, content: bytes, code: str, says: str
) -> None:
    """Parsers are fed by strangers: what they cannot read is the file's failure, not the server's."""
    with retrieval.client() as client:
        store = client.vector_stores.create()
        file = client.files.create(file=(name, content), purpose="assistants")
        member = client.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id)
        assert member.status == "failed"
        assert member.last_error is not None
        assert member.last_error.code == code
        assert says in member.last_error.message
        assert client.vector_stores.retrieve(store.id).file_counts.failed == 1


def send(retrieval: RetrievalGateway, tenant: str, method: str, path: str, body: object) -> httpx.Response:
    gateway = retrieval.gateway
    return gateway.http.request(method, f"/v1{path}", json=body, headers=gateway.headers(tenant))


def test_public_collections_are_the_operators_and_only_readable(retrieval: RetrievalGateway) -> None:
    with retrieval.client("dave") as operator:
        file = operator.files.create(file=("law.txt", b"The law of the land."), purpose="assistants")
        store = operator.vector_stores.create(name="laws", extra_body={"public": True})
        operator.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id)
        private = operator.vector_stores.create(name="drafts")
    with retrieval.client("alice") as alice:
        assert alice.vector_stores.search(store.id, query="law").data[0].filename == "law.txt"
        assert retrieval.ask(alice, "What law?", store.id).usage is not None
        assert (alice.vector_stores.retrieve(store.id).model_extra or {})["public"] is True
        for attempt in (
            lambda: alice.vector_stores.delete(store.id),
            lambda: alice.vector_stores.files.delete(file.id, vector_store_id=store.id),
            lambda: alice.vector_stores.search(private.id, query="law"),
            lambda: alice.files.retrieve(file.id),
        ):
            with pytest.raises(openai.NotFoundError):
                attempt()
        with pytest.raises(openai.PermissionDeniedError):
            alice.vector_stores.create(name="mine", extra_body={"public": True})
    with retrieval.client("dave") as operator:
        operator.vector_stores.update(store.id, extra_body={"public": False})
    with retrieval.client("alice") as alice, pytest.raises(openai.NotFoundError):
        alice.vector_stores.search(store.id, query="law")


def test_a_stores_files_are_listed_and_filtered_by_status(retrieval: RetrievalGateway) -> None:
    """The query could not be read at all: every list was a 500."""
    with retrieval.client() as client:
        store, ids = retrieval.store_with(client, {"a.txt": "One.", "b.txt": "Two."})
        files = client.vector_stores.files
        assert {file.id for file in files.list(store)} == set(ids.values())
        assert len(files.list(store, filter="completed").data) == 2
        assert files.list(store, filter="failed").data == []
        with pytest.raises(openai.BadRequestError) as caught:
            files.list(store, extra_query={"filter": "lost"})
    assert caught.value.param == "filter"


def test_lists_are_paged_as_the_sdk_pages_them(retrieval: RetrievalGateway) -> None:
    with retrieval.client() as client:
        ids = [client.files.create(file=(f"{i}.txt", f"Text {i}.".encode()), purpose="assistants").id for i in range(7)]
        assert [file.id for file in client.files.list(limit=3, order="asc")] == ids
        assert [file.id for file in client.files.list(limit=2)] == list(reversed(ids))
        page = client.files.list(limit=3, order="asc", after=ids[1])
        assert ([file.id for file in page.data], page.has_more) == (ids[2:5], True)
        with pytest.raises(openai.BadRequestError):
            client.files.list(limit=3, after="file-nothing")
        stores = [client.vector_stores.create(name=str(i)).id for i in range(3)]
        assert [store.id for store in client.vector_stores.list(limit=2)] == list(reversed(stores))
        before = client.vector_stores.list(order="asc", before=stores[2], limit=1)
        assert [store.id for store in before.data] == [stores[1]]


def test_a_cancelled_batch_ends_what_has_not_ended(retrieval: RetrievalGateway) -> None:
    with retrieval.client() as client:
        store = client.vector_stores.create()
        ids = [client.files.create(file=(f"{i}.txt", f"Text {i}.".encode()), purpose="assistants").id for i in range(4)]
        retrieval.gateway.on_loop(lambda: retrieval.embedder.hold(after=0))
        batch = client.vector_stores.file_batches.create(store.id, file_ids=ids)
        cancelled = client.vector_stores.file_batches.cancel(batch.id, vector_store_id=store.id)
        retrieval.gateway.on_loop(retrieval.embedder.release)
        assert (cancelled.status, cancelled.file_counts.cancelled) == ("cancelled", 4)
        assert client.vector_stores.search(store.id, query="Text").data == []


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_embeddings(retrieval: RetrievalGateway, encoding_format: str) -> None:
    with retrieval.client() as client:
        answer = client.embeddings.create(model="hashing", input=["one two", "three"])
        assert [item.index for item in answer.data] == [0, 1]
        assert len(answer.data[0].embedding) == 64
        assert abs(np.linalg.norm(answer.data[0].embedding) - 1) < 1e-5
        assert answer.usage.prompt_tokens == 3
        raw = send(
            retrieval,
            "alice",
            "POST",
            "/embeddings",
            {"model": "hashing", "input": "one two", "encoding_format": encoding_format},
        )
        sent = raw.json()["data"][0]["embedding"]
        values = np.frombuffer(base64.b64decode(sent), "<f4") if encoding_format == "base64" else np.array(sent)
        assert np.allclose(values, answer.data[0].embedding, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": [1, 2, 3]}, "input"),  # LangChain's default: ids of another model's tokenizer
        ({"input": [[1, 2], [3]]}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": "word " * 300}, "input"),
        ({"dimensions": 7}, "dimensions"),
        ({"model": "text-embedding-3-small"}, "model"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_embeddings_that_cannot_be_made_are_named(
    retrieval: RetrievalGateway, change: dict[str, object], param: str
) -> None:
    response = send(retrieval, "alice", "POST", "/embeddings", {"model": "hashing", "input": "text", **change})
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/vector_stores", {"expires_after": {"anchor": "last_active_at", "days": 1}}, "expires_after"),
        ("/vector_stores", {"metadata": {"a": 1}}, "metadata[...]"),
        (
            "/vector_stores",
            {
                "chunking_strategy": {
                    "type": "static",
                    "static": {"max_chunk_size_tokens": 1, "chunk_overlap_tokens": 0},
                }
            },
            "chunking_strategy.static.max_chunk_size_tokens",
        ),
        ("/vector_stores/{store}/search", {"query": ""}, "query"),
        ("/vector_stores/{store}/search", {"query": "a", "max_num_results": 51}, "max_num_results"),
        (
            "/vector_stores/{store}/search",
            {"query": "a", "filters": {"type": "like", "key": "a", "value": "b"}},
            "filters.type",
        ),
        (
            "/vector_stores/{store}/search",
            {"query": "a", "filters": {"type": "and", "filters": [{"type": "gt", "key": "a", "value": "b"}]}},
            "filters.filters[0].value",
        ),
        (
            "/vector_stores/{store}/search",
            {"query": "a", "ranking_options": {"ranker": "rerank"}},
            "ranking_options.ranker",
        ),
        ("/vector_stores/{store}/files", {}, "file_id"),
        ("/vector_stores/{store}/file_batches", {}, "file_ids"),
    ],
)
def test_a_bad_field_is_400_and_named(retrieval: RetrievalGateway, path: str, body: object, param: str) -> None:
    with retrieval.client() as client:
        store = client.vector_stores.create().id
    response = send(retrieval, "alice", "POST", path.replace("{store}", store), body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_uploads_that_are_refused(retrieval: RetrievalGateway) -> None:
    with retrieval.client() as client:
        for content, purpose in ((b"", "assistants"), (b"x" * ((1 << 20) + 1), "assistants"), (b"x", "fine-tune")):
            with pytest.raises(openai.APIStatusError) as caught:
                client.files.create(file=("a.txt", content), purpose=purpose)  # pyright: ignore[reportArgumentType]
            assert caught.value.status_code in (400, 413)
        assert client.files.list().data == []
        name = client.files.create(file=("../../etc/pass\nwd", b"x"), purpose="assistants").filename
        assert name == "passwd"


def test_the_same_upload_again_is_the_same_file(retrieval: RetrievalGateway) -> None:
    """Uploading again gave duplicates in every answer (ragflow#12039)."""
    with retrieval.client() as client:
        store, ids = retrieval.store_with(client, {"a.txt": "A passage."})
        again = client.files.create(file=("a.txt", b"A passage."), purpose="assistants")
        assert again.id == ids["a.txt"]
        member = client.vector_stores.files.create_and_poll(again.id, vector_store_id=store)
        assert member.status == "completed"
        assert len(client.vector_stores.search(store, query="passage").data) == 1


def test_a_client_that_leaves_while_it_uploads_is_no_error_of_ours(
    retrieval: RetrievalGateway, caplog: pytest.LogCaptureFixture
) -> None:
    """The framework calls it an internal error: it counted as one of ours, and any client could write tracebacks."""
    caplog.set_level("INFO")
    gateway = retrieval.gateway
    head = f"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: {gateway.headers()['authorization']}\r\n"
    form = "content-type: multipart/form-data; boundary=b\r\ncontent-length: 1000\r\n\r\n--b\r\ncontent-disposition: fo"
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        client.sendall((head + form).encode())
    gateway.wait_until(lambda: any("/v1/files" in record.getMessage() for record in caplog.records))
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
