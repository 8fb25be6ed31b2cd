"""A model's chat template, rendered and cut at the borders of the message contents.

    messages      system: "You …"        user: "Hi"
    whole         <|im_start|>system\\nYou …<|im_end|>\\n<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n
    cut           '<|im_start|>system\\n' 'You …' '<|im_end|>\\n<|im_start|>user\\n' 'Hi' '<|im_end|>\\n<|im_start|>…'
                   template               content  template                          content template

Only the template's own pieces may become special tokens, so we must know which characters are the template's and
which a client's. Searching the rendering for the contents cannot tell (a content may repeat the template's text),
so a rendering with unguessable marks in place of the contents says where they go:

  1. render with content i = PAD mark_i PAD. The marks cut the template's text; a missing PAD says that the
     template strips contents on that side. Put the contents, stripped alike, into the holes.
  2. the result must equal the template's rendering of the real messages. If not, the template looks into the
     contents (it drops an old turn's `<think>…</think>`): render with content i = content_i mark_i, and walk:
     each template piece must stand exactly where the last content ended, each content ends at its mark.
  3. if that fails too (the template repeats or drops contents), it cannot be cut: `cut` gives None.

Rejected: parsing the Jinja tree (templates are programs), and splitting per known model family (there is no end).
Both renderings see one clock, so that a template that prints the date cannot change between them.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import InvalidRequestError, ModelLoadError

# White space that no template prints by itself and that every kind of strip takes away.
_PAD = "\u2003"
# A content that is not empty, and in no model's vocabulary of added tokens.
_NOBODYS = "\ue000"
_CONVERSATIONS = (("user",), ("system", "user"), ("user", "assistant", "user"), ("system", "user", "assistant", "user"))


class Turn(NamedTuple):
    """A message as templates take it."""

    role: str
    content: str


class Cut(NamedTuple):
    """A piece of the rendering: the template's own text, or (`turn` is its index) the content of a message."""

    text: str
    turn: int | None = None


@dataclass(frozen=True, slots=True)
class _Hole:
    """Where a content goes: after `before`, without the white space that the template strips."""

    before: str
    turn: int
    strips_left: bool
    strips_right: bool

    def fill(self, content: str) -> str:
        content = content.lstrip() if self.strips_left else content
        return content.rstrip() if self.strips_right else content


class _FoundMark(NamedTuple):
    turn: int
    start: int
    end: int


