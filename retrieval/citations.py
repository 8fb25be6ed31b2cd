"""Which parts of an answer are supported by which documents, in Cohere's shape. Computed, not claimed by the model.

A sentence cites a document when most of its words that carry meaning, and at least one pair of neighbouring ones,
stand in the document. That is a test of wording, not of truth: it misses free paraphrase, and it cannot cite a document
for what the document does not say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from retrieval.documents import Document

_SUPPORT = 0.6  # of a sentence's words
_MIN_WORDS = 3
_MAX_SOURCES = 3
_SENTENCE = re.compile(r"[^.!?\n]+(?:[.!?](?!\s|$)[^.!?\n]*)*[.!?]*")
_WORD = re.compile(r"\w+")
_FUNCTION_WORDS = frozenset(
    {"a", "an", "and", "are", "as", "at", "be", "been", "but", "by", "can", "do", "does", "for", "from", "had", "has"}
    | {"have", "he", "her", "his", "i", "if", "in", "is", "it", "its", "may", "not", "of", "on", "or", "she", "so"}
    | {"that", "the", "their", "them", "then", "there", "these", "they", "this", "to", "was", "we", "were", "what"}
    | {"when", "which", "who", "will", "with", "would", "you", "your"}
)


@dataclass(frozen=True, slots=True)
class Citation:
    start: int  # characters of the answer
    end: int
    text: str
    sources: tuple[Document, ...]  # best supported first


def find_citations(answer: str, documents: Sequence[Document]) -> list[Citation]:
    bags = [_Bag.of(f"{document.title}\n{document.text}") for document in documents]
    return [citation for span in _sentences(answer) if (citation := _cite(answer, span, documents, bags)) is not None]


@dataclass(frozen=True, slots=True)
class _Bag:
    words: frozenset[str]
    pairs: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, text: str) -> _Bag:
        words = _meaningful(text)
        return cls(frozenset(words), frozenset(pairwise(words)))


def _cite(answer: str, span: tuple[int, int], documents: Sequence[Document], bags: Sequence[_Bag]) -> Citation | None:
    start, end = span
    sentence = _Bag.of(answer[start:end])
    if len(sentence.words) < _MIN_WORDS:
        return None
    support = [
        (len(sentence.words & bag.words) / len(sentence.words), -i)
        for i, bag in enumerate(bags)
        if sentence.pairs & bag.pairs
    ]
    best = sorted((each for each in support if each[0] >= _SUPPORT), reverse=True)[:_MAX_SOURCES]
    if not best:
        return None
    return Citation(start, end, answer[start:end], tuple(documents[-i] for _, i in best))


def _sentences(text: str) -> Iterator[tuple[int, int]]:
    for match in _SENTENCE.finditer(text):
        found = match[0]
        start = match.start() + len(found) - len(found.lstrip())
        end = match.start() + len(found.rstrip())
        if start < end:
            yield start, end


def _meaningful(text: str) -> list[str]:
    return [word for word in _WORD.findall(text.lower()) if word not in _FUNCTION_WORDS]
