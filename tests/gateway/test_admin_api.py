"""/admin/v1 over a real store: who may do what, what it does, and what is written down of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

import httpx
import pytest
import redis

from gateway.audit_log import Actor, AuditLog
from gateway.store_client import StoreClient
from gateway.tenant_admin import TenantAdmin, TenantDraft, TenantPatch
from gateway.tenant_records import RateLimits
from tests.gateway.admin_client import AdminClient
from tests.gateway.conftest import RunningGateway, run_gateway_thread
from tests.gateway.fake_engine import MODEL, FakeEngine

pytestmark = pytest.mark.redis


@pytest.fixture
def root(stored_gateway: RunningGateway) -> AdminClient:
    return AdminClient(stored_gateway)


def status_of(gateway: RunningGateway, key: str) -> int:
    return gateway.http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code


def error_of(response: httpx.Response) -> dict[str, Any]:
    return response.json()["error"]


# ---------------------------------------------------------------- the life of a key


def test_a_new_key_works_at_once_and_is_shown_once(stored_gateway: RunningGateway, root: AdminClient) -> None:
    made = root.ok("POST", "tenants/alice/keys", {"name": "ci", "expires_in_seconds": 3600})
    key = made["api_key"]
    assert status_of(stored_gateway, key) == 200
    shown = root.ok("GET", f"tenants/alice/keys/{made['key']['id']}")
    assert shown == made["key"]
    assert shown["last_four"] == key[-4:]
    everything = json.dumps(root.ok("GET", "tenants/alice/keys")) + json.dumps(root.ok("GET", "audit"))
    assert key not in everything
    assert "key_hash" not in everything


def test_the_store_holds_no_key(stored_gateway: RunningGateway, root: AdminClient, empty_store_url: str) -> None:
    """Whoever reads the store, or a copy of it, must not be able to use a key."""
    key = root.ok("POST", "tenants/alice/keys", {})["api_key"]
    with redis.Redis(unix_socket_path=empty_store_url.removeprefix("unix://")) as client:
        dump = str([client.hgetall(f"radixgate:{name}") for name in ("tenants", "keys")])
        dump += str(client.xrange("radixgate:audit"))
    assert "key_hash" in dump
    assert key[3:20] not in dump


def test_a_revoked_key_is_refused_at_once_and_for_ever(stored_gateway: RunningGateway, root: AdminClient) -> None:
    """litellm#1775: a revoked key that still worked."""
    made = root.ok("POST", "tenants/alice/keys", {})
    assert status_of(stored_gateway, made["api_key"]) == 200
    for _ in range(2):
        revoked = root.ok("POST", f"tenants/alice/keys/{made['key']['id']}/revoke")
        assert revoked["revoked_at"] is not None
    assert status_of(stored_gateway, made["api_key"]) == 401
    assert root.call("POST", f"tenants/alice/keys/{made['key']['id']}/rotate", {}).status_code == 409


def test_an_expired_key_is_refused_and_shown_by_four_characters_at_most(
    stored_gateway: RunningGateway, root: AdminClient
) -> None:
    """litellm#18731: an expired key was echoed whole in the error."""
    made = root.ok("POST", "tenants/alice/keys", {"expires_in_seconds": 0.01})
    time.sleep(0.02)
    key = made["api_key"]
    response = stored_gateway.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
    assert response.status_code == 401
    assert "has expired" in error_of(response)["message"]
    assert key[-4:] in response.text
    assert key[-5:] not in response.text


def test_rotation_honours_the_grace_period(stored_gateway: RunningGateway, root: AdminClient) -> None:
    """litellm#27193: the old key ended with the rotation, and every client with it."""
    made = root.ok("POST", "tenants/alice/keys", {"role": "tenant-admin"})
    old, path = made["api_key"], f"tenants/alice/keys/{made['key']['id']}"
    new = root.ok("POST", f"{path}/rotate", {"grace_seconds": 3600})
    assert new["key"]["role"] == "tenant-admin"
    assert [status_of(stored_gateway, key) for key in (old, new["api_key"])] == [200, 200]
    assert root.ok("GET", path)["rotated_to"] == new["key"]["id"]
    assert root.call("POST", f"{path}/rotate", {}).status_code == 409


def test_rotation_without_grace_ends_the_old_key_at_once(stored_gateway: RunningGateway, root: AdminClient) -> None:
    made = root.ok("POST", "tenants/alice/keys", {})
    new = root.ok("POST", f"tenants/alice/keys/{made['key']['id']}/rotate", {})
    assert [status_of(stored_gateway, key) for key in (made["api_key"], new["api_key"])] == [401, 200]


def test_grace_does_not_lengthen_a_keys_life(root: AdminClient) -> None:
    made = root.ok("POST", "tenants/alice/keys", {"expires_in_seconds": 100})
    root.ok("POST", f"tenants/alice/keys/{made['key']['id']}/rotate", {"grace_seconds": 10_000})
    ended = root.ok("GET", f"tenants/alice/keys/{made['key']['id']}")
    assert ended["expires_at"] == made["key"]["expires_at"]