class _Marks:
    """Texts that nobody can have written before: one random nonce, and the index of the message."""

    def __init__(self, count: int) -> None:
        nonce = secrets.token_hex(16)
        self._marks = [f"{nonce}x{i:06d}" for i in range(count)]
        self._pattern = re.compile(nonce + r"x(\d{6})")

    def __getitem__(self, turn: int) -> str:
        return self._marks[turn]

    def find(self, text: str) -> Iterator[_FoundMark]:
        """Every mark in `text`, in one pass: a search for each would be quadratic in the messages."""
        for match in self._pattern.finditer(text):
            yield _FoundMark(int(match[1]), match.start(), match.end())


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; to us it is its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """`supports_system`: it prints a system message. `system_leads`: before the first user turn, in any conversation.
    `default_system`: what it says by itself when there is none (SmolLM2's does). `drops_reasoning`: it leaves what an
    earlier answer thought (`<think>…</think>`) out."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self._source = source
        self._special_tokens = special_tokens
        try:
            self._template = _environment().from_string(source, globals={"raise_exception": _raise_exception})
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"the model's chat template is not valid Jinja: {error}") from error
        self.supports_system = self._order(["system", "user"]) is not None
        self.system_leads = self._order(["system", "user", "assistant", "user"]) == [0, 1, 2, 3]
        self.default_system = self._find_default_system()
        self.drops_reasoning = self._find_drops_reasoning()

    def render(self, turns: Sequence[Turn]) -> str:
        """The template's own rendering. Raises `InvalidRequestError` with the template's words when it refuses."""
        return self._render(turns, datetime.datetime.now())

    def own_text(self) -> str:
        """Its source, and what it prints by itself in conversations of every shape that it takes."""
        texts = [self._source]
        for roles in _CONVERSATIONS:
            with contextlib.suppress(InvalidRequestError):
                texts.append(self.render([Turn(role, _NOBODYS) for role in roles]))
        return "\n".join(texts)

    def cut(self, turns: Sequence[Turn]) -> list[Cut] | None:
        """The rendering in pieces that concatenate to `render(turns)`; None if this template cannot be cut here."""
        now = datetime.datetime.now()
        whole = self._render(turns, now)
        found = self._holes([turn.role for turn in turns], now)
        if found is None:
            return None
        holes, tail = found
        cuts = [
            cut for hole in holes for cut in (Cut(hole.before), Cut(hole.fill(turns[hole.turn].content), hole.turn))
        ]
        cuts.append(Cut(tail))
        if _text(cuts) != whole:
            cuts = self._cut_by_tail_marks(turns, holes, tail, now)
            if cuts is None or _text(cuts) != whole:
                return None
        return [cut for cut in cuts if cut.text]

    def _cut_by_tail_marks(
        self, turns: Sequence[Turn], holes: Sequence[_Hole], tail: str, now: datetime.datetime
    ) -> list[Cut] | None:
        marks = _Marks(len(turns))
        contents = {hole.turn: hole.fill(turns[hole.turn].content) for hole in holes}
        rendered = self._render([Turn(turn.role, contents[i] + marks[i]) for i, turn in enumerate(turns)], now)
        found = list(marks.find(rendered))
        if [mark.turn for mark in found] != [hole.turn for hole in holes]:
            return None
        cuts: list[Cut] = []
        at = 0
        for hole, mark in zip(holes, found, strict=True):
            if not rendered.startswith(hole.before, at):
                return None
            cuts += [Cut(hole.before), Cut(rendered[at + len(hole.before) : mark.start], hole.turn)]
            at = mark.end
        return [*cuts, Cut(tail)] if rendered[at:] == tail else None

    def _holes(self, roles: Sequence[str], now: datetime.datetime) -> tuple[list[_Hole], str] | None:
        """The holes in the order in which the template prints them, and the text after the last."""
        marks = _Marks(len(roles))
        rendered = self._render([Turn(role, _PAD + marks[i] + _PAD) for i, role in enumerate(roles)], now)
        found = list(marks.find(rendered))
        if sorted(mark.turn for mark in found) != list(range(len(roles))):
            return None
        holes: list[_Hole] = []
        at = 0
        for mark in found:
            padded_left, padded_right = rendered[at : mark.start].endswith(_PAD), rendered.startswith(_PAD, mark.end)
            before = rendered[at : mark.start - padded_left]
            holes.append(_Hole(before, mark.turn, not padded_left, not padded_right))
            at = mark.end + padded_right
        return holes, rendered[at:]

    def _order(self, roles: Sequence[str]) -> list[int] | None:
        """The order in which the messages of these roles are printed; None if one is refused, dropped or repeated."""
        try:
            found = self._holes(roles, datetime.datetime.now())
        except InvalidRequestError:
            return None
        return None if found is None else [hole.turn for hole in found[0]]

    def _find_drops_reasoning(self) -> bool:
        answer = f"<think>{_NOBODYS}</think>ok"
        with contextlib.suppress(InvalidRequestError):
            return _NOBODYS not in self.render([Turn("user", "a"), Turn("assistant", answer), Turn("user", "b")])
        return False

    def _find_default_system(self) -> str:
        """What stands between the system header and the system footer when no system message was given."""
        if not (self.system_leads and self._order(["user"])):
            return ""
        now = datetime.datetime.now()
        with_system, without = self._holes(["system", "user"], now), self._holes(["user"], now)
        assert with_system is not None, "system_leads"
        assert without is not None, "a lone user turn was cut above"
        header, footer, head = with_system[0][0].before, with_system[0][1].before, without[0][0].before
        if len(head) <= len(header) + len(footer) or not (head.startswith(header) and head.endswith(footer)):
            return ""
        return head[len(header) : len(head) - len(footer)]

    def _render(self, turns: Sequence[Turn], now: datetime.datetime) -> str:
        variables: dict[str, object] = {
            **self._special_tokens,
            "messages": [{"role": turn.role, "content": turn.content} for turn in turns],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            "strftime_now": now.strftime,
        }
        try:
            return self._template.render(variables)
        except Exception as error:  # a template is a program: on some texts it fails in any way Python can
            reason = str(error) or type(error).__name__
            message = f"The model's chat template refuses these messages: {reason}"
            raise InvalidRequestError(message, param="messages") from error


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that templates on the model hub are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json  # pyright: ignore[reportUnknownMemberType]
    return environment


def _to_json(value: object, indent: int | None = None, ensure_ascii: bool = False) -> str:
    # Jinja's own filter escapes HTML characters, which no model has seen in training.
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _text(cuts: Sequence[Cut]) -> str:
    return "".join(cut.text for cut in cuts)
