"""Who may use the server: API keys, Host and Origin checks, and the headers that keep browsers in bounds.

One middleware over every route. /health and /ping alone need no key: load balancers have none.
"""

import base64
import binascii
import hashlib
import hmac
import ipaddress
from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from servers.config import ServerConfig
from servers.errors import ApiError

OWNER = web.RequestKey("OWNER", str)  # whose request it is: a digest of the key, "" without keys
FOREIGN_ORIGIN = web.RequestKey("FOREIGN_ORIGIN", str)  # of another site's page that may use the server
OPEN_PATHS = frozenset({"/health", "/ping"})
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_PREFLIGHT_HEADERS = {
    "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, X-Request-Id, X-Request-Timeout",
    "Access-Control-Max-Age": "600",
}


class Access:
    """The rules of one server."""

    def __init__(self, config: ServerConfig):
        self._digests = [hashlib.sha256(key.encode()).digest() for key in config.api_keys]
        self._priorities = dict(zip(self.owners, _for_each(config.best_priority, self.owners), strict=True))
        self._checks_hosts = config.is_local or bool(config.allowed_hosts)
        self._hosts = {"localhost", config.host.lower(), *(host.lower() for host in config.allowed_hosts)}
        self._origins = {origin.lower().rstrip("/") for origin in config.allowed_origins}

    @property
    def owners(self) -> list[str]:
        """Everyone who can own a request."""
        return [digest.hex()[:16] for digest in self._digests] or [""]

    def best_priority(self, owner: str) -> int:
        """Return the lowest priority value that `owner` may ask for."""
        return self._priorities[owner]

    def owner_of(self, request: web.Request) -> str:
        """Return whose request it is.

        Raises:
          ApiError: a 401, because the request holds none of the keys.
        """
        if not self._digests:
            return ""
        given = hashlib.sha256(_key(request.headers.get("Authorization", ""))).digest()
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]  # all, in equal time
        if not any(matches):
            raise ApiError(
                401,
                "the API key is missing or wrong; send one of the server's keys as Authorization: Bearer KEY",
                headers={"WWW-Authenticate": 'Basic realm="pagedjax", charset="UTF-8"'},
            )
        return self.owners[matches.index(True)]

    def check_host(self, request: web.Request) -> None:
        """Refuse names that are not ours: a web page may have its own name point at this machine.

        Raises:
          ApiError: a 421.
        """
        given = request.headers.get("Host")
        if given is None:  # HTTP 1.0, which no browser speaks
            return
        name = _without_port(given).lower()
        if self._checks_hosts and name not in self._hosts and not _is_address(name):
            raise ApiError(
                421,
                f"this server is not {name[:100]!r}; use its address, or start it with --allowed-hosts {name[:100]}",
            )

    def check_origin(self, request: web.Request) -> str | None:
        """Return the foreign origin of a page that may use the server; None if no foreign page asks.

        Raises:
          ApiError: a 403, because its origin is not allowed.
        """
        origin = request.headers.get("Origin")
        if origin is None or origin.lower() in (f"http://{request.host}".lower(), f"https://{request.host}".lower()):
            return None
        if "*" in self._origins or origin.lower().rstrip("/") in self._origins:
            return origin
        raise ApiError(
            403, f"pages of {origin[:100]!r} may not use this server; start it with --allowed-origins {origin[:100]}"
        )


def access_control(access: Access) -> Middleware:
    """Return the middleware that applies `access` to every request and marks each with its owner."""

    @web.middleware
    async def control(request: web.Request, handler: Handler) -> web.StreamResponse:
        access.check_host(request)
        origin = access.check_origin(request)
        if origin is not None:
            request[FOREIGN_ORIGIN] = origin
            if request.method == "OPTIONS":
                return web.Response(status=204, headers=_PREFLIGHT_HEADERS)
        request[OWNER] = "" if request.path in OPEN_PATHS else access.owner_of(request)
        return await handler(request)

    return control


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add what every response has: bounds for browsers, and leave to read it for the page of an allowed origin."""
    response.headers.update(_HEADERS)
    origin = request.get(FOREIGN_ORIGIN)
    if origin is not None:
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Cross-Origin-Resource-Policy"] = "cross-origin"
        response.headers["Vary"] = "Origin"


def _key(authorization: str) -> bytes:
    """The key in an Authorization header: Bearer for programs, the password of Basic for browsers."""
    scheme, _, value = authorization.partition(" ")
    value = value.strip().encode("utf-8", "surrogateescape")
    if scheme.lower() == "bearer":
        return value
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""


def _for_each(values: Sequence[int], owners: Sequence[str]) -> Sequence[int]:
    return values if len(values) == len(owners) else [values[0]] * len(owners)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