def test_a_disabled_tenant_is_refused_and_comes_back(stored_gateway: RunningGateway, root: AdminClient) -> None:
    for disabled, status in ((True, 401), (False, 200)):
        assert root.ok("PATCH", "tenants/alice", {"disabled": disabled})["disabled"] is disabled
        assert status_of(stored_gateway, stored_gateway.keys["alice"]) == status
    assert status_of(stored_gateway, stored_gateway.keys["bob"]) == 200


def test_every_gateway_learns_of_a_revocation_within_a_second(empty_store_url: str) -> None:
    """Two gateways on one store: what one revokes the other refuses."""
    with contextlib.ExitStack() as stack:
        gateways = contextlib.contextmanager(run_gateway_thread)
        one = stack.enter_context(gateways(FakeEngine(), store_url=empty_store_url))
        other = stack.enter_context(gateways(FakeEngine(), store_url=empty_store_url, keys=one.keys))
        key_id = AdminClient(one).new_key("alice", "shared")
        key = one.keys["shared"]
        other.wait_until(lambda: status_of(other, key) == 200)
        AdminClient(one).ok("POST", f"tenants/alice/keys/{key_id}/revoke")
        assert status_of(one, key) == 401
        time.sleep(1.0)  # the promise; it is about five polls
        assert status_of(other, key) == 401


def test_what_the_settings_name_is_made_once_and_stays_revoked(empty_store_url: str) -> None:
    """A restart must not bring a key back that was revoked because it had leaked."""
    keys: dict[str, str] | None = None
    for expected in (200, 401):
        for gateway in run_gateway_thread(FakeEngine(), store_url=empty_store_url, keys=keys):
            keys = gateway.keys
            assert status_of(gateway, keys["alice"]) == expected
            root = AdminClient(gateway)
            (key,) = [k for k in root.ok("GET", "tenants/alice/keys")["data"] if k["role"] == "user"]
            root.ok("POST", f"tenants/alice/keys/{key['id']}/revoke")


def test_a_store_that_was_emptied_is_noticed(
    stored_gateway: RunningGateway, root: AdminClient, empty_store_url: str
) -> None:
    """FLUSHALL while serving: what the settings name is made again, what was made since is gone."""
    root.new_key("alice", "made")
    assert status_of(stored_gateway, stored_gateway.keys["made"]) == 200
    with redis.Redis(unix_socket_path=empty_store_url.removeprefix("unix://")) as client:
        client.flushall()
    stored_gateway.wait_until(lambda: status_of(stored_gateway, stored_gateway.keys["made"]) == 401)
    assert status_of(stored_gateway, stored_gateway.keys["alice"]) == 200
    assert {tenant["id"] for tenant in root.ok("GET", "tenants")["data"]} == {"alice", "bob", "carol", "dave", "root"}


# ---------------------------------------------------------------- tenants and limits


def test_a_tenant_from_creation_to_its_first_answer(stored_gateway: RunningGateway, root: AdminClient) -> None:
    made = root.ok(
        "POST",
        "tenants",
        {"id": "erin", "limits": {"requests_per_minute": 5}, "policy": {"weight": 2.5, "priority": -1}},
    )
    assert made["limits"]["requests_per_minute"] == 5
    root.new_key("erin", "erin")
    with stored_gateway.client("erin") as client:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    (submit,) = stored_gateway.engine.submitted
    assert submit.policy is not None
    assert (submit.tenant_id, submit.priority, submit.policy.weight) == ("erin", -1, 2.5)
    assert root.call("POST", "tenants", {"id": "erin"}).status_code == 409


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"id": "a b"}, "id"),
        ({"id": "a\nb"}, "id"),
        ({"id": "public"}, "id"),
        ({}, "id"),
        ({"id": "x", "limits": {"requests_per_minute": 0}}, "limits.requests_per_minute"),
        ({"id": "x", "limits": {"requests": 1}}, "limits.requests"),
        ({"id": "x", "policy": {"weight": 0}}, "policy.weight"),
        ({"id": "x", "scope": "abc"}, "scope"),
    ],
)
def test_a_bad_tenant_is_400_and_its_field_named(root: AdminClient, body: dict[str, object], param: str) -> None:
    response = root.call("POST", "tenants", body)
    assert (response.status_code, error_of(response)["param"]) == (400, param)


def test_new_limits_hold_from_the_next_request(stored_gateway: RunningGateway, root: AdminClient) -> None:
    root.ok("PUT", "tenants/bob/limits", {"requests_per_minute": 1})
    assert root.ok("GET", "tenants/bob/limits")["limits"]["requests_per_minute"] == 1
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    found = [
        stored_gateway.http.post("/v1/chat/completions", json=body, headers=stored_gateway.headers("bob")).status_code
        for _ in range(2)
    ]
    assert found == [200, 429]


