"""The dashboard over HTTP: who may log in, who may see what, and that the figures are the API's."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from engine.protocol import CacheView, DocumentStart, EvictionLine, OwnerUse, PrefixNode, RequestView
from gateway.auth import hash_api_key
from gateway.dashboard.drawings import (
    BAR_WIDTH,
    NUM_COLORS,
    NUM_HEATS,
    draw_blocks,
    draw_holders,
    draw_tree,
    owner_colors,
)
from gateway.dashboard.login import ATTEMPTS, LoginThrottle
from gateway.dashboard.pages import MEANINGS
from gateway.dashboard.session import FORM_COOKIE, SESSION_COOKIE, Session, SessionSigner
from gateway.history import HistoryWriter
from gateway.metrics import GatewayMetrics
from gateway.store import EmbeddedStore
from gateway.store_client import StoreClient
from gateway.usage import PROMPT_CLASSES
from tests.gateway.conftest import SECRET, RunningGateway
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.operated import PASSWORD, ask, run_operated, run_store
from tests.gateway.test_metrics import record

pytestmark = pytest.mark.redis
PAGES = ("/dashboard", "/dashboard/cache", "/dashboard/live")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedStore]:
    with run_store(tmp_path_factory.mktemp("dashboard")) as running:
        yield running


@pytest.fixture
def operated(store: EmbeddedStore, tmp_path: Path) -> Iterator[RunningGateway]:
    with run_operated(tmp_path, store.url) as running:
        yield running


@contextmanager
def browser(gateway: RunningGateway, credential: str | None = None) -> Generator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=20, follow_redirects=True) as client:
        if credential is not None:
            answer = log_in(client, credential)
            assert answer.status_code == 200
            assert "Overview" in answer.text
        yield client


def log_in(client: httpx.Client, credential: str) -> httpx.Response:
    token = form_token(client.get("/dashboard/login").text)
    return client.post("/dashboard/login", data={"form_token": token, "credential": credential})


def form_token(page: str) -> str:
    match = re.search(r'name="form_token" value="(\w+)"', page)
    assert match is not None
    return match[1]


def figure(page: str, name: str) -> str:
    match = re.search(rf'id="{name}">([^<]*)<', page)
    assert match is not None
    return match[1]


def test_without_a_login_every_page_leads_to_it(operated: RunningGateway) -> None:
    with httpx.Client(base_url=operated.url) as client:
        for path in (*PAGES, "/dashboard/tenants"):
            answer = client.get(path)
            assert (answer.status_code, answer.headers["location"]) == (303, "/dashboard/login")
            # A fragment request must not swap the login form into the page.
            fragment = client.get(path, headers={"hx-request": "true"})
            assert (fragment.status_code, fragment.headers["hx-redirect"]) == (401, "/dashboard/login")


def test_a_tenant_sees_itself_and_the_figures_of_its_responses(operated: RunningGateway) -> None:
    used = [
        operated.client("carol").chat.completions.create(
            model="echo/byte-model", messages=[{"role": "user", "content": "the same long question, asked again"}]
        )
        for _ in range(3)
    ]
    usages = [answer.usage for answer in used if answer.usage is not None]
    details = [usage.prompt_tokens_details for usage in usages if usage.prompt_tokens_details is not None]
    with browser(operated, operated.keys["carol"]) as client:
        operated.wait_until(lambda: figure(client.get("/dashboard").text, "requests") == "3")
        page = client.get("/dashboard").text
        assert figure(page, "prompt-tokens") == f"{sum(usage.prompt_tokens for usage in usages):,}"
        assert figure(page, "output-tokens") == f"{sum(usage.completion_tokens for usage in usages):,}"
        cached = sum(detail.cached_tokens or 0 for detail in details)
        assert cached > 0
        assert figure(page, "cached-tokens") == f"{cached:,}"
        for path in PAGES:
            assert client.get(path).status_code == 200


def test_a_time_stamp_at_the_head_of_a_system_prompt_is_named(operated: RunningGateway) -> None:
    """open-chat-studio#3625, goose#2434: 0% for ever, and nothing said why. The page does, and quotes no prompt."""
    for minute in (15, 16, 17):
        system = {
            "role": "system",
            "content": f"It is 2026-11-29 08:{minute}. You help dave's customers, and are brief.",
        }
        ask(operated, "hi", "dave", messages=[system, {"role": "user", "content": "Where do I begin?"}])
    with browser(operated, operated.keys["dave"]) as client:
        operated.wait_until(lambda: figure(client.get("/dashboard").text, "requests") == "3")
        page = client.get("/dashboard").text
        row = re.search(r"<tr>[^\n]*timestamp_in_system_prompt[^\n]*</tr>", page)
        assert row is not None
        assert "<td>3</td>" in row[0]
        assert "put dates and times at the prompt&#39;s end" in row[0]
        assert "2026-11-29" not in page
        assert re.search(r"<li>[^\n]*timestamp_in_system_prompt", page) is not None
    with browser(operated, operated.keys["alice"]) as client:
        assert "timestamp_in_system_prompt" not in client.get("/dashboard").text


