"""Erasures that are not done everywhere yet, kept in a file until they are.

    erase ──► append, fsync ──► device, host, disk at once ──► payloads overwritten, Redis told ──► file emptied
                   │                                                     ▲
                   └── the process ends, or Redis is away: applied again when the index has been read

Applying one twice costs at most a cache entry that was made in between.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from engine.erasure import Selection


class ErasureLog:
    """`pending` is what has to be applied again if this process ends now."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._decoder = msgspec.json.Decoder(Selection)
        self.pending: list[Selection] = []
        if path.exists():
            self.pending = [entry for line in path.read_bytes().splitlines() if (entry := self._decode(line))]

    def _decode(self, line: bytes) -> Selection | None:
        try:
            return self._decoder.decode(line)
        except msgspec.DecodeError:
            return None  # the last line, torn: nobody has been told that it was accepted

    def add(self, selection: Selection) -> None:
        """Returns when it is safe on disk. Raises OSError."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self._path, "ab", opener=_open_private) as file:
            file.write(msgspec.json.encode(selection) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.pending.append(selection)

    def finish(self) -> None:
        """All of them are done everywhere."""
        self._path.unlink(missing_ok=True)
        self.pending.clear()


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
