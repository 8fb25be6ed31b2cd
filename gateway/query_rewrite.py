"""The last question of a conversation as a question that can be searched for: "and in winter?" finds nothing.

    conversations ─► rewriting_of ─► Rewriting ─► its request is admitted (admission.py) ─► rewrite ─► queries

The model itself is asked, greedily and briefly, behind a prompt of its own that every rewriting shares. It is work for
the request that the query belongs to: under its limits, in its usage, ended with it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.protocol import SamplingParams, Submit
from gateway.admission import Admission
from gateway.engine_port import Engine
from gateway.generation import Generation
from gateway.model_use import ModelUse
from gateway.prompt import Message
from gateway.prompt_scopes import PromptScopes
from gateway.served_model import ServedModel, num_tokens
from gateway.tenants import Tenant

_INSTRUCTION = (
    "Rewrite the last question of the conversation as one search query that can be understood without the "
    "conversation. Answer with the query alone."
)
_MAX_TOKENS = 64
_MAX_MESSAGES = 6
_MAX_CHARACTERS = 2_000  # of a message


class Asked(NamedTuple):
    conversation: Sequence[Message]
    question: str


@dataclass(frozen=True, slots=True)
class Rewriting:
    """Questions, and what asks the model for each of them. Where there is no room for that, the question stays."""

    questions: tuple[str, ...]
    submits: dict[int, Submit]  # by the question's place; never empty

    @property
    def num_tokens(self) -> int:
        """At most: prompts and output."""
        return sum(num_tokens(each.segments) + each.sampling.max_tokens for each in self.submits.values())


async def rewriting_of(
    asked: Sequence[Asked], model: ServedModel, tenant: Tenant, scopes: PromptScopes, *, use_cache: bool
) -> Rewriting | None:
    """None when no question can be rewritten, since its conversation leaves no room in the model's context."""
    submits: dict[int, Submit] = {}
    for place, each in enumerate(asked):
        segments = await asyncio.to_thread(model.prompts.build, _prompt(each.conversation), (), scopes)
        if num_tokens(segments) + _MAX_TOKENS <= model.info.max_model_len:
            submits[place] = Submit(
                request_id=f"rewrite-{uuid.uuid4().hex}",
                tenant_id=tenant.id,
                segments=segments,
                sampling=SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0, stop=("\n",), min_tokens=1),
                policy=tenant.record.policy_for_engine(),
                priority=tenant.record.policy.priority,
                use_cache=use_cache,
            )
    return Rewriting(tuple(each.question for each in asked), submits) if submits else None


def _prompt(conversation: Sequence[Message]) -> list[Message]:
    turns = [message for message in conversation if message.role != "system"][-_MAX_MESSAGES:]
    told = "\n".join(f"{message.role}: {message.text[:_MAX_CHARACTERS]}" for message in turns)
    return [Message("system", _INSTRUCTION), Message("user", f"{told}\n\nSearch query:")]


async def rewrite(engine: Engine, rewriting: Rewriting, admission: Admission) -> tuple[str, ...]:
    """A query a question: the question itself where the model has nothing to say.

    Raises `RadixgateError`, and not the plain question instead: who asked for a rewritten query and got the results of
    another one would not know. Raises `ClientDisconnectedError`.
    """
    places = list(rewriting.submits)
    uses = [ModelUse() for _ in places]
    texts = ["" for _ in places]
    async with Generation(engine, list(rewriting.submits.values())) as generation:
        with admission.interruption.reaches(generation):
            async for choice, delta in generation.updates():
                uses[choice] = uses[choice].noting(delta)
                texts[choice] += delta.text
                admission.note_rewriting(sum(uses, ModelUse()))
    queries = list(rewriting.questions)
    for place, text in zip(places, texts, strict=True):
        queries[place] = text.strip().strip("\"'") or queries[place]
    return tuple(queries)
