"""Why a prompt was computed, piece by piece: the answer to `cache_report: true` or `x-radixgate-cache-report: 1`.

    prompt    | template | system | document a | document b | question |
    account   ├─ device ───────────────┤├─ diverged ───────────┤├ partial ┤      one account, laid along the prompt
                                        └── first divergent token

    history   the tenant's last few prompts, as far as hints need them: what of this one is new?

Hints compare a request with earlier ones *of its own tenant*, never with anybody else's: that a prompt is cached for
another tenant is nothing this tenant may learn. So "another scope" is said only of the tenant's own salts and users.
Every request is diagnosed; the report goes to who asks for it, the dashboard counts the codes of the hints.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from engine.protocol import PromptAccount, Segment, SegmentKind
from gateway.chat_request import ChatRequest
from retrieval.documents import Document
from retrieval.lint import TIMES, Finding, first_volatile, volatile_at

_MAX_TENANTS = 1024
_MAX_PROMPTS = 4  # of a tenant
_MAX_CHARACTERS = 2000  # of a system prompt
_WORD = re.compile(r"\w+")
_CACHED = ("device", "host", "disk")
_CLASSES = (*_CACHED, "cold", "diverged", "evicted", "partial_block", "disabled")


class SegmentReport(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    document_id: str | None
    tokens: int
    cached_tokens: int
    classes: dict[str, int]  # those that are not 0
    first_divergent_token: int | None  # counted from the segment's start; None: all of it was cached


class Hint(msgspec.Struct, frozen=True):
    code: str
    message: str


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    cached_tokens: int
    first_divergent_token: int | None
    segments: tuple[SegmentReport, ...]
    hints: tuple[Hint, ...]


@dataclass(frozen=True, slots=True)
class Outline:
    """What hints need to know of a prompt."""

    system: str
    documents: tuple[tuple[str, int], ...]  # id, hash of the text
    narrowing: tuple[tuple[str, str], ...]
    loses_reasoning: bool  # an earlier answer comes with its thoughts, and the template leaves them out

    @classmethod
    def of(cls, request: ChatRequest, given: Sequence[Document], *, drops_reasoning: bool) -> Outline:
        system = "\n\n".join(message.text for message in request.messages if message.role == "system")
        documents = tuple((document.id, hash((document.title, document.text))) for document in given)
        reasoning = any(message.role == "assistant" and "</think>" in message.text for message in request.messages)
        narrowing = tuple(sorted(request.body.narrowing.items()))
        return cls(system[:_MAX_CHARACTERS], documents, narrowing, drops_reasoning and reasoning)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Of one request: complete when the account is known."""

    segments: tuple[Segment, ...]
    outline: Outline
    earlier: tuple[Outline, ...]  # latest first
    is_report_wanted: bool

    def hints(self, account: PromptAccount) -> tuple[Hint, ...]:
        """Why what could have been shared was not."""
        return tuple(_hints(self, account))

    def report(
        self, account: PromptAccount, document_order: Sequence[int] | None, hints: tuple[Hint, ...]
    ) -> CacheReport | None:
        """None when nobody asked for it."""
        if not self.is_report_wanted:
            return None
        segments = _arranged(self.segments, document_order)
        cached = account.num_cached_tokens
        total = account.num_prompt_tokens
        return CacheReport(
            prompt_tokens=total,
            cached_tokens=cached,
            first_divergent_token=None if cached >= total else cached,
            segments=tuple(_segment_reports(segments, account)),
            hints=hints,
        )


