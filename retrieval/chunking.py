"""A text as chunks, measured in tokens of the served model. Runs in the parser's process.

    text ──anchors──► sections (some chunks long each) ──splitter──► chunks of at most `max_tokens`

The splitter packs greedily from its start: on a whole text, a word put in at the top would shift every later border,
and an edited document would be all new chunks. So the text is first cut into sections where its own content says
so: at a heading, or after a paragraph whose digest is a multiple of `_ANCHOR`, once the section is long enough.
Borders fall into step again soon after an edit, and all chunks from there on are the old ones.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from functools import lru_cache

from semantic_text_splitter import MarkdownSplitter, TextSplitter
from tokenizers import Tokenizer

from retrieval.parsing import ParsedText
from retrieval.records import Chunking

_CHARACTERS_A_TOKEN = 4
_SECTION_CHUNKS = 4
_ANCHOR = 4
_KEPT_SPLITTERS = 4  # a tokenizer's copy each, in a process with a limit on its memory
_HEADING = re.compile(r"#{1,3} ")


class TextChunker:
    """Of one tokenizer. Splitters are kept: each copies the tokenizer, which takes longer than splitting a file."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._splitter = lru_cache(_KEPT_SPLITTERS)(self._make_splitter)

    def split(self, parsed: ParsedText, chunking: Chunking) -> list[str]:
        splitter = self._splitter(chunking.max_tokens, chunking.overlap_tokens, is_markdown=parsed.is_markdown)
        min_length = chunking.max_tokens * _CHARACTERS_A_TOKEN * _SECTION_CHUNKS
        chunks: list[str] = []
        for section in sections(parsed, min_length):
            parts = splitter.chunks(section)
            chunks += parts if chunking.overlap_tokens else _merge_small(parts, chunking.max_tokens, self._tokenizer)
        return chunks

    def _make_splitter(
        self, max_tokens: int, overlap_tokens: int, *, is_markdown: bool
    ) -> TextSplitter | MarkdownSplitter:
        splitter_type = MarkdownSplitter if is_markdown else TextSplitter
        return splitter_type.from_huggingface_tokenizer(self._tokenizer, max_tokens, overlap=overlap_tokens)


def _merge_small(parts: list[str], max_tokens: int, tokenizer: Tokenizer) -> list[str]:
    """Neighbours that fit into one chunk together: the splitter leaves a heading alone before its longer sections."""
    merged: list[str] = []
    for part in parts:
        joined = f"{merged[-1]}\n\n{part}" if merged else ""
        if merged and len(tokenizer.encode(joined, add_special_tokens=False).ids) <= max_tokens:
            merged[-1] = joined
        else:
            merged.append(part)
    return merged


def sections(parsed: ParsedText, min_length: int) -> Iterator[str]:
    """Parts of the text, none shorter than `min_length` characters but the last."""
    start, length = 0, 0
    ends = [match.end() for match in re.finditer(r"\n[ \t]*\n+", parsed.text)]
    paragraph = 0
    for end in [*ends, len(parsed.text)]:
        length = end - start
        is_anchor = zlib.crc32(parsed.text[paragraph:end].strip().encode()) % _ANCHOR == 0
        heads = parsed.is_markdown and _HEADING.match(parsed.text, end) is not None
        paragraph = end
        if length >= min_length and (is_anchor or heads):
            yield parsed.text[start:end]
            start = end
    if parsed.text[start:].strip():
        yield parsed.text[start:]
