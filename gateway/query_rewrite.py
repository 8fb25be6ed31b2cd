"""The last question of a conversation as a question that can be searched for: "and in winter?" finds nothing.

The model itself is asked, greedily and briefly, behind a prompt of its own that every rewriting shares.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import aclosing

from engine.protocol import SamplingParams, Submit
from gateway.engine_port import Engine
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


async def rewrite_query(
    engine: Engine,
    model: ServedModel,
    tenant: Tenant,
    scopes: PromptScopes,
    messages: Sequence[Message],
    question: str,
    *,
    use_cache: bool,
) -> str:
    """The question itself when the model has nothing to say. Raises `RadixgateError`."""
    turns = [message for message in messages if message.role != "system"][-_MAX_MESSAGES:]
    conversation = "\n".join(f"{message.role}: {message.text[:_MAX_CHARACTERS]}" for message in turns)
    prompt = [Message("system", _INSTRUCTION), Message("user", f"{conversation}\n\nSearch query:")]
    segments = await asyncio.to_thread(model.prompts.build, prompt, (), scopes)
    if num_tokens(segments) + _MAX_TOKENS > model.info.max_model_len:
        return question
    submit = Submit(
        request_id=f"rewrite-{uuid.uuid4().hex}",
        tenant_id=tenant.id,
        segments=segments,
        sampling=SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0, stop=("\n",), min_tokens=1),
        policy=tenant.record.policy.for_engine(),
        priority=tenant.record.policy.priority,
        use_cache=use_cache,
    )
    parts: list[str] = []
    async with aclosing(engine.generate(submit)) as deltas:
        async for delta in deltas:
            parts.append(delta.text)
    return "".join(parts).strip().strip("\"'") or question
