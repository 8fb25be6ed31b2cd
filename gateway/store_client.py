"""The gateway's line to the store (Redis protocol): never a reason for a request to wait.

    on a request's path   ask(…) ─┐                      one connection; what is asked while an answer is under way
                          ask(…) ─┼─► [pipeline] ─► ◄─   goes out together with the next pipeline, in order
                          ask(…) ─┘                      at most `timeout` seconds, else the circuit opens
    beside it             fetch(…) ─► its own connections, seconds of patience: listings, reports, changes

    closed ──an answer is late, or the connection is lost──► open: `ask` fails at once, nobody waits
    open   ──`probe` gets an answer (the directory asks several times a second)──► closed

Requests are never the ones that try whether the store is back. Nothing is sent twice: the client's own retries are
off, since a script that counts must not run again because its answer was lost.

Rejected: a pool of connections with a command each. A thousand requests at once would open a thousand connections,
and a release could overtake the reservation it belongs to.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from typing import NamedTuple, cast

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from engine.errors import StoreUnavailableError

logger = logging.getLogger(__name__)

Argument = str | bytes | int
Command = tuple[Argument, ...]

FETCH_SECONDS = 5.0
_MAX_PIPELINE = 256  # commands


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script of `gateway/lua`; the store knows it by its digest after the first use."""

    name: str
    text: str
    digest: str

    @classmethod
    def load(cls, name: str) -> Script:
        text = files("gateway").joinpath("lua", f"{name}.lua").read_text("utf-8")
        return cls(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())

    def command(self, keys: Sequence[str], arguments: Sequence[Argument]) -> Command:
        return ("EVALSHA", self.digest, len(keys), *keys, *arguments)


class _Question(NamedTuple):
    command: Command
    answer: asyncio.Future[object]


