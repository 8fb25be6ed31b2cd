"""`radixgate tenant …` and `radixgate key …`: what the admin API does, from the machine that the store runs on.

It talks to the store itself, so it makes the first operator's key, and works without a gateway. Every change goes
into the audit log under `cli:USER`.
"""

from __future__ import annotations

import argparse
import asyncio
import getpass
import sys
from collections.abc import Awaitable, Callable

import msgspec

from engine.errors import InvalidRequestError
from engine.settings import Settings, store_url
from gateway.audit_log import Actor
from gateway.auth import hash_api_key, load_or_create_secret, new_api_key
from gateway.commands import Commands
from gateway.store_client import FETCH_SECONDS, StoreClient
from gateway.tenant_admin import KeyDraft, NewKey, TenantAdmin, TenantDraft, TenantPatch
from gateway.tenant_records import KeyRecord, RateLimits, Role, SharePolicy, TenantRecord

Action = Callable[[TenantAdmin, Actor, argparse.Namespace], Awaitable[None]]
SettingsOf = Callable[[argparse.Namespace], Settings]
AddFlags = Callable[[argparse.ArgumentParser], None]

_LIMITS = RateLimits.__struct_fields__
_POLICY = tuple(name for name in SharePolicy.__struct_fields__ if name != "no_store")


def add_tenant_commands(commands: Commands, add_setting_flags: AddFlags, settings_of: SettingsOf) -> None:
    """`commands` are those of the parser of `radixgate`."""

    def command(group: Commands, name: str, meaning: str, action: Action) -> argparse.ArgumentParser:
        parser = group.add_parser(name, help=meaning)
        add_setting_flags(parser)

        def run(arguments: argparse.Namespace) -> int:
            return asyncio.run(_run(settings_of(arguments), action, arguments))

        parser.set_defaults(command=run)
        return parser

    tenant = commands.add_parser("tenant", help="create, list, change, disable and enable tenants")
    tenants = tenant.add_subparsers(required=True, metavar="ACTION")
    command(tenants, "list", "every tenant", _list_tenants)
    for name, meaning, action in (
        ("create", "a new tenant", _create_tenant),
        ("update", "change limits and shares; what is not given stays", _update_tenant),
    ):
        parser = command(tenants, name, meaning, action)
        parser.add_argument("tenant")
        _add_tenant_options(parser)
    for name, disabled in (("disable", True), ("enable", False)):
        parser = command(tenants, name, f"{name} a tenant and its keys", _switch_tenant)
        parser.add_argument("tenant")
        parser.set_defaults(disabled=disabled)

    key = commands.add_parser(
        "key", help="create, list, rotate, revoke API keys; alone: make a key, and its hash for the settings"
    )
    add_setting_flags(key)

    def make_hash(arguments: argparse.Namespace) -> int:
        return _make_hash(settings_of(arguments))

    key.set_defaults(command=make_hash)
    keys = key.add_subparsers(metavar="ACTION")
    parser = command(keys, "create", "a new key; it is printed once", _create_key)
    parser.add_argument("tenant")
    parser.add_argument("--role", choices=[role.value for role in Role], default=Role.USER.value)
    parser.add_argument("--name", default="")
    parser.add_argument("--expires-in", type=float, metavar="SECONDS")
    command(keys, "list", "a tenant's keys", _list_keys).add_argument("tenant")
    for name, meaning, action in (
        ("rotate", "a new key in the place of one, which goes on for a while", _rotate_key),
        ("revoke", "end a key, within a second on every gateway", _revoke_key),
    ):
        parser = command(keys, name, meaning, action)
        parser.add_argument("tenant")
        parser.add_argument("key")
        if name == "rotate":
            parser.add_argument("--grace", type=float, default=0.0, metavar="SECONDS")


def _add_tenant_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", help="for people")
    parser.add_argument("--cache-group", metavar="GROUP", help="tenants of one group share KV")
    for name in (*_LIMITS, *_POLICY):
        kind = float if name == "weight" else int
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N")
    # Two options: argparse's own pair takes whatever begins with `--no-` for the negative one.
    caching = parser.add_mutually_exclusive_group()
    caching.add_argument("--no-store", action="store_true", default=None, help="find and leave nothing in the cache")
    caching.add_argument("--store", dest="no_store", action="store_false", default=None, help="use the cache (again)")


