"""Files to chunks through a process of their own, which is killed when a file takes too long."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress

import msgspec

from retrieval.errors import FileContentError
from retrieval.parser_worker import LENGTH_BYTES, FromWorker, ParseFailure, ParseJob, UseTokenizer, frame
from retrieval.records import Chunking

# None of our environment's secrets for a process that reads hostile files.
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LANG", "LD_LIBRARY_PATH")


class ParserProcess:
    """One file at a time; the process starts with the first one, and anew after each one that it did not survive."""

    def __init__(self, *, timeout_seconds: float, memory_bytes: int) -> None:
        self._timeout = timeout_seconds
        self._memory = memory_bytes
        self._process: asyncio.subprocess.Process | None = None
        self._tokenizer: bytes | None = None
        self._lock = asyncio.Lock()

    async def split(self, filename: str, content: bytes, chunking: Chunking, tokenizer_json: bytes) -> list[str]:
        """The texts of the file's chunks. Raises `FileContentError`."""
        async with self._lock:
            reply = await self._ask(ParseJob(filename, content, chunking), tokenizer_json)
        if isinstance(reply, ParseFailure):
            raise FileContentError(reply.message, reply.code)
        return reply.chunks

    async def close(self) -> None:
        async with self._lock:
            await self._kill()

    async def _ask(self, job: ParseJob, tokenizer_json: bytes) -> FromWorker:
        process = self._process or await self._start()
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        try:
            async with asyncio.timeout(self._timeout):
                if self._tokenizer != tokenizer_json:
                    process.stdin.write(frame(UseTokenizer(tokenizer_json)))
                    self._tokenizer = tokenizer_json
                process.stdin.write(frame(job))
                await process.stdin.drain()
                length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "big")
                return msgspec.msgpack.decode(await process.stdout.readexactly(length), type=FromWorker)
        except TimeoutError:
            await self._kill()
            raise FileContentError(f"The file could not be read within {self._timeout:.0f} seconds.") from None
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            await self._kill()
            raise FileContentError("The file is damaged: the parser did not survive it.") from error
        except asyncio.CancelledError:
            await self._kill()  # it may be in the middle of an answer that nobody waits for
            raise

    async def _start(self) -> asyncio.subprocess.Process:
        environ = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "retrieval.parser_worker",
            str(self._memory),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=environ,
        )
        self._tokenizer = None
        return self._process

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