class StoreClient:
    """`url` None: there is no store, and everything that asks it is told so."""

    def __init__(self, url: str | None, timeout: float = 0.05) -> None:
        """`timeout`: seconds that a question on a request's path may take."""
        self._url = url
        self._timeout = timeout
        self._fast = None if url is None else _connect(url, timeout)
        self._slow = None if url is None else _connect(url, FETCH_SECONDS)
        self._scripts: dict[str, Script] = {}
        self._questions: list[_Question] = []
        self._sender: asyncio.Task[None] | None = None
        self._problem: str | None = None if url is None else "not reached yet"

    @property
    def configured(self) -> bool:
        return self._url is not None

    def problem(self) -> str | None:
        """Why the store cannot be used now; None when it can, or when there is none."""
        return None if self._problem is None else f"the store is away: {self._problem}"

    async def close(self) -> None:
        if self._sender is not None:
            self._sender.cancel()
            with suppress(asyncio.CancelledError):
                await self._sender
        self._fail_questions(self._questions, "closed")
        for client in (self._fast, self._slow):
            if client is not None:
                await client.aclose()

    # ------------------------------------------------------------ on a request's path

    async def ask(self, script: Script, keys: Sequence[str], arguments: Sequence[Argument]) -> object:
        """Runs a script. Raises `StoreUnavailableError`, at once while the circuit is open.

        When that is `asked`, the script may have run all the same; who is cancelled does not know, either.
        """
        if self._fast is None or self._problem is not None:
            raise StoreUnavailableError(self.problem() or "There is no store.")
        self._scripts[script.digest] = script
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._questions.append(_Question(script.command(keys, arguments), answer))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send(self._fast))
        return await answer

    async def _send(self, client: redis.asyncio.Redis) -> None:
        while self._questions:
            batch, self._questions = self._questions[:_MAX_PIPELINE], self._questions[_MAX_PIPELINE:]
            try:
                async with asyncio.timeout(self._timeout):
                    answers = await self._pipeline(client, [question.command for question in batch])
            except (RedisError, OSError, TimeoutError) as error:
                self._open_circuit(error)
                self._fail_questions(batch, str(error), asked=True)
                self._fail_questions(self._questions, str(error))
                self._questions = []
                return
            except asyncio.CancelledError:
                self._fail_questions(batch, "closed", asked=True)
                raise
            for question, answer in zip(batch, answers, strict=True):
                _settle(question.answer, _refusal(answer) or answer)

    def _fail_questions(self, questions: list[_Question], why: str, *, asked: bool = False) -> None:
        for question in questions:
            _settle(question.answer, StoreUnavailableError(f"the store is away: {why}", asked=asked))

    def _open_circuit(self, error: Exception) -> None:
        why = "it answers too late" if isinstance(error, TimeoutError) else type(error).__name__
        if self._problem is None:
            logger.warning("the store is away (%s): requests are served from memory", why)
        self._problem = why

    # ------------------------------------------------------------ beside it

    async def probe(self, *commands: Command) -> list[object]:
        """Like `fetch`, and an answer closes the circuit. For a background task."""
        answers = await self.fetch(*commands)
        if self._problem is not None:
            logger.info("the store answers")
            self._problem = None
        return answers

    async def fetch(self, *commands: Command) -> list[object]:
        """The answers of some commands, in order. Raises `StoreUnavailableError`."""
        if self._slow is None:
            raise StoreUnavailableError("There is no store.")
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                answers = await self._pipeline(self._slow, commands)
        except (RedisError, OSError, TimeoutError) as error:
            self._open_circuit(error)
            raise StoreUnavailableError(f"the store is away: {type(error).__name__}") from error
        for answer in answers:
            if (refusal := _refusal(answer)) is not None:
                raise refusal
        return answers

    async def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Argument]) -> object:
        """Runs a script beside a request's path."""
        self._scripts[script.digest] = script
        return (await self.fetch(script.command(keys, arguments)))[0]

    async def _pipeline(self, client: redis.asyncio.Redis, commands: Sequence[Command]) -> list[object]:
        answers = await _execute(client, commands)
        # Nothing was run for these: sending them again, with their text, runs them once.
        unknown = [i for i, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            again = await _execute(client, [self._with_text(commands[i]) for i in unknown])
            for i, answer in zip(unknown, again, strict=True):
                answers[i] = answer
        return answers

    def _with_text(self, command: Command) -> Command:
        return ("EVAL", self._scripts[str(command[1])].text, *command[2:])


async def _execute(client: redis.asyncio.Redis, commands: Sequence[Command]) -> list[object]:
    # The client's annotations leave its commands' types open: this function is the one place that has to know.
    try:
        async with client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)  # pyright: ignore[reportUnknownMemberType]
            answers = cast("list[object]", await pipeline.execute(raise_on_error=False))
    finally:
        _keep_cancelled()
    for answer in answers:
        if isinstance(answer, RedisError) and not isinstance(answer, ResponseError):
            raise answer
        if isinstance(answer, ResponseError) and str(answer).startswith(("LOADING", "MISCONF", "OOM", "READONLY")):
            raise answer
    return answers


def _connect(url: str, timeout: float) -> redis.asyncio.Redis:
    client = redis.asyncio.Redis.from_url(  # pyright: ignore[reportUnknownMemberType]
        url,
        socket_timeout=timeout,
        socket_connect_timeout=max(timeout, 1.0),
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )
    # Answers as the protocol has them: what the client makes of them differs between its versions.
    client.response_callbacks.clear()
    return client


def _keep_cancelled() -> None:
    """The client turns a cancellation into a connection error: whoever cancelled would wait for ever."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _refusal(answer: object) -> StoreUnavailableError | None:
    """A command that the store refuses (a value of another type under our name): for the log, and for the caller."""
    if not isinstance(answer, Exception):
        return None
    logger.error("the store refuses a command: %s", answer)
    return StoreUnavailableError("The store refuses a command.", refused=True)


def _settle(answer: asyncio.Future[object], result: object) -> None:
    if answer.done():  # whoever asked has gone
        return
    if isinstance(result, Exception):
        answer.set_exception(result)
        # A caller that was cancelled never looks: that is no error of its own.
        answer.exception()
    else:
        answer.set_result(result)