async def _run(settings: Settings, action: Action, arguments: argparse.Namespace) -> int:
    store = StoreClient(store_url(settings), FETCH_SECONDS)
    secret = load_or_create_secret(settings.security.secret, settings.store.data_dir)
    try:
        admin = TenantAdmin(store, secret, _nothing_to_reload)
        await action(admin, Actor(name=f"cli:{getpass.getuser()}"), arguments)
    finally:
        await store.close()
    return 0


async def _nothing_to_reload() -> None:
    """This process serves nobody."""


def _make_hash(settings: Settings) -> int:
    secret = load_or_create_secret(settings.security.secret, settings.store.data_dir)
    key = new_api_key()
    print(f"key   {key}     (give it to the tenant; it is not kept here)")
    print(f"hash  {hash_api_key(secret, key)}     (into the tenant's key_hashes)")
    return 0


# ---------------------------------------------------------------- tenants


async def _list_tenants(admin: TenantAdmin, _: Actor, __: argparse.Namespace) -> None:
    for record in await admin.tenants():
        _print_tenant(record)


async def _create_tenant(admin: TenantAdmin, actor: Actor, arguments: argparse.Namespace) -> None:
    draft = {
        "id": arguments.tenant,
        "name": arguments.name or "",
        "cache_group": arguments.cache_group,
        "limits": _given(arguments, _LIMITS),
        "policy": _given(arguments, (*_POLICY, "no_store")),
    }
    try:
        wanted = msgspec.convert(draft, TenantDraft)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(str(error)) from error
    _print_tenant(await admin.create_tenant(actor, wanted))


async def _update_tenant(admin: TenantAdmin, actor: Actor, arguments: argparse.Namespace) -> None:
    before = await admin.tenant(arguments.tenant)
    change: dict[str, object] = {
        "limits": {**msgspec.to_builtins(before.limits), **_given(arguments, _LIMITS)},
        "policy": {**msgspec.to_builtins(before.policy), **_given(arguments, (*_POLICY, "no_store"))},
        **_given(arguments, ("name", "cache_group")),
    }
    try:
        patch = msgspec.convert(change, TenantPatch)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(str(error)) from error
    _print_tenant(await admin.update_tenant(actor, arguments.tenant, patch))


async def _switch_tenant(admin: TenantAdmin, actor: Actor, arguments: argparse.Namespace) -> None:
    patch = TenantPatch(disabled=arguments.disabled)
    _print_tenant(await admin.update_tenant(actor, arguments.tenant, patch))


def _given(arguments: argparse.Namespace, names: tuple[str, ...]) -> dict[str, object]:
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def _print_tenant(record: TenantRecord) -> None:
    limits = {name: value for name, value in msgspec.to_builtins(record.limits).items() if value is not None}
    state = "disabled" if record.disabled else "enabled"
    group = f"  group={record.cache_group}" if record.cache_group else ""
    no_store = "  no_store" if record.policy.no_store else ""
    print(f"{record.id:<24} {state:<9} weight={record.policy.weight:g}{group}{no_store}  {_pairs(limits)}".rstrip())


def _pairs(values: dict[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


# ---------------------------------------------------------------- keys


async def _create_key(admin: TenantAdmin, actor: Actor, arguments: argparse.Namespace) -> None:
    draft = KeyDraft(name=arguments.name, role=Role(arguments.role), expires_in_seconds=arguments.expires_in)
    _print_new_key(await admin.create_key(actor, arguments.tenant, draft))


async def _list_keys(admin: TenantAdmin, _: Actor, arguments: argparse.Namespace) -> None:
    await admin.tenant(arguments.tenant)
    for record in await admin.keys(arguments.tenant):
        _print_key(record)


async def _rotate_key(admin: TenantAdmin, actor: Actor, arguments: argparse.Namespace) -> None:
    _print_new_key(await admin.rotate_key(actor, arguments.tenant, arguments.key, arguments.grace))


async def _revoke_key(admin: TenantAdmin, actor: Actor, arguments: argparse.Namespace) -> None:
    _print_key(await admin.revoke_key(actor, arguments.tenant, arguments.key))


def _print_new_key(new: NewKey) -> None:
    _print_key(new.record)
    print("The key, shown this once:", file=sys.stderr)
    print(new.api_key)


def _print_key(record: KeyRecord) -> None:
    state = "revoked" if record.revoked_at is not None else "rotated" if record.rotated_to is not None else "active"
    print(f"{record.id:<24} {record.role.value:<13} {state:<8} …{record.last_four:<4} {record.name}".rstrip())
