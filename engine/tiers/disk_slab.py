"""The disk tier's file: one a model fingerprint, a manifest page and fixed-size slots.

    offset     0            4096                4096 + slot_bytes
               [ manifest ] [ slot 0: payload ] [ slot 1 ] …            slot_bytes: block_bytes, rounded up to 4096

    manifest   one line of JSON: format, fingerprint, slab id, block bytes, number of slots, engine, xxh3 of the rest

The file holds payloads only; which block lies in which slot, and its checksum, is in the index in Redis, under the slab
id. A file that was made anew has a new id, so entries of the old one are never followed. One process at a time has the
file (`flock`): whoever is second gets `SlabError` and serves without it.

A file of another format version is refused and left alone. One whose manifest is damaged, or names another
fingerprint or size, is started over: nothing in it could be trusted, and a cache may be lost.

Nothing is synced: after a crash of the process the kernel still writes; after one of the machine, what is torn fails
its checksum. Reads go through the page cache (direct I/O was no faster for blocks of this size, and after a restart
of the process the cache is still warm). Neighbours in a prompt mostly lie in neighbouring slots, and the kernel reads
ahead by itself; hints (`posix_fadvise`) slot by slot halved the speed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
from pathlib import Path

import msgspec
import xxhash

from engine.tiers.slab import SlabError, SlabReadError, payload_checksum

FORMAT = 1
PAGE = 4096


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The first page of the file, in clear."""

    radixgate_slab: int  # the format's version
    fingerprint: str
    slab_id: str
    block_bytes: int
    num_slots: int
    host: str
    checksum: str = ""

    def digest(self) -> str:
        return xxhash.xxh3_64_hexdigest(msgspec.json.encode(msgspec.structs.replace(self, checksum="")))

    def sealed(self) -> bytes:
        """The page, with its checksum."""
        return msgspec.json.encode(msgspec.structs.replace(self, checksum=self.digest())).ljust(PAGE, b"\0")


class DiskSlab:
    """Payloads in a file. Every method may block; `engine/tiers/io_thread.py` calls them."""

    name = "disk"

    def __init__(self, path: Path, fingerprint: str, num_slots: int, block_bytes: int) -> None:
        """Opens or makes the file. Raises `SlabError` when it is another's, or of another format."""
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self.path = path
        self._slot_bytes = -(-block_bytes // PAGE) * PAGE
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SlabError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            self._lock()
            self.manifest = self._open(fingerprint)
        except BaseException:
            os.close(self._file)
            raise

    @property
    def slab_id(self) -> str:
        return self.manifest.slab_id

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SlabError(f"{self.path} is in use by another engine") from error

    def _open(self, fingerprint: str) -> Manifest:
        wanted = Manifest(
            radixgate_slab=FORMAT,
            fingerprint=fingerprint,
            slab_id=secrets.token_hex(8),
            block_bytes=self.block_bytes,
            num_slots=self.num_slots,
            host=socket.gethostname(),
        )
        try:
            found = read_manifest(os.pread(self._file, PAGE, 0))
        except OSError as error:
            raise SlabError(f"{self.path} cannot be read: {error.strerror}") from error
        if found is not None and found.radixgate_slab != FORMAT:
            raise SlabError(f"{self.path} has format {found.radixgate_slab}; this version reads {FORMAT}")
        if found is not None and _same_shape(found, wanted):
            return found
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, wanted.sealed(), 0)
        except OSError as error:
            raise SlabError(f"{self.path} cannot be written: {error.strerror}") from error
        return wanted

    # ------------------------------------------------------------------ payloads

    def _offset(self, number: int) -> int:
        return PAGE + number * self._slot_bytes

    def write(self, number: int, payload: memoryview, key: bytes) -> int:
        checksum = payload_checksum(payload, key)
        written, offset = 0, self._offset(number)
        while written < len(payload):
            count = os.pwrite(self._file, payload[written:], offset + written)
            if not count:
                raise OSError(errno.EIO, "nothing was written")
            written += count
        return checksum

    def read(self, number: int, into: memoryview, key: bytes, checksum: int) -> None:
        done, offset = 0, self._offset(number)
        while done < len(into):
            count = os.preadv(self._file, [into[done:]], offset + done)
            if not count:
                raise SlabReadError(f"disk slot {number} lies beyond the end of the file")
            done += count
        if payload_checksum(into, key) != checksum:
            raise SlabReadError(f"disk slot {number} does not hold its block")

    def clear(self, number: int) -> None:
        os.pwrite(self._file, bytes(self._slot_bytes), self._offset(number))

    def close(self) -> None:
        os.close(self._file)


def slab_path(data_dir: Path, fingerprint: str) -> Path:
    return data_dir / "kv" / f"{fingerprint}.slab"


def read_manifest(page: bytes) -> Manifest | None:
    """None when it is damaged, cut off, or no manifest at all."""
    try:
        manifest = msgspec.json.decode(page.rstrip(b"\0"), type=Manifest)
    except msgspec.DecodeError:
        return None
    return manifest if manifest.digest() == manifest.checksum else None


def _same_shape(found: Manifest, wanted: Manifest) -> bool:
    return (found.fingerprint, found.block_bytes, found.num_slots) == (
        wanted.fingerprint,
        wanted.block_bytes,
        wanted.num_slots,
    )
