"""The prompt of a request: its layout, and its segments (docs/architecture.md).

    [template] system prompt [documents] [template] history … question [template]

    supports a system role    system content = system text · head · document · document … · foot
    does not, or prints the   first user turn = (system text ·) head · document · document … · foot · its own text
    system message elsewhere

    later turns               user turn i = head · documents of turn i · foot · its own text
    question                  note · its own text

What many requests share stands first: the system prompt, then the documents, then what is the user's own. Documents
of earlier turns stay where they were, so that a conversation's own prefix survives. Each
piece of a content is tokenized on its own (`prompt_tokenizer`), so a document has the same token ids beside any
neighbour. Head and foot are there for that too: a template that strips a content takes white space from them,
and never from a document. A piece also knows how private it is by itself (`Level`); a segment's scope is that of
the most private piece up to its end (`prompt_scopes.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from engine.errors import InvalidRequestError
from engine.protocol import Segment, SegmentKind, pack_tokens
from gateway.chat_template import ChatTemplate, Cut, Turn
from gateway.prompt_scopes import Level, PromptScopes, narrowing_levels
from gateway.prompt_tokenizer import PromptTokenizer
from gateway.published import Published
from retrieval.documents import Document, render

Role = Literal["system", "user", "assistant"]

_HEAD = "Documents:\n\n"
_FOOT = "End of documents."
_GAP = "\n\n"


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    text: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a message's content that is tokenized on its own."""

    kind: SegmentKind
    text: str
    level: Level | None  # None: ours, the same in every prompt; it goes with what stands around it
    document_id: str | None = None
    tokens: bytes = b""  # packed ids of `text`, if they are known already


@dataclass(frozen=True, slots=True)
class PromptDocuments:
    """Documents and where they go: behind the system prompt, or before the message with that index."""

    head: tuple[Document, ...] = ()
    turns: Mapping[int, tuple[Document, ...]] = field(default_factory=dict[int, tuple[Document, ...]])
    note: str = ""  # to the model, before the question: what would break a prefix if it stood earlier

    @property
    def num_characters(self) -> int:
        return sum(len(each.text) for run in (self.head, *self.turns.values()) for each in run)


