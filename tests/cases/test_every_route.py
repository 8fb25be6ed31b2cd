"""Every route, from the server's own table, so that a new one cannot be forgotten.

    foreign ids    404, with the same words as for an id that nobody has (litellm#16303, #35530; bifrost#5025;
                   rag_api#301; ogx#4393), also where only one of several ids is foreign
    own ids        anything but 404: the positive half
    no key         401;  a user's key on /admin/v1: 403

A route with a parameter or a body that is not told of below fails its test.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from litestar.routes import HTTPRoute

from retrieval.redis_commands import connect_store
from tests.gateway.admin_client import AdminClient
from tests.gateway.conftest import RunningGateway, run_gateway_thread
from tests.gateway.fake_engine import MODEL, FakeEngine
from tests.gateway.operated import operated_settings
from tests.gateway.retrieval_gateway import flush
from tests.retrieval.hashing_embedder import HashingEmbedder

pytestmark = pytest.mark.redis

# Without a key: the dashboard has sessions, the metrics a token, each with tests of their own in tests/gateway.
OPEN = ("/livez", "/readyz", "/dashboard", "/metrics")
# Parameters that name nothing of a tenant's.
EVERYBODYS = {"model_id", "prompt_id", "collection_id"}
BODIES: dict[tuple[str, str], Any] = {
    ("POST", "/v1/vector_stores/{store_id}"): {"name": "mine"},
    ("POST", "/v1/vector_stores/{store_id}/search"): {"query": "passage"},
    ("POST", "/v1/vector_stores/{store_id}/files"): {"file_id": "{file_id}"},
    ("POST", "/v1/vector_stores/{store_id}/files/{file_id}"): {"attributes": {}},
    ("POST", "/v1/vector_stores/{store_id}/file_batches"): {"file_ids": ["{file_id}"]},
    ("PATCH", "/admin/v1/tenants/{tenant_id}"): {"name": "x"},
    ("PUT", "/admin/v1/tenants/{tenant_id}/limits"): {},
    ("POST", "/admin/v1/tenants/{tenant_id}/keys"): {},
    ("POST", "/admin/v1/tenants/{tenant_id}/keys/{key_id}/rotate"): {},
    # Without an id in the path; these have one in the body.
    ("POST", "/v1/vector_stores"): {"file_ids": ["{file_id}"]},
    ("POST", "/v1/chat/completions"): {
        "model": MODEL,
        "messages": [{"role": "user", "content": "passage?"}],
        "retrieval": {"vector_store_ids": ["{store_id}"]},
    },
}
SECRET_TEXT = "A passage that is bob's alone"

Route = tuple[str, str]
Ids = dict[str, str]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, store_url: str) -> Iterator[RunningGateway]:
    """With everything that can be mounted."""
    flush(store_url)
    settings = operated_settings(tmp_path_factory.mktemp("routes"), store_url)
    yield from run_gateway_thread(
        FakeEngine(), settings, operated=True, redis=connect_store(store_url), embedder=HashingEmbedder()
    )


def routes_of(gateway: RunningGateway) -> list[Route]:
    return sorted(
        (method, route.path_format)
        for route in gateway.app.routes
        if isinstance(route, HTTPRoute)
        for method in route.methods - {"OPTIONS", "HEAD"}
        if not route.path.startswith(OPEN)
    )


def parameters(value: object) -> list[str]:
    """Names in braces, in a path or anywhere in a body."""
    if isinstance(value, str):
        return [part.partition("}")[0] for part in value.split("{")[1:]]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [name for part in parts for name in parameters(part)]


def filled(value: Any, ids: Ids) -> Any:
    if isinstance(value, str):
        return value.format_map(ids) if "{" in value else value
    if isinstance(value, dict):
        return {name: filled(part, ids) for name, part in value.items()}
    return [filled(part, ids) for part in value] if isinstance(value, list) else value


def objects_of(gateway: RunningGateway, tenant: str, text: str) -> Ids:
    """One of each thing that has an id, fresh; what another test made is left alone."""
    with gateway.client(tenant) as client:
        file = client.files.create(file=("a.txt", text.encode()), purpose="assistants")
        store = client.vector_stores.create(name="docs")
        batch = client.vector_stores.file_batches.create_and_poll(store.id, file_ids=[file.id])
        assert batch.file_counts.completed == 1
        passage = client.vector_stores.search(store.id, query="passage").data[0].model_extra or {}
    key = AdminClient(gateway).ok("POST", f"tenants/{tenant}/keys", {})["key"]["id"]
    return {
        "tenant_id": tenant,
        "key_id": key,
        "file_id": file.id,
        "document_id": passage["document_id"],
        "store_id": store.id,
        "batch_id": batch.id,
    }


def send(gateway: RunningGateway, who: str | None, route: Route, ids: Ids) -> httpx.Response:
    method, path = route
    body = filled(BODIES.get(route), ids)
    headers = {} if who is None else gateway.headers(who)
    return gateway.http.request(method, filled(path, ids), json=body, headers=headers)


def names_of(route: Route) -> list[str]:
    """The ids of a tenant's that a route is about."""
    named = dict.fromkeys([*parameters(route[1]), *parameters(BODIES.get(route))])
    return [name for name in named if name not in EVERYBODYS]


