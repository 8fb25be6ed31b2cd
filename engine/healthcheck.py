"""`python -m engine.healthcheck`: exit 0 when the engine of these settings computes a real decode step, else 1."""

from __future__ import annotations

import asyncio
import os
import sys

from engine.client import EngineClient
from engine.errors import RadixgateError
from engine.settings import engine_endpoint, load_settings

_SECONDS = 10.0


async def check(endpoint: str) -> str | None:
    """What is wrong, or None."""
    client = EngineClient(endpoint.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:"))
    await client.start()
    try:
        await client.wait_ready(_SECONDS)
        result = await client.probe(_SECONDS)
        return None if result.ok else result.message
    except RadixgateError as error:
        return error.message
    finally:
        await client.close()


def main() -> int:
    problem = asyncio.run(check(engine_endpoint(load_settings(None, os.environ))))
    if problem is not None:
        print(problem, file=sys.stderr)
    return int(problem is not None)


if __name__ == "__main__":
    sys.exit(main())
