"""What a client may ask of retrieval, wherever it asks: in a search, in `retrieval`, in a `file_search` tool."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from engine.errors import InvalidRequestError, UnsupportedParameterError
from gateway.json_body import as_object, convert_fields
from retrieval.collection_index import Weights
from retrieval.document_order import DocumentOrder
from retrieval.errors import InvalidValueError
from retrieval.filters import Predicate, compile_filter

CollectionIds = Annotated[tuple[str, ...], Meta(min_length=1, max_length=8)]
NumResults = Annotated[int, Meta(ge=1, le=50)]
# Of a chat; each is some hundred tokens of its prompt.
_CHAT_RESULTS = 4


class HybridSearch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights of the two rankings that are fused."""

    embedding_weight: Annotated[float, Meta(ge=0)]
    text_weight: Annotated[float, Meta(ge=0)]


class RankingOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`auto` is fusion; `rerank` puts the server's cross-encoder on top of it; `none` is fusion too."""

    ranker: Literal["auto", "none", "default-2024-11-15", "rerank"] = "auto"
    score_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.0
    hybrid_search: HybridSearch | None = None

    @property
    def weights(self) -> Weights:
        if self.hybrid_search is None:
            return Weights()
        return Weights(self.hybrid_search.embedding_weight, self.hybrid_search.text_weight)

    @property
    def reranks(self) -> bool:
        return self.ranker == "rerank"

    def check(self, path: str) -> None:
        weights = self.weights
        if weights.vector == 0 and weights.text == 0:
            raise InvalidRequestError(
                f"`{path}.hybrid_search`: one of the weights must be above 0.", param=f"{path}.hybrid_search"
            )


class ChatRetrieval(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `retrieval` field of a chat completion."""

    vector_store_ids: CollectionIds
    max_num_results: NumResults = _CHAT_RESULTS
    filters: dict[str, object] | None = None
    ranking_options: RankingOptions = RankingOptions()
    rewrite_query: bool = False
    document_order: DocumentOrder = "cache"
    pin_top: Annotated[int, Meta(ge=0, le=50)] = 0
    rank_note: bool = False

    def predicate(self, path: str) -> Predicate | None:
        return compile_filters(self.filters, f"{path}.filters")


def compile_filters(filters: object, path: str) -> Predicate | None:
    """Raises `InvalidRequestError` with the path of what is wrong."""
    if filters is None:
        return None
    try:
        return compile_filter(filters, path)
    except InvalidValueError as error:
        raise InvalidRequestError(f"`{error.path}` {error.message}.", param=error.path) from error


def read_tools(tools: list[object]) -> ChatRetrieval | None:
    """A `file_search` tool, in OpenAI's fields, as the retrieval that it asks for. Other tools are refused."""
    found: ChatRetrieval | None = None
    for i, raw in enumerate(tools):
        fields = dict(as_object(raw, f"tools[{i}]"))
        kind = fields.pop("type", None)
        if kind != "file_search":
            raise UnsupportedParameterError(
                f"`tools[{i}].type`: only `file_search` is supported.", param=f"tools[{i}].type"
            )
        if found is not None:
            raise InvalidRequestError("`tools` has two `file_search` tools; give one.", param="tools")
        given = {name: value for name, value in fields.items() if value is not None}
        try:
            found = convert_fields(given, ChatRetrieval)
        except (InvalidRequestError, UnsupportedParameterError) as error:
            path = f"tools[{i}].{error.param}"
            raise type(error)(error.message.replace(f"`{error.param}`", f"`{path}`"), param=path) from error
    return found
