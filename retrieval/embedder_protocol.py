"""What a gateway and the embedder say to each other: msgspec structs, msgpack over zmq.

gateway (DEALER) ──► embedder (ROUTER)      Describe, Embed, Rerank, Cancel
gateway (DEALER) ◄── embedder (ROUTER)      EmbedderInfo, Vectors, Scores, EmbedFailure
"""

from __future__ import annotations

import msgspec


class Describe(msgspec.Struct, frozen=True, tag="describe"):
    """Asks for `EmbedderInfo`; also the heartbeat."""


class Embed(msgspec.Struct, frozen=True, kw_only=True, tag="embed"):
    id: int
    texts: tuple[str, ...]
    urgent: bool  # somebody waits for an answer: before what is ingested


class Rerank(msgspec.Struct, frozen=True, kw_only=True, tag="rerank"):
    id: int
    query: str
    texts: tuple[str, ...]


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    id: int


class EmbedderInfo(msgspec.Struct, frozen=True, kw_only=True, tag="info"):
    incarnation: str  # new with every start: what an earlier one was asked, nobody answers any more
    model: str
    fingerprint: str  # another one: vectors that cannot be compared with these
    dimension: int
    max_tokens: int  # of a text that is embedded in one piece
    has_reranker: bool

    @property
    def tag(self) -> str:
        """Short form of the fingerprint, in the ids of chunks."""
        return self.fingerprint[:8]


class Vectors(msgspec.Struct, frozen=True, kw_only=True, tag="vectors"):
    id: int
    data: bytes  # float32, [len(texts), dimension], normalised
    num_tokens: tuple[int, ...]


class Scores(msgspec.Struct, frozen=True, kw_only=True, tag="scores"):
    id: int
    scores: tuple[float, ...]  # 0 to 1, one for each text


class EmbedFailure(msgspec.Struct, frozen=True, kw_only=True, tag="failure"):
    id: int
    message: str


ToEmbedder = Describe | Embed | Rerank | Cancel
FromEmbedder = EmbedderInfo | Vectors | Scores | EmbedFailure
