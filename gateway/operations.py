"""What is there to run a gateway in production: metrics, history, dashboard, traces. Made once, wired in two places.

AccessLog ─► observers: metrics, history, traces          create_app ─► routers: /metrics, /dashboard
                                                                        lifespan: history writer, store watcher
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from litestar import Litestar, Router

from engine.settings import Settings
from gateway.dashboard.routes import dashboard_router
from gateway.drain import Drain
from gateway.engine_port import Engine
from gateway.handover import SHARED_METRICS_VARIABLE
from gateway.history import HistoryWriter, watch_store
from gateway.history_reader import HistoryReader
from gateway.metrics import GatewayMetrics
from gateway.metrics_routes import load_or_create_metrics_token, metrics_router
from gateway.request_record import RequestObserver
from gateway.store_client import StoreClient
from gateway.tenants import TenantDirectory
from gateway.tracing import build_tracer


class Operations:
    """Of one gateway process."""

    def __init__(self, settings: Settings, store: StoreClient) -> None:
        shared = os.environ.get(SHARED_METRICS_VARIABLE)
        self.store = store
        self.metrics = GatewayMetrics(
            shared_dir=Path(shared) if shared else None, tenant_labels=settings.server.tenant_labels
        )
        self._history = HistoryWriter(store, settings.usage.retention_days, self.metrics)
        self._tracer = build_tracer(settings.tracing)
        self._metrics_token = load_or_create_metrics_token(settings.security.metrics_token, settings.store.data_dir)

    @property
    def observers(self) -> tuple[RequestObserver, ...]:
        tracer = () if self._tracer is None else (self._tracer,)
        return (self.metrics, self._history, *tracer)

    def routers(self, settings: Settings, engine: Engine, tenants: TenantDirectory, drain: Drain) -> list[Router]:
        return [
            metrics_router(self.metrics, engine, drain, self.store.problem, self._metrics_token),
            dashboard_router(settings, engine, tenants, HistoryReader(self.store)),
        ]

    @asynccontextmanager
    async def lifespan(self, _: Litestar) -> AsyncGenerator[None]:
        tasks = [asyncio.create_task(self._history.run(), name="history")] if self.store.configured else []
        if self.store.configured:
            tasks.append(asyncio.create_task(watch_store(self.store), name="store-watch"))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.store.close()
            if self._tracer is not None:
                await asyncio.to_thread(self._tracer.close)
