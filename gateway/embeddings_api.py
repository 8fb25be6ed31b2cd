"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from typing import Annotated, Literal, cast

import msgspec
from litestar import Response, post
from litestar.handlers import HTTPRouteHandler
from msgspec import Meta

from engine.errors import ContextLengthExceededError, InvalidRequestError, ModelNotFoundError
from gateway.http_io import HttpRequest, body_of, json_response
from gateway.retrieval_service import RetrievalService
from gateway.retrieval_types import EmbeddingList, EmbeddingObject, EmbeddingUsage
from retrieval.embedder_protocol import EmbedderInfo

_MAX_TEXTS = 2048


class EmbeddingBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    input: str | list[object]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None  # for the vendor's abuse reports; it says nothing about the vectors


def embedding_routes(retrieval: RetrievalService) -> list[HTTPRouteHandler]:
    embedder = retrieval.embedder

    @post("/embeddings", status_code=200)
    async def create_embeddings(request: HttpRequest) -> Response[bytes]:
        body = await body_of(request, EmbeddingBody)
        texts = _texts(body.input)
        info = await embedder.wait_ready()
        _check(body, info)
        vectors, num_tokens = await embedder.embed(texts, urgent=True)
        for i, count in enumerate(num_tokens):
            if count > info.max_tokens:
                raise ContextLengthExceededError(
                    f"`input[{i}]` has {count} tokens, and this model reads {info.max_tokens}. Shorten it.",
                    param="input",
                )
        data = tuple(
            EmbeddingObject(index=i, embedding=_encoded(cast("list[float]", vector.tolist()), vector.tobytes(), body))
            for i, vector in enumerate(vectors)
        )
        total = sum(num_tokens)
        usage = EmbeddingUsage(prompt_tokens=total, total_tokens=total)
        return json_response(EmbeddingList(data=data, model=info.model, usage=usage))

    return [create_embeddings]


def _texts(sent: str | list[object]) -> list[str]:
    items: list[object] = [sent] if isinstance(sent, str) else sent
    if not items or len(items) > _MAX_TEXTS:
        raise InvalidRequestError(f"`input` must have 1 to {_MAX_TEXTS} texts.", param="input")
    texts: list[str] = []
    for i, item in enumerate(items):
        if isinstance(item, int | list):
            raise InvalidRequestError(
                "`input` is token ids, which are another model's here. Send text (LangChain: "
                "`check_embedding_ctx_length=False`).",
                param="input",
            )
        if not isinstance(item, str) or not item:
            raise InvalidRequestError(f"`input[{i}]` must be a non-empty string.", param=f"input[{i}]")
        texts.append(item)
    return texts


def _check(body: EmbeddingBody, info: EmbedderInfo) -> None:
    if body.model != info.model:
        raise ModelNotFoundError(
            f"The embedding model `{body.model[:200]}` does not exist; this server has `{info.model}`.", param="model"
        )
    if body.dimensions not in (None, info.dimension):
        raise InvalidRequestError(
            f"`dimensions` is {body.dimensions}, and this model has {info.dimension}.", param="dimensions"
        )


def _encoded(values: list[float], packed: bytes, body: EmbeddingBody) -> list[float] | str:
    return values if body.encoding_format == "float" else base64.b64encode(packed).decode()
