"""One line a request, with ids and numbers and no text of a prompt or an answer.

An ASGI wrapper around the whole application, so that it also sees a request whose client went away.
"""

from __future__ import annotations

import logging
import time

from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from engine.protocol import PromptAccount
from gateway.request_context import request_context

logger = logging.getLogger("gateway.access")

# What the log says of a request whose client left before a response began; never sent.
_CLIENT_CLOSED_REQUEST = 499

HEALTH_PATHS = frozenset({"/livez", "/readyz"})


class AccessLog:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.monotonic()
        status = _CLIENT_CLOSED_REQUEST

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        finally:
            _log(scope, status, time.monotonic() - start)


def _log(scope: HTTPScope, status: int, seconds: float) -> None:
    context = request_context(scope)
    account = context.account or PromptAccount()
    logger.log(
        # Every second or so, from whoever watches the server.
        logging.DEBUG if scope["path"] in HEALTH_PATHS else logging.INFO,
        "%s %s %d %.1fms id=%s tenant=%s prompt=%d cached=%d output=%d%s",
        str(scope["method"]),
        _printable(scope["path"]),
        status,
        seconds * 1000,
        context.request_id,
        context.tenant.id if context.tenant is not None else "-",
        account.num_prompt_tokens,
        account.num_cached_tokens,
        context.num_output_tokens,
        f" outcome={context.outcome}" if context.outcome else "",
    )


def _printable(path: str) -> str:
    """A path is the client's text: it must not start a new line in the log."""
    return "".join(char if char.isprintable() else "?" for char in path[:200])
