"""POST /v1/completions: text that goes on, without a chat template around it."""

from __future__ import annotations

from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp

from gateway.admission import Admitted
from gateway.answering import Answering, Prompt
from gateway.call import Call, call_of
from gateway.completion_request import parse_completion_request
from gateway.completion_response import CompletionForm
from gateway.http_io import HttpRequest


class Completions:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    async def respond(self, call: Call) -> Admitted:
        """Raises whatever can be known to be wrong before the engine is asked."""
        answering = self._answering
        answering.check_open()
        request = parse_completion_request(call.raw, call.content_type, answering.max_choices)
        body = request.body
        model = await answering.model(body)
        scopes = answering.scopes(body, call.caller)
        prompts = [Prompt(segments=await model.build_raw_prompt(prompt, scopes)) for prompt in request.prompts]
        header = answering.header("cmpl", model)
        form = CompletionForm(header, include_usage=body.include_usage, has_logprobs=body.num_logprobs is not None)
        answer = answering.answer(call.caller.tenant, body, request.max_tokens, model, prompts, form, header.id)
        return answering.admitted(call, body, answer, header)


def completion_route(completions: Completions) -> HTTPRouteHandler:
    @post("/completions", status_code=200)
    async def create_completion(request: HttpRequest) -> ASGIApp:
        return await completions.respond(await call_of(request))

    return create_completion
