"""Counts and durations of HTTP requests, under the names that vLLM's instrumentation of its web framework gives them.

Everything but the routes that machines poll is counted.
"""

import time

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CollectorRegistry, Counter, Histogram

POLLED_PATHS = frozenset({"/metrics", "/health", "/load", "/ping", "/version"})
_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH"})


def http_metrics(registry: CollectorRegistry) -> Middleware:
    """Return the middleware that counts into `registry`; put it outside of what turns exceptions into answers."""
    total = Counter(
        "http_requests", "HTTP requests by method, status and handler.", ("method", "status", "handler"),
        registry=registry,
    )  # fmt: skip
    seconds = Histogram(
        "http_request_duration_seconds", "Seconds until the answer's end.", ("method", "handler"), buckets=_BUCKETS,
        registry=registry,
    )  # fmt: skip

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in POLLED_PATHS:
            return await handler(request)
        began, status = time.monotonic(), "499"  # the client has left
        method, route = _method(request), _route(request)
        try:
            response = await handler(request)
            status = f"{response.status // 100}xx"
            return response
        finally:
            total.labels(method, status, route).inc()
            seconds.labels(method, route).observe(time.monotonic() - began)

    return count


def _method(request: web.Request) -> str:
    """The method, unless the client made it up: each label is a series that stays for ever."""
    return request.method if request.method in _METHODS else "other"


def _route(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return "none" if resource is None else resource.canonical
