"""Whose each piece of a prompt is. Going along the prompt the scope only narrows:

    [template | published system prompt | published document | own document | history | question | answer]
     ── public ──────────────────────────────────────────────►── shared ────►── own ─────────────────────►

    public   what the operator has published, passages of its public collections, and what the template puts between
             them, up to the last of them: every tenant
    shared   system prompts and documents: the tenant, or its cache group
    own      what an end user wrote and was told: the end user that the request names in `user`; without one, as shared

A prompt in which nothing is published has no public part: not even that two tenants use one model shows.
A piece that is public by itself is not public any more behind one that is private: its KV has seen the private one.
`cache_salt` and `prompt_cache_key` narrow everything, the public part too: who sends one wants to share with nobody
who does not. `user` narrows what is the user's, so that the users of a tenant still share its documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from engine.settings import PUBLIC_OWNER
from gateway.published import Published
from gateway.tenants import Tenant, narrow_scope, public_scope

_END_USER = "user"


class Level(IntEnum):
    """Wider first."""

    PUBLIC = 0
    SHARED = 1
    OWN = 2


class Layer(NamedTuple):
    scope: bytes
    owner: str  # in the engine's accounts; "": the tenant of the request


@dataclass(frozen=True, slots=True)
class PromptScopes:
    """The layers of one request."""

    public: Layer
    shared: Layer
    own: Layer
    published: Published = field(compare=False)

    def layer(self, level: Level) -> Layer:
        return (self.public, self.shared, self.own)[level]

    @classmethod
    def only(cls, scope: bytes, owner: str = "") -> PromptScopes:
        """One scope for everything."""
        layer = Layer(scope, owner)
        return cls(layer, layer, layer, Published())

    @classmethod
    def of_request(
        cls, secret: bytes, tenant: Tenant, narrowing: Mapping[str, str], published: Published
    ) -> PromptScopes:
        """`narrowing`: the fields of the request's body that narrow its scope."""
        salts = {name: value for name, value in narrowing.items() if name != _END_USER}
        users = {name: value for name, value in narrowing.items() if name == _END_USER}
        shared = Layer(narrow_scope(tenant.scope, salts), tenant.owner)
        public = shared if salts else Layer(public_scope(secret), PUBLIC_OWNER)
        return cls(public, shared, Layer(narrow_scope(shared.scope, users), tenant.owner), published)


def narrowing_levels(levels: Iterable[Level | None]) -> Iterator[Level]:
    """The level of each piece in its place, where `levels` are those of the pieces by themselves; None: neither."""
    alone = list(levels)
    first_private = next((i for i, level in enumerate(alone) if level not in (None, Level.PUBLIC)), len(alone))
    num_public = max((i + 1 for i in range(first_private) if alone[i] is Level.PUBLIC), default=0)
    so_far = Level.SHARED
    for i, level in enumerate(alone):
        if i < num_public:
            yield Level.PUBLIC
        else:
            so_far = max(so_far, level or so_far)
            yield so_far
