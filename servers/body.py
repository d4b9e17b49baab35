"""Read a request body as a JSON object, or refuse it. Knows nothing of what the fields mean."""

import asyncio
import json
import re
from typing import Any

from aiohttp import web

from pagedjax.errors import InvalidRequestError
from servers.errors import ApiError

MAX_DEPTH = 64  # of arrays and objects in each other
MAX_CONTAINERS = 100_000  # arrays and objects: parsing and walking them holds up every other request
BODY_SECONDS = 60.0  # for the whole body to arrive


async def read_json(request: web.Request) -> dict[str, Any]:
    """Return the body of `request`.

    Raises:
      InvalidRequestError: it is no JSON object.
      ApiError: it takes too long to arrive.
      web.HTTPRequestEntityTooLarge: it is longer than the server takes.
    """
    if request.content_type != "application/json":
        raise InvalidRequestError(
            f"the content type is {request.content_type!r:.80}; send a JSON object with Content-Type: application/json"
        )
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await request.read()
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:.0f} seconds; send it faster") from None
    except web.RequestPayloadError:
        raise InvalidRequestError("the body is not what its Content-Encoding says; send plain JSON") from None
    return parse_json(body)


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse a body. NaN and infinity pass here: each field's own check names the field that holds them."""
    if not body.strip():
        raise InvalidRequestError("the body is empty; send a JSON object")
    num_containers = _num_containers(body)
    if num_containers > MAX_CONTAINERS:
        raise InvalidRequestError(
            f"the body holds {num_containers} arrays and objects, the limit is {MAX_CONTAINERS}; split the request"
        )
    try:
        value = json.loads(body.decode("utf-8"))
        if b"\\u" in body:
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # half a surrogate pair is no text
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not UTF-8 at byte {error.start}; send UTF-8") from None
    except UnicodeEncodeError:
        raise InvalidRequestError("the body holds half of a surrogate pair (\\ud800 to \\udfff); remove it") from None
    except RecursionError:
        raise InvalidRequestError(f"the body is nested deeper than {MAX_DEPTH} levels; flatten it") from None
    except ValueError as error:  # malformed, or an integer of thousands of digits
        raise InvalidRequestError(f"the body is not JSON: {error!s:.120}; send a JSON object") from None
    if num_containers > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise InvalidRequestError(f"the body is nested deeper than {MAX_DEPTH} levels; flatten it")
    if not isinstance(value, dict):
        raise InvalidRequestError(f"the body is a JSON {_JSON_NAMES[type(value)]}; send an object")
    return value


def _num_containers(body: bytes) -> int:
    """Count brackets, those inside strings only while that does not matter."""
    count = body.count(b"[") + body.count(b"{")
    if count > MAX_CONTAINERS:
        outside = _STRING.sub(b"", body)
        count = outside.count(b"[") + outside.count(b"{")
    return count


def _is_deeper(value: Any, limit: int) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        children = (child for one in level for child in (one.values() if isinstance(one, dict) else one))
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return False
    return True


_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_JSON_NAMES = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}
