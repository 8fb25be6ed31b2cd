"""`radixgate tenant …` and `key …` against a real store, and a gateway that learns of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from gateway.cli import main
from tests.gateway.conftest import SECRET, RunningGateway
from tests.gateway.fake_engine import MODEL

pytestmark = pytest.mark.redis

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(
    empty_store_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    monkeypatch.setenv("RADIXGATE_STORE__URL", empty_store_url)
    monkeypatch.setenv("RADIXGATE_STORE__DATA_DIR", str(tmp_path))
    monkeypatch.setenv("RADIXGATE_SECURITY__SECRET", SECRET.decode())

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


def status_of(gateway: RunningGateway, key: str) -> int:
    response: httpx.Response = gateway.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
    return response.status_code


def test_the_first_operator_is_made_here_and_a_revoked_key_is_refused(run: Run, stored_gateway: RunningGateway) -> None:
    assert run("tenant", "create", "ops", "--requests-per-minute", "50", "--weight", "2")[0] == 0
    code, out, _ = run("key", "create", "ops", "--role", "operator", "--name", "first")
    line, key = out.splitlines()
    assert code == 0
    stored_gateway.wait_until(lambda: status_of(stored_gateway, key) == 200)
    listed = stored_gateway.http.get("/admin/v1/tenants", headers={"authorization": f"Bearer {key}"}).json()
    (ops,) = [tenant for tenant in listed["data"] if tenant["id"] == "ops"]
    assert (ops["limits"]["requests_per_minute"], ops["policy"]["weight"]) == (50, 2.0)
    key_id = line.split()[0]
    assert "revoked" in run("key", "revoke", "ops", key_id)[1]
    stored_gateway.wait_until(lambda: status_of(stored_gateway, key) == 401)


def test_rotation_and_listing(run: Run) -> None:
    run("tenant", "create", "t")
    key_id = run("key", "create", "t")[1].split()[0]
    rotated = run("key", "rotate", "t", key_id, "--grace", "60")[1]
    assert rotated.splitlines()[-1].startswith("rg-")
    listed = run("key", "list", "t")[1]
    assert sorted(line.split()[2] for line in listed.splitlines()) == ["active", "rotated"]


def test_an_update_leaves_what_is_not_given(run: Run) -> None:
    run("tenant", "create", "t", "--tokens-per-day", "1000", "--cache-group", "g")
    run("tenant", "update", "t", "--requests-per-minute", "5")
    run("tenant", "disable", "t")
    line = run("tenant", "list")[1].strip()
    assert "disabled" in line
    assert "group=g" in line
    assert line.endswith("requests_per_minute=5 tokens_per_day=1000")


def test_a_tenant_can_opt_out_of_the_cache_and_back_in(run: Run, stored_gateway: RunningGateway) -> None:
    """`--no-store` was read as the negative of itself, and set nothing."""
    assert "no_store" in run("tenant", "create", "t", "--no-store")[1]
    key = run("key", "create", "t")[1].splitlines()[-1]
    stored_gateway.wait_until(lambda: status_of(stored_gateway, key) == 200)
    assert [cached_tokens(stored_gateway, key) for _ in range(2)] == [0, 0]
    run("tenant", "update", "t", "--weight", "2")
    assert "no_store" in run("tenant", "list")[1]  # what is not given stays
    assert "no_store" not in run("tenant", "update", "t", "--store")[1]
    stored_gateway.wait_until(lambda: cached_tokens(stored_gateway, key) > 0)
    assert "no_store" in run("tenant", "update", "t", "--no-store")[1]
    stored_gateway.wait_until(lambda: cached_tokens(stored_gateway, key) == 0)


def cached_tokens(gateway: RunningGateway, key: str) -> int:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "What does the second document say of the sea?"}]}
    response = gateway.http.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tenant", "disable", "nobody"), "There is no tenant `nobody`."),
        (("key", "create", "nobody"), "There is no tenant `nobody`."),
        (("tenant", "create", "a b"), "id"),
        (("tenant", "create", "x", "--weight", "0"), "weight"),
    ],
)
def test_what_is_wrong_is_said_and_the_exit_code_is_1(run: Run, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    assert message in err
