"""How fast this engine computes prompts, as it has measured itself: what a cached token saves."""

from __future__ import annotations

import asyncio
import logging

from engine.errors import RadixgateError
from gateway.engine_port import Engine

logger = logging.getLogger(__name__)

POLL_SECONDS = 5.0


class EngineSpeed:
    """Asks the engine now and then; 0 until it has computed a prompt."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.prefill_tokens_per_second = 0.0

    def saved_microseconds(self, num_cached_tokens: int) -> int:
        speed = self.prefill_tokens_per_second
        return round(num_cached_tokens / speed * 1e6) if speed else 0

    async def refresh(self) -> None:
        try:
            stats = await self._engine.stats()
        except RadixgateError as error:
            logger.debug("the engine's speed is not known now: %s", error)
            return
        self.prefill_tokens_per_second = stats.prefill_tokens_per_second

    async def run(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(POLL_SECONDS)