def test_a_tenant_cannot_reach_anothers_page_by_any_url(operated: RunningGateway) -> None:
    ask(operated, "a secret question", "bob")
    with browser(operated, operated.keys["alice"]) as client:
        for path in PAGES:
            for other in ("bob", "nobody", "*"):
                answer = client.get(path, params={"tenant": other})
                assert answer.status_code == 404
            assert client.get(path, params={"tenant": "alice"}).status_code == 200
            assert "bob" not in client.get(path).text
        assert client.get("/dashboard/tenants").status_code == 404
        assert client.get("/dashboard/no-such-page").status_code == 404


def test_the_operator_sees_everyone_and_can_look_at_one(operated: RunningGateway) -> None:
    ask(operated, "hello", "alice")
    ask(operated, "hello", "bob")
    with browser(operated, PASSWORD) as client:
        # The two may be written by two flushes.
        operated.wait_until(lambda: all(name in client.get("/dashboard/tenants").text for name in ("alice", "bob")))
        assert "alice" not in client.get("/dashboard/tenants", params={"search": "BO"}).text
        assert "of tenant <strong>bob</strong>" in client.get("/dashboard", params={"tenant": "bob"}).text


def test_an_operators_key_opens_the_operators_view(operated: RunningGateway) -> None:
    """It ruled over /admin/v1, and on the dashboard saw only the tenant that it belongs to."""
    ask(operated, "hello", "bob")
    with browser(operated, operated.keys["root"]) as client:
        assert client.get("/dashboard", params={"tenant": "bob"}).status_code == 200
        operated.wait_until(lambda: "bob" in client.get("/dashboard/tenants").text)
        assert '<span class="whoami">operator</span>' in client.get("/dashboard").text


@pytest.mark.parametrize("key", ["alice", "alice-admin"])
def test_any_other_key_opens_its_tenants_view_alone(operated: RunningGateway, key: str) -> None:
    with browser(operated, operated.keys[key]) as client:
        assert '<span class="whoami">tenant alice</span>' in client.get("/dashboard").text
        assert client.get("/dashboard", params={"tenant": "bob"}).status_code == 404
        assert client.get("/dashboard/tenants").status_code == 404


def test_a_signed_session_whose_key_has_another_role_is_over(operated: RunningGateway) -> None:
    """A cookie from the time when the key was an operator's."""
    stale = Session(
        role="operator",
        tenant_id="alice",
        stands_on=hash_api_key(SECRET, operated.keys["alice"]),
        until=int(time.time()) + 60,
    )
    with browser(operated) as client:
        client.cookies.set(SESSION_COOKIE, SessionSigner(SECRET).sign(stale))
        assert client.get("/dashboard/tenants").url.path == "/dashboard/login"


def test_a_member_of_a_cache_group_sees_the_groups_blocks_and_its_own_requests(
    store: EmbeddedStore, tmp_path: Path
) -> None:
    """Its KV is the group's: asked for by the tenant's own name, there was none."""
    engine = FakeEngine()
    group = OwnerUse(owner="group:research", num_blocks=77, floor_blocks=0, quota_blocks=None)
    live = [
        RequestView(
            request_id=f"of-{tenant}",
            tenant_id=tenant,
            state="running",
            num_prompt_tokens=8,
            num_cached_tokens=0,
            num_computed_tokens=8,
            num_output_tokens=1,
        )
        for tenant in ("carol", "dave")
    ]
    engine.view = view(engine.view, owners=(group,), requests=tuple(live))
    with run_operated(tmp_path, store.url, engine) as gateway, browser(gateway, gateway.keys["carol"]) as client:
        assert "<td>77</td>" in client.get("/dashboard/cache").text
        page = client.get("/dashboard/live").text
        assert "of-carol" in page
        assert "of-dave" not in page


def test_a_wrong_credential_is_refused_and_not_repeated(operated: RunningGateway) -> None:
    with browser(operated) as client:
        answer = log_in(client, "wrong-<script>alert(1)</script>")
        assert answer.status_code == 401
        assert "alert(1)" not in answer.text
        assert SESSION_COOKIE not in client.cookies