def admin_or_user(route: Route, tenant: str) -> str:
    return f"{tenant}-admin" if route[1].startswith("/admin") else tenant


def without_ids(response: httpx.Response, ids: Ids) -> str:
    text: str = response.json()["error"]["message"]
    for name in ids.values():
        text = text.replace(name, "…")
    return text


@pytest.mark.parametrize("document", ["file", "passage"])
def test_foreign_ids_are_404_on_every_route_and_look_like_none(server: RunningGateway, document: str) -> None:
    theirs, own = objects_of(server, "bob", SECRET_TEXT), objects_of(server, "alice", "A passage of Alice's.")
    if document == "file":
        theirs["document_id"] = theirs["file_id"]
    nobodys = {name: f"{value[:-3]}zzz" for name, value in theirs.items()}
    asked = 0
    for route in routes_of(server):
        names = names_of(route)
        assert set(names) <= set(theirs), f"{route}: what is a foreign id here?"
        for foreign in itertools.product([False, True], repeat=len(names)):
            if not any(foreign):
                continue
            ids = {**own, **{name: theirs[name] for name, is_foreign in zip(names, foreign, strict=True) if is_foreign}}
            unknown = {
                **own,
                **{name: nobodys[name] for name, is_foreign in zip(names, foreign, strict=True) if is_foreign},
            }
            who = admin_or_user(route, "alice")
            answer, none = send(server, who, route, ids), send(server, who, route, unknown)
            assert (answer.status_code, none.status_code) == (404, 404), (route, ids, answer.text, none.text)
            assert without_ids(answer, ids) == without_ids(none, unknown), route
            assert SECRET_TEXT not in answer.text
            asked += 1
    assert asked > 40
    # Nothing of it has done anything.
    with server.client("bob") as bob:
        assert SECRET_TEXT in bob.files.content(theirs["file_id"]).text
        assert [file.id for file in bob.vector_stores.files.list(theirs["store_id"])] == [theirs["file_id"]]
    assert AdminClient(server).ok("GET", f"tenants/bob/keys/{theirs['key_id']}")["revoked_at"] is None


def test_the_same_routes_with_own_ids_answer(server: RunningGateway) -> None:
    """Else the test above would pass on a server that knows no ids at all."""
    for number, route in enumerate(routes_of(server)):
        if names_of(route):
            own = objects_of(server, "bob", f"Text number {number} of bob's.")
            who = "root" if route[1].startswith("/admin") else "bob"
            answer = send(server, who, route, own)
            assert answer.status_code in (200, 201, 204), (route, answer.text)


def test_without_a_key_every_route_is_401(server: RunningGateway) -> None:
    own = objects_of(server, "bob", "One more text of bob's.")
    ids = {**own, "model_id": MODEL, "prompt_id": "p", "collection_id": "c"}
    for route in routes_of(server):
        answer = send(server, None, route, ids)
        assert answer.status_code == 401, (route, answer.text)


def test_a_users_key_gets_nowhere_in_the_admin_api(server: RunningGateway) -> None:
    own = objects_of(server, "alice", "A text of alice's.")
    for tenant in ("alice", "bob", "nobody"):
        ids = {**own, "tenant_id": tenant, "prompt_id": "p", "collection_id": "c"}
        for route in routes_of(server):
            if route[1].startswith("/admin"):
                assert send(server, "alice", route, ids).status_code == 403, route


def test_ids_in_queries_match_nothing_of_anybody_elses(server: RunningGateway) -> None:
    """Usage by a foreign tenant or key: as empty as by one that does not exist."""
    theirs = objects_of(server, "bob", "A text.")
    question = {"model": MODEL, "messages": [{"role": "user", "content": "Hello?"}]}
    for who in ("alice", "bob"):
        assert server.http.post("/v1/chat/completions", json=question, headers=server.headers(who)).status_code == 200

    def results(who: str, path: str, **query: str) -> list[Any]:
        today = int(time.time()) // 86_400 * 86_400
        params = {"start_time": str(today), "bucket_width": "1d", "limit": "1", **query}
        answer = server.http.get(path, params=params, headers=server.headers(who))
        assert answer.status_code == 200, answer.text
        return [result for bucket in answer.json()["data"] for result in bucket["results"]]

    for who, path in (("alice", "/v1/usage"), ("alice-admin", "/admin/v1/usage")):
        assert results(who, path, project_ids="bob") == []
        assert results(who, path, api_key_ids=theirs["key_id"]) == []
        assert results(who, path, project_ids="alice")
    assert results("bob", "/v1/usage", project_ids="bob")
