"""What is text in, decision out: citations, lint, order, fusion, filters."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval.citations import find_citations
from retrieval.document_order import DocumentOrder, arrange
from retrieval.documents import Document
from retrieval.errors import InvalidValueError
from retrieval.filters import compile_filter
from retrieval.fusion import fuse
from retrieval.lexical_index import Entry, LexicalIndex
from retrieval.lint import lint

LISBON = Document("a", "Lisbon", "Lisbon is the capital of Portugal. The river Tagus flows into the Atlantic.")
VIENNA = Document("b", "Vienna", "Vienna is the capital of Austria, on the river Danube.")


def test_a_sentence_cites_the_document_that_says_it() -> None:
    answer = "Portugal has a capital. The river Tagus flows into the Atlantic near Lisbon. I like trains very much!"
    (citation,) = find_citations(answer, [VIENNA, LISBON])
    assert citation.text == "The river Tagus flows into the Atlantic near Lisbon."
    assert answer[citation.start : citation.end] == citation.text
    assert citation.sources == (LISBON,)


def test_words_alone_are_no_support() -> None:
    """The same words strewn over a document say something else."""
    assert find_citations("Atlantic flows Portugal capital river.", [LISBON]) == []


@given(st.text(max_size=300))
def test_citations_are_spans_of_the_answer_in_order(answer: str) -> None:
    found = find_citations(answer, [LISBON, Document("c", "", answer)])
    assert all(answer[each.start : each.end] == each.text for each in found)
    assert all(one.end <= two.start for one, two in pairwise(found))


@pytest.mark.parametrize(
    ("text", "kind", "what"),
    [
        ("You are kind. It is 2026-03-01T14:22:05Z. Be brief.", "date and time", "2026-03-01T14:22:05Z"),
        ("Today is 2026-03-01. Be brief.", "today's date", "Today is 2026-03-01"),
        ("Today Date: 01 Mar 2026\nBe brief.", "today's date", "Today Date: 01 Mar 2026"),
        ("Current time: 14:22", "time of day", "time: 14:22"),
        ("Session id: 8c1f22ab-x", "id of a request or session", "Session id: 8c1f22ab-x"),
        ("Trace 123e4567-e89b-12d3-a456-426614174000.", "UUID", "123e4567-e89b-12d3-a456-426614174000"),
        ("Now: 1767225600", "Unix time", "1767225600"),
        ("The user is named Alice.", "name or address of a user", "user is named Alice"),
        ("Write to bob@example.org.", "name or address of a user", "bob@example.org"),
        ("Hello {{user_name}}.", "unfilled template", "{{user_name}}"),
    ],
)
def test_lint_names_what_breaks_a_prefix(text: str, kind: str, what: str) -> None:
    """A time stamp at the head of the system prompt: nothing is ever cached, and nobody knows why (goose#2434)."""
    (finding, *_) = lint([text, "The question?"])
    assert (finding.kind, finding.text, finding.part) == (kind, what, 0)
    assert text[finding.start :].startswith(what)
    assert finding.num_behind == len(text) - finding.start - len(what) + len("The question?")


@pytest.mark.parametrize(
    "text",
    [
        "The licence is dated 29 June 2007, and version 3.11.7 is from 2023.",
        "Use port 8080 and at most 1234567 tokens. A user may ask anything; users are kind.",
        "Battle of Hastings, 14 October 1066.",
    ],
)
def test_lint_leaves_alone_what_stays(text: str) -> None:
    assert lint([text, "Question?"]) == []


def test_what_stands_in_the_question_breaks_nothing() -> None:
    assert lint(["You are kind.", "What was on 2026-03-01 14:22?"]) == []


@pytest.mark.parametrize(
    ("order", "pin_top", "expected"),
    [
        ("given", 0, "badc"),
        ("relevance", 0, "badc"),
        ("canonical", 0, "dabc"),
        ("canonical", 2, "dcab"),
        ("relevance", 1, "adcb"),
        ("cache", 0, "dabc"),
        ("cache", 2, "dcab"),
        ("cache", 9, "cdab"),
    ],
)
def test_orders(order: DocumentOrder, pin_top: int, expected: str) -> None:
    popularity = {"d": 3}
    arranged = arrange("badc", order, pin_top, lambda each: (-popularity.get(each, 0), each))
    assert "".join(arranged) == expected


@given(st.permutations("abcdef"))
def test_the_canonical_order_is_the_same_for_every_ranking(ranked: list[str]) -> None:
    assert arrange(ranked, "canonical", 0, lambda each: (each,)) == list("abcdef")


def test_fusion_prefers_what_both_rankings_have() -> None:
    fused = fuse([(["a", "b", "c"], 1.0), (["c", "d", "a"], 1.0)])
    assert [key for key, _ in fused] == ["a", "c", "b", "d"]
    assert fuse([(["a"], 1.0), (["a"], 0.5)]) == [("a", pytest.approx(1.0))]
    assert fuse([]) == []


@pytest.mark.parametrize(
    ("raw", "passes"),
    [
        ({"type": "eq", "key": "n", "value": 3}, True),
        ({"type": "eq", "key": "n", "value": True}, False),
        ({"type": "in", "key": "s", "value": ["x", "y"]}, True),
        ({"type": "nin", "key": "s", "value": ["x", "y"]}, False),
        ({"type": "nin", "key": "none", "value": ["x"]}, True),
        ({"type": "lt", "key": "none", "value": 9}, False),
        ({"type": "lte", "key": "s", "value": 9}, False),
        (
            {"type": "or", "filters": [{"type": "gt", "key": "n", "value": 5}, {"type": "lt", "key": "n", "value": 5}]},
            True,
        ),
        (
            {
                "type": "and",
                "filters": [{"type": "gte", "key": "n", "value": 3}, {"type": "ne", "key": "b", "value": True}],
            },
            False,
        ),
    ],
)
def test_filters(raw: object, passes: bool) -> None:
    assert compile_filter(raw)({"n": 3.0, "s": "x", "b": True}) is passes


def test_filters_nested_without_end_are_refused() -> None:
    raw: object = {"type": "eq", "key": "a", "value": 1}
    for _ in range(2000):
        raw = {"type": "and", "filters": [raw]}
    with pytest.raises(InvalidValueError):
        compile_filter(raw)


def test_a_removed_passage_is_no_longer_found_by_its_words() -> None:
    """Deleting by term silently matches nothing for an unsigned key in this binding."""
    index = LexicalIndex()
    index.change([Entry(1, 0, "t", "a river of gold"), Entry(2, 1, "t", "a river of silver")])
    assert {key for key, _ in index.search("rivers", 5)} == {1, 2}
    assert [key for key, _ in index.search("rivers", 5, files=[1])] == [2]
    index.change([], removed=[1])
    assert [key for key, _ in index.search("rivers", 5)] == [2]
    index.change([], removed=[2])
    assert index.search("rivers", 5) == []
    assert index.search("of the and", 5) == []
    assert index.search('text:"gold" AND (', 5) == []
