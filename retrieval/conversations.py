"""Which documents the earlier turns of a conversation were answered with, so that they can stay where they were.

    turn 1   system · documents A B · u1                         remembers (…u1) → {u1: A B}
    turn 2   system · documents A B · u1 a1 · document C · u2     finds (…u1), remembers (…u2) → {u1: A B, u2: C}

The API has no conversations: a client sends all messages again. So a turn is found by its messages up to its
question; the answer and the next question come on top. Retrieving anew for turn 2 and putting the result where turn
1 had its own would change the prompt at its head, and every token behind it would be computed again.

In memory for speed, in Redis for the other gateways; forgotten after a day, or earlier: then a conversation goes on
with the documents of its last turn alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from retrieval import keys
from retrieval.errors import StoreUnavailableError
from retrieval.redis_commands import RedisCommands

logger = logging.getLogger(__name__)

_SECONDS = 24 * 3600
_IN_MEMORY = 10_000
_STORE_SECONDS = 0.1


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Ids of documents in their order in the prompt: behind the system prompt, and before messages by their index."""

    head: tuple[str, ...] = ()
    turns: dict[int, tuple[str, ...]] = msgspec.field(default_factory=dict[int, tuple[str, ...]])

    @property
    def document_ids(self) -> list[str]:
        return [each for run in (self.head, *self.turns.values()) for each in run]


class Conversations:
    def __init__(self, redis: RedisCommands) -> None:
        self._redis = redis
        self._known: OrderedDict[str, Placement] = OrderedDict()

    async def recall(self, tenant: str, scope: bytes, messages: Sequence[tuple[str, str]]) -> Placement | None:
        """Where the documents of the turns before the last message stand; None for a first turn."""
        before = _without_last_turn(messages)
        if not before:
            return None
        key = keys.conversation(tenant, _digest(scope, before))
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        try:
            async with asyncio.timeout(_STORE_SECONDS):
                raw = await self._redis.get(key)
        except (StoreUnavailableError, TimeoutError):
            return None
        return None if raw is None else msgspec.json.decode(raw, type=Placement)

    async def remember(
        self, tenant: str, scope: bytes, messages: Sequence[tuple[str, str]], placement: Placement
    ) -> None:
        key = keys.conversation(tenant, _digest(scope, messages))
        self._known[key] = placement
        self._known.move_to_end(key)
        if len(self._known) > _IN_MEMORY:
            self._known.popitem(last=False)
        try:
            async with asyncio.timeout(_STORE_SECONDS):
                await self._redis.run("SET", key, msgspec.json.encode(placement), "EX", _SECONDS)
        except (StoreUnavailableError, TimeoutError) as error:
            logger.warning("a conversation is known to this gateway only: %s", error)


def _without_last_turn(messages: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    """Up to the question before the last one, if an answer stands between the two."""
    end = len(messages) - 1
    while end > 0 and messages[end - 1][0] == "assistant":
        end -= 1
    answered = 0 < end < len(messages) - 1
    return messages[:end] if answered else ()


def _digest(scope: bytes, messages: Sequence[tuple[str, str]]) -> str:
    digest = hashlib.blake2b(scope, digest_size=16)
    for role, text in messages:
        for part in (role.encode(), text.encode("utf-8", "surrogatepass")):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
    return digest.hexdigest()
