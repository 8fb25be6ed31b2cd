"""An engine with behaviour and without a model: it answers with the question, one character a delta.

It has a prefix cache (blocks of 16 tokens, by scope), counts what it was sent, obeys `max_tokens` and `stop`, and
does as the question says:

    fail:CODE          a Failure with that code before the first delta
    break:CODE         the first three characters, then that Failure
    wait               nothing but the account's delta, until it is aborted
    silence            nothing at all, until it is aborted
    crash              an exception that is no RadixgateError
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from itertools import permutations

import msgspec

from engine.errors import EngineUnavailableError, from_wire
from engine.protocol import (
    PROTOCOL_VERSION,
    CacheView,
    Delta,
    DocumentStats,
    DocumentUse,
    DrawnToken,
    EngineInfo,
    EngineStats,
    Erase,
    Erased,
    EvictionLine,
    FinishReason,
    GetDocumentStats,
    OwnerUse,
    ProbeResult,
    PromptAccount,
    Segment,
    SegmentKind,
    Submit,
    TokenLogprob,
    unpack_tokens,
)
from tests.gateway.byte_tokenizer import byte_tokenizer
from tests.gateway.chat_templates import CHATML, SPECIAL_TOKENS

BLOCK_SIZE = 16
MODEL = "echo/byte-model"


def empty_view() -> CacheView:
    return CacheView(
        query_id="",
        block_size=BLOCK_SIZE,
        num_blocks=1024,
        nodes=(),
        num_nodes=0,
        block_map=b"f" * 1024,
        blocks_per_cell=1,
        owners=(),
        evictions=(),
        requests=(),
    )


def one_owner(view: CacheView, owner: str, tenant_id: str | None) -> CacheView:
    return msgspec.structs.replace(
        view,
        nodes=tuple(node for node in view.nodes if node.owner == owner),
        block_map=b"",
        owners=tuple(row for row in view.owners if row.owner == owner),
        evictions=tuple(row for row in view.evictions if row.owner == owner),
        requests=tuple(row for row in view.requests if row.tenant_id == tenant_id),
    )


class FakeEngine:
    def __init__(self, *, max_model_len: int = 8192, chat_template: str = CHATML, reachable: bool = True) -> None:
        self.tokenizer = byte_tokenizer()
        self.submitted: list[Submit] = []
        self.finished: list[str] = []
        self.aborted: list[str] = []
        self.num_probes = 0
        self.probe_result = ProbeResult(probe_id="", ok=True)
        self.prefill_speed = 1000.0
        self.owners: tuple[OwnerUse, ...] = ()
        self.ledger: tuple[EvictionLine, ...] = ()
        self.probe_gate = asyncio.Event()
        self.probe_gate.set()
        self.started = self.closed = False
        self.reachable = reachable
        self.view = empty_view()
        self.metrics = b"# TYPE radixgate_engine_steps counter\nradixgate_engine_steps_total 7.0\n"
        self.erased: list[Erase] = []
        # Of each full block: whose it is, and the documents with tokens in it or before it.
        self._blocks: dict[tuple[bytes, tuple[int, ...]], tuple[str, frozenset[tuple[str, str]]]] = {}
        self._info = EngineInfo(
            protocol_version=PROTOCOL_VERSION,
            incarnation="1",
            model=MODEL,
            created=1_700_000_000,
            fingerprint="f" * 32,
            max_model_len=max_model_len,
            block_size=BLOCK_SIZE,
            num_blocks=1024,
            block_bytes=1024,
            eos_token_ids=(257,),
            vocab_size=self.tokenizer.get_vocab_size(),
            dtype="float32",
            device="cpu",
            tokenizer_json=self.tokenizer.to_str().encode(),
            chat_template=chat_template,
            special_tokens=SPECIAL_TOKENS,
        )

    @property
    def info(self) -> EngineInfo | None:
        return self._info if self.reachable else None

    @property
    def running(self) -> set[str]:
        return {submit.request_id for submit in self.submitted} - {*self.finished, *self.aborted}

    async def start(self) -> None:
        self.started = True

    async def close(self) -> None:
        self.closed = True

    async def probe(self, timeout: float) -> ProbeResult:
        self.num_probes += 1
        await self.probe_gate.wait()
        if not self.reachable:
            raise EngineUnavailableError("no engine")
        return self.probe_result

    async def stats(self) -> EngineStats:
        if not self.reachable:
            raise EngineUnavailableError("no engine")
        counts = {name: 0 for name in EngineStats.__struct_fields__ if name.startswith("num_")}
        return EngineStats(
            incarnation="1",
            **counts,  # pyright: ignore[reportArgumentType]
            prefill_tokens_per_second=self.prefill_speed,
            owners=self.owners,
            ledger=self.ledger,
        )

    @property
    def connected(self) -> bool:
        return self.reachable

    async def metrics_text(self, timeout: float) -> bytes:
        if not self.reachable:
            raise EngineUnavailableError("no engine")
        return self.metrics

    async def cache_view(self, owner: str | None, tenant_id: str | None, max_nodes: int, timeout: float) -> CacheView:
        if not self.reachable:
            raise EngineUnavailableError("no engine")
        return self.view if owner is None else one_owner(self.view, owner, tenant_id)

    async def erase(self, request: Erase) -> Erased:
        if not self.reachable:
            raise EngineUnavailableError("no engine")
        self.erased.append(request)
        gone = [
            block
            for block, (owner, documents) in self._blocks.items()
            if (request.document_ids is None and request.owner in (None, owner))
            or any(
                request.owner in (None, whose) and document_id in (request.document_ids or ())
                for whose, document_id in documents
            )
        ]
        for block in gone:
            del self._blocks[block]
        return Erased(erase_id=request.erase_id, num_blocks=len(gone), num_by_tier={"device": len(gone)})

    async def document_stats(self, request: GetDocumentStats) -> DocumentStats:
        if not self.reachable:
            raise EngineUnavailableError("no engine")
        counts = {
            document_id: sum(
                scope in request.scopes and document_id in {name for _, name in documents}
                for (scope, _), (_, documents) in self._blocks.items()
            )
            for document_id in request.document_ids
        }
        return DocumentStats(
            query_id=request.query_id,
            documents=tuple(
                DocumentUse(
                    document_id=document_id,
                    num_blocks=count,
                    num_bytes=count * 1024,
                    num_by_tier={"device": count},
                    hits=0,
                    tokens_saved=0,
                    last_use=0.0,
                )
                for document_id, count in counts.items()
                if count
            ),
        )

    async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        self.submitted.append(submit)
        ended = False
        try:
            async for delta in self._answer(submit):
                ended = delta.finish_reason is not None
                yield delta
        except EngineUnavailableError:
            ended = True
            raise
        finally:
            (self.finished if ended else self.aborted).append(submit.request_id)

    def question(self, submit: Submit) -> str:
        ids = [i for s in submit.segments if s.kind is SegmentKind.QUESTION for i in unpack_tokens(s.tokens)]
        return self.tokenizer.decode(ids)

    def prompt(self, submit: Submit) -> str:
        ids = [i for s in submit.segments for i in unpack_tokens(s.tokens)]
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    async def _answer(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        command, _, code = self.question(submit).partition(":")
        if command == "crash":
            raise ZeroDivisionError("a secret of the server")
        if command == "fail":
            raise from_wire(code, f"the engine says {code}", None)
        if command == "silence":
            await asyncio.Event().wait()
        submit, order = self._arrange(submit)
        account = self._admit(submit)
        admitted = Delta(
            request_id=submit.request_id,
            text="",
            num_output_tokens=0,
            account=account,
            document_order=order,
            queue_seconds=0.0,
            seconds_saved=account.num_cached_tokens / self.prefill_speed,
        )
        if command == "wait":
            yield admitted
            await asyncio.Event().wait()
        text, reason = self._output(submit)
        for i, char in enumerate(text, 1):
            if command == "break" and i > 3:
                raise from_wire(code, f"the engine says {code}", None)
            last = reason if i == len(text) else None
            first = admitted if i == 1 else Delta(request_id=submit.request_id, text="", num_output_tokens=0)
            tokens = _drawn(char, submit.sampling.num_logprobs)
            yield msgspec.structs.replace(first, text=char, num_output_tokens=i, tokens=tokens, finish_reason=last)
            await asyncio.sleep(0)
        if not text:
            yield msgspec.structs.replace(admitted, finish_reason=reason)

    def _output(self, submit: Submit) -> tuple[str, FinishReason]:
        text = self.question(submit)
        ends = [at for at in (text.find(stop) for stop in submit.sampling.stop) if at >= 0]
        if ends:
            text = text[: min(ends)]
        if len(text) > submit.sampling.max_tokens:
            return text[: submit.sampling.max_tokens], FinishReason.LENGTH
        return text, FinishReason.STOP

    def _arrange(self, submit: Submit) -> tuple[Submit, tuple[int, ...] | None]:
        """For `cache`: of all orders of the documents that need not stay last, the one with the longest hit."""
        if submit.document_order != "cache":
            return submit, None
        places = [i for i, each in enumerate(submit.segments) if each.kind is SegmentKind.DOCUMENT]
        head, foot = submit.segments[: places[0]], submit.segments[places[-1] + 1 :]
        num_free = max(0, len(places) - submit.pin_top)
        orders = [(*free, *range(num_free, len(places))) for free in permutations(range(num_free))]
        arranged = [(*head, *(submit.segments[places[i]] for i in order), *foot) for order in orders]
        best = max(range(len(orders)), key=lambda i: (self._num_cached(arranged[i]), -i))
        return msgspec.structs.replace(submit, segments=arranged[best]), orders[best]

    def _num_cached(self, segments: tuple[Segment, ...]) -> int:
        ids = [i for segment in segments for i in unpack_tokens(segment.tokens)]
        cached = 0
        for end in range(BLOCK_SIZE, len(ids) + 1, BLOCK_SIZE):
            if (_scope_at(segments, end), tuple(ids[:end])) not in self._blocks or end == len(ids):
                break
            cached = end
        return cached

    def _admit(self, submit: Submit) -> PromptAccount:
        """The account of a prompt, by full blocks; the last token is always computed."""
        ids = [i for segment in submit.segments for i in unpack_tokens(segment.tokens)]
        if not submit.use_cache:
            return PromptAccount(disabled=len(ids))
        cached = self._num_cached(submit.segments)
        for end in range(BLOCK_SIZE, len(ids) + 1, BLOCK_SIZE):
            block = (_scope_at(submit.segments, end), tuple(ids[:end]))
            owner = _segment_at(submit.segments, end).owner or submit.tenant_id
            self._blocks[block] = (owner, _documents_before(submit, end))
        tail = len(ids) % BLOCK_SIZE or 1
        return PromptAccount(device=cached, cold=max(len(ids) - cached - tail, 0), partial_block=tail)


def _drawn(char: str, num_logprobs: int | None) -> tuple[DrawnToken, ...]:
    """A character is its token, with the letters from `a` on as the best beside it."""
    if num_logprobs is None:
        return ()
    top = tuple(TokenLogprob(bytes([97 + i]), -0.5 - i) for i in range(num_logprobs))
    return (DrawnToken(char.encode(), -0.25, top),)


def _scope_at(segments: tuple[Segment, ...], end: int) -> bytes:
    """The scope of the block that ends there: that of its last token."""
    return _segment_at(segments, end).scope


def _segment_at(segments: tuple[Segment, ...], end: int) -> Segment:
    for segment in segments:
        end -= len(segment)
        if end <= 0:
            return segment
    raise AssertionError("the block ends behind the prompt")


def _documents_before(submit: Submit, end: int) -> frozenset[tuple[str, str]]:
    """(owner, id) of the documents that the block has seen."""
    found: set[tuple[str, str]] = set()
    start = 0
    for segment in submit.segments:
        if start < end and segment.document_id is not None:
            found.add((segment.owner or submit.tenant_id, segment.document_id))
        start += len(segment)
    return frozenset(found)
