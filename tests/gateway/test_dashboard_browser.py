"""The dashboard in a real browser, over the whole engine on the fake device.

With RADIXGATE_TEST_SCREENSHOTS=DIRECTORY the pages are also saved as pictures, for a look at them.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from engine.client import EngineClient
from engine.engine import LLMEngine
from engine.measured_engine import MeasuredEngine
from engine.server import EngineServer
from engine.settings import EngineSettings
from tests.engine.fake_runner import FakeRunner
from tests.engine.harness import engine_info
from tests.gateway.byte_tokenizer import byte_tokenizer
from tests.gateway.chat_templates import CHATML, SPECIAL_TOKENS
from tests.gateway.conftest import RunningGateway, run_gateway_thread
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.operated import PASSWORD, operated_settings, run_store

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.redis,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NUM_BLOCKS = 192  # few, so that something is evicted
BLOCK_SIZE = 16
PAGES = ("/dashboard", "/dashboard/cache", "/dashboard/live", "/dashboard/tenants")
SYSTEM = "You answer from the given documents, in one short sentence, and say so when they do not hold the answer. " * 2


@dataclass
class Used:
    requests: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0


@dataclass
class Loaded:
    """A gateway with some load behind it, and what the API said of it."""

    gateway: RunningGateway
    used: dict[str, Used]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    directory = tmp_path_factory.mktemp("browser")
    with run_store(directory) as store, engine_server(directory) as server:
        client = EngineClient(server.endpoint)
        settings = operated_settings(directory, store.url)
        for gateway in run_gateway_thread(cast("FakeEngine", client), settings, operated=True):
            gateway.wait_until(lambda: client.info is not None)
            yield Loaded(gateway, generate_load(gateway))


@contextmanager
def engine_server(directory: Path) -> Generator[EngineServer]:
    tokenizer = byte_tokenizer()
    info = msgspec.structs.replace(
        engine_info(NUM_BLOCKS, BLOCK_SIZE, 3000),
        tokenizer_json=tokenizer.to_str().encode(),
        vocab_size=tokenizer.get_vocab_size(),
        eos_token_ids=(tokenizer.token_to_id("<|im_end|>"),),
        chat_template=CHATML,
        special_tokens=SPECIAL_TOKENS,
    )
    settings = EngineSettings(max_num_batched_tokens=512, prefill_chunk_size=128)
    engine = LLMEngine(info, settings, FakeRunner(NUM_BLOCKS, BLOCK_SIZE, vocab_size=256))
    server = EngineServer(MeasuredEngine(engine), f"ipc://{directory}/engine.sock", drain_seconds=0)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(20)
        assert not thread.is_alive()


def generate_load(gateway: RunningGateway) -> dict[str, Used]:
    used = {tenant: Used() for tenant in ("alice", "bob", "carol")}
    texts = {name: f"{name} is a document about {name}, and says little else of it. " * 5 for name in "abcdef"}
    turns = [
        "alice:ab",
        "alice:ab",
        "alice:abc",
        "bob:de",
        "bob:ed",
        "alice:ba",
        "bob:de",
        "carol:f",
        "carol:f",
        "alice:ab",
    ]
    for turn, (tenant, _, names) in enumerate(word.partition(":") for word in turns):
        answer = gateway.client(tenant).chat.completions.create(
            model="fake",
            messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Question {turn % 3}?"}],
            max_tokens=8,
            extra_body={"documents": [{"id": f"doc-{name}", "text": texts[name]} for name in names]},
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        count = used[tenant]
        count.requests += 1
        count.prompt += answer.usage.prompt_tokens
        count.cached += answer.usage.prompt_tokens_details.cached_tokens or 0
        count.output += answer.usage.completion_tokens
    return used


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@contextmanager
def context(browser: Browser, loaded: Loaded, *, width: int = 1280, dark: bool = False) -> Generator[BrowserContext]:
    scheme = "dark" if dark else "light"
    opened = browser.new_context(
        base_url=loaded.gateway.url, viewport={"width": width, "height": 900}, color_scheme=scheme
    )
    opened.set_default_timeout(20_000)
    yield opened
    opened.close()


def log_in(opened: BrowserContext, credential: str) -> Page:
    page = opened.new_page()
    page.problems = []  # type: ignore[attr-defined]
    page.on("console", lambda message: page.problems.append(message.text) if message.type == "error" else None)  # type: ignore[attr-defined]
    page.on("pageerror", lambda error: page.problems.append(str(error)))  # type: ignore[attr-defined]
    page.goto("/dashboard")
    assert page.url.endswith("/dashboard/login")
    page.get_by_label("API key").fill(credential)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_selector("#requests")
    return page


def wait_for_figures(page: Page, used: Used) -> None:
    """The history is written a moment after the requests."""
    for _ in range(120):
        if figure(page, "requests") == f"{used.requests:,}":
            return
        page.wait_for_timeout(500)
        page.reload()
    raise AssertionError("the figures never came")


def figure(page: Page, name: str) -> str:
    return page.locator(f"#{name}").inner_text()


def screenshot(page: Page, name: str) -> None:
    directory = os.environ.get("RADIXGATE_TEST_SCREENSHOTS")
    if directory:
        page.screenshot(path=Path(directory) / f"{name}.png", full_page=True)


def test_a_tenant_logs_in_and_sees_the_figures_of_its_responses(chromium: Browser, loaded: Loaded) -> None:
    used = loaded.used["alice"]
    with context(chromium, loaded) as opened:
        page = log_in(opened, loaded.gateway.keys["alice"])
        wait_for_figures(page, used)
        assert figure(page, "prompt-tokens") == f"{used.prompt:,}"
        assert figure(page, "cached-tokens") == f"{used.cached:,}"
        assert figure(page, "output-tokens") == f"{used.output:,}"
        assert figure(page, "hit-rate") == f"{100 * used.cached / used.prompt:.1f}%"
        assert page.locator(".chart canvas").count() == 3
        assert page.problems == []  # type: ignore[attr-defined]
        screenshot(page, "tenant-overview")


def test_the_operator_logs_in_and_sees_the_sum_and_each(chromium: Browser, loaded: Loaded) -> None:
    everyone = Used(*(sum(getattr(used, name) for used in loaded.used.values()) for name in Used.__dataclass_fields__))
    with context(chromium, loaded) as opened:
        page = log_in(opened, PASSWORD)
        wait_for_figures(page, everyone)
        assert figure(page, "prompt-tokens") == f"{everyone.prompt:,}"
        screenshot(page, "operator-overview")
        page.get_by_role("link", name="Tenants").click()
        page.get_by_role("link", name="bob").click()
        assert figure(page, "prompt-tokens") == f"{loaded.used['bob'].prompt:,}"
        page.get_by_role("link", name="Cache").click()
        assert page.locator("svg.tree rect").count() > 0
        page.goto("/dashboard/cache")
        assert page.locator("svg.blocks rect").count() == NUM_BLOCKS
        screenshot(page, "operator-cache")
        assert page.problems == []  # type: ignore[attr-defined]


def test_a_tenant_cannot_reach_anothers_page_by_any_url(chromium: Browser, loaded: Loaded) -> None:
    with context(chromium, loaded) as opened:
        page = log_in(opened, loaded.gateway.keys["carol"])
        for path in ("", "/cache", "/live"):
            answer = page.goto(f"/dashboard{path}?tenant=alice")
            assert answer is not None
            assert answer.status == 404
        tenants = page.goto("/dashboard/tenants")
        assert tenants is not None
        assert tenants.status == 404
        page.goto("/dashboard/cache")
        assert "alice" not in page.content()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_page_is_accessible(chromium: Browser, loaded: Loaded, dark: bool) -> None:
    """axe: contrast, names, labels, landmarks, order of headings."""
    with context(chromium, loaded, dark=dark) as opened:
        page = opened.new_page()
        page.goto("/dashboard/login")
        assert problems(page) == []
        page.close()
        page = log_in(opened, PASSWORD)
        for path in PAGES:
            page.goto(path)
            for summary in page.locator("summary").all():
                summary.click()
            assert problems(page) == [], path


def problems(page: Page) -> list[str]:
    found = Axe().run(page)
    return [f"{rule['id']}: {node['target']}" for rule in found.response["violations"] for node in rule["nodes"]]


def test_it_is_readable_on_a_phone(chromium: Browser, loaded: Loaded) -> None:
    """Nothing may stick out sideways: wide tables scroll inside themselves."""
    with context(chromium, loaded, width=375, dark=True) as opened:
        page = log_in(opened, PASSWORD)
        for path in PAGES:
            page.goto(path)
            assert page.evaluate("document.documentElement.scrollWidth") <= 375, path
        page.goto("/dashboard")
        screenshot(page, "phone")


def test_keys_work_and_a_refresh_keeps_what_was_opened(chromium: Browser, loaded: Loaded) -> None:
    with context(chromium, loaded) as opened:
        page = log_in(opened, PASSWORD)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("t")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.reload()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.locator("summary").first.click()
        with page.expect_response(lambda answer: answer.request.headers.get("hx-request") == "true"):
            page.evaluate("htmx.ajax('GET', '/dashboard', {target: '#content', select: '#content', swap: 'outerHTML'})")
        expect(page.locator(".chart canvas")).to_have_count(
            3
        )  # a function in a string is what the page's policy forbids
        assert page.locator("details").first.get_attribute("open") is not None
        page.get_by_role("button", name="Log out").click()
        page.wait_for_url("**/dashboard/login")
        page.goto("/dashboard/cache")
        assert page.url.endswith("/dashboard/login")
