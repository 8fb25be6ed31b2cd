"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from litestar import get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.response import Response
from msgspec import json

from engine.errors import ModelNotFoundError
from gateway.openai_types import ModelCard, ModelList
from gateway.served_model import ServedModels


def model_routes(models: ServedModels) -> list[HTTPRouteHandler]:
    def card() -> ModelCard:
        info = models.info()
        return ModelCard(id=info.model, created=info.created, max_model_len=info.max_model_len)

    @get("/models")
    async def list_models() -> Response[bytes]:
        return _json(ModelList(data=(card(),)))

    # A path, since the id of a model from a hub has a slash in it.
    @get("/models/{model_id:path}")
    async def retrieve_model(model_id: FromPath[str]) -> Response[bytes]:
        wanted, found = model_id.lstrip("/"), card()
        if wanted != found.id:
            raise ModelNotFoundError(f"The model `{wanted[:200]}` does not exist.", param="model")
        return _json(found)

    return [list_models, retrieve_model]


def _json(body: ModelCard | ModelList) -> Response[bytes]:
    return Response(json.encode(body), media_type="application/json")
