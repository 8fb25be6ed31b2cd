"""The index of one slab in Redis: keys, scripts, and nothing else. Synchronous: only the journal's thread calls it.

    radixgate:kv:{slab id}:meta      hash     incarnation, layout, fingerprint, host
    radixgate:kv:{slab id}:names     hash     digest → packed name
    radixgate:kv:{slab id}:g:N       string   records of slots 512·N …

The slab id is in every key: an engine reads what its own file holds, never what another host's or an older file's
entries promise. The braces keep all of it in one slot of a Redis cluster, so that a script may touch it together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import cast

import redis

from engine.tiers.index_record import GROUP_SLOTS, RECORD_FORMAT, RecordFormat

_GROUPS_A_READ = 16
_TIMEOUT = 2.0  # seconds
_MAX_UNPACK = 7_000  # Lua's `unpack` puts its results on a stack of 8,000


@dataclass(slots=True, frozen=True)
class SlabLayout:
    """Whose index it is, and what decides where a record lies."""

    slab_id: str
    fingerprint: str
    host: str
    num_slots: int
    block_size: int


class IndexStore:
    """Raises `redis.RedisError` from every method when the store cannot be asked."""

    def __init__(self, url: str, layout: SlabLayout, ttl_seconds: int) -> None:
        self._client: redis.Redis = redis.Redis.from_url(url, socket_timeout=_TIMEOUT, socket_connect_timeout=_TIMEOUT)
        self.format = RecordFormat(layout.block_size)
        self._layout = layout
        self._ttl = ttl_seconds
        prefix = f"radixgate:kv:{{{layout.slab_id}}}"
        self._meta, self._names = f"{prefix}:meta", f"{prefix}:names"
        num_groups = -(-layout.num_slots // GROUP_SLOTS)
        self._groups = [f"{prefix}:g:{group}" for group in range(num_groups)]
        self._claim = self._client.register_script(_lua("claim"))
        self._publish = self._client.register_script(_lua("publish"))

    def close(self) -> None:
        self._client.close()

    def claim(self, incarnation: str, *, wipe: bool) -> bool:
        """Take the index over; True when entries may be there."""
        layout = self._layout
        if len(self._groups) > _MAX_UNPACK:
            self._client.delete(*self._groups[_MAX_UNPACK:]) if wipe else None
        answer = cast(
            bytes,
            self._claim(
                keys=[self._meta, self._names, *self._groups[:_MAX_UNPACK]],
                args=[
                    incarnation,
                    f"{RECORD_FORMAT}/{self.format.size}/{layout.num_slots}",
                    self._ttl,
                    "wipe" if wipe else "keep",
                    *("fingerprint", layout.fingerprint, "host", layout.host),
                ],
            ),
        )
        return answer == b"kept"

    def publish(self, incarnation: str, names: Mapping[bytes, bytes], records: Mapping[int, bytes]) -> str:
        """Write records by slot, and names by digest (an empty one is deleted): "ok", "gone" or "stale"."""
        groups = sorted({slot // GROUP_SLOTS for slot in records})
        place = {group: index for index, group in enumerate(groups, 3)}
        arguments: list[bytes | str | int] = [incarnation, self._ttl, len(names)]
        for digest, packed in names.items():
            arguments += [digest, packed]
        for slot, record in records.items():
            arguments += [place[slot // GROUP_SLOTS], slot % GROUP_SLOTS * self.format.size, record]
        keys = [self._meta, self._names, *(self._groups[group] for group in groups)]
        return cast(bytes, self._publish(keys=keys, args=arguments)).decode()

    def names(self) -> dict[bytes, bytes]:
        """Every name, by its digest."""
        return dict(cast("Iterator[tuple[bytes, bytes]]", self._client.hscan_iter(self._names, count=1_000)))

    def groups(self) -> Iterator[tuple[int, bytes]]:
        """(first slot, records) of every group that is there, in order of slots."""
        for first in range(0, len(self._groups), _GROUPS_A_READ):
            values = cast("list[bytes | None]", self._client.mget(self._groups[first : first + _GROUPS_A_READ]))
            for group, value in enumerate(values, first):
                if value:
                    yield group * GROUP_SLOTS, value

    def memory_bytes(self) -> int:
        """What the index takes in Redis."""
        keys = [self._meta, self._names, *self._groups]
        return sum(cast("int | None", self._client.memory_usage(key)) or 0 for key in keys)


def _lua(name: str) -> str:
    return (resources.files("engine.tiers") / "lua" / f"{name}.lua").read_text("utf-8")
