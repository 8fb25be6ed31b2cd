"""An engine without a model: it answers with its prompt's token ids as characters, one a step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from engine.errors import ContextLengthExceededError, EngineStepError
from engine.protocol import (
    PROTOCOL_VERSION,
    CacheVerified,
    CacheView,
    Delta,
    DocumentStats,
    EngineInfo,
    EngineStats,
    Erase,
    Erased,
    EvictCache,
    ExplainedPart,
    Failure,
    FinishReason,
    GetCacheView,
    GetDocumentStats,
    PromptAccount,
    Submit,
    unpack_tokens,
)

MAX_MODEL_LEN = 1_000


@dataclass
class EchoRequest:
    prompt: str
    max_tokens: int
    num_output_tokens: int = 0


@dataclass
class EchoEngine:
    """`step_seconds` makes it slow, `failing` makes its steps fail, `held` makes it compute nothing, `prefilling` makes
    it compute without a delta, `restoring` makes it wait for an earlier life's cache."""

    incarnation: str = "first"
    step_seconds: float = 0.0
    failing: bool = False
    held: bool = False
    prefilling: bool = False
    restoring: bool = False
    requests: dict[str, EchoRequest] = field(default_factory=dict[str, EchoRequest])
    submitted: list[Submit] = field(default_factory=list[Submit])
    aborted: list[str] = field(default_factory=list[str])
    explained: list[Submit] = field(default_factory=list[Submit])
    num_integrity_checks: int = 0
    num_persists: int = 0
    num_computed_tokens: int = 0
    num_different: int = 0  # blocks that a verification finds wrong
    tokenizer_json: bytes = b"{}"
    chat_template: str = ""

    def add_request(self, submit: Submit) -> None:
        ids = [token_id for segment in submit.segments for token_id in unpack_tokens(segment.tokens)]
        if len(ids) >= MAX_MODEL_LEN:
            raise ContextLengthExceededError(f"{len(ids)} tokens, {MAX_MODEL_LEN} fit", param="messages")
        assert submit.request_id not in self.requests
        self.submitted.append(submit)
        self.requests[submit.request_id] = EchoRequest("".join(map(chr, ids)), submit.sampling.max_tokens)

    def abort_request(self, request_id: str) -> bool:
        known = self.requests.pop(request_id, None) is not None
        if known:
            self.aborted.append(request_id)
        return known

    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Delta | Failure]:
        time.sleep(0.001 if self.held or self.prefilling else self.step_seconds)
        if self.held:
            return []
        if self.failing:
            failed = list(self.requests)
            self.requests.clear()
            return [Failure(request_id=name, code=EngineStepError.code, message="device lost") for name in failed]
        self.num_computed_tokens += len(self.requests)
        return [] if self.prefilling else [self._next(name) for name in list(self.requests)]

    def _next(self, request_id: str) -> Delta:
        request = self.requests[request_id]
        position = request.num_output_tokens
        request.num_output_tokens += 1
        finished = request.num_output_tokens == min(request.max_tokens, len(request.prompt))
        if finished:
            del self.requests[request_id]
        return Delta(
            request_id=request_id,
            text=request.prompt[position],
            num_output_tokens=request.num_output_tokens,
            account=PromptAccount(cold=len(request.prompt)) if position == 0 else None,
            document_order=(1, 0) if position == 0 else None,
            finish_reason=FinishReason.LENGTH if finished else None,
        )

    def idle(self) -> bool:
        return False

    @property
    def is_restoring(self) -> bool:
        return self.restoring

    def persist(self) -> None:
        self.num_persists += 1

    def erase(self, erase: Erase) -> Erased:
        return Erased(erase_id=erase.erase_id, num_blocks=3, num_by_tier={"device": 1, "host": 1, "disk": 1})

    def evict(self, evict: EvictCache) -> int:
        return evict.num_blocks

    def verify(self, num_paths: int) -> CacheVerified:
        return CacheVerified(
            call_id="", num_read=5, num_unreadable=0, num_recomputed=num_paths, num_different=self.num_different
        )

    def explain(self, submit: Submit) -> list[ExplainedPart]:
        self.explained.append(submit)
        return [ExplainedPart(start=0, end=4, place="cold")]

    def check_integrity(self) -> bool:
        self.num_integrity_checks += 1
        return True

    def info(self) -> EngineInfo:
        return EngineInfo(
            protocol_version=PROTOCOL_VERSION,
            incarnation=self.incarnation,
            model="echo",
            created=0,
            fingerprint="00" * 16,
            max_model_len=MAX_MODEL_LEN,
            block_size=16,
            num_blocks=64,
            block_bytes=1024,
            eos_token_ids=(0,),
            vocab_size=0x110000,
            dtype="float32",
            device="cpu",
            tokenizer_json=self.tokenizer_json,
            chat_template=self.chat_template,
            special_tokens={},
        )

    def stats(self) -> EngineStats:
        fields = [name for name in EngineStats.__struct_fields__ if name.startswith("num_")]
        counts = {**dict.fromkeys(fields, 0), "num_running": len(self.requests)}
        counts["num_computed_tokens"] = self.num_computed_tokens
        return EngineStats(incarnation=self.incarnation, **counts)  # pyright: ignore[reportArgumentType]

    def document_stats(self, query: GetDocumentStats) -> DocumentStats:
        return DocumentStats(query_id=query.query_id, documents=())

    def metrics_text(self) -> bytes:
        return f"echo_requests {len(self.requests)}\n".encode()

    def cache_view(self, query: GetCacheView) -> CacheView:
        return CacheView(
            query_id=query.query_id,
            block_size=16,
            num_blocks=64,
            nodes=(),
            num_nodes=0,
            block_map=b"f" * 64,
            blocks_per_cell=1,
            owners=(),
            evictions=(),
            requests=(),
        )
