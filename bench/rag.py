"""python -m bench.rag: what the order of documents is worth, what deciding it costs, what retrieval costs.

    hit ratio      topic-clustered Zipf retrieval over the real engine's bookkeeping, a device that does nothing, and a
                   cache of half the unique tokens: documents in relevance order, in the engine's cache order, and in
                   the order that an exhaustive search over all orders finds (each order in an engine of its own);
                   the same with the gdsf eviction (`_gdsf`), and for bench.workload's questions (`_flat`)
    order          the engine's ordering of four and ten documents in a tree of 100,000 nodes, for sets of which
                   half were asked for before                                                           ms a request
    permuted       a real server: the same four documents in another order, against cold             TTFT, cached
                   and, in the order that is given, how far greedy answers to both orders agree      words
    ahead          a real server: the first question after an upload, prefilled ahead                cached
    ingest         the same server: files attached until they are searchable, against the
                   embedding model alone over the same passages                                      texts/s
    search         100,000 random passages: a search beside the embedding of its query               ms, p50

The parts with a server need a minute and a quiet machine; `--parts order,hits` leaves them out.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import openai

from bench.chat_client import Target, ask, client_session, first_model
from bench.idle_device import IdleDevice
from bench.index import BLOCK_SIZE, Cache
from bench.server import running_server
from bench.workload import DOCUMENTS_PER_TENANT, RETRIEVED, ZIPF_EXPONENT, Document, Workload
from engine.block_pool import BlockPool
from engine.document_order import DocumentPopularity, order_documents
from engine.engine import LLMEngine
from engine.eviction import Policy
from engine.prefix_index import PrefixIndex
from engine.protocol import PROTOCOL_VERSION, Delta, EngineInfo, SamplingParams, Segment, SegmentKind, Submit
from engine.scoped_tokens import ScopedTokens
from engine.settings import EngineSettings
from retrieval.collection_index import CollectionIndex
from retrieval.embedder import SentenceTransformerModel
from retrieval.records import Chunk, Chunking, CollectionFile, FileStatus, chunk_id

VOCABULARY = 49152
TENANTS, TOPICS, DOCUMENTS_OF_TOPIC = 4, 5, 12
SYSTEM_TOKENS, DOCUMENT_TOKENS, QUESTION_TOKENS = 300, 350, 30
ANSWER_TOKENS = 32
EXHAUSTIVE_UP_TO = 4  # documents
INGESTED_FILES = 8
Figures = dict[str, float]


# ---------------------------------------------------------------- hit ratio


@dataclass(frozen=True)
class Question:
    tenant: int
    documents: tuple[int, ...]  # best first


@dataclass
class Corpus:
    """Systems and documents as token ids, and questions whose documents come from one topic."""

    k: int
    seed: int = 11
    num_documents: int = TOPICS * DOCUMENTS_OF_TOPIC  # of a tenant
    systems: list[list[int]] = field(default_factory=list[list[int]])
    documents: list[list[list[int]]] = field(default_factory=list[list[list[int]]])

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.systems = [rng.choices(range(VOCABULARY), k=SYSTEM_TOKENS) for _ in range(TENANTS)]
        self.documents = [
            [rng.choices(range(VOCABULARY), k=DOCUMENT_TOKENS) for _ in range(self.num_documents)]
            for _ in range(TENANTS)
        ]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.systems)) + sum(len(each) for tenant in self.documents for each in tenant)

    def questions(self, count: int) -> Iterator[Question]:
        """A topic by Zipf's law; of it, documents by a law of their own, in an order that no two questions share."""
        rng = random.Random(self.seed + 1)
        for _ in range(count):
            topic = _zipf(rng, TOPICS)
            # Gumbel noise on log weights: sampling without replacement, and a ranking, in one.
            weights = [-np.log(rank + 1) - np.log(-np.log(rng.random())) for rank in range(DOCUMENTS_OF_TOPIC)]
            ranked = sorted(range(DOCUMENTS_OF_TOPIC), key=lambda i: -weights[i])[: self.k]
            rng.shuffle(ranked)
            yield Question(rng.randrange(TENANTS), tuple(topic * DOCUMENTS_OF_TOPIC + i for i in ranked))

    def segments(self, question: Question, order: Sequence[int], asked: list[int]) -> tuple[Segment, ...]:
        scope = f"tenant {question.tenant}".encode().ljust(16)
        documents = [
            Segment.of(SegmentKind.DOCUMENT, self.documents[question.tenant][i], scope, f"d{question.tenant}.{i:03d}")
            for i in order
        ]
        system = Segment.of(SegmentKind.SYSTEM, self.systems[question.tenant], scope)
        return (system, *documents, Segment.of(SegmentKind.QUESTION, asked, scope))


