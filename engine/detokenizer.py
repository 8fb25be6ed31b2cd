"""Turns token ids into text as they come, and ends the text at a stop string.

    token id ──► bytes ──► UTF-8 decoder ──► characters ──► stop strings ──► delta
              (spelling)   holds ≤ 3 bytes                  hold the longest suffix that may still become a match
                           of an open character

Deltas joined, and `flush()` last, equal `tokenizer.decode(ids)` cut where a stop string begins. Work per token does not
grow with the output.

The usual way decodes a window of the last ids twice and subtracts, and waits while the text ends with U+FFFD. A model
that emits bytes which are no UTF-8 then never gets a text out and its window grows without end; and the difference of
two lossy decodes is wrong when the window begins inside a character. So tokens are spelled as bytes here: the
tokenizer's own decoder tells how (`_Spelling`), and a decoder that cannot be followed token by token is refused when
the model is loaded. Invalid bytes come out as U+FFFD as soon as they are proven invalid, one for each maximal subpart.

One difference to the `tokenizers` library is meant: where a run of byte-fallback tokens (<0xE2>…) is not UTF-8 as a
whole, the library replaces every byte of it, the valid characters too. Here those have long been sent.

Stop strings: the first one to be complete wins, and of several complete at one character the longest. So the result
depends on the text alone, not on how it was cut into tokens, and no token is generated only to decide.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from tokenizers import Tokenizer

from engine.errors import ModelLoadError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def special_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that mark and never are text; reads all added tokens, so call it once a model."""
    return frozenset(token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special)


