"""The whole product but the model: HTTP, gateway, zmq, engine server, scheduler, cache, over the fake device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from engine.client import EngineClient
from engine.engine import LLMEngine
from engine.measured_engine import MeasuredEngine
from engine.protocol import EngineStats
from engine.server import EngineServer
from engine.settings import EngineSettings, RetrievalSettings, Settings
from engine.tiers.tiered_cache import TieredCache
from retrieval.redis_commands import connect_store
from tests.engine.fake_runner import FakeRunner
from tests.engine.harness import engine_info
from tests.engine.tiers.tiered_harness import host_only
from tests.gateway.byte_tokenizer import byte_tokenizer
from tests.gateway.chat_templates import CHATML, SPECIAL_TOKENS
from tests.gateway.conftest import RunningGateway, empty_store_url, run_gateway_thread, store_server, store_url
from tests.gateway.fake_engine import FakeEngine
from tests.retrieval.hashing_embedder import HashingEmbedder

__all__ = ["empty_store_url", "store_server", "store_url"]  # fixtures of the gateway's tests

NUM_BLOCKS = 512
BLOCK_SIZE = 16
MODEL = "fake"


@dataclass
class Stack:
    gateway: RunningGateway
    engine: LLMEngine
    runner: FakeRunner
    server: EngineServer

    def stats(self) -> EngineStats:
        """Read from the test's thread: only while the engine is idle."""
        return self.engine.stats()

    def wait_idle(self) -> EngineStats:
        self.gateway.wait_until(lambda: not self.engine.has_work())
        return self.stats()


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """A gateway with tenants alice, bob, and (in one cache group) carol and dave."""
    yield from run_stack(tmp_path)


def run_stack(
    tmp_path: Path,
    *,
    num_blocks: int = NUM_BLOCKS,
    host_blocks: int = 0,
    tiers: TieredCache | None = None,
    **gateway_options: Any,
) -> Iterator[Stack]:
    """`host_blocks`: with a host tier of so many. `tiers`: with these, closed with the engine, as at a clean stop.

    `gateway_options`: as for `run_gateway_thread`.
    """
    tokenizer = byte_tokenizer()
    info = msgspec.structs.replace(
        engine_info(num_blocks, BLOCK_SIZE, 4096),
        tokenizer_json=tokenizer.to_str().encode(),
        vocab_size=tokenizer.get_vocab_size(),
        eos_token_ids=(tokenizer.token_to_id("<|im_end|>"),),
        chat_template=CHATML,
        special_tokens=SPECIAL_TOKENS,
    )
    runner = FakeRunner(num_blocks, BLOCK_SIZE, vocab_size=256)  # bytes only: it never ends by itself
    settings = EngineSettings(max_num_seqs=16, max_num_batched_tokens=512, prefill_chunk_size=128)
    engine = LLMEngine(info, settings, runner)
    if host_blocks:
        tiers = host_only(host_blocks, BLOCK_SIZE)
    if tiers is not None:
        runner.host = tiers.host_slab
        engine.attach_tiers(tiers)
    server = EngineServer(MeasuredEngine(engine), f"ipc://{tmp_path}/engine.sock", drain_seconds=0)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        client = EngineClient(server.endpoint)
        for gateway in run_gateway_thread(cast("FakeEngine", client), **gateway_options):
            gateway.wait_until(lambda: client.info is not None)
            yield Stack(gateway, engine, runner, server)
    finally:
        server.stop()
        thread.join(20)
        assert not thread.is_alive()
        engine.close()


def retrieval_options(store_url: str, operator_tenant: str) -> dict[str, Any]:
    """For `run_stack`: retrieval and the admin API over one store."""
    settings = RetrievalSettings(operator_tenant=operator_tenant, chunk_tokens=400, prefill_tokens_per_minute=0)
    return {
        "settings": Settings(retrieval=settings),
        "store_url": store_url,
        "redis": connect_store(store_url),
        "embedder": HashingEmbedder(),
    }
