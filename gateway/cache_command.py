"""`radixgate cache`: what an operator asks of the engine's cache, over the engine's own socket.

    stats                what lies in which tier, what moved, how far the index in Redis is behind
    explain FILE         a chat request (the body of POST /v1/chat/completions): where each part of its prompt would
                         come from now, and why the rest would be computed
    verify               read every block on disk again, and compute a sample anew; exit code 1 if a block differs
    evict TIER           let go of blocks in the order of eviction
    erase                out of every tier: documents of a tenant, a tenant, or everything

The engine answers between two steps. `verify` holds it up until it is done.
"""

from __future__ import annotations

import argparse
import json
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from engine.errors import ConfigError, EngineUnavailableError, UnsupportedParameterError, from_wire
from engine.protocol import (
    CacheEvicted,
    CacheVerified,
    ClientMessage,
    EngineInfo,
    EngineStats,
    Erase,
    Erased,
    EvictCache,
    Explain,
    Explained,
    Failure,
    GetStats,
    Hello,
    OperatorAnswer,
    SamplingParams,
    Submit,
    TierStats,
    VerifyCache,
)
from engine.settings import Settings, engine_endpoint
from gateway.auth import load_or_create_secret
from gateway.chat_request import parse_chat_request
from gateway.first_run import with_demo_tenant
from gateway.prompt import PromptDocuments
from gateway.prompt_scopes import PromptScopes
from gateway.served_model import ServedModel
from gateway.tenants import Tenant, TenantDirectory

ANSWER_SECONDS = 30.0
VERIFY_SECONDS = 3600.0

Answer = TypeVar("Answer", bound=OperatorAnswer)
SettingsOf = Callable[[argparse.Namespace], Settings]


