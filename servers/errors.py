"""From exceptions to OpenAI's error bodies: {"error": {message, type, param, code}}.

InvalidRequestError   400     ApiError       its own status     EngineDeadError   500 with a fixed message
web.HTTPException     its status      TimeoutError  504         anything else     500, logged, with a fixed message
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from pagedjax.errors import EngineDeadError, InvalidRequestError

logger = logging.getLogger(__name__)

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    421: "MisdirectedRequestError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


class ApiError(Exception):
    """An answer other than 200. `param` names the offending field, None where there is no single one."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = headers


def to_api_error(error: Exception) -> ApiError:
    """Decide what the client hears of an exception; the unexpected goes to the log and not to the client."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            return ApiError(400, str(error), param=error.param)
        case EngineDeadError():
            return ApiError(500, "the engine has stopped and answers nothing more; the server's log says why")
        case TimeoutError():
            return ApiError(504, "the request has reached its deadline; allow it more time or ask for fewer tokens")
        case web.HTTPMethodNotAllowed():
            return ApiError(error.status, _http_message(error), headers={"Allow": error.headers["Allow"]})
        case web.HTTPException():
            return ApiError(error.status, _http_message(error))
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed on this request; its log says why")


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the JSON body of an error."""
    kind = _TYPES.get(error.status, "HTTPError")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.status}}


@web.middleware
async def errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer every exception of a handler, unknown paths and methods included, with an error body."""
    try:
        return await handler(request)
    except ConnectionError:
        raise  # the client has left: nobody reads an answer
    except Exception as error:
        api_error = to_api_error(error)
        return web.json_response(error_body(api_error), status=api_error.status, headers=api_error.headers)


def _http_message(error: web.HTTPException) -> str:
    match error:
        case web.HTTPNotFound():
            return "there is no such path; GET /v1/models and POST /v1/chat/completions are two that exist"
        case web.HTTPMethodNotAllowed():
            return f"the method {error.method} is not allowed here; use {' or '.join(sorted(error.allowed_methods))}"
        case web.HTTPRequestEntityTooLarge():
            return f"{error.text}; shorten the request or raise --max-request-bytes"
    return error.reason