@dataclass(frozen=True, slots=True)
class LaidOutMessage:
    role: Role
    pieces: tuple[Piece, ...]

    @property
    def content(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class PromptBuilder:
    """Thread-safe: long prompts are built outside the event loop."""

    def __init__(self, template: ChatTemplate, tokenizer: PromptTokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer

    def build(
        self, messages: Sequence[Message], documents: Sequence[Document] | PromptDocuments, scopes: PromptScopes
    ) -> tuple[Segment, ...]:
        """The segments, whose texts concatenate to the template's own rendering. Raises `InvalidRequestError`.

        Documents of the latest turn have kind DOCUMENT, those of earlier ones HISTORY: they have their place.
        """
        laid_out = lay_out(self._template, messages, documents, scopes.published)
        turns = [Turn(message.role, message.content) for message in laid_out]
        cuts = self._template.cut(turns)
        if cuts is None:
            return self._uncut(turns, scopes)
        return tuple(self._segments(cuts, laid_out, scopes))

    @property
    def drops_reasoning(self) -> bool:
        """Whether what an earlier answer thought is left out of the prompt."""
        return self._template.drops_reasoning

    def build_raw(self, prompt: str | Sequence[int], scopes: PromptScopes) -> tuple[Segment, ...]:
        """A text that a client wrote as a whole, behind what the tokenizer begins every text with; or its token ids."""
        scope, owner = scopes.layer(Level.OWN)
        if not isinstance(prompt, str):
            return (Segment(SegmentKind.QUESTION, pack_tokens(prompt), scope, owner=owner),)
        parts = (
            (SegmentKind.TEMPLATE, self._tokenizer.beginning),
            (SegmentKind.QUESTION, self._tokenizer.opening_tokens(prompt, scope)),
        )
        return tuple(Segment(kind, tokens, scope, owner=owner) for kind, tokens in parts if tokens)

    def build_head(self, system: Sequence[Message], document: Document, scopes: PromptScopes) -> tuple[Segment, ...]:
        """The beginning of every prompt in which this document comes first behind this system prompt."""
        segments = self.build([*system, Message("user", "?")], [document], scopes)
        end = next((i for i, each in enumerate(segments, 1) if each.kind is SegmentKind.DOCUMENT), 0)
        return segments[:end]

    def document_tokens(self, rendered: str) -> bytes:
        """Packed ids of a document's rendering, for whoever keeps them. Not cached."""
        return self._tokenizer.encode_text(rendered)

    def _segments(
        self, cuts: Sequence[Cut], messages: Sequence[LaidOutMessage], scopes: PromptScopes
    ) -> Iterator[Segment]:
        pieces: list[Piece] = []
        for cut in cuts:
            if cut.turn is None:
                pieces.append(Piece(SegmentKind.TEMPLATE, cut.text, None))
            else:
                pieces += clip(messages[cut.turn].pieces, cut.text)
        for i, (piece, level) in enumerate(zip(pieces, narrowing_levels(p.level for p in pieces), strict=True)):
            scope, owner = scopes.layer(level)
            if piece.kind is SegmentKind.TEMPLATE:
                tokens = self._tokenizer.template_tokens(piece.text, begins=i == 0)
            else:
                tokens = piece.tokens or self._tokenizer.text_tokens(piece.text, scope)
            if tokens:
                yield Segment(piece.kind, tokens, scope, piece.document_id, owner)

    def _uncut(self, turns: Sequence[Turn], scopes: PromptScopes) -> tuple[Segment, ...]:
        """A template that repeats or rewrites contents: one segment, if the contents bring no special token along."""
        whole = self._template.render(turns)
        blank = self._template.render([Turn(turn.role, "x") for turn in turns])
        forged = any(self._tokenizer.control_tokens(turn.content) for turn in turns)
        if forged or self._tokenizer.control_tokens(whole) != self._tokenizer.control_tokens(blank):
            raise InvalidRequestError(
                "The messages contain text that the model would read as special tokens, and its chat template "
                "rewrites messages in a way that does not let it be kept apart.",
                param="messages",
            )
        scope, owner = scopes.layer(Level.OWN)
        return (Segment(SegmentKind.TEMPLATE, self._tokenizer.rendering_tokens(whole, scope), scope, owner=owner),)


def lay_out(
    template: ChatTemplate,
    messages: Sequence[Message],
    documents: Sequence[Document] | PromptDocuments,
    published: Published,
) -> list[LaidOutMessage]:
    """Where system prompt and documents go, by what the template can say. Without a place given: to the head."""
    placed = documents if isinstance(documents, PromptDocuments) else PromptDocuments(tuple(documents))
    laid_out = _turns(messages, placed, published)
    system_end = next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))
    head = _head_pieces(messages, placed, published)
    if head and template.system_leads:
        if system_end == 0:
            default = (_ours(SegmentKind.SYSTEM, template.default_system),) if template.default_system else ()
            return [LaidOutMessage("system", (*default, *_spaced(head, bool(default)))), *laid_out]
        pieces = laid_out[system_end - 1].pieces
        pieces = (*pieces, *_spaced(head, bool(pieces[-1].text)))
        laid_out[system_end - 1] = LaidOutMessage("system", pieces)
        return laid_out
    lead: tuple[Piece, ...] = ()
    if system_end and not template.supports_system:
        text = _GAP.join(message.text for message in messages[:system_end])
        level = max(_system_level(message, published) for message in messages[:system_end])
        lead, laid_out = (Piece(SegmentKind.SYSTEM, text, level),), laid_out[system_end:]
    if head:
        lead = (*lead, *_spaced(head, bool(lead)))
    return _lead_first_user_turn(laid_out, lead) if lead else laid_out