def add_cache_command(
    parser: argparse.ArgumentParser, add_flags: Callable[[argparse.ArgumentParser], None], settings_of: SettingsOf
) -> None:
    """The subcommands; `add_flags` gives each the flags that are settings."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace, Settings], int], text: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=text)
        add_flags(one)
        one.add_argument("--json", action="store_true", help="one JSON object")

        def command_of(arguments: argparse.Namespace) -> int:
            return run(arguments, settings_of(arguments))

        one.set_defaults(command=command_of)
        return one

    command("stats", _stats, "what lies in which tier")
    explain = command("explain", _explain, "where each part of a request's prompt would come from")
    explain.add_argument("file", type=Path, help="the JSON body of a chat completion")
    explain.add_argument("--tenant", help="whose request it is (default: the first one)")
    verify = command("verify", _verify, "read every block on disk again, and compute a sample anew")
    verify.add_argument("--sample", type=int, default=4, metavar="N", help="prefixes to compute anew (default: 4)")
    evict = command("evict", _evict, "let go of blocks in the order of eviction")
    evict.add_argument("tier", choices=("device", "host", "disk"))
    evict.add_argument("--blocks", type=int, default=1 << 30, metavar="N", help="at most so many (default: all)")
    erase = command("erase", _erase, "out of every tier")
    erase.add_argument("--owner", help="a tenant")
    erase.add_argument("--document", action="append", metavar="ID", help="only these documents; may be repeated")
    erase.add_argument("--everything", action="store_true", help="of everyone")


# ---------------------------------------------------------------- commands


def _stats(arguments: argparse.Namespace, settings: Settings) -> int:
    with EngineConnection(engine_endpoint(settings)) as engine:
        stats = engine.ask(GetStats(), EngineStats)
    if arguments.json:
        print(msgspec.json.encode(stats).decode())
        return 0
    print(
        f"{'tier':<8}{'state':<10}{'blocks':>9}{'of':>9}{'GiB':>8}{'written':>12}{'read':>12}{'evicted':>9}{'MB/s':>8}"
    )
    device = stats.num_cached_blocks + stats.num_active_blocks
    print(f"{'device':<8}{'ready':<10}{device:>9,}{stats.num_blocks:>9,}{'':>40}{stats.num_evicted_blocks:>9,}")
    for tier in stats.tiers:
        print(_tier_line(tier))
    if stats.index is not None:
        index = stats.index
        print(
            f"index   {index.state}: {index.num_pending:,} to be written, {index.lag_seconds:.1f} s behind; "
            f"{index.num_failures:,} failures, {index.num_resyncs:,} resyncs"
        )
    return 0


def _tier_line(tier: TierStats) -> str:
    size = tier.num_blocks * tier.block_bytes / (1 << 30)
    errors = f"  {tier.num_read_errors + tier.num_write_errors:,} errors" if tier.num_read_errors else ""
    return (
        f"{tier.name:<8}{tier.state:<10}{tier.num_blocks:>9,}{tier.num_slots:>9,}{size:>8.2f}"
        f"{tier.bytes_written / 1e6:>9,.0f} MB{tier.bytes_read / 1e6:>9,.0f} MB{tier.num_evicted:>9,}"
        f"{tier.bandwidth / 1e6:>8,.0f}{errors}"
    )


def _explain(arguments: argparse.Namespace, settings: Settings) -> int:
    settings = with_demo_tenant(settings)
    directory = _directory(settings)
    tenant = _tenant(directory, settings, arguments.tenant)
    try:
        raw = Path(arguments.file).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {arguments.file}: {error.strerror}") from error
    with EngineConnection(engine_endpoint(settings)) as engine:
        submit = _submit(raw, directory, tenant, engine.ask(Hello(), EngineInfo), settings)
        explained = engine.call(lambda call_id: Explain(call_id=call_id, submit=submit), Explained)
    if arguments.json:
        print(msgspec.json.encode(explained.parts).decode())
        return 0
    total = max(explained.parts[-1].end, 1)
    for part in explained.parts:
        count = part.end - part.start
        print(f"{part.start:>7,} … {part.end:<7,} {count:>7,} tokens {count / total:>5.0%}  {part.place}")
    return 0


def _submit(raw: bytes, directory: TenantDirectory, tenant: Tenant, info: EngineInfo, settings: Settings) -> Submit:
    request = parse_chat_request(raw, "application/json", settings.server.max_choices)
    if request.retrieval is not None:
        raise UnsupportedParameterError(
            "explain does not search collections: give the documents that were found as `documents`", param="retrieval"
        )
    scopes = PromptScopes.of_request(directory.secret, tenant, request.body.narrowing, directory.published)
    segments = ServedModel.of(info).prompts.build(request.messages, PromptDocuments(request.documents), scopes)
    return Submit(
        request_id="explain",
        tenant_id=tenant.id,
        segments=segments,
        sampling=SamplingParams(max_tokens=1),
        use_cache=request.body.use_cache,
    )


def _directory(settings: Settings) -> TenantDirectory:
    secret = load_or_create_secret(settings.security.secret, settings.store.data_dir)
    return TenantDirectory(secret, settings.tenants)


def _tenant(directory: TenantDirectory, settings: Settings, tenant_id: str | None) -> Tenant:
    for tenant in settings.tenants:
        if tenant_id in (None, tenant.id) and (found := directory.find(next(iter(tenant.key_hashes), ""))):
            return found.tenant
    raise ConfigError(f"no tenant {tenant_id!r} with an API key", param="tenants")


def _verify(arguments: argparse.Namespace, settings: Settings) -> int:
    with EngineConnection(engine_endpoint(settings), seconds=VERIFY_SECONDS) as engine:
        done = engine.call(lambda call_id: VerifyCache(call_id=call_id, num_recomputed=arguments.sample), CacheVerified)
    if arguments.json:
        print(msgspec.json.encode(done).decode())
    else:
        print(f"{done.num_read:,} blocks read, {done.num_unreadable:,} unreadable and dropped")
        print(f"{done.num_recomputed:,} blocks computed anew, {done.num_different:,} different")
    return 1 if done.num_different else 0


def _evict(arguments: argparse.Namespace, settings: Settings) -> int:
    with EngineConnection(engine_endpoint(settings)) as engine:
        done = engine.call(
            lambda call_id: EvictCache(call_id=call_id, tier=arguments.tier, num_blocks=arguments.blocks), CacheEvicted
        )
    print(json.dumps({"num_blocks": done.num_blocks}) if arguments.json else f"{done.num_blocks:,} blocks let go")
    return 0


def _erase(arguments: argparse.Namespace, settings: Settings) -> int:
    if not (arguments.owner or arguments.document or arguments.everything):
        print("radixgate: say what to erase: --owner, --document, or --everything", file=sys.stderr)
        return 2
    documents = tuple(arguments.document) if arguments.document else None
    with EngineConnection(engine_endpoint(settings)) as engine:
        done = engine.call(
            lambda call_id: Erase(erase_id=call_id, owner=arguments.owner, document_ids=documents), Erased
        )
    if arguments.json:
        print(json.dumps({"num_blocks": done.num_blocks, **done.num_by_tier}))
    else:
        print(f"{done.num_blocks:,} blocks: " + ", ".join(f"{n:,} {tier}" for tier, n in done.num_by_tier.items()))
    return 0


# ---------------------------------------------------------------- the wire


class EngineConnection:
    """One question at a time, on a socket of its own. Raises EngineUnavailableError when nobody answers."""

    def __init__(self, endpoint: str, *, seconds: float | None = None) -> None:
        self._endpoint = endpoint
        self._seconds = ANSWER_SECONDS if seconds is None else seconds
        self._decoder = msgspec.msgpack.Decoder(OperatorAnswer)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        self._socket.connect(endpoint)

    def __enter__(self) -> EngineConnection:
        return self

    def __exit__(self, *error: object) -> None:
        self._context.destroy(linger=0)

    def call(self, question: Callable[[str], ClientMessage], answer: type[Answer]) -> Answer:
        """Ask with an id of its own; a refusal comes back as the error it is."""
        return self.ask(question(uuid.uuid4().hex), answer)

    def ask(self, question: ClientMessage, answer: type[Answer]) -> Answer:
        self._socket.send(msgspec.msgpack.encode(question))
        while self._socket.poll(int(self._seconds * 1000)):
            message = self._decoder.decode(b"".join(self._socket.recv_multipart()))
            if isinstance(message, answer):
                return message
            if isinstance(message, Failure):
                raise from_wire(message.code, message.message, message.param)
        raise EngineUnavailableError(f"no engine answers at {self._endpoint} within {self._seconds:.0f} s")
