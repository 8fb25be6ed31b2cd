"""All that can be found in one collection, in memory: passages, their vectors, their words, their files' attributes.

    file ──► keys ──► Passage
              ├────► VectorIndex    ─┐
              └────► LexicalIndex   ─┴─► ranks ─► fused ─► one passage a text

A key is a passage of one file; the same chunk in two files is two keys and, found, one hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from retrieval.filters import Predicate
from retrieval.fusion import fuse
from retrieval.lexical_index import Entry, LexicalIndex
from retrieval.records import Attributes, Chunk, CollectionFile
from retrieval.vector_index import EXACT_BELOW, VectorIndex

# Each list is this much longer than what is asked for, so that what both find has a chance to be in both.
_CANDIDATES = 4
_MIN_CANDIDATES = 40

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Passage:
    document_id: str
    title: str
    text: str
    tokens: bytes
    tokenizer: str
    file_id: str
    filename: str
    place: int  # among its file's chunks


@dataclass(frozen=True, slots=True)
class Found:
    passage: Passage
    score: float  # 0 to 1
    attributes: Attributes
    is_public: bool  # in a collection that every tenant may read


@dataclass(frozen=True, slots=True)
class Weights:
    vector: float = 1.0
    text: float = 1.0


@dataclass(slots=True)
class _File:
    number: int
    generation: str
    attributes: Attributes
    keys: list[int]


@dataclass(slots=True)
class _Alike:
    """Files with the same attributes: a filter decides on all of them at once."""

    attributes: Attributes
    numbers: set[int]


class CollectionIndex:
    """Not thread-safe: one thread owns it (`SearchIndexes`)."""

    def __init__(self, dimension: int, exact_below: int = EXACT_BELOW) -> None:
        self.dimension = dimension
        self.is_public = False
        self.version = -1  # of the collection, as far as it has been taken in
        self._vectors = VectorIndex(dimension, exact_below)
        self._words = LexicalIndex()
        self._passages: dict[int, Passage] = {}
        self._by_document: dict[str, int] = {}  # one key of each document
        self._files: dict[str, _File] = {}
        self._alike: dict[bytes, _Alike] = {}
        self._next_key = 0
        self._next_file = 0

    def __len__(self) -> int:
        return len(self._passages)

    @property
    def graph_backlog(self) -> int:
        return self._vectors.backlog

    def generations(self) -> dict[str, str]:
        return {file_id: file.generation for file_id, file in self._files.items()}

    def has_attributes(self, file_id: str, attributes: Attributes) -> bool:
        return _attributes_key(self._files[file_id].attributes) == _attributes_key(attributes)

    def add_file(self, member: CollectionFile, chunks: Sequence[Chunk]) -> None:
        """The whole file; one that is there already is replaced in the same step."""
        stale = self._forget(member.file_id)
        file = _File(self._next_file, member.generation, member.attributes, [])
        self._next_file += 1
        entries: list[Entry] = []
        for place, chunk in enumerate(chunks):
            key = self._next_key
            self._next_key += 1
            file.keys.append(key)
            self._passages[key] = Passage(
                chunk.document_id,
                chunk.title,
                chunk.text,
                chunk.tokens,
                chunk.tokenizer,
                member.file_id,
                member.filename,
                place,
            )
            self._by_document[chunk.document_id] = key
            entries.append(Entry(key, file.number, chunk.title, chunk.text))
        if chunks:
            vectors = np.stack([np.frombuffer(chunk.vector, np.float32) for chunk in chunks])
            self._vectors.add(file.keys, vectors, file.number)
        self._words.change(entries, stale)
        self._files[member.file_id] = file
        self._join_alike(file)

    def remove_file(self, file_id: str) -> None:
        self._words.change([], self._forget(file_id))

    def set_attributes(self, file_id: str, attributes: Attributes) -> None:
        file = self._files[file_id]
        self._leave_alike(file)
        file.attributes = attributes
        self._join_alike(file)

    def find(self, document_id: str) -> Found | None:
        key = self._by_document.get(document_id)
        passage = None if key is None else self._passages.get(key)
        return None if passage is None else Found(passage, 0.0, {}, self.is_public)

    def advance_graph(self, max_rows: int) -> None:
        self._vectors.advance(max_rows)

    def search(
        self, vector: Floats, text: str, k: int, keep: Predicate | None = None, weights: Weights | None = None
    ) -> list[Found]:
        """The `k` best passages, of different texts, from files whose attributes `keep` lets pass."""
        weights = weights or Weights()
        files = None if keep is None else self._kept(keep)
        num_candidates = max(_MIN_CANDIDATES, _CANDIDATES * k)
        rankings: list[tuple[list[int], float]] = []
        if weights.vector > 0:
            near = self._vectors.search(vector, num_candidates, files)
            rankings.append(([key for key, _ in near], weights.vector))
        if weights.text > 0:
            worded = self._words.search(text, num_candidates, files)
            rankings.append(([key for key, _ in worded], weights.text))
        return self._distinct(fuse(rankings), k)

    def _kept(self, keep: Predicate) -> list[int]:
        return [number for alike in self._alike.values() if keep(alike.attributes) for number in alike.numbers]

    def _join_alike(self, file: _File) -> None:
        alike = self._alike.setdefault(_attributes_key(file.attributes), _Alike(file.attributes, set()))
        alike.numbers.add(file.number)

    def _leave_alike(self, file: _File) -> None:
        key = _attributes_key(file.attributes)
        self._alike[key].numbers.remove(file.number)
        if not self._alike[key].numbers:
            del self._alike[key]

    def _distinct(self, ranked: Sequence[tuple[int, float]], k: int) -> list[Found]:
        found: dict[str, Found] = {}
        for key, score in ranked:
            passage = self._passages[key]
            if passage.text not in found:
                attributes = self._files[passage.file_id].attributes
                found[passage.text] = Found(passage, score, attributes, self.is_public)
                if len(found) == k:
                    break
        return list(found.values())

    def _forget(self, file_id: str) -> list[int]:
        """Everything but the words, which change with what comes in its place."""
        file = self._files.pop(file_id, None)
        if file is None:
            return []
        self._leave_alike(file)
        self._vectors.remove(file.keys)
        for key in file.keys:
            document_id = self._passages.pop(key).document_id
            if self._by_document.get(document_id) == key:
                del self._by_document[document_id]
        return file.keys


def _attributes_key(attributes: Attributes) -> bytes:
    """Not the values themselves: in Python 1 and True are equal, for a filter they are not."""
    return msgspec.json.encode(attributes, order="deterministic")
