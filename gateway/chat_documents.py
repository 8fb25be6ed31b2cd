"""The documents of one chat completion: found, placed, ordered, and told of in the answer.

    last user turn ─(rewritten?)─► search ─► without those of earlier turns ─► arrange ─┐
    earlier turns (Conversations) ───────────────────────────────────────────────────────┴─► PromptDocuments ─► prompt
    the engine's order of the latest run ─► settle: remembered for the next turn ─► citations, report

Documents that a client sends itself take the same way from `arrange` on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from engine.errors import InvalidRequestError, RadixgateError, UnsupportedParameterError
from engine.protocol import Segment
from gateway.answering import may_cache
from gateway.chat_request import ChatRequest
from gateway.engine_port import Engine
from gateway.openai_types import (
    CitationObject,
    CitationSource,
    CitedDocument,
    RetrievalReport,
    RetrievedDocument,
)
from gateway.prefill_ahead import prefill
from gateway.prompt import Message, PromptDocuments
from gateway.prompt_scopes import PromptScopes
from gateway.published import Published
from gateway.query_rewrite import Asked, Rewriting, rewriting_of
from gateway.retrieval_request import ChatRetrieval
from gateway.retrieval_service import RetrievalService
from gateway.served_model import ServedModel
from gateway.tenants import Tenant
from retrieval.citations import find_citations
from retrieval.collection_index import Found
from retrieval.conversations import Placement
from retrieval.document_order import DocumentOrder, arrange
from retrieval.documents import Document
from retrieval.search_indexes import Name
from retrieval.searcher import Query

_NOTE_WORDS = 8


@dataclass(slots=True, kw_only=True)
class ChatDocuments:
    """`latest` is the run whose order is (or was) open; `earlier` stands where it stood in earlier turns."""

    prompt: PromptDocuments = field(default_factory=PromptDocuments)
    latest: tuple[Document, ...] = ()
    engine_order: Literal["given", "cache"] = "given"
    pin_top: int = 0
    order: DocumentOrder = "given"
    retrieved: RetrievedDocuments | None = None

    def settle(self, order: tuple[int, ...] | None) -> None:
        """The engine has admitted the request, and put the latest run into this order."""
        if order is not None:
            self.latest = tuple(self.latest[i] for i in order)

    async def remember(self) -> None:
        if self.retrieved is not None:
            await self.retrieved.remember(self.latest)

    @property
    def all(self) -> list[Document]:
        earlier = [*self.prompt.head, *(each for run in self.prompt.turns.values() for each in run)]
        latest = {each.id for each in self.latest}
        return [*(each for each in earlier if each.id not in latest), *self.latest]

    def citations(self, answer: str) -> tuple[CitationObject, ...]:
        return tuple(
            CitationObject(
                start=found.start,
                end=found.end,
                text=found.text,
                sources=tuple(
                    CitationSource(
                        id=source.id, document=CitedDocument(id=source.id, title=source.title, snippet=source.text)
                    )
                    for source in found.sources
                ),
            )
            for found in find_citations(answer, self.all)
        )

    def report(self) -> RetrievalReport | None:
        return None if self.retrieved is None else self.retrieved.report(self.order, self.latest)


@dataclass(slots=True, kw_only=True)
class RetrievedDocuments:
    """What a search has brought, best first, and the conversation that it belongs to."""

    service: RetrievalService
    tenant: Tenant
    scope: bytes
    messages: tuple[Message, ...]
    query: str
    found: tuple[Found, ...]
    earlier: Placement | None

    async def remember(self, latest: Sequence[Document]) -> None:
        ids = tuple(each.id for each in latest)
        if self.earlier is None:
            placement = Placement(head=ids)
        elif ids:
            placement = Placement(head=self.earlier.head, turns={**self.earlier.turns, _question(self.messages): ids})
        else:
            placement = self.earlier
        await self.service.conversations.remember(self.tenant.id, self.scope, _pairs(self.messages), placement)
        self.service.popularity.count(self.tenant.id, [each.passage.document_id for each in self.found])

    def report(self, order: DocumentOrder, latest: Sequence[Document]) -> RetrievalReport:
        positions = {each.id: i for i, each in enumerate(latest)}
        return RetrievalReport(
            query=self.query,
            document_order=order,
            documents=tuple(
                RetrievedDocument(
                    id=each.passage.document_id,
                    file_id=each.passage.file_id,
                    filename=each.passage.filename,
                    score=each.score,
                    rank=rank,
                    # Without a position: it stands in an earlier turn already.
                    position=positions.get(each.passage.document_id),
                )
                for rank, each in enumerate(self.found)
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSearch:
    """What is to be found for one chat completion: checked, and nothing asked of the model for it yet."""

    service: RetrievalService
    wanted: ChatRetrieval
    names: tuple[Name, ...]
    query: str
    messages: tuple[Message, ...]
    tenant: Tenant
    scopes: PromptScopes
    model: ServedModel
    use_cache: bool

    @property
    def system(self) -> list[Message]:
        return [message for message in self.messages if message.role == "system"]

    async def rewriting(self) -> Rewriting | None:
        """What has to be asked of the model before the search; None: nothing."""
        if not self.wanted.rewrite_query:
            return None
        asked = Asked(self.messages, self.query)
        return await rewriting_of([asked], self.model, self.tenant, self.scopes, use_cache=self.use_cache)

    def rewritten(self, query: str) -> ChatSearch:
        return replace(self, query=query)


class ChatRetriever:
    """Finds the documents of chat completions."""

    def __init__(self, engine: Engine, service: RetrievalService | None) -> None:
        self._engine = engine
        self._service = service

    async def search_of(
        self, request: ChatRequest, tenant: Tenant, scopes: PromptScopes, model: ServedModel
    ) -> ChatSearch | None:
        """None for a request that wants nothing found. Raises `RadixgateError` or `RetrievalError`."""
        wanted, service, messages = request.retrieval, self._service, request.messages
        if wanted is None:
            return None
        if service is None:
            raise UnsupportedParameterError("`retrieval`: this server has none.", param="retrieval")
        names = [await service.searcher.resolve(tenant.id, each) for each in wanted.vector_store_ids]
        query = messages[_question(messages)].text
        if not query.strip():
            raise InvalidRequestError("The last user message, which is searched for, is empty.", param="messages")
        await service.searcher.check(rerank=wanted.ranking_options.reranks)
        return ChatSearch(
            service=service,
            wanted=wanted,
            names=tuple(names),
            query=query,
            messages=messages,
            tenant=tenant,
            scopes=scopes,
            model=model,
            use_cache=may_cache(request.body, tenant),
        )

    async def documents(self, search: ChatSearch) -> ChatDocuments:
        """Raises `RadixgateError` or `RetrievalError`."""
        service, tenant, scope = search.service, search.tenant, search.scopes.own.scope
        if search.use_cache:
            service.prefill.saw_prompt(tenant.id, search.system, search.scopes)
        found = await self._found(search)
        await service.popularity.load(tenant.id)
        earlier = await service.conversations.recall(tenant.id, scope, _pairs(search.messages))
        retrieved = RetrievedDocuments(
            service=service,
            tenant=tenant,
            scope=scope,
            messages=search.messages,
            query=search.query,
            found=tuple(found),
            earlier=earlier,
        )
        return self._place(retrieved, search.names, search.wanted, search.model)

    async def _found(self, search: ChatSearch) -> list[Found]:
        wanted, model = search.wanted, search.model
        speculation: list[asyncio.Task[None]] = []

        def prefill_best(best: Found) -> None:
            segments = model.prompts.build_head(search.system, _as_document(best, model), search.scopes)
            speculation.append(asyncio.create_task(_speculate(self._engine, search.tenant.id, segments)))

        try:
            return await search.service.searcher.search(
                search.names,
                Query(
                    texts=(search.query,),
                    max_results=wanted.max_num_results,
                    keep=wanted.predicate("retrieval"),
                    weights=wanted.ranking_options.weights,
                    rerank=wanted.ranking_options.reranks,
                    score_threshold=wanted.ranking_options.score_threshold,
                ),
                on_candidate=prefill_best if search.use_cache else _no_guess,
            )
        finally:
            for task in speculation:
                task.cancel()

    def _place(
        self, retrieved: RetrievedDocuments, names: Sequence[Name], wanted: ChatRetrieval, model: ServedModel
    ) -> ChatDocuments:
        service, earlier = retrieved.service, retrieved.earlier
        standing = set(earlier.document_ids) if earlier is not None else set[str]()
        new = [each for each in retrieved.found if each.passage.document_id not in standing]
        ordered = arrange(
            new,
            wanted.document_order,
            wanted.pin_top,
            lambda each: (
                not each.is_public,
                -service.popularity.rank(retrieved.tenant.id, each.passage.document_id),
                each.passage.document_id,
            ),
        )
        latest = tuple(_as_document(each, model) for each in ordered)
        note = _rank_note(retrieved.found) if wanted.rank_note else ""
        if earlier is None:
            prompt = PromptDocuments(head=latest, note=note)
        else:
            turns = {i: self._standing(service, names, ids, model) for i, ids in earlier.turns.items()}
            if latest:
                turns[_question(retrieved.messages)] = latest
            prompt = PromptDocuments(self._standing(service, names, earlier.head, model), turns, note)
        return ChatDocuments(
            prompt=prompt,
            latest=latest,
            engine_order="cache" if wanted.document_order == "cache" and latest else "given",
            pin_top=wanted.pin_top,
            order=wanted.document_order,
            retrieved=retrieved,
        )

    def _standing(
        self, service: RetrievalService, names: Sequence[Name], ids: Sequence[str], model: ServedModel
    ) -> tuple[Document, ...]:
        """Documents of an earlier turn; those that were deleted since are gone from the prompt too."""
        found = [service.indexes.find(names, each) for each in ids]
        return tuple(_as_document(each, model) for each in found if each is not None)


def without_earlier_turns(documents: ChatDocuments) -> ChatDocuments | None:
    """For a conversation that has outgrown the context: this turn's documents alone, or None if these are all."""
    retrieved = documents.retrieved
    if retrieved is None or retrieved.earlier is None:
        return None
    retrieved.earlier = None
    prompt = PromptDocuments(head=documents.latest, note=documents.prompt.note)
    return ChatDocuments(
        prompt=prompt,
        latest=documents.latest,
        engine_order=documents.engine_order,
        pin_top=documents.pin_top,
        order=documents.order,
        retrieved=retrieved,
    )