def test_a_form_without_its_token_changes_nothing(operated: RunningGateway) -> None:
    """A foreign page can make a browser send a form, with cookies: not with our token."""
    with browser(operated, operated.keys["alice"]) as client:
        client.post("/dashboard/logout", data={"form_token": "0" * 64})
        assert client.get("/dashboard/cache").url.path == "/dashboard/cache"
        client.post("/dashboard/logout", data={"form_token": form_token(client.get("/dashboard").text)})
        assert client.get("/dashboard/cache").url.path == "/dashboard/login"
    with browser(operated) as client:
        client.get("/dashboard/login")
        answer = client.post("/dashboard/login", data={"credential": operated.keys["alice"]})
        assert answer.status_code == 403
        assert SESSION_COOKIE not in client.cookies


def test_cookies_and_headers_keep_scripts_and_foreign_pages_out(operated: RunningGateway) -> None:
    with httpx.Client(base_url=operated.url) as client:
        page = client.get("/dashboard/login")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "unsafe" not in page.headers["content-security-policy"]
        for attribute in ("HttpOnly", "SameSite=strict", "Path=/dashboard"):
            assert attribute.lower() in page.headers["set-cookie"].lower()


def test_forged_and_old_sessions_are_no_sessions(operated: RunningGateway) -> None:
    signer, foreign = SessionSigner(b"one"), SessionSigner(b"two")
    session = Session(role="operator", tenant_id="", stands_on="x", until=100)
    cookie = signer.sign(session)
    assert signer.read(cookie, now=99) == session
    assert signer.read(cookie, now=101) is None
    assert foreign.read(cookie, now=99) is None
    payload, _, mac = cookie.partition(".")
    for forged in ("", ".", "a.b", f"{payload}.", f"{payload[:-2]}AA.{mac}", "é.é", f"{payload}.{mac}.{mac}"):
        assert signer.read(forged, now=99) is None
    with httpx.Client(base_url=operated.url, cookies={SESSION_COOKIE: cookie, FORM_COOKIE: "x"}) as client:
        assert client.get("/dashboard").status_code == 303


def test_attempts_are_bounded_for_an_address_and_come_back() -> None:
    now = [0.0]
    throttle = LoginThrottle(lambda: now[0])
    assert [throttle.allows("a") for _ in range(ATTEMPTS + 2)] == [True] * ATTEMPTS + [False] * 2
    assert throttle.allows("b")
    now[0] = 61.0
    assert throttle.allows("a")


def test_what_tenants_and_documents_are_called_is_text(store: EmbeddedStore, tmp_path: Path) -> None:
    """A document id that is a script runs in the operator's browser."""
    engine = FakeEngine()
    evil = '"><script>alert(1)</script>'
    owner = OwnerUse(owner=evil, num_blocks=3, floor_blocks=0, quota_blocks=None)
    engine.view = view(engine.view, nodes=(tree_node(0, None, 0, 32, 1, evil),), owners=(owner,))
    with run_operated(tmp_path, store.url, engine) as gateway:
        ask(gateway, "hello", "dave", documents=[{"id": evil, "text": "a document"}])
        with browser(gateway, PASSWORD) as client:
            gateway.wait_until(lambda: "&lt;script&gt;" in client.get("/dashboard", params={"tenant": "dave"}).text)
            for path in (*PAGES, "/dashboard/tenants"):
                assert "<script>alert" not in client.get(path).text


def tree_node(number: int, parent: int | None, first: int, tokens: int, hits: int, owner: str = "o") -> PrefixNode:
    return PrefixNode(
        node=number,
        parent=parent,
        owner=owner,
        first_token=first,
        num_tokens=tokens,
        num_blocks=1,
        hits=hits,
        num_holders=0,
    )


def view(base: CacheView, **changes: object) -> CacheView:
    return msgspec.structs.replace(base, **changes)


def test_engine_and_store_away_leave_a_page_that_says_so(tmp_path: Path) -> None:
    with run_operated(tmp_path, f"unix://{tmp_path}/nothing.sock") as gateway, browser(gateway) as client:
        log_in(client, PASSWORD)
        assert "The store is away" in client.get("/dashboard").text
        assert "The store is away" in client.get("/dashboard/tenants").text
        gateway.engine.reachable = False
        assert "The engine does not answer" in client.get("/dashboard/cache").text


def test_a_thousand_tenants_are_listed_in_pages(store: EmbeddedStore, tmp_path: Path) -> None:
    async def fill() -> None:
        client = StoreClient(store.url)
        writer = HistoryWriter(client, 35, GatewayMetrics())
        for i in range(1000):
            writer.request_finished(record(f"many-{i:04}", time=time.time()))
        await writer.flush()
        await client.close()

    asyncio.run(fill())
    with run_operated(tmp_path, store.url) as gateway, browser(gateway, PASSWORD) as client:
        page = client.get("/dashboard/tenants", params={"search": "many-", "page": "20"}).text
        assert page.count("many-0") + page.count("many-1") > 0
        assert "Page 20 of 20" in page
        for odd in ("0", "-1", "99999999", "x", "²"):
            assert client.get("/dashboard/tenants", params={"page": odd}).status_code == 200


