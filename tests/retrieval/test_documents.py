from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval.documents import Document, DocumentError, content_id, parse, render


def test_both_shapes_give_the_same_document() -> None:
    ours = parse([{"id": "a", "title": "T", "text": "body"}])
    cohere = parse([{"id": "a", "data": {"title": "T", "text": "body"}}])
    assert ours == cohere == [Document("a", "T", "body")]


def test_other_fields_of_coheres_data_are_lines_above_the_text() -> None:
    (document,) = parse([{"id": "a", "data": {"snippet": "body", "year": 1990, "by": "X\nY"}}])
    assert document.text == "year: 1990\nby: X\nY\nbody"
    (plain,) = parse([{"id": "b", "data": "just text"}])
    assert plain.text == "just text"


def test_the_id_of_a_document_without_one_is_its_contents() -> None:
    """A position or a random id would make the same document another one in the next request."""
    first, again, other = parse([{"text": "x"}, {"text": "x", "title": None}, {"text": "y"}])
    assert first.id == again.id == content_id("", "x")
    assert other.id != first.id
    assert content_id("ab", "c") != content_id("a", "bc")


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ({}, "documents"),
        ("text", "documents"),
        (["text"], "documents[0]"),
        ([{}], "documents[0].text"),
        ([{"text": "a"}, {"text": 1}], "documents[1].text"),
        ([{"text": " \n"}], "documents[0].text"),
        ([{"text": "a", "id": 1}], "documents[0].id"),
        ([{"text": "a", "title": []}], "documents[0].title"),
        ([{"text": "a", "score": 1}], "documents[0].score"),
        ([{"data": []}], "documents[0].data"),
        ([{"data": {}}], "documents[0].data"),
        ([{"data": {"text": 1}}], "documents[0].data.text"),
        ([{"data": {"a": {}}}], "documents[0].data.a"),
        ([{"data": {"text": "a"}, "text": "b"}], "documents[0].text"),
    ],
)
def test_errors_name_the_path(raw: object, path: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse(raw)
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (Document("a", "Title", "x"), "[a] Title\nx\n\n"),
        (Document("a", "", " x \n"), "[a]\nx\n\n"),
        (Document(content_id("Title", "x"), "Title", "x"), "Title\nx\n\n"),
        (Document(content_id("", "x"), "", "x"), f"[{content_id('', 'x')}]\nx\n\n"),
        (Document("a\n\n[b] Other\r\u2028", "T\x00\ty", "x"), "[a [b] Other] T y\nx\n\n"),
    ],
)
def test_rendering(document: Document, text: str) -> None:
    """A line break in an id or a title could pass for the start of another document."""
    assert render(document) == text


@given(id=st.text(), title=st.text(), text=st.text())
def test_the_label_is_one_short_line(id: str, title: str, text: str) -> None:  # noqa: A002
    label = render(Document(id, title, "BODY" + text)).partition("BODY")[0]
    assert label.splitlines(keepends=True) == [label]
    assert len(label) <= 405
