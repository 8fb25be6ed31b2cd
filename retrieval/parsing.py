"""The bytes of a file as text: plain text, Markdown, HTML, PDF. Runs in the parser's process only.

What a file is, its content says where it can (`%PDF-`, a byte order mark), else its name. HTML is text and nothing
else: no scripts, no styles, nothing is fetched. A PDF without a text layer is an error, not an empty document.
"""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

from retrieval.errors import FileContentError

MAX_CHARACTERS = 20_000_000
MAX_PDF_PAGES = 5_000

_MARKDOWN = frozenset({".md", ".markdown", ".mdx"})
_HTML = frozenset({".html", ".htm", ".xhtml"})
_REFUSED = frozenset({".doc", ".docx", ".ppt", ".pptx", ".xls", ".xlsx", ".odt", ".epub", ".rtf", ".zip", ".gz"})
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_NOT_TEXT = ("script", "style", "noscript", "template", "head", "svg", "iframe", "object")
_BLOCKS = frozenset(
    {"address", "article", "aside", "blockquote", "br", "dd", "details", "div", "dl", "dt", "fieldset", "figcaption"}
    | {"figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main", "nav", "ol", "p"}
    | {"pre", "section", "summary", "table", "tbody", "td", "tfoot", "th", "thead", "tr", "ul"}
)
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}


@dataclass(frozen=True, slots=True)
class ParsedText:
    text: str
    is_markdown: bool


def parse_file(filename: str, content: bytes) -> ParsedText:
    """Raises `FileContentError`; on hostile input also anything else, so it must not run where that would hurt."""
    suffix = PurePath(filename).suffix.lower()
    if content.startswith(b"%PDF-") or suffix == ".pdf":
        parsed = ParsedText(_pdf_text(content), is_markdown=False)
    elif suffix in _REFUSED or content.startswith((b"PK\x03\x04", b"\xd0\xcf\x11\xe0")):
        raise FileContentError(f"Files of this type are not supported: {suffix or 'an archive'}.", "unsupported_file")
    elif suffix in _HTML or content[:1024].lstrip().lower().startswith((b"<!doctype html", b"<html")):
        parsed = ParsedText(_html_text(_decode(content)), is_markdown=True)  # headings come out as Markdown's
    else:
        parsed = ParsedText(_decode(content), is_markdown=suffix in _MARKDOWN)
    text = _clean(parsed.text)
    if not text:
        raise FileContentError("The file has no text in it.")
    if len(text) > MAX_CHARACTERS:
        raise FileContentError(f"The file has {len(text)} characters of text; the most is {MAX_CHARACTERS}.")
    return ParsedText(text, parsed.is_markdown)


def _decode(content: bytes) -> str:
    encoding = next((name for mark, name in _BYTE_ORDER_MARKS if content.startswith(mark)), "utf-8")
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        raise FileContentError(f"The file is no text in UTF-8 or UTF-16 (at byte {error.start}).") from error
    if "\x00" in text:
        raise FileContentError("The file is binary: it has zero bytes in it.", "unsupported_file")
    return text


def _clean(text: str) -> str:
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "\n\n")
    text = "".join(char for char in text if char in "\n\t" or char >= " ") if _has_controls(text) else text
    return re.sub(r"[ \t]+\n", "\n", text).strip("\n").rstrip()


def _has_controls(text: str) -> bool:
    return re.search(r"[\x00-\x08\x0b-\x1f]", text) is not None


# ---------------------------------------------------------------- PDF


def _pdf_text(content: bytes) -> str:
    # Imported here: most files are no PDFs.
    from pypdf import PdfReader
    from pypdf.errors import PyPdfError

    try:
        reader = PdfReader(io.BytesIO(content))
        if reader.is_encrypted:
            raise FileContentError("The PDF is encrypted.")
        if len(reader.pages) > MAX_PDF_PAGES:
            raise FileContentError(f"The PDF has {len(reader.pages)} pages; the most is {MAX_PDF_PAGES}.")
        text = "\n\n".join(_within_limit(page.extract_text() for page in reader.pages))
    except PyPdfError as error:
        raise FileContentError(f"The PDF is damaged: {error}") from error
    if not text.strip():
        raise FileContentError("The PDF has no text in it; scanned pages are not read.")
    return text


def _within_limit(pages: Iterator[str]) -> Iterator[str]:
    num_characters = 0
    for page in pages:
        num_characters += len(page)
        if num_characters > MAX_CHARACTERS:
            raise FileContentError(f"The PDF has more than {MAX_CHARACTERS} characters of text.")
        yield page


# ---------------------------------------------------------------- HTML


def _html_text(source: str) -> str:
    from selectolax.lexbor import LexborHTMLParser, LexborNode

    tree = LexborHTMLParser(source)
    tree.strip_tags(list(_NOT_TEXT), recursive=True)
    parts: list[str] = []
    # A stack of our own: nesting a hundred thousand deep is a file's good right, and no recursion's.
    stack: list[LexborNode | str] = [tree.root] if tree.root is not None else []
    while stack:
        node = stack.pop()
        if isinstance(node, str):
            parts.append(node)
            continue
        if node.is_text_node:
            parts.append(_inline(node))
            continue
        tag = node.tag or ""
        if tag in _BLOCKS:
            parts.append("\n" if tag in ("br", "tr", "li", "td", "th") else "\n\n")
            parts.append(_HEADINGS.get(tag, "- " if tag == "li" else ""))
            stack.append(" " if tag in ("td", "th") else "\n")
        stack.extend(reversed(list(node.iter(include_text=True))))
    return re.sub(r"\n{3,}", "\n\n", re.sub(r" *\n *(?=\n)", "\n", "".join(parts)))


def _inline(node: object) -> str:
    from selectolax.lexbor import LexborNode

    assert isinstance(node, LexborNode)
    text = node.text_content or ""
    parent = node.parent
    while parent is not None and parent.tag not in _BLOCKS:
        parent = parent.parent
    return text if parent is not None and parent.tag == "pre" else re.sub(r"\s+", " ", text)