def test_the_tree_is_drawn_with_hot_paths_wide_and_nothing_overlapping() -> None:
    shape = [(0, None, 0, 100, 9), (1, 0, 100, 50, 6), (2, 0, 100, 20, 1), (3, None, 0, 10, 0)]
    tree = draw_tree([tree_node(*row) for row in shape], {"o": 0})
    by_node = {box.node.node: box for box in tree.boxes}
    assert by_node[1].height > 1.5 * by_node[2].height
    assert by_node[1].height + by_node[2].height <= by_node[0].height + 1e-6
    assert sum(by_node[i].height for i in (0, 3)) == pytest.approx(tree.height)
    assert by_node[1].y + by_node[1].height <= by_node[2].y + 1e-6, "the hotter one stands above"
    assert (by_node[0].heat, by_node[3].heat) == (NUM_HEATS - 1, 0)
    assert draw_tree([], {}).boxes == ()


def test_what_is_too_thin_to_see_is_counted_and_not_drawn() -> None:
    crowd = [tree_node(0, None, 0, 16, 10_000), *(tree_node(i, 0, 16, 16, 0) for i in range(1, 401))]
    tree = draw_tree(crowd, {})
    assert (len(tree.boxes), tree.num_left_out) == (1, 400)
    assert tree.boxes[0].color == NUM_COLORS, "an owner without a color of its own"


def test_documents_stand_where_they_begin_and_names_never_run_into_each_other() -> None:
    documents = (DocumentStart(400, "handbook"), DocumentStart(800, "a-document-with-a-long-name"))
    node = msgspec.structs.replace(tree_node(0, None, 0, 960, 3, "acme"), documents=documents)
    (box,) = draw_tree([node], {"acme": 0}).boxes
    assert [(name.x, name.text) for name in box.names[:2]] == [(0.0, "acme"), (400.0, "handbook")]
    assert box.cuts == (400.0, 800.0)
    assert box.names[2].text.endswith("…")
    assert box.figure == "960 tok · 3×"
    assert [(mark.x, mark.text) for mark in draw_tree([node], {}).marks[:3]] == [(0, "0"), (200, "200"), (400, "400")]


def test_the_bar_of_holders_is_the_whole_pool(operated: RunningGateway) -> None:
    owners = tuple(OwnerUse(owner=f"t{i}", num_blocks=10 - i, floor_blocks=0, quota_blocks=None) for i in range(8))
    crowded = view(operated.engine.view, num_blocks=100, block_map=b"f" * 40 + b"c" * 50 + b"a" * 10, owners=owners)
    colors = owner_colors(crowded)
    assert colors == owner_colors(view(crowded, owners=owners[2::-1] + owners[3:])), "whoever grows keeps its color"
    parts = {part.name: part.num_blocks for part in draw_holders(crowded, colors)}
    assert parts == {"t0": 10, "t1": 9, "t2": 8, "t3": 7, "t4": 6, "t5": 5, "others": 7, "in use": 8, "free": 40}
    assert sum(part.width for part in draw_holders(crowded, colors)) == pytest.approx(BAR_WIDTH)
    blocks = draw_blocks(crowded)
    assert (len(blocks.cells), blocks.columns * blocks.rows) == (100, 100)
    assert draw_holders(view(crowded, block_map=b""), colors) == [], "one tenant's view says nothing of the pool"


def test_every_class_of_tokens_has_a_meaning() -> None:
    assert set(MEANINGS) == set(PROMPT_CLASSES)


def test_requests_and_evictions_are_shown_to_whom_they_concern(store: EmbeddedStore, tmp_path: Path) -> None:
    engine = FakeEngine()
    rows = [
        RequestView(
            request_id=f"chat-of-{tenant}",
            tenant_id=tenant,
            state="running",
            num_prompt_tokens=10,
            num_cached_tokens=None,
            num_computed_tokens=5,
            num_output_tokens=0,
        )
        for tenant in ("alice", "bob")
    ]
    engine.view = view(
        engine.view, requests=tuple(rows), evictions=(EvictionLine(owner="bob", pressed_by="x9", num_blocks=4),)
    )
    with run_operated(tmp_path, store.url, engine) as gateway:
        with browser(gateway, gateway.keys["alice"]) as client:
            live = client.get("/dashboard/live").text
            assert "chat-of-alice" in live
            assert "chat-of-bob" not in live
            assert "x9" not in client.get("/dashboard/cache").text
        with browser(gateway, PASSWORD) as client:
            assert "chat-of-bob" in client.get("/dashboard/live").text
            assert "x9" in client.get("/dashboard/cache").text