def clip(pieces: Sequence[Piece], text: str) -> Iterator[Piece]:
    """The pieces of a content, as far as the template printed it: `text` is the content, or a part of it."""
    content = "".join(piece.text for piece in pieces)
    start = content.find(text)
    if start < 0:  # the template rewrote it: one piece, of the kind that says most about who wrote it
        yield replace(pieces[-1], text=text, tokens=b"")
        return
    end, at = start + len(text), 0
    for piece in pieces:
        kept = piece.text[max(start - at, 0) : max(end - at, 0)]
        at += len(piece.text)
        if kept:
            yield piece if kept == piece.text else replace(piece, text=kept, tokens=b"")


def _turns(messages: Sequence[Message], placed: PromptDocuments, published: Published) -> list[LaidOutMessage]:
    """Every message with the documents of its own turn before it."""
    question = _question(messages)
    laid_out: list[LaidOutMessage] = []
    for i, message in enumerate(messages):
        system = message.role == "system"
        kind = SegmentKind.SYSTEM if system else SegmentKind.QUESTION if i == question else SegmentKind.HISTORY
        level = _system_level(message, published) if system else Level.OWN
        pieces: tuple[Piece, ...] = (Piece(kind, message.text, level),)
        if i == question and placed.note:
            pieces = (Piece(SegmentKind.HISTORY, placed.note + _GAP, Level.OWN), *pieces)
        if documents := placed.turns.get(i):
            kind = SegmentKind.DOCUMENT if i == question else SegmentKind.HISTORY
            run = _document_pieces(documents, kind, SegmentKind.HISTORY, published)
            pieces = (*run, _ours(SegmentKind.HISTORY, _GAP), *pieces)
        laid_out.append(LaidOutMessage(message.role, pieces))
    return laid_out


def _question(messages: Sequence[Message]) -> int | None:
    return max((i for i, message in enumerate(messages) if message.role == "user"), default=None)


def _head_pieces(messages: Sequence[Message], placed: PromptDocuments, published: Published) -> tuple[Piece, ...]:
    if not placed.head:
        return ()
    is_latest = _question(messages) not in placed.turns
    kind = SegmentKind.DOCUMENT if is_latest else SegmentKind.HISTORY
    return _document_pieces(placed.head, kind, SegmentKind.SYSTEM, published)


def _document_pieces(
    documents: Sequence[Document], kind: SegmentKind, frame: SegmentKind, published: Published
) -> tuple[Piece, ...]:
    bodies: list[Piece] = []
    for document in documents:
        is_public = document.is_public or published.is_public_document(document)
        level = Level.PUBLIC if is_public else Level.SHARED
        bodies.append(Piece(kind, render(document), level, document.id, document.tokens))
    return (_ours(frame, _HEAD), *bodies, _ours(frame, _FOOT))


def _system_level(message: Message, published: Published) -> Level:
    return Level.PUBLIC if published.is_public_prompt(message.text) else Level.SHARED


def _ours(kind: SegmentKind, text: str) -> Piece:
    """Text that this file or the model's template brings along: the same for everybody."""
    return Piece(kind, text, None)


def _spaced(pieces: Sequence[Piece], follows_text: bool) -> Sequence[Piece]:
    """Tokenized together with the head, as one piece: the same tokens whatever stands before."""
    return (replace(pieces[0], text=_GAP + pieces[0].text), *pieces[1:]) if follows_text else pieces


def _lead_first_user_turn(messages: list[LaidOutMessage], lead: tuple[Piece, ...]) -> list[LaidOutMessage]:
    first = next((i for i, message in enumerate(messages) if message.role == "user"), None)
    if first is None:
        raise InvalidRequestError(
            "This model's chat template has no place for a system prompt or documents without a user message.",
            param="messages",
        )
    pieces = (*lead, _ours(SegmentKind.SYSTEM, _GAP), *messages[first].pieces)
    return [*messages[:first], LaidOutMessage("user", pieces), *messages[first + 1 :]]