async def test_two_administrators_cannot_undo_each_other_unseen(empty_store_url: str) -> None:
    """Both read, both write: the later write must not bring the earlier one's old values back."""
    store = StoreClient(empty_store_url, timeout=10)

    async def nothing() -> None:
        pass

    admin = TenantAdmin(store, b"s", nothing)
    actor = Actor(name="test")
    await admin.create_tenant(actor, TenantDraft(id="t"))
    await asyncio.gather(
        admin.update_tenant(actor, "t", TenantPatch(name="new")),
        admin.update_tenant(actor, "t", TenantPatch(limits=RateLimits(tokens_per_day=5))),
    )
    record = await admin.tenant("t")
    assert (record.name, record.limits.tokens_per_day) == ("new", 5)
    entries, more = await AuditLog(store).page(None, 10, None)
    assert [entry.line.action for entry in entries] == ["tenant.update", "tenant.update", "tenant.create"]
    assert not more
    await store.close()


# ---------------------------------------------------------------- who may


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "tenants", {"id": "mine"}),
        ("PATCH", "tenants/alice", {"limits": {}}),
        ("PUT", "tenants/alice/limits", {"tokens_per_day": 10**12}),
        ("POST", "tenants/alice/keys", {"role": "operator"}),
        ("PUT", "prompts/p", {"text": "x"}),
        ("DELETE", "prompts/p", None),
        ("PUT", "collections/c", {"documents": []}),
        ("DELETE", "collections/c", None),
    ],
)
def test_an_admin_of_a_tenant_cannot_lift_its_own_limits_or_role(
    stored_gateway: RunningGateway, method: str, path: str, body: object
) -> None:
    assert AdminClient(stored_gateway, "alice-admin").call(method, path, body).status_code == 403


def test_an_operators_key_cannot_be_renewed_into_other_hands(stored_gateway: RunningGateway, root: AdminClient) -> None:
    """A tenant's admin that rotates an operator's key of the same tenant would be handed its successor."""
    key_id = root.new_key("alice", "alice-operator", role="operator")
    admin = AdminClient(stored_gateway, "alice-admin")
    for action in ("rotate", "revoke"):
        body = {} if action == "rotate" else None
        assert admin.call("POST", f"tenants/alice/keys/{key_id}/{action}", body).status_code == 403
    assert status_of(stored_gateway, stored_gateway.keys["alice-operator"]) == 200


def test_lists_hold_only_ones_own(stored_gateway: RunningGateway, root: AdminClient) -> None:
    root.ok("PATCH", "tenants/bob", {"name": "Bob"})
    admin = AdminClient(stored_gateway, "alice-admin")
    admin.ok("POST", "tenants/alice/keys", {})
    assert [tenant["id"] for tenant in admin.ok("GET", "tenants")["data"]] == ["alice"]
    assert {entry["line"]["tenant_id"] for entry in admin.ok("GET", "audit")["data"]} == {"alice"}
    everyone = {entry["line"]["tenant_id"] for entry in root.ok("GET", "audit")["data"]}
    assert {"alice", "bob"} <= everyone


def test_the_audit_log_says_who_did_what_and_pages(stored_gateway: RunningGateway, root: AdminClient) -> None:
    admin = AdminClient(stored_gateway, "alice-admin")
    ids = [admin.ok("POST", "tenants/alice/keys", {"name": str(i)})["key"]["id"] for i in range(5)]
    page = admin.ok("GET", "audit", limit=3)
    rest = admin.ok("GET", "audit", limit=3, before=page["data"][-1]["id"])
    assert page["has_more"] is True
    entries = page["data"] + rest["data"]
    assert [entry["line"]["target"] for entry in entries[:5]] == ids[::-1]
    (own_key,) = [k["id"] for k in root.ok("GET", "tenants/alice/keys")["data"] if k["role"] == "tenant-admin"]
    assert {entry["line"]["actor"]["name"] for entry in entries[:5]} == {own_key}
    assert all(entry["line"]["actor"]["request_id"] for entry in entries[:5])


@pytest.mark.parametrize(
    "query",
    [
        {"limit": "0"},
        {"limit": "x"},
        {"limit": "9" * 5000},
        {"before": "yesterday"},
        {"before": str(2**64)},
        {"since": "1"},
    ],
)
def test_a_bad_query_is_400(root: AdminClient, query: dict[str, str]) -> None:
    assert root.call("GET", "audit", **query).status_code == 400


def test_without_its_store_the_admin_api_is_503_and_chat_goes_on(gateway: RunningGateway) -> None:
    response = AdminClient(gateway).call("GET", "tenants")
    assert (response.status_code, error_of(response)["code"]) == (503, "store_unavailable")
    assert status_of(gateway, gateway.keys["alice"]) == 200
