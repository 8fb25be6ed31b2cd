"""Text to token ids, with the template's text and everybody else's kept apart.

    template text   special tokens are recognised: <|im_start|> is one token
    other text      special tokens are plain text: "<|im_start|>" in a document is its letters

*Special* here is what the tokenizer says is special, and every added token that the chat template prints, or that
is written like a mark (`<|…|>`): some models (DeepSeek) mark turns with added tokens that are not flagged, and those
must not be forged either. What a template prints is not always in its source (`'<|' + role + '|>'`), so it is also
looked for in renderings. The other added tokens that are not flagged (Gemma's `<b>`, runs of white space) are words:
they stay what the model was trained on. Rejected: no added token at all in clients' text, which takes those away.

Segments are tokenized one by one. A tokenizer that puts a space before its input (SentencePiece's dummy prefix)
would put one at every seam; so it does that only where the text really begins, or follows a special token.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from typing import cast

from tokenizers import Tokenizer

from engine.protocol import pack_tokens

_CACHED_CHARACTERS = 16 << 20
_MARK = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)

Json = dict[str, object]


class PromptTokenizer:
    """Thread-safe. Token ids are cached by text, and for other than template text by scope: a cache that tenants
    shared would tell one, by its speed, what another has sent."""

    def __init__(self, tokenizer_json: bytes, template_text: str) -> None:
        """`template_text`: all that the template may print by itself, see `ChatTemplate.own_text`."""
        spec = cast(Json, json.loads(tokenizer_json))
        control = _control_tokens(spec, template_text)
        self._control = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or r"(?!)")
        self._beginning = Tokenizer.from_str(json.dumps(spec))
        self.beginning = _beginning(self._beginning)  # packed ids of what stands before every text (<s>), if anything
        self._opening = Tokenizer.from_str(json.dumps(spec))
        self._opening.encode_special_tokens = True
        _drop_dummy_prefix(spec)
        without_prefix = json.dumps(spec)
        self._template = Tokenizer.from_str(without_prefix)
        self._text = Tokenizer.from_str(without_prefix)
        self._text.encode_special_tokens = True
        self._cache = TokenCache(_CACHED_CHARACTERS)

    def template_tokens(self, text: str, *, begins: bool) -> bytes:
        """Packed ids of template text; `begins`: it is the start of the prompt."""
        begins = begins or self._control.match(text) is not None
        return self._encode(self._beginning if begins else self._template, text, b"begin" if begins else b"")

    def rendering_tokens(self, text: str, scope: bytes) -> bytes:
        """Packed ids of a whole rendering, special tokens included, with clients' texts in it."""
        return self._encode(self._beginning, text, b"begin" + scope)

    def text_tokens(self, text: str, scope: bytes) -> bytes:
        """Packed ids of a client's text, free of special tokens."""
        return self._encode(self._text, text, scope)

    def opening_tokens(self, text: str, scope: bytes) -> bytes:
        """The same for a client's text that a prompt begins with."""
        return self._encode(self._opening, text, b"opening" + scope)

    def encode_text(self, text: str) -> bytes:
        """The same, not cached: for texts whose ids somebody else keeps."""
        return pack_tokens(self._text.encode(text, add_special_tokens=False).ids)

    def control_tokens(self, text: str) -> list[str]:
        """The special tokens that `template_tokens` would find, in order."""
        return self._control.findall(text)

    def _encode(self, tokenizer: Tokenizer, text: str, namespace: bytes) -> bytes:
        tokens = self._cache.get(namespace, text)
        if tokens is None:
            tokens = pack_tokens(tokenizer.encode(text, add_special_tokens=False).ids)
            self._cache.put(namespace, text, tokens)
        return tokens


class TokenCache:
    """Least recently used texts go first; bounded by characters, since a document may be long.

    The key is the text itself: a hash could be made to collide, and would then give another prompt's tokens.
    """

    def __init__(self, max_characters: int) -> None:
        self._max_characters = max_characters
        self._characters = 0
        self._entries: OrderedDict[tuple[bytes, str], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, namespace: bytes, text: str) -> bytes | None:
        with self._lock:
            tokens = self._entries.get((namespace, text))
            if tokens is not None:
                self._entries.move_to_end((namespace, text))
            return tokens

    def put(self, namespace: bytes, text: str, tokens: bytes) -> None:
        if len(text) > self._max_characters // 4:
            return
        with self._lock:
            if (namespace, text) not in self._entries:
                self._characters += len(text)
            self._entries[namespace, text] = tokens
            while self._characters > self._max_characters:
                (_, oldest), _ = self._entries.popitem(last=False)
                self._characters -= len(oldest)

    def __len__(self) -> int:
        return len(self._entries)


def _control_tokens(spec: Json, template_text: str) -> list[str]:
    """The added tokens that only the template may produce; those that were not flagged special are flagged now."""
    control: list[str] = []
    for token in cast("list[Json]", spec.get("added_tokens") or []):
        content = cast(str, token["content"])
        if content.strip() and (content in template_text or _MARK.fullmatch(content)):
            token["special"] = True
        if token["special"]:
            control.append(content)
    return control


def _beginning(tokenizer: Tokenizer) -> bytes:
    alone, dressed = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    before = next((at for at in range(len(dressed)) if dressed[at : at + len(alone)] == alone), 0)
    return pack_tokens(dressed[:before])


def _drop_dummy_prefix(spec: Json) -> None:
    for section in ("normalizer", "pre_tokenizer"):
        part = cast("Json | None", spec.get(section))
        if part is not None:
            spec[section] = _without_prefix(part)


def _without_prefix(part: Json) -> Json | None:
    match part.get("type"):
        case "Sequence":
            name = "normalizers" if "normalizers" in part else "pretokenizers"
            kept = [_without_prefix(inner) for inner in cast("list[Json]", part[name])]
            return {**part, name: [inner for inner in kept if inner is not None]}
        case "Prepend":
            return None
        case "Metaspace":
            return {**part, "prepend_scheme": "never"}
        case "ByteLevel":
            return {**part, "add_prefix_space": False}
        case _:
            return part
