"""What one request was, once it is over: the one record that log, metrics, history and traces are made from.

    AccessLog (around the whole application) ─► RequestRecord ─► every observer, in order

One record means one truth: metrics, history and log lines add up to the same sums. No text of a prompt or an answer is
in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from engine.protocol import PromptAccount, Segment, SegmentKind
from gateway.model_use import ModelUse

Outcome = Literal["ok", "client_error", "rate_limited", "server_error", "disconnected", "stream_error"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "client_error", "rate_limited", "server_error", "disconnected", "stream_error")

HitClass = Literal["hit", "partial", "miss"]
HIT_CLASSES: tuple[HitClass, ...] = ("hit", "partial", "miss")


@dataclass(frozen=True, slots=True, kw_only=True)
class MissPoint:
    """Where in its prompt a request stopped finding anything."""

    segment: SegmentKind
    document_id: str | None
    token: int  # of the prompt
    token_in_segment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentShare:
    """A document in one prompt."""

    document_id: str
    num_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    time: float  # Unix seconds, at its end
    request_id: str
    method: str
    path: str
    route: str  # bounded: the path of a known route, else "other"
    status: int
    outcome: Outcome
    error_code: str
    tenant_id: str | None
    model: str
    stream: bool
    seconds: float
    account: PromptAccount | None
    num_output_tokens: int
    time_to_first_token: float | None
    queue_seconds: float | None
    seconds_saved: float
    retrieval: tuple[float, float] | None  # from when to when, in seconds since its arrival
    prepare_seconds: float | None  # until its prompt went to the engine
    traceparent: str  # as the caller sent it; "": none
    token_intervals: Sequence[float]
    miss: MissPoint | None
    causes: tuple[str, ...]  # codes of `gateway/cache_report.py`
    documents: tuple[DocumentShare, ...]
    rewriting: ModelUse | None = None  # of its query, before the prompt was known

    @property
    def used(self) -> ModelUse | None:
        """All that the model did for it, which is what is counted; `account` and its neighbours are the answer's."""
        if self.account is None:
            return self.rewriting
        answer = ModelUse(
            account=self.account, num_output_tokens=self.num_output_tokens, seconds_saved=self.seconds_saved
        )
        return answer if self.rewriting is None else self.rewriting + answer


class RequestObserver(Protocol):
    def request_finished(self, record: RequestRecord) -> None:
        """Called once a request, on the event loop: it must neither wait nor raise."""
        ...


def hit_class(account: PromptAccount) -> HitClass:
    """`hit`: at least half of the prompt was found; `partial`: something; `miss`: nothing."""
    if account.num_cached_tokens == 0:
        return "miss"
    return "hit" if 2 * account.num_cached_tokens >= account.num_prompt_tokens else "partial"


def miss_reason(account: PromptAccount) -> str:
    """The class of the tokens that had to be computed although a cache could have held them; "" when there are none."""
    reasons = {name: getattr(account, name) for name in ("cold", "diverged", "evicted", "disabled")}
    reason, count = max(reasons.items(), key=lambda item: item[1])
    return reason if count else ""


def in_prompt_order(segments: tuple[Segment, ...], document_order: tuple[int, ...] | None) -> tuple[Segment, ...]:
    """The segments as they stood in the prompt, where the engine chose the documents' order."""
    if document_order is None:
        return segments
    documents = [segment for segment in segments if segment.kind is SegmentKind.DOCUMENT]
    chosen = iter([documents[place] for place in document_order])
    return tuple(next(chosen) if segment.kind is SegmentKind.DOCUMENT else segment for segment in segments)


def locate(segments: tuple[Segment, ...], account: PromptAccount) -> tuple[MissPoint | None, tuple[DocumentShare, ...]]:
    """Where the cached prefix ends, and how much of each document lies in it."""
    cached, start = account.num_cached_tokens, 0
    miss: MissPoint | None = None
    shares: dict[str, DocumentShare] = {}
    for segment in segments:
        end = start + len(segment)
        if miss is None and start <= cached < end and miss_reason(account):
            miss = MissPoint(
                segment=segment.kind,
                document_id=segment.document_id,
                token=cached,
                token_in_segment=cached - start,
            )
        if segment.document_id is not None:
            found = min(max(cached - start, 0), len(segment))
            earlier = shares.get(segment.document_id)
            shares[segment.document_id] = DocumentShare(
                document_id=segment.document_id,
                num_tokens=len(segment) + (earlier.num_tokens if earlier else 0),
                num_cached_tokens=found + (earlier.num_cached_tokens if earlier else 0),
            )
        start = end
    return miss, tuple(shares.values())