class PromptHistory:
    """The last prompts of the tenants that asked lately. Bounded in tenants, prompts and characters."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[str, deque[Outline]] = OrderedDict()

    def note(self, tenant_id: str, outline: Outline) -> tuple[Outline, ...]:
        """Remembers a prompt; the earlier ones of this tenant, latest first."""
        prompts = self._prompts.setdefault(tenant_id, deque(maxlen=_MAX_PROMPTS))
        earlier = tuple(reversed(prompts))
        if outline not in prompts:
            prompts.append(outline)
        self._prompts.move_to_end(tenant_id)
        if len(self._prompts) > _MAX_TENANTS:
            self._prompts.popitem(last=False)
        return earlier


# ---------------------------------------------------------------- the account along the prompt


def _arranged(segments: Sequence[Segment], order: Sequence[int] | None) -> list[Segment]:
    """As the prompt was in the end: the engine may have put the documents into another order."""
    documents = [segment for segment in segments if segment.kind is SegmentKind.DOCUMENT]
    if order is None or len(order) != len(documents):
        return list(segments)
    ordered = iter([documents[i] for i in order])
    return [next(ordered) if segment.kind is SegmentKind.DOCUMENT else segment for segment in segments]


def _segment_reports(segments: Sequence[Segment], account: PromptAccount) -> Iterator[SegmentReport]:
    runs = [[name, int(getattr(account, name))] for name in _CLASSES]
    for segment in segments:
        left, classes = len(segment), Counter[str]()
        while left and runs:
            name, count = str(runs[0][0]), int(runs[0][1])
            taken = min(left, count)
            if taken:
                classes[name] += taken
            left -= taken
            runs[0][1] = count - taken
            if count == taken:
                runs.pop(0)
        cached = sum(classes[name] for name in _CACHED)
        yield SegmentReport(
            kind=segment.kind.value,
            document_id=segment.document_id,
            tokens=len(segment),
            cached_tokens=cached,
            classes=dict(classes),
            first_divergent_token=None if cached == len(segment) else cached,
        )


# ---------------------------------------------------------------- hints


# What to do about it, in a word; the hint itself says where.
ADVICE = {
    "caching_disabled": "caching was off for the request, its tenant, or the engine",
    "evicted": "it was cached once and had to make room: more memory, a floor, or a pin",
    "reasoning_in_history": "send earlier answers without their reasoning",
    "timestamp_in_system_prompt": "put dates and times at the prompt's end",
    "volatile_system_prompt": "put names, ids and whatever else changes at the prompt's end",
    "reordered_system_prompt": "keep one order of tools and rules",
    "system_prompt_changed": "the system prompt was another one",
    "document_changed": "a document came with another text under its id",
    "documents_reordered": 'keep one order of documents, or ask for `document_order: "cache"`',
    "other_scope": "the same text was asked under another salt or user",
}


def _hints(asked: Diagnosis, account: PromptAccount) -> Iterator[Hint]:
    if account.disabled:
        yield Hint("caching_disabled", "Caching is off: for this request (`use_cache`), this tenant, or this engine.")
        return
    if account.evicted:
        yield Hint("evicted", f"{account.evicted} tokens were cached once and had to make room.")
    if asked.outline.loses_reasoning and (account.cold or account.diverged or account.evicted):
        yield Hint(
            "reasoning_in_history",
            "An earlier answer comes with its reasoning (`</think>`), and this model's chat template leaves that out "
            "of later prompts: what was computed when the answer was given is not found again from there on.",
        )
    if account.num_cached_tokens < _num_shareable(asked.segments):
        yield from _differences(asked.outline, asked.earlier)


def _num_shareable(segments: Sequence[Segment]) -> int:
    """Tokens up to the end of what other prompts may have, too: the system prompt and the documents."""
    position = shareable = 0
    for segment in segments:
        position += len(segment)
        if segment.kind in (SegmentKind.SYSTEM, SegmentKind.DOCUMENT):
            shareable = position
    return shareable


def _differences(now: Outline, earlier: Sequence[Outline]) -> Iterator[Hint]:
    yield from _system_difference(now, earlier)
    yield from _document_differences(now, earlier)
    for before in earlier:
        if (before.system, before.documents) == (now.system, now.documents) and before.narrowing != now.narrowing:
            names = sorted({name for name, _ in (*now.narrowing, *before.narrowing)})
            yield Hint("other_scope", f"The same text was asked under another {' or '.join(f'`{n}`' for n in names)}.")
            return


def _system_difference(now: Outline, earlier: Sequence[Outline]) -> Iterator[Hint]:
    if any(before.system == now.system for before in earlier) or not now.system:
        return
    places = [_first_difference(now.system, before.system) for before in earlier]
    for at in places:
        if (found := volatile_at(now.system, at)) is not None:
            yield _volatile(found, f"The system prompt changes at character {at}, in")
            return
    words = Counter(_WORD.findall(now.system))
    if any(Counter(_WORD.findall(before.system)) == words for before in earlier):
        yield Hint(
            "reordered_system_prompt",
            "The system prompt has the same words as before in another order (tools, perhaps): keep one order.",
        )
    elif places:
        yield Hint("system_prompt_changed", f"The system prompt differs from the last one at character {places[0]}.")
    elif (found := first_volatile(now.system)) is not None:
        yield _volatile(found, f"The system prompt has, at character {found.start},")


def _volatile(found: Finding, where: str) -> Hint:
    code = "timestamp_in_system_prompt" if found.kind in TIMES else "volatile_system_prompt"
    return Hint(
        code,
        f"{where} what looks like a {found.kind}: {found.text!r}. Nothing after it can be shared when it changes. "
        "Put it at the prompt's end.",
    )


def _document_differences(now: Outline, earlier: Sequence[Outline]) -> Iterator[Hint]:
    hashes = dict(now.documents)
    for before in earlier:
        changed = [name for name, text in before.documents if name in hashes and hashes[name] != text]
        if changed:
            yield Hint("document_changed", f"Document {changed[0]!r} has another text than before.")
            return
    for before in earlier:
        if before.documents != now.documents and sorted(before.documents) == sorted(now.documents):
            yield Hint("documents_reordered", "The same documents were sent in another order before.")
            return


def _first_difference(one: str, other: str) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low
