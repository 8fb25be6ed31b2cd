from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest

from engine.errors import AuthenticationError, ConfigError
from engine.settings import TenantSettings
from gateway.auth import authenticate, hash_api_key, load_or_create_secret, new_api_key
from gateway.tenants import SCOPE_BYTES, TenantDirectory, narrow_scope

SECRET = b"s" * 32


def directory(*tenants: TenantSettings) -> TenantDirectory:
    return TenantDirectory(SECRET, tenants)


def tenant(id: str, key: str = "", group: str = "") -> TenantSettings:  # noqa: A002 (the setting's name)
    return TenantSettings(id=id, key_hashes=(hash_api_key(SECRET, key),) if key else (), cache_group=group)


def test_keys_are_256_random_bits_with_the_prefix() -> None:
    keys = {new_api_key() for _ in range(50)}
    assert len(keys) == 50
    assert all(re.fullmatch(r"rg-[A-Za-z0-9_-]{43}", key) for key in keys)


def test_a_hash_is_worth_nothing_without_the_servers_secret() -> None:
    assert hash_api_key(b"a", "rg-x") != hash_api_key(b"b", "rg-x")


def test_the_key_finds_its_tenant_and_no_other() -> None:
    tenants = directory(tenant("a", "key-of-a"), tenant("b", "key-of-b"))
    assert authenticate(tenants, "Bearer key-of-b").tenant.id == "b"
    assert authenticate(tenants, "bearer  key-of-a ").tenant.id == "a"


@pytest.mark.parametrize("sent", [None, "", "Bearer", "Bearer ", "Basic key-of-a", "key-of-a", "Bearer key-of-A"])
def test_anything_else_is_refused(sent: str | None) -> None:
    with pytest.raises(AuthenticationError):
        authenticate(directory(tenant("a", "key-of-a")), sent)


def test_a_short_wrong_key_is_not_shown_at_all() -> None:
    """The last four characters of a five-character password are the password."""
    with pytest.raises(AuthenticationError) as caught:
        authenticate(directory(), "Bearer hunter2")
    assert "ter2" not in caught.value.message


@pytest.mark.parametrize(
    ("tenants", "param"),
    [
        ([tenant("a"), tenant("a")], "tenants[1].id"),
        ([tenant("")], "tenants[0].id"),
        ([tenant("a", "k"), tenant("b", "k")], "tenants[1].key_hashes[0]"),
        ([TenantSettings(id="a", key_hashes=("rg-plain-key",))], "tenants[0].key_hashes[0]"),
    ],
)
def test_settings_that_would_mix_tenants_up_are_refused(tenants: list[TenantSettings], param: str) -> None:
    """One key for two tenants would make one of them the other, silently."""
    with pytest.raises(ConfigError) as caught:
        TenantDirectory(SECRET, tenants)
    assert caught.value.param == param


def test_an_empty_secret_is_refused() -> None:
    """Scope keys derived from nothing could be computed by anybody."""
    with pytest.raises(ConfigError):
        TenantDirectory(b"", [])


def test_scopes_are_apart_by_tenant_by_group_and_between_the_two() -> None:
    """A tenant named like a group must not land in the group's scope."""
    tenants = directory(tenant("a", "ka"), tenant("b", "kb", "g"), tenant("c", "kc", "g"), tenant("g", "kg"))
    a, b, c, g = (authenticate(tenants, f"Bearer {key}").tenant.scope for key in ("ka", "kb", "kc", "kg"))
    assert b == c
    assert len({a, b, g}) == 3
    assert {len(scope) for scope in (a, b, g)} == {SCOPE_BYTES}
    other = authenticate(
        TenantDirectory(b"other", [TenantSettings(id="a", key_hashes=(hash_api_key(b"other", "ka"),))]), "Bearer ka"
    )
    assert other.tenant.scope != a


def test_narrowing_depends_on_field_value_and_parent_and_not_on_order() -> None:
    parent, other = b"p" * 16, b"o" * 16
    found = [
        narrow_scope(parent, {"user": "x"}),
        narrow_scope(parent, {"cache_salt": "x"}),
        narrow_scope(parent, {"cache_salt": "x", "user": "x"}),
        narrow_scope(other, {"user": "x"}),
        narrow_scope(parent, {"user": "y"}),
        parent,
    ]
    assert len(set(found)) == len(found)
    assert narrow_scope(parent, {}) == parent
    assert narrow_scope(parent, {"user": "1", "cache_salt": "2"}) == narrow_scope(
        parent, {"cache_salt": "2", "user": "1"}
    )


def test_label_lists_that_concatenate_alike_are_apart() -> None:
    """`user` = "b" below `cache_salt` = "a" must not equal another split of the same letters."""
    parent = b"p" * 16
    assert narrow_scope(parent, {"user": "ab"}) != narrow_scope(parent, {"usera": "b"})


def test_the_secret_is_made_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    made = load_or_create_secret("", tmp_path / "data")
    path = tmp_path / "data" / "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_or_create_secret("", tmp_path / "data") == made
    assert load_or_create_secret("configured", tmp_path / "data") == b"configured"
    assert [file.name for file in path.parent.iterdir()] == ["secret"]


def test_an_empty_secret_file_is_an_error_and_not_an_empty_secret(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        load_or_create_secret("", tmp_path)
