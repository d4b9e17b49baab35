"""POST /abort: end requests early. A client reaches its own only: of others' ids it does not learn that they exist."""

from typing import Any

from aiohttp import web

from pagedjax import InvalidRequestError
from servers.access import OWNER
from servers.body import read_json
from servers.open_requests import OpenRequest
from servers.protocol import ABORT, parse
from servers.state import STATE, ServerState
from servers.streaming import json_answer


async def abort(request: web.Request) -> web.Response:
    """End the named requests, or all of this client's, and answer the ids of those that were running.

    Each gets its answer as far as it came, with finish_reason "abort".
    """
    state = request.app[STATE]
    fields = parse(await read_json(request), ABORT)
    found = _find(state, request[OWNER], fields)
    await state.engine.abort([one for opened in found for one in opened.engine_request_ids])
    return json_answer({"aborted": [opened.id for opened in found]})


def _find(state: ServerState, owner: str, fields: dict[str, Any]) -> list[OpenRequest]:
    if fields["all"] == (fields["request_id"] is not None):
        raise InvalidRequestError("send either request_id, one or a list of them, or all: true", param="request_id")
    if fields["all"]:
        return state.open_requests.of_owner(owner)
    candidates = (state.open_requests.find(owner, request_id) for request_id in fields["request_id"])
    return [opened for opened in candidates if opened is not None]
