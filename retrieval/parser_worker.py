"""The parser's process: `python -m retrieval.parser_worker`, frames of msgpack over stdin and stdout.

    parent ── Tokenizer, ParseJob ──► this process, which may not use more than its share of memory
           ◄── ParsedFile | ParseFailure

Files are hostile until proven otherwise. What a parser is known to raise becomes a `ParseFailure`; anything else, and
running out of memory or of time, ends this process, and the parent says so about the file and starts another.
"""

from __future__ import annotations

import resource
import sys
from typing import BinaryIO

import msgspec
from tokenizers import Tokenizer

from retrieval.chunking import TextChunker
from retrieval.errors import FileContentError, FileErrorCode
from retrieval.parsing import parse_file
from retrieval.records import Chunking


class UseTokenizer(msgspec.Struct, frozen=True, tag="tokenizer"):
    """The tokenizer in whose tokens the following files are measured."""

    json: bytes


class ParseJob(msgspec.Struct, frozen=True, tag="parse"):
    filename: str
    content: bytes
    chunking: Chunking


class ParsedFile(msgspec.Struct, frozen=True, tag="parsed"):
    chunks: list[str]


class ParseFailure(msgspec.Struct, frozen=True, tag="failure"):
    code: FileErrorCode
    message: str


ToWorker = UseTokenizer | ParseJob
FromWorker = ParsedFile | ParseFailure
LENGTH_BYTES = 4


def frame(message: ToWorker | FromWorker) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    chunker: TextChunker | None = None
    while head := source.read(LENGTH_BYTES):
        message = msgspec.msgpack.decode(source.read(int.from_bytes(head, "big")), type=ToWorker)
        if isinstance(message, UseTokenizer):
            tokenizer = Tokenizer.from_str(message.json.decode())
            tokenizer.no_truncation()
            chunker = TextChunker(tokenizer)
            continue
        assert chunker is not None, "the parent sends the tokenizer first"
        sink.write(frame(_answer(message, chunker)))
        sink.flush()


def _answer(job: ParseJob, chunker: TextChunker) -> FromWorker:
    try:
        return ParsedFile(chunker.split(parse_file(job.filename, job.content), job.chunking))
    except FileContentError as error:
        return ParseFailure(error.code, error.message)
    except (MemoryError, RecursionError) as error:
        return ParseFailure("invalid_file", f"The file needs more memory than a file may ({type(error).__name__}).")


def main() -> None:
    limit = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
