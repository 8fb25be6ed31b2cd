"""What every route that generates text does alike: the model it asks for, and the engine requests of its choices.

body ─► Answering.model ─► prompts (the route's own) ─► Answering.answer ─► Answer ───────► Answering.admitted
        404                 400                         prompts × n engine requests (answer.py)  429 (admission.py)
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.errors import ModelNotFoundError, ShuttingDownError
from engine.protocol import Segment, Submit
from gateway.admission import Admissions, Admitted
from gateway.answer import Answer, AnswerForm, CompletionHeader
from gateway.call import Call
from gateway.drain import Drain
from gateway.engine_port import Engine
from gateway.generation_fields import GenerationFields, check_min_tokens
from gateway.prompt_scopes import PromptScopes
from gateway.served_model import ServedModel, ServedModels, num_tokens
from gateway.tenants import Caller, Tenant, TenantDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    segments: tuple[Segment, ...]
    document_order: Literal["given", "cache"] = "given"
    pin_top: int = 0


def may_cache(body: GenerationFields, tenant: Tenant) -> bool:
    """Whether anything of a request may be looked up in the cache, or left there."""
    return body.use_cache and not tenant.record.policy.no_store


class Answering:
    def __init__(
        self,
        engine: Engine,
        models: ServedModels,
        drain: Drain,
        tenants: TenantDirectory,
        admissions: Admissions,
        max_choices: int,
    ) -> None:
        self.tenants = tenants
        self.max_choices = max_choices
        self.admissions = admissions
        self._engine = engine
        self._models = models
        self._drain = drain

    def check_open(self) -> None:
        if self._drain.draining:
            raise ShuttingDownError("The server is shutting down.")

    async def model(self, body: GenerationFields) -> ServedModel:
        """The model that a body asks for. Raises `RequestError` for what only the model can tell to be wrong."""
        model = await self._models.current()
        if body.model != model.info.model:
            raise ModelNotFoundError(f"The model `{body.model[:200]}` does not exist.", param="model")
        body.check_vocabulary(model.info.vocab_size)
        return model

    def scopes(self, body: GenerationFields, caller: Caller) -> PromptScopes:
        return PromptScopes.of_request(self.tenants.secret, caller.tenant, body.narrowing, self.tenants.published)

    def header(self, prefix: str, model: ServedModel) -> CompletionHeader:
        return CompletionHeader(
            id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=model.info.model,
            system_fingerprint=f"fp_{model.info.fingerprint[:16]}",
        )

    def answer(
        self,
        tenant: Tenant,
        body: GenerationFields,
        max_tokens: int | None,
        model: ServedModel,
        prompts: Sequence[Prompt],
        form: AnswerForm,
        completion_id: str,
    ) -> Answer:
        """The choices of the first prompt, then those of the second, …"""
        submits: list[Submit] = []
        for prompt in prompts:
            limit = model.max_tokens(max_tokens, num_tokens(prompt.segments))
            check_min_tokens(body.min_tokens, limit)
            leader = ""
            for choice in range(body.n):
                submits.append(
                    Submit(
                        request_id=f"{completion_id}-{len(submits)}",
                        tenant_id=tenant.id,
                        segments=prompt.segments,
                        sampling=body.sampling(limit, choice),
                        document_order=prompt.document_order,
                        pin_top=prompt.pin_top,
                        policy=tenant.record.policy_for_engine(),
                        priority=tenant.record.policy.priority,
                        sibling_of=leader,
                        use_cache=may_cache(body, tenant),
                    )
                )
                leader = leader or submits[-1].request_id
        return Answer(form, submits, self._engine, choices_per_prompt=body.n, stream=body.stream)

    def admitted(self, call: Call, body: GenerationFields, answer: Answer, header: CompletionHeader) -> Admitted:
        return self.admissions.admitted(
            call,
            answer.give,
            request_id=header.id,
            model=header.model,
            num_tokens=answer.num_tokens,
            stream=body.stream,
        )
