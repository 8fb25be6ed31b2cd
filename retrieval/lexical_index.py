"""BM25 over one collection: tantivy in memory.

An index a collection, never one for all with a filter: term statistics are part of a BM25 score, and a shared index
would let one tenant's scores tell of another's documents.

tantivy, because documents come and go: it adds and deletes in place, and finds them a few milliseconds after. bm25s
and rank-bm25 score from a matrix made once, which every upload would have to make again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import tantivy

_ANALYZER = "passage"
_WRITER_MEMORY = 15_000_000  # bytes; tantivy's least, used while a writer is open
_TITLE_BOOST = 0.5
_MAX_TERMS = 64


class Entry(NamedTuple):
    key: int
    file: int  # what a filter selects by
    title: str
    text: str


class LexicalIndex:
    """Not thread-safe."""

    def __init__(self) -> None:
        builder = tantivy.SchemaBuilder()
        builder.add_unsigned_field("key", indexed=True, fast=True)
        builder.add_unsigned_field("file", indexed=True, fast=False)
        builder.add_text_field("title", tokenizer_name=_ANALYZER)
        builder.add_text_field("text", tokenizer_name=_ANALYZER)
        self._schema = builder.build()
        self._analyzer = _analyzer()
        self._index = tantivy.Index(self._schema)
        self._index.register_tokenizer(_ANALYZER, self._analyzer)

    def change(self, added: Sequence[Entry], removed: Collection[int] = ()) -> None:
        """Searchable, or gone, when this returns."""
        writer = self._index.writer(_WRITER_MEMORY, 1)
        if removed:
            # Not by term: tantivy-py 0.27 takes a Python integer for a signed one there, and matches nothing.
            writer.delete_documents_by_query(tantivy.Query.term_set_query(self._schema, "key", list(removed)))
        for entry in added:
            document = tantivy.Document()
            document.add_unsigned("key", entry.key)
            document.add_unsigned("file", entry.file)
            document.add_text("title", entry.title)
            document.add_text("text", entry.text)
            writer.add_document(document)
        writer.commit()
        writer.wait_merging_threads()
        self._index.reload()

    def search(self, query: str, k: int, files: Sequence[int] | None = None) -> list[tuple[int, float]]:
        """Keys with at least one of the query's terms, best first, with their scores; of `files` only, if given."""
        terms = list(dict.fromkeys(self._analyzer.analyze(query)))[:_MAX_TERMS]
        if not terms or files == []:
            return []
        either = [(tantivy.Occur.Should, self._term("text", term)) for term in terms]
        either += [
            (tantivy.Occur.Should, tantivy.Query.boost_query(self._term("title", term), _TITLE_BOOST)) for term in terms
        ]
        wanted = tantivy.Query.boolean_query(either)
        if files is not None:
            of_files = tantivy.Query.const_score_query(tantivy.Query.term_set_query(self._schema, "file", files), 0.0)
            wanted = tantivy.Query.boolean_query([(tantivy.Occur.Must, wanted), (tantivy.Occur.Must, of_files)])
        searcher = self._index.searcher()
        hits = searcher.search(wanted, k, count=False).hits  # counting would score every match, not only the best
        keys = searcher.fast_field_values("key", [address for _, address in hits])
        return [(int(key), float(score)) for key, (score, _) in zip(keys, hits, strict=True) if key is not None]

    def __len__(self) -> int:
        return self._index.searcher().num_docs

    def _term(self, field: str, term: str) -> tantivy.Query:
        return tantivy.Query.term_query(self._schema, field, term)


def _analyzer() -> tantivy.TextAnalyzer:
    return (
        tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
        .filter(tantivy.Filter.remove_long(40))
        .filter(tantivy.Filter.lowercase())
        .filter(tantivy.Filter.ascii_fold())
        .filter(tantivy.Filter.stopword("english"))
        .filter(tantivy.Filter.stemmer("english"))
        .build()
    )