@dataclass
class FlatCorpus(Corpus):
    """Without topics, as in bench.workload: every question retrieves by one Zipf law over the tenant's documents."""

    num_documents: int = DOCUMENTS_PER_TENANT

    def questions(self, count: int) -> Iterator[Question]:
        rng = random.Random(self.seed + 1)
        for _ in range(count):
            weights = [1 / (rank + 1) ** ZIPF_EXPONENT for rank in range(self.num_documents)]
            retrieved: list[int] = []
            for _ in range(self.k):
                [number] = rng.choices(range(self.num_documents), weights)
                retrieved.append(number)
                weights[number] = 0.0
            yield Question(rng.randrange(TENANTS), tuple(retrieved))


def _zipf(rng: random.Random, count: int) -> int:
    return rng.choices(range(count), weights=[1 / (rank + 1) for rank in range(count)])[0]


def idle_engine(num_blocks: int, eviction: Policy) -> LLMEngine:
    """The real bookkeeping over a device that does nothing."""
    info = EngineInfo(
        protocol_version=PROTOCOL_VERSION,
        incarnation="bench",
        model="idle",
        created=0,
        fingerprint="00" * 16,
        max_model_len=8192,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        block_bytes=1,
        eos_token_ids=(),
        vocab_size=VOCABULARY,
        dtype="none",
        device="none",
        tokenizer_json=_EMPTY_TOKENIZER,
        chat_template="",
        special_tokens={},
    )
    return LLMEngine(info, EngineSettings(eviction_policy=eviction), IdleDevice())


