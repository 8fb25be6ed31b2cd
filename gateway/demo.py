"""`radixgate demo`: what prefix caching does, in three requests over the same documents.

    1  a question             everything is computed
    2  the same question      all but the last tokens is cached
    3  another question       the documents are cached, the question is computed

Without `--base-url` the demo runs a server of its own: free port, temporary data directory, the real one's models.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from importlib import resources
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from engine.errors import ConfigError, EngineUnavailableError, RadixgateError, from_wire
from engine.settings import Settings
from gateway.first_run import demo_key_path, with_demo_tenant
from gateway.supervisor import Supervisor, free_port, local_url

SYSTEM = "You answer questions from the given documents, in one short sentence."
FIRST_QUESTION = "What was the name of the lunar module of Apollo 11?"
OTHER_QUESTION = "Which container ship ran aground in the Suez Canal in March 2021?"
STEPS = ((1, "first time", FIRST_QUESTION), (2, "again", FIRST_QUESTION), (3, "other question", OTHER_QUESTION))
MAX_TOKENS = 48
REQUEST_SECONDS = 300.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One request, as the client saw it."""

    step: int
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float  # from sending to the first text
    text: str


def run_demo(settings: Settings, *, base_url: str | None, api_key: str | None, as_json: bool) -> int:
    if base_url is None:
        return asyncio.run(_demo_with_own_server(settings, as_json=as_json))
    _ask_all(base_url, api_key or _stored_key(settings.store.data_dir), as_json=as_json)
    return 0


def _stored_key(data_dir: Path) -> str:
    try:
        return demo_key_path(data_dir).read_text("utf-8").strip()
    except OSError as error:
        raise ConfigError(f"no demo key in {data_dir}: give one with --api-key") from error


# ---------------------------------------------------------------- a server of its own


async def _demo_with_own_server(settings: Settings, *, as_json: bool) -> int:
    with _temporary_data_dir(settings.store.data_dir) as data_dir:
        own = with_demo_tenant(_own_settings(settings, data_dir))
        ready = asyncio.Event()
        supervisor = Supervisor(own, on_ready=lambda _: ready.set())
        server = asyncio.create_task(supervisor.run())
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait([server, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if server.done():
            return await server or 1  # it ended before it was ready
        try:
            await asyncio.to_thread(_ask_all, f"{local_url(own)}/v1", _stored_key(data_dir), as_json=as_json)
        finally:
            supervisor.stop()
            code = await server
        return code


def _own_settings(settings: Settings, data_dir: Path) -> Settings:
    replace = msgspec.structs.replace
    return replace(
        settings,
        server=replace(settings.server, host="127.0.0.1", port=free_port()),
        engine=replace(settings.engine, endpoint=""),
        store=replace(settings.store, data_dir=data_dir, url="", port=0),
        tenants=(),
    )


@contextmanager
def _temporary_data_dir(data_dir: Path) -> Generator[Path]:
    """A data directory that is gone afterwards, but for the converted model, which takes a minute to make."""
    models = data_dir.resolve() / "models"
    models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="radixgate-demo-") as directory:
        os.symlink(models, Path(directory) / "models")
        yield Path(directory)


# ---------------------------------------------------------------- the three requests


def demo_documents() -> list[dict[str, str]]:
    """As the request's `documents` field takes them."""
    files = sorted(
        (file for file in resources.files("gateway").joinpath("demo_documents").iterdir() if file.name.endswith(".md")),
        key=lambda file: file.name,
    )
    documents: list[dict[str, str]] = []
    for file in files:
        title, _, text = file.read_text("utf-8").partition("\n")
        documents.append({"id": file.name.removesuffix(".md"), "title": title.lstrip("# "), "text": text.strip()})
    return documents


def _ask_all(base_url: str, api_key: str, *, as_json: bool) -> None:
    model = _first_model(base_url, api_key)
    if not as_json:
        print(f"\n{'':16}{'prompt':>8}{'cached':>8}{'computed':>10}{'first token':>13}")
    for step, label, question in STEPS:
        outcome = ask(base_url, api_key, model, step, question)
        print(
            json.dumps(msgspec.to_builtins(outcome), ensure_ascii=False) if as_json else _row(label, outcome),
            flush=True,
        )


def _row(label: str, outcome: Outcome) -> str:
    computed = outcome.prompt_tokens - outcome.cached_tokens
    counts = f"{outcome.prompt_tokens:>8}{outcome.cached_tokens:>8}{computed:>10}{outcome.ttft_s * 1_000:>10.0f} ms"
    return f"{outcome.step} {label:<14}{counts}   {' '.join(outcome.text.split())}"


def ask(base_url: str, api_key: str, model: str, step: int, question: str) -> Outcome:
    """One streamed request. Raises the typed error of a refusal."""
    body = {
        "model": model,
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        "documents": demo_documents(),
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    first_text: float | None = None
    text = ""
    usage: _Usage | None = None
    with _request("POST", f"{base_url}/chat/completions", api_key, body) as response:
        for chunk in _chunks(response):
            delta = "".join(choice.delta.content or "" for choice in chunk.choices)
            if delta and first_text is None:
                first_text = time.perf_counter()
            text += delta
            usage = chunk.usage or usage
    if usage is None:
        raise EngineUnavailableError("the stream ended without its usage")
    return Outcome(
        step=step,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.prompt_tokens_details.cached_tokens,
        ttft_s=round((first_text or time.perf_counter()) - started, 4),
        text=text.strip(),
    )


def _first_model(base_url: str, api_key: str) -> str:
    with _request("GET", f"{base_url}/models", api_key, None) as response:
        return msgspec.json.decode(response.read(), type=_Models).data[0].id


@contextmanager
def _request(method: str, url: str, api_key: str, body: object) -> Generator[http.client.HTTPResponse]:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    with closing(kind(parts.netloc, timeout=REQUEST_SECONDS)) as connection:
        try:
            connection.request(method, parts.path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
        except OSError as error:
            raise EngineUnavailableError(f"{parts.netloc} cannot be reached: {error}") from error
        if response.status != http.client.OK:
            raise _refusal(response.status, response.read())
        yield response


def _chunks(response: http.client.HTTPResponse) -> Iterator[_Chunk]:
    for line in response:
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            chunk = msgspec.json.decode(data, type=_Chunk)
            if chunk.error is not None:
                raise from_wire(chunk.error.code or "", chunk.error.message, None)
            yield chunk


def _refusal(status: int, body: bytes) -> RadixgateError:
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except msgspec.DecodeError:
        return EngineUnavailableError(f"the server answered {status}")
    return from_wire(error.code or "", f"the server answered {status}: {error.message}", None)


class _Error(msgspec.Struct, frozen=True):
    message: str
    code: str | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Error


class _CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    prompt_tokens_details: _CachedTokens = _CachedTokens()


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta


class _Chunk(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: _Error | None = None


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...]
