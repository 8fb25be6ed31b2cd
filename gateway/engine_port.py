"""What the gateway asks of an engine. `engine.client.EngineClient` is the one that talks to a process."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from engine.protocol import (
    CacheView,
    Delta,
    DocumentStats,
    EngineInfo,
    EngineStats,
    Erase,
    Erased,
    GetDocumentStats,
    ProbeResult,
    Submit,
)


class Engine(Protocol):
    @property
    def info(self) -> EngineInfo | None:
        """None until the engine has been reached for the first time."""
        ...

    @property
    def connected(self) -> bool: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def probe(self, timeout: float) -> ProbeResult:
        """One real decode step. Raises `EngineUnavailableError` when none is answered within `timeout` seconds."""
        ...

    async def stats(self) -> EngineStats:
        """Raises `EngineUnavailableError`."""
        ...

    async def metrics_text(self, timeout: float) -> bytes:
        """The engine's metrics in Prometheus' text format. Raises `EngineUnavailableError`."""
        ...

    async def cache_view(self, owner: str | None, tenant_id: str | None, max_nodes: int, timeout: float) -> CacheView:
        """The cache now; of one owner, and one tenant's requests, if given. Raises `EngineUnavailableError`."""
        ...

    async def erase(self, request: Erase) -> Erased:
        """Raises `EngineUnavailableError`."""
        ...

    async def document_stats(self, request: GetDocumentStats) -> DocumentStats:
        """Raises `EngineUnavailableError`."""
        ...

    def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        """The deltas of one request. Raises a `RadixgateError` for a failure; closed early, it aborts the request."""
        ...
