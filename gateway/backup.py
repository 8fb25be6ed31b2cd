"""`radixgate backup FILE` and `restore FILE`: what a new machine needs to be this one.

    FILE (tar.gz, mode 0600)
      store.bin     every key of the store as the store itself serializes it (DUMP), with its remaining time
      files/…       secret, keys and password of the data directory: without the secret no stored key hash is of any use

The KV payload is a cache and is not in it, nor are models. A backup may be taken while the server runs: each key is
consistent in itself, and what the tenants' limits count meanwhile is seconds old. A restore wants the server stopped,
and overwrites.
"""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import msgspec

from engine.errors import ConfigError
from engine.settings import Settings
from gateway.store import EmbeddedStore
from gateway.store_client import StoreClient
from gateway.supervisor import running_supervisor

FORMAT = 1
FILES = ("secret", "demo.key", "operator.password", "metrics.token")
_BATCH = 500


class StoredKey(msgspec.Struct, frozen=True, array_like=True):
    name: bytes
    value: bytes  # DUMP
    ttl_ms: int  # 0: none


class StoreDump(msgspec.Struct, frozen=True):
    format: int
    taken: float  # Unix seconds
    keys: tuple[StoredKey, ...]


def run_backup(settings: Settings, target: Path) -> int:
    dump = asyncio.run(_dump(settings))
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        _add(archive, "store.bin", msgspec.msgpack.encode(dump))
        for name in FILES:
            path = settings.store.data_dir / name
            if path.exists():
                _add(archive, f"files/{name}", path.read_bytes())
    print(f"{target}: {len(dump.keys)} keys of the store. It holds secrets: keep it like one.")
    return 0


def run_restore(settings: Settings, source: Path) -> int:
    if running_supervisor(settings.store.data_dir) is not None:
        raise ConfigError("a server runs on this data directory: stop it first", param="store.data_dir")
    with tarfile.open(source, "r:gz") as archive:
        dump = msgspec.msgpack.decode(_read(archive, "store.bin"), type=StoreDump)
        if dump.format != FORMAT:
            raise ConfigError(f"{source} has format {dump.format}; this version reads {FORMAT}")
        files = {name: _read(archive, f"files/{name}") for name in FILES if f"files/{name}" in archive.getnames()}
    settings.store.data_dir.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        fd = os.open(settings.store.data_dir / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
    num_keys = asyncio.run(_load(settings, dump))
    print(f"{num_keys} keys of the store and {len(files)} files restored")
    return 0


@asynccontextmanager
async def store_of(settings: Settings) -> AsyncGenerator[StoreClient]:
    """The store of these settings; the embedded one is started for as long as this lasts if no server runs it."""
    embedded = EmbeddedStore(settings.store.data_dir, on_line=lambda _name, _line: None)
    own = not settings.store.url and running_supervisor(settings.store.data_dir) is None
    if own:
        await embedded.start()
    client = StoreClient(settings.store.url or embedded.url)
    try:
        yield client
    finally:
        await client.close()
        if own:
            await embedded.stop()


async def _dump(settings: Settings) -> StoreDump:
    async with store_of(settings) as store:
        keys: list[StoredKey] = []
        async for names in _scan(store):
            commands = [(command, name) for name in names for command in ("DUMP", "PTTL")]
            answers = await store.fetch(*commands)
            for name, value, ttl in zip(names, answers[::2], answers[1::2], strict=True):
                if isinstance(value, bytes) and isinstance(ttl, int):  # else it went meanwhile
                    keys.append(StoredKey(name, value, max(ttl, 0)))
        return StoreDump(FORMAT, time.time(), tuple(keys))


async def _scan(store: StoreClient) -> AsyncGenerator[list[bytes]]:
    cursor, seen = b"0", set[bytes]()
    while True:
        answer = (await store.fetch(("SCAN", cursor, "MATCH", "radixgate:*", "COUNT", _BATCH)))[0]
        cursor, found = cast("tuple[bytes | int, list[bytes]]", answer)
        fresh = [name for name in found if name not in seen]
        seen.update(fresh)
        yield fresh
        cursor = str(cursor).encode() if isinstance(cursor, int) else cursor
        if cursor == b"0":
            return


async def _load(settings: Settings, dump: StoreDump) -> int:
    elapsed_ms = int((time.time() - dump.taken) * 1000)
    alive = [key for key in dump.keys if not key.ttl_ms or key.ttl_ms > elapsed_ms]
    async with store_of(settings) as store:
        for batch in _batches(alive):
            await store.fetch(
                *(
                    ("RESTORE", key.name, key.ttl_ms - elapsed_ms if key.ttl_ms else 0, key.value, "REPLACE")
                    for key in batch
                )
            )
    return len(alive)


def _batches(keys: list[StoredKey]) -> Iterator[list[StoredKey]]:
    for at in range(0, len(keys), _BATCH):
        yield keys[at : at + _BATCH]


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