class IncrementalDetokenizer:
    """The text of one request. `stopped` is the stop string that ended it, if one did."""

    def __init__(
        self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), skip_token_ids: frozenset[int] = frozenset()
    ) -> None:
        """Raises `ModelLoadError` when the tokenizer's decoder cannot be followed token by token."""
        self._tokenizer = tokenizer
        self._skip_token_ids = skip_token_ids
        self._spelling = _Spelling.of(tokenizer)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_first = True  # no token has been spelled yet
        self._strip_left = self._spelling.strip_left  # spaces still to be dropped at the head of the text
        self._stops = [_StopString(text) for text in stop]
        self._held = ""  # decoded, and the beginning of a stop string
        self.stopped: str | None = None

    def push(self, token_id: int, *, honour_stop: bool = True) -> str:
        """The text that is safe to send now.

        A stop string that is complete within a token pushed with `honour_stop=False` is text like any other.
        """
        assert self.stopped is None, "a token after the stop string"
        token = None if token_id in self._skip_token_ids else self._tokenizer.id_to_token(token_id)
        if token is None:  # hidden, or a padded row of the vocabulary
            return ""
        spelled = self._spelling.to_bytes(token, is_first=self._is_first)
        self._is_first = False
        return self._until_stop(self._normalize(self._utf8.decode(spelled)), honour_stop=honour_stop)

    @property
    def num_held(self) -> int:
        """Characters that are decoded and not sent: they may become a stop string."""
        return len(self._held)

    def spell(self, token_id: int) -> bytes:
        """A token by itself, as it would stand here; nothing for a padded row of the vocabulary."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._skip_token_ids:
            return token.encode()
        return self._spelling.to_bytes(token, is_first=self._is_first)

    def flush(self) -> str:
        """The rest, once no token follows: an open character as U+FFFD, a held beginning of a stop string as text."""
        if self.stopped is not None:
            return ""
        text = self._until_stop(self._normalize(self._utf8.decode(b"", final=True)), honour_stop=True)
        text, self._held = text + self._held, ""
        return text

    def _normalize(self, text: str) -> str:
        for old, new in self._spelling.replace_in_text:
            text = text.replace(old, new)
        while text and self._strip_left:
            if text[0] != self._spelling.strip_char:
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text

    def _until_stop(self, text: str, *, honour_stop: bool) -> str:
        if not self._stops:
            return text
        buffer = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            complete = [stop.text for stop in self._stops if stop.advance(char)]
            if complete and honour_stop:
                self.stopped = max(complete, key=len)
                self._held = ""
                return buffer[: end - len(self.stopped)]
        safe = len(buffer) - max(stop.num_matched for stop in self._stops)
        self._held = buffer[safe:]
        return buffer[:safe]


class _StopString:
    """Knuth-Morris-Pratt: how much of `text` the characters so far end with, in constant time a character."""

    __slots__ = ("_border", "num_matched", "text")

    def __init__(self, text: str) -> None:
        assert text, "an empty stop string"
        self.text = text
        self.num_matched = 0
        # border[n]: the longest proper prefix of text that text[: n + 1] ends with
        self._border = [0] * len(text)
        for end in range(1, len(text)):
            self.advance(text[end])
            self._border[end] = self.num_matched
        self.num_matched = 0

    def advance(self, char: str) -> bool:
        """Whether `char` completes the stop string."""
        while self.num_matched and self.text[self.num_matched] != char:
            self.num_matched = self._border[self.num_matched - 1]
        if self.text[self.num_matched] == char:
            self.num_matched += 1
        if self.num_matched < len(self.text):
            return False
        self.num_matched = self._border[-1]
        return True


class _Stage(msgspec.Struct, frozen=True):
    """A decoder of the `tokenizers` library as it serialises itself; only the fields of those that are followed."""

    type: str
    decoders: list[_Stage] = []
    pattern: dict[str, str] = {}
    content: str = ""
    start: int = 0
    stop: int = 0
    replacement: str = ""
    prepend_scheme: str = "always"


@dataclass(slots=True)
class _Spelling:
    """How a tokenizer's decoder spells a token.

    ByteLevel (GPT-2, Llama 3, Qwen, SmolLM)           every character of a token stands for a byte
    Replace, ByteFallback, Fuse, Strip (Llama 2,       ▁ is a space, <0x0A> a byte,
        Mistral, Gemma, Phi-3), in any sensible order      the head of the text loses a space
    Metaspace (T5, XGLM)                               ▁ is a space, and nothing in the first token
    none                                               tokens are words
    """

    byte_level: bool = False
    byte_fallback: bool = False
    separator: str = ""  # between tokens
    drop_in_first: str = ""  # this character vanishes from the first token
    replace_in_token: tuple[tuple[str, str], ...] = ()
    replace_in_text: tuple[tuple[str, str], ...] = ()  # single characters, so that none straddles two tokens
    strip_left: int = 0
    strip_char: str = ""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> _Spelling:
        decoder = tokenizer.decoder
        if decoder is None:
            return cls(separator=" ")
        root = msgspec.json.decode(decoder.__getstate__(), type=_Stage)
        stages = root.decoders if root.type == "Sequence" else [root]
        spelling = cls()
        is_fused = False
        for position, stage in enumerate(stages):
            if not spelling._follow(
                stage, is_alone=len(stages) == 1, is_last=position == len(stages) - 1, is_fused=is_fused
            ):
                chain = " → ".join(stage.type for stage in stages)
                raise ModelLoadError(f"the tokenizer's decoder ({chain}) cannot be followed token by token")
            is_fused |= stage.type == "Fuse"
        return spelling

    def _follow(self, stage: _Stage, *, is_alone: bool, is_last: bool, is_fused: bool) -> bool:
        """Takes a stage in; False when it depends on more than one token at a time."""
        match stage:
            case _Stage(type="ByteLevel") if is_alone:
                self.byte_level = True
            case _Stage(type="Metaspace") if is_alone:
                self.replace_in_token = ((stage.replacement, " "),)
                self.drop_in_first = "" if stage.prepend_scheme == "never" else stage.replacement
            case _Stage(type="ByteFallback") if not is_fused:
                self.byte_fallback = True
            case _Stage(type="Replace", pattern={"String": old}) if not is_fused and not self.byte_fallback:
                self.replace_in_token += ((old, stage.content),)
            case _Stage(type="Replace", pattern={"String": old}) if len(old) == 1:
                self.replace_in_text += ((old, stage.content),)
            case _Stage(type="Strip", stop=0) if is_fused and is_last:
                self.strip_left, self.strip_char = stage.start, stage.content
            case _Stage(type="Fuse"):
                pass
            case _:
                return False
        return True

    def to_bytes(self, token: str, *, is_first: bool) -> bytes:
        if self.byte_level:
            # A token with a character outside the alphabet is an added one: it stands for itself.
            values = [_BYTE_OF_CHAR.get(char) for char in token]
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else token.encode()
        if is_first and self.drop_in_first:
            token = token.replace(self.drop_in_first, "")
        for old, new in self.replace_in_token:
            token = token.replace(old, new)
        if self.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return (token if is_first else self.separator + token).encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and up, in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()
