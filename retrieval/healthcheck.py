"""`python -m retrieval.healthcheck ENDPOINT`: exit 0 when the embedder there answers, else 1."""

from __future__ import annotations

import asyncio
import sys

from retrieval.embedder_client import EmbedderClient

_SECONDS = 10.0


async def check(endpoint: str, seconds: float = _SECONDS) -> bool:
    client = EmbedderClient(endpoint)
    await client.start()
    try:
        async with asyncio.timeout(seconds):
            await client.wait_ready()
    except TimeoutError:
        return False
    finally:
        await client.close()
    return True


if __name__ == "__main__":
    sys.exit(not asyncio.run(check(sys.argv[1])))