def hit_ratio(
    corpus: Corpus, num_questions: int, eviction: Policy, arrange: Callable[[LLMEngine, Question], Submit]
) -> float:
    engine = idle_engine(corpus.num_tokens // 2 // BLOCK_SIZE, eviction)
    cached = total = 0
    for question in corpus.questions(num_questions):
        engine.add_request(arrange(engine, question))
        while engine.has_work():
            for message in engine.step():
                assert isinstance(message, Delta), message
                if message.account is not None:
                    cached += message.account.num_cached_tokens
                    total += message.account.num_prompt_tokens
    return cached / total


def measure_hits(corpus: Corpus, num_questions: int, name: str, eviction: Policy = "lru") -> Figures:
    """Of all orders; the exhaustive one only for four documents: all orders of ten are 3.6 million."""
    rng = random.Random(3)
    numbers = itertools.count()

    def submit(question: Question, order: Sequence[int], document_order: str = "given") -> Submit:
        asked = rng.choices(range(VOCABULARY), k=QUESTION_TOKENS)
        return Submit(
            request_id=f"r{next(numbers)}",
            tenant_id=f"t{question.tenant}",
            segments=corpus.segments(question, order, asked),
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            document_order="cache" if document_order == "cache" else "given",
        )

    def best(engine: LLMEngine, question: Question) -> Submit:
        def cached(order: tuple[int, ...]) -> int:
            spans = [(s.tokens, s.scope, f"t{question.tenant}") for s in corpus.segments(question, order, [])]
            sequence = ScopedTokens(BLOCK_SIZE, spans)
            return engine.scheduler.manager.index.match_prefix(sequence, len(sequence)).num_tokens

        # Sorted first, so that of equally good orders the same one is taken by every question.
        return submit(question, max(itertools.permutations(sorted(question.documents)), key=cached))

    orders: dict[str, Callable[[LLMEngine, Question], Submit]] = {
        "relevance": lambda _, question: submit(question, question.documents),
        "canonical": lambda _, question: submit(question, sorted(question.documents)),
        "cache": lambda _, question: submit(question, question.documents, "cache"),
    }
    if corpus.k <= EXHAUSTIVE_UP_TO:
        orders["oracle"] = best
    figures = {
        f"hit_ratio_{order}_{name}": hit_ratio(corpus, num_questions, eviction, arrange)
        for order, arrange in orders.items()
    }
    ratio = figures[f"hit_ratio_cache_{name}"] / figures[f"hit_ratio_relevance_{name}"]
    return figures | {f"cache_over_relevance_{name}": ratio}


# ---------------------------------------------------------------- order


def measure_order(num_nodes: int, k: int) -> float:
    """Milliseconds, the median, in a tree of so many nodes in which the documents' paths lie."""
    rng = random.Random(5)
    corpus = Corpus(k)
    index = PrefixIndex(BLOCK_SIZE, ghost_entries=0)
    cache = Cache(index, BlockPool(4 * num_nodes + 20_000))
    for number in range(num_nodes):
        scope = b"others".ljust(16)
        cache.free(
            *cache.insert(ScopedTokens.of([number, *rng.choices(range(VOCABULARY), k=31)], scope, BLOCK_SIZE), 2)
        )
    questions = list(corpus.questions(1200))
    for question in questions[:600]:
        spans = [(s.tokens, s.scope, "t") for s in corpus.segments(question, sorted(question.documents), [])]
        sequence = ScopedTokens(BLOCK_SIZE, spans)
        cache.free(*cache.insert(sequence, len(sequence) // BLOCK_SIZE))
    popularity = DocumentPopularity()
    times: list[float] = []
    for question in questions[600:]:
        segments = corpus.segments(question, question.documents, rng.choices(range(VOCABULARY), k=QUESTION_TOKENS))
        started = time.perf_counter()
        order_documents(segments, index, popularity)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


# ---------------------------------------------------------------- a real server


async def measure_permuted(base_url: str, api_key: str, sessions: int, salt: str) -> Figures:
    async with client_session() as session:
        model = await first_model(session, base_url, api_key)
        target = Target("radixgate", base_url, model, api_key, takes_documents=True)
        ratios: list[float] = []
        cached: list[float] = []
        agreements: list[float] = []
        workload = Workload(salt=salt)
        await ask(session, target, workload.warmup().as_documents(), 2)
        for requests in workload.sessions(sessions):
            by_kind = {request.kind: request for request in requests}
            cold = await ask(session, target, by_kind["cold"].as_documents() | {"document_order": "cache"}, 2)
            perm = await ask(session, target, by_kind["perm"].as_documents() | {"document_order": "cache"}, 2)
            ratios.append(perm.ttft_s / cold.ttft_s)
            # The question is another one, and is no document: what is left of it is not counted against the documents.
            question = len(by_kind["perm"].question.split()) * 1.5 + 16
            cached.append((perm.cached_tokens or 0) / (perm.prompt_tokens - question))
            given = await ask(session, target, by_kind["newq"].as_documents(), ANSWER_TOKENS)
            permuted = await ask(session, target, by_kind["perm"].as_documents(), ANSWER_TOKENS)
            agreements.append(_agreement(given.text, permuted.text))
        return {
            "answer_agreement": statistics.mean(agreements),
            "permuted_cached_fraction": min(1.0, statistics.median(cached)),
            "permuted_ttft_over_cold": statistics.median(ratios),
        }


def _agreement(one: str, other: str) -> float:
    """The share of words up to the first one that differs."""
    pairs = list(zip(one.split(), other.split(), strict=False))
    same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return same / max(1, len(pairs))


def measure_ahead(base_url: str, api_key: str, salt: str) -> Figures:
    """Upload, wait for idle, ask for the first time: how much of the top document was there already."""
    documents = Workload(salt=salt).tenants[0].documents[:8]
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        model = client.models.list().data[0].id
        system = {"role": "system", "content": f"You answer from documents ({salt})."}
        store = client.vector_stores.create(name=salt)

        def put_question(text: str) -> tuple[int, int]:
            answer = client.chat.completions.create(
                model=model,
                messages=[system, {"role": "user", "content": text}],  # pyright: ignore[reportArgumentType]
                max_tokens=1,
                extra_body={"retrieval": {"vector_store_ids": [store.id], "max_num_results": 1}},
            )
            assert answer.usage is not None
            details = answer.usage.prompt_tokens_details
            return answer.usage.prompt_tokens, (details.cached_tokens or 0) if details is not None else 0

        head, _ = put_question("Anything?")  # the tenant's system prompt is known from its questions
        for document in documents:
            name, content = f"{document.id}.txt", document.text.encode()
            client.vector_stores.files.upload_and_poll(vector_store_id=store.id, file=(name, content))
        time.sleep(5)
        total, cached = put_question(f"What is said about {documents[3].title}?")
        client.vector_stores.delete(store.id)
    # Without what the empty prompt has too, so that its hit is not taken for the document's: a little too strict.
    return {"ahead_cached_fraction": max(0, cached - head) / max(1, total - head)}


# ---------------------------------------------------------------- ingest and search


@dataclass(frozen=True)
class Ingestion:
    passages: list[str]  # as they were embedded
    seconds: float  # from attaching the files to the last passage being searchable


def measure_ingestion(base_url: str, api_key: str, salt: str) -> Ingestion:
    """Real text, eight files, through parsing, splitting, embedding, tokenizing, Redis and the index."""
    documents = [document for tenant in Workload(salt=salt).tenants for document in tenant.documents]
    files = {f"{salt}-{i}.txt": documents[i::INGESTED_FILES] for i in range(INGESTED_FILES)}
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        store = client.vector_stores.create(name=f"ingest {salt}")
        # As the model alone embeds something before it is measured: the parser starts with its first file.
        first = client.vector_stores.files.upload_and_poll(
            vector_store_id=store.id, file=(f"{salt}.txt", f"A first file ({salt}).".encode())
        )
        ids = {
            client.files.create(file=(name, _as_file(salt, part)), purpose="assistants").id: name
            for name, part in files.items()
        }
        started = time.perf_counter()
        # Asks as often as the server says: asking all the time took a tenth of the machine, which no client shares.
        batch = client.vector_stores.file_batches.create_and_poll(store.id, file_ids=list(ids))
        seconds = time.perf_counter() - started
        assert batch.file_counts.completed == len(files), batch.file_counts
        passages = [
            f"{name}\n{part.text}"
            for file_id, name in ids.items()
            for part in client.vector_stores.files.content(file_id, vector_store_id=store.id)
        ]
        for file_id in (first.id, *ids):
            client.files.delete(file_id)
        client.vector_stores.delete(store.id)
    return Ingestion(passages, seconds)


def _as_file(salt: str, documents: Sequence[Document]) -> bytes:
    """New to the server with each salt: what it has embedded before, it does not embed again."""
    return "\n\n".join(f"{document.title} ({salt})\n{document.text}" for document in documents).encode()


def measure_embedding(ingestion: Ingestion) -> Figures:
    """The model alone over the same passages, in batches of its own choice, nothing beside it."""
    model = SentenceTransformerModel("", "", threads=0)
    model.embed(ingestion.passages[:16])
    started = time.perf_counter()
    for start in range(0, len(ingestion.passages), 64):
        model.embed(ingestion.passages[start : start + 64])
    speed = len(ingestion.passages) / (time.perf_counter() - started)
    return {
        "embed_texts_per_s": speed,
        "ingest_texts_per_s": len(ingestion.passages) / ingestion.seconds,
        "ingest_over_embed": len(ingestion.passages) / ingestion.seconds / speed,
    }


def measure_search(num_passages: int) -> Figures:
    """Beside the embedding of the query. Random vectors are a graph's worst case; words follow Zipf's law."""
    rng = np.random.default_rng(1)
    index = CollectionIndex(384)
    words = np.array([f"word{i}" for i in range(50_000)])
    weights = 1 / np.arange(1, 50_001)
    weights /= weights.sum()
    per_file = 500
    for number in range(num_passages // per_file):
        vectors = rng.standard_normal((per_file, 384), np.float32)
        vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
        drawn = rng.choice(words, (per_file, 120), p=weights)
        chunks = [
            Chunk(
                id=chunk_id("bench", f"{number}.{i}"),
                title=f"file {number}",
                text=" ".join(drawn[i]),
                vector=vectors[i].tobytes(),
                tokens=b"",
                tokenizer="",
            )
            for i in range(per_file)
        ]
        index.add_file(_member(number), chunks)
        _progress(f"{(number + 1) * per_file} passages")
    while index.graph_backlog:
        index.advance_graph(2048)
        _progress(f"graph: {index.graph_backlog} left")
    times: list[float] = []
    for _ in range(200):
        query = rng.standard_normal(384, np.float32)
        query = (query / np.linalg.norm(query)).astype(np.float32)
        text = " ".join(rng.choice(words, 8, p=weights))
        started = time.perf_counter()
        index.search(query, text, 4)
        times.append(time.perf_counter() - started)
    return {"search_p50_ms": statistics.median(times) * 1e3}


def _member(number: int) -> CollectionFile:
    return CollectionFile(
        file_id=f"file-{number}",
        filename=f"{number}.txt",
        created_at=0,
        generation="1",
        status=FileStatus.COMPLETED,
        attributes={},
        chunking=Chunking(max_tokens=256, overlap_tokens=0),
    )


# ---------------------------------------------------------------- all of it

PARTS = ("hits", "order", "server", "search")
_EMPTY_TOKENIZER = (
    b'{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,"pre_tokenizer":null,'
    b'"post_processor":null,"decoder":null,"model":{"type":"BPE","dropout":null,"unk_token":null,'
    b'"continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,'
    b'"vocab":{},"merges":[]}}'
)


def _progress(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


def _hits(num_questions: int) -> Figures:
    figures: Figures = {}
    for k in (4, 10):
        figures |= measure_hits(Corpus(k), num_questions, f"k{k}")
        figures |= measure_hits(Corpus(k), num_questions, f"k{k}_gdsf", "gdsf")
    figures |= measure_hits(FlatCorpus(RETRIEVED), num_questions, "flat")
    figures |= measure_hits(FlatCorpus(RETRIEVED), num_questions, "flat_gdsf", "gdsf")
    # Over both: each k asks as often, and a prompt of ten documents weighs what it is long.
    weights = {k: SYSTEM_TOKENS + k * DOCUMENT_TOKENS + QUESTION_TOKENS for k in (4, 10)}
    for order in ("relevance", "canonical", "cache"):
        tokens = sum(figures[f"hit_ratio_{order}_k{k}"] * weight for k, weight in weights.items())
        figures[f"hit_ratio_{order}"] = tokens / sum(weights.values())
    figures["cache_over_relevance"] = figures["hit_ratio_cache"] / figures["hit_ratio_relevance"]
    figures["fraction_of_oracle"] = figures["hit_ratio_cache_k4"] / figures["hit_ratio_oracle_k4"]
    return figures


def _server(args: argparse.Namespace) -> Figures:
    salt = f"{time.time():.0f}"
    with running_server(args.data_dir) as server:
        # Before any question: afterwards the engine prefills what was ingested, on the same cores.
        ingestion = measure_ingestion(server.base_url, server.api_key, salt)
        figures = asyncio.run(measure_permuted(server.base_url, server.api_key, args.sessions, salt))
        figures |= measure_ahead(server.base_url, server.api_key, salt)
    return figures | measure_embedding(ingestion)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(".radixgate"))
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--questions", type=int, default=2000)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--passages", type=int, default=100_000)
    args = parser.parse_args()
    work: dict[str, Callable[[], Figures]] = {
        "hits": lambda: _hits(args.questions),
        "order": lambda: {
            "order_ms": measure_order(100_000, 4),
            "order_ms_k10": measure_order(100_000, 10),
        },
        "server": lambda: _server(args),
        "search": lambda: measure_search(args.passages),
    }
    figures: Figures = {}
    for part in args.parts:
        figures |= work[part]()
    for name, value in figures.items():
        print(f"{name:>28} {value:10.4f}")
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
