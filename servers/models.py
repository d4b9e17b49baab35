"""GET /v1/models and /v1/models/{model}: the one model that this server has."""

from typing import Any

from aiohttp import web

from servers.state import STATE, ServerState


async def list_models(request: web.Request) -> web.Response:
    """Answer the list of models."""
    return web.json_response({"object": "list", "data": [_card(request.app[STATE])]})


async def get_model(request: web.Request) -> web.Response:
    """Answer one model; 404 for any other name."""
    state = request.app[STATE]
    state.check_model(request.match_info["model"])
    return web.json_response(_card(state))


def _card(state: ServerState) -> dict[str, Any]:
    config = state.engine.config
    return {
        "id": config.model_name,
        "object": "model",
        "created": state.started,
        "owned_by": "pagedjax",
        "root": config.model,
        "parent": None,
        "max_model_len": config.max_model_len,
    }
