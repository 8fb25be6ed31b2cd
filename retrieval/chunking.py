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

from semantic_text_splitter import MarkdownSplitter, TextSplitter
from tokenizers import Tokenizer

from retrieval.parsing import ParsedText
from retrieval.records import Chunking

_CHARACTERS_A_TOKEN = 4
_SECTION_CHUNKS = 4
_ANCHOR = 4
_HEADING = re.compile(r"#{1,3} ")


def split_text(parsed: ParsedText, chunking: Chunking, tokenizer: Tokenizer) -> list[str]:
    splitter_type = MarkdownSplitter if parsed.is_markdown else TextSplitter
    splitter = splitter_type.from_huggingface_tokenizer(tokenizer, chunking.max_tokens, overlap=chunking.overlap_tokens)
    min_length = chunking.max_tokens * _CHARACTERS_A_TOKEN * _SECTION_CHUNKS
    chunks: list[str] = []
    for section in sections(parsed, min_length):
        parts = splitter.chunks(section)
        chunks += parts if chunking.overlap_tokens else _merge_small(parts, chunking.max_tokens, tokenizer)
    return chunks


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