def clients_own(request: ChatRequest, published: Published) -> ChatDocuments:
    """The documents that a client sends itself, if any."""
    order = request.body.document_order
    latest = tuple(
        arrange(
            request.documents,
            order,
            request.body.pin_top,
            lambda each: (not published.is_public_document(each), each.id),
        )
    )
    return ChatDocuments(
        prompt=PromptDocuments(head=latest),
        latest=latest,
        engine_order="cache" if order == "cache" and latest else "given",
        pin_top=request.body.pin_top,
        order=order,
    )


def _as_document(found: Found, model: ServedModel) -> Document:
    passage = found.passage
    tokens = passage.tokens if passage.tokenizer == model.tokenizer_name else b""
    return Document(passage.document_id, passage.title, passage.text, tokens, found.is_public)


def _rank_note(found: Sequence[Found]) -> str:
    beginnings = (" ".join(each.passage.text.split()[:_NOTE_WORDS]) for each in found)
    listed = "\n".join(f"{rank}. {beginning} …" for rank, beginning in enumerate(beginnings, 1))
    return f"The documents by relevance, most relevant first:\n{listed}" if listed else ""


def _question(messages: Sequence[Message]) -> int:
    found = [i for i, message in enumerate(messages) if message.role == "user"]
    if not found:
        raise InvalidRequestError("`retrieval` needs a user message to search for.", param="messages")
    return found[-1]


def _pairs(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in messages]


def _no_guess(best: Found) -> None:
    """A request that leaves nothing in the cache must not leave its guesses there."""


async def _speculate(engine: Engine, tenant: str, segments: tuple[Segment, ...]) -> None:
    """Prefills while the reranker still thinks, if the engine is idle; stopped when it has decided."""
    with suppress(RadixgateError):
        await prefill(engine, tenant, segments)
