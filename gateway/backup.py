"""`radixgate backup FILE` and `restore FILE`: what a new machine needs to be this one.

    FILE (tar.gz, mode 0600)
      backup.json   the format, and when it was taken
      store/N       keys of the store as the store itself serializes them (DUMP), with their remaining time
      files/…       secret, keys and password of the data directory: without the secret no stored key hash is of any use

All that the store holds of ours is in it: tenants, keys, usage, history, audit log, uploaded files and what was made of
them. The KV payload is a cache and is not in it, nor are its index and the models. A backup may be taken while the
server runs: each key is consistent in itself, and what the tenants' limits count meanwhile is seconds old. A restore
wants the server stopped, and overwrites. Neither holds more than a part of the store in memory.
"""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import cast

import msgspec

from engine.errors import ConfigError
from engine.settings import Settings
from gateway.store import EmbeddedStore, has_data
from gateway.store_client import StoreClient
from gateway.supervisor import running_supervisor

FORMAT = 2
FILES = ("secret", "demo.key", "operator.password", "metrics.token")
_OURS = (b"radixgate:", b"rg:")
_INDEX = b"radixgate:kv:"  # where the cached blocks of this machine lie
_NAMES = 64  # keys that are asked for at once; one may be a file of tens of MB
_PART_BYTES = 16 << 20


class StoredKey(msgspec.Struct, frozen=True, array_like=True):
    name: bytes
    value: bytes  # DUMP
    ttl_ms: int  # 0: none


class Header(msgspec.Struct, frozen=True):
    format: int
    taken: float  # Unix seconds


def run_backup(settings: Settings, target: Path) -> int:
    if not settings.store.url and not has_data(settings.store.data_dir):
        raise ConfigError(f"there is no store in {settings.store.data_dir}", param="store.data_dir")
    with _new_archive(target) as archive:
        num_keys = asyncio.run(_dump(settings, archive))
        for name in FILES:
            path = settings.store.data_dir / name
            if path.exists():
                _add(archive, f"files/{name}", path.read_bytes())
    print(f"{target}: {num_keys} keys of the store. It holds secrets: keep it like one.")
    return 0


@contextmanager
def _new_archive(target: Path) -> Generator[tarfile.TarFile]:
    """In the place of an older one only when it is complete."""
    unfinished = target.with_name(f"{target.name}.unfinished")
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            with tarfile.open(fileobj=file, mode="w:gz") as archive:
                yield archive
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def run_restore(settings: Settings, source: Path) -> int:
    if running_supervisor(settings.store.data_dir) is not None:
        raise ConfigError("a server runs on this data directory: stop it first", param="store.data_dir")
    with _archive(source) as archive:
        header = msgspec.json.decode(_read(archive, "backup.json"), type=Header)
        if header.format != FORMAT:
            raise ConfigError(f"{source} has format {header.format}; this version reads {FORMAT}")
        settings.store.data_dir.mkdir(parents=True, exist_ok=True)
        names = [name for name in FILES if f"files/{name}" in archive.getnames()]
        for name in names:
            fd = os.open(settings.store.data_dir / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(_read(archive, f"files/{name}"))
        num_keys = asyncio.run(_load(settings, archive, header))
    print(f"{num_keys} keys of the store and {len(names)} files restored")
    return 0


@contextmanager
def _archive(source: Path) -> Generator[tarfile.TarFile]:
    try:
        with tarfile.open(source, "r:gz") as archive:
            yield archive
    except (OSError, tarfile.TarError) as error:
        raise ConfigError(f"{source} cannot be read as a backup: {error}") from error


@asynccontextmanager
async def store_of(settings: Settings) -> AsyncGenerator[StoreClient]:
    """The store of these settings; the embedded one is started for as long as this lasts if no server runs it."""
    async with AsyncExitStack() as stack:
        url = settings.store.url
        if not url:
            embedded = EmbeddedStore(settings.store.data_dir, on_line=lambda _name, _line: None)
            if running_supervisor(settings.store.data_dir) is None:
                await embedded.start()
                stack.push_async_callback(embedded.stop)
            url = embedded.url
        client = StoreClient(url)
        stack.push_async_callback(client.close)
        yield client


async def _dump(settings: Settings, archive: tarfile.TarFile) -> int:
    """The number of keys."""
    _add(archive, "backup.json", msgspec.json.encode(Header(FORMAT, time.time())))
    num_keys = num_parts = num_bytes = 0
    part: list[StoredKey] = []

    def finish_part() -> None:
        nonlocal part, num_parts, num_bytes
        if part:
            _add(archive, f"store/{num_parts:06}", msgspec.msgpack.encode(part))
        part, num_parts, num_bytes = [], num_parts + 1, 0

    async with store_of(settings) as store:
        async for keys in _keys(store):
            part += keys
            num_keys += len(keys)
            num_bytes += sum(len(key.value) for key in keys)
            if num_bytes >= _PART_BYTES:
                finish_part()
    finish_part()
    return num_keys


async def _keys(store: StoreClient) -> AsyncGenerator[list[StoredKey]]:
    async for names in _scan(store):
        commands = [(command, name) for name in names for command in ("DUMP", "PTTL")]
        answers = await store.fetch(*commands)
        yield [
            StoredKey(name, value, max(ttl, 0))
            for name, value, ttl in zip(names, answers[::2], answers[1::2], strict=True)
            if isinstance(value, bytes) and isinstance(ttl, int)  # else it went meanwhile
        ]


async def _scan(store: StoreClient) -> AsyncGenerator[list[bytes]]:
    cursor, seen = b"0", set[bytes]()
    while True:
        answer = (await store.fetch(("SCAN", cursor, "COUNT", _NAMES)))[0]
        cursor, found = cast("tuple[bytes | int, list[bytes]]", answer)
        fresh = [name for name in found if name.startswith(_OURS) and not name.startswith(_INDEX) and name not in seen]
        seen.update(fresh)
        yield fresh
        cursor = str(cursor).encode() if isinstance(cursor, int) else cursor
        if cursor == b"0":
            return


async def _load(settings: Settings, archive: tarfile.TarFile, header: Header) -> int:
    """The number of keys; those whose time has run out meanwhile are left out."""
    elapsed_ms = int((time.time() - header.taken) * 1000)
    num_keys = 0
    async with store_of(settings) as store:
        for name in [name for name in archive.getnames() if name.startswith("store/")]:
            part = msgspec.msgpack.decode(_read(archive, name), type=list[StoredKey])
            alive = [key for key in part if not key.ttl_ms or key.ttl_ms > elapsed_ms]
            num_keys += len(alive)
            for at in range(0, len(alive), _NAMES):
                await store.fetch(*(_restoring(key, elapsed_ms) for key in alive[at : at + _NAMES]))
    return num_keys


def _restoring(key: StoredKey, elapsed_ms: int) -> tuple[str, bytes, int, bytes, str]:
    return "RESTORE", key.name, key.ttl_ms - elapsed_ms if key.ttl_ms else 0, key.value, "REPLACE"


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = len(content), 0o600, int(time.time())
    archive.addfile(member, io.BytesIO(content))


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    try:
        file = archive.extractfile(name)
    except KeyError as error:
        raise ConfigError(f"this is no backup: it has no {name}") from error
    assert file is not None, "a regular file"
    return file.read()
