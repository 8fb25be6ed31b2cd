"""Files as text, in a process that hostile ones may take with them."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
import pytest_asyncio

from retrieval.chunking import TextChunker, sections
from retrieval.errors import FileContentError
from retrieval.parser_process import ParserProcess
from retrieval.parsing import ParsedText, parse_file
from retrieval.records import Chunking
from tests.gateway.byte_tokenizer import byte_tokenizer
from tests.retrieval.real_texts import real_text

TOKENIZER = byte_tokenizer()
CHUNKER = TextChunker(TOKENIZER)
CHUNKING = Chunking(max_tokens=400, overlap_tokens=0)


def test_html_is_text_only() -> None:
    source = b"""<!doctype html><html><head><title>T</title><style>p {x: y}</style></head><body>
    <script>alert('no')</script><h2>Rivers &amp; seas</h2><p>The <b>Tagus</b>
    flows.</p><ul><li>one<li>two</ul><table><tr><td>a</td><td>b</td></tr></table><pre>  keep
    this</pre><template>not this</template></body></html>"""
    text = parse_file("page.html", source).text
    assert "## Rivers & seas" in text
    assert "The Tagus flows." in text
    assert "- one\n" in text
    assert "  keep\n    this" in text
    assert not any(word in text for word in ("alert", "x: y", "not this", "<"))


def test_html_nested_thousands_deep_is_read() -> None:
    """Recursion over a document's tree is a stack overflow that anybody can send."""
    assert parse_file("deep.html", b"<div>" * 5_000 + b"bottom").text.strip() == "bottom"


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.txt", "Zürich\r\nBern\r\n".encode(), "Zürich\nBern"),
        ("a.txt", "Zürich".encode("utf-16"), "Zürich"),
        ("a.txt", b"\xef\xbb\xbftext", "text"),
        ("a.txt", b"a\x1b[31mb", "a[31mb"),
        ("README", b"plain", "plain"),
    ],
)
def test_text_in_its_encodings(name: str, content: bytes, text: str) -> None:
    assert parse_file(name, content).text == text


@pytest_asyncio.fixture
async def parser() -> AsyncIterator[ParserProcess]:
    process = ParserProcess(timeout_seconds=5, memory_bytes=1 << 30)
    yield process
    await process.close()


def pdf(stream: bytes) -> bytes:
    """A PDF of one page whose content is this stream, compressed."""
    packed = zlib.compress(stream, 9)
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 4 0 R /Resources << /Font << /F 5 0 R >> >> >>",
        b"<< /Length %d /Filter /FlateDecode >>\nstream\n" % len(packed) + packed + b"\nendstream",
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    body, offsets = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(body))
        body += b"%d 0 obj\n" % number + content + b"\nendobj\n"
    table = b"xref\n0 6\n0000000000 65535 f \n" + b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    return body + table + b"trailer << /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % len(body)


async def test_a_pdf_is_read(parser: ParserProcess) -> None:
    content = pdf(b"BT /F 9 Tf (The Tagus flows.) Tj ET")
    assert await parser.split("a.pdf", content, CHUNKING, TOKENIZER.to_str().encode()) == ["The Tagus flows."]


async def test_a_pdf_bomb_fails_and_the_next_file_is_read(parser: ParserProcess) -> None:
    """A few kilobytes that unfold to gigabytes, or to hours of work, are the file's failure and nobody else's."""
    bomb = pdf(b"BT /F 9 Tf " + b"(A) Tj " * 20_000_000 + b"ET")
    assert len(bomb) < 1_000_000
    with pytest.raises(FileContentError):
        await parser.split("bomb.pdf", bomb, CHUNKING, TOKENIZER.to_str().encode())
    assert await parser.split("a.txt", b"fine", CHUNKING, TOKENIZER.to_str().encode()) == ["fine"]


def test_chunks_have_at_most_the_tokens_and_together_all_words() -> None:
    for name in ("argparse", "textwrap", "json"):
        text = real_text(name)
        chunks = CHUNKER.split(ParsedText(text, is_markdown=False), CHUNKING)
        assert all(len(chunk.encode()) <= CHUNKING.max_tokens for chunk in chunks)
        assert " ".join(chunks).split() == text.split()


def test_sections_fall_into_step_again_after_an_edit() -> None:
    """Otherwise a word at the top makes every chunk of a document another one."""
    text = "\n\n".join(real_text(name) for name in ("argparse", "textwrap", "json", "csv", "logging"))
    before = list(sections(ParsedText(text, is_markdown=False), 2000))
    after = list(sections(ParsedText("A new paragraph.\n\n" + text, is_markdown=False), 2000))
    assert len(before) > 4
    assert len(set(after) - set(before)) <= 2


def test_overlap_repeats_the_end_of_a_chunk() -> None:
    chunking = Chunking(max_tokens=400, overlap_tokens=150)
    chunks = CHUNKER.split(ParsedText(real_text("argparse"), is_markdown=False), chunking)
    repeated = sum(bool(set(one.split("\n")) & set(two.split("\n"))) for one, two in pairwise(chunks))
    assert repeated > len(chunks) // 3
