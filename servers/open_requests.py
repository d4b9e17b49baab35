"""The HTTP requests that generate at this moment: who owns them, their ids, and whether another one may join.

Bounds what can pile up in front of the engine. Knows nothing of what the requests ask for.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from pagedjax import InvalidRequestError
from servers.access import OWNER
from servers.errors import ApiError

RETRY = {"Retry-After": "1"}
REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")
_CLAIM = web.RequestKey("CLAIM", tuple)  # the owner and the id of a request that has one


@dataclass(frozen=True)
class OpenRequest:
    """One HTTP request, from admission until its answer is complete."""

    id: str
    owner: str
    path: str
    arrival_time: float  # on time.monotonic()
    engine_request_ids: tuple[str, ...]  # one a prompt
    num_sequences: int  # prompts times completions, or hypotheses, of each
    num_prompt_tokens: int  # each prompt once: it is computed once


class OpenRequests:
    """All of them. A client may use an id again when the request that had it is over."""

    def __init__(self, *, max_sequences: int, max_prompt_tokens: int, on_rejection: Callable[[str], None]):
        self._max_sequences = max_sequences
        self._max_prompt_tokens = max_prompt_tokens
        self._num_handled = 0
        self._claims: set[tuple[str, str]] = set()
        self._by_owner_and_id: dict[tuple[str, str], OpenRequest] = {}
        self._num_sequences = self._num_prompt_tokens = 0
        self._is_closed = False
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._on_rejection = on_rejection

    def __len__(self) -> int:
        return len(self._by_owner_and_id)

    @contextmanager
    def handle(self, request: web.Request) -> Iterator[None]:
        """Let `request` claim an id, and `wait_empty` wait for it, for as long as the context lasts."""
        self._num_handled += 1
        self._is_empty.clear()
        try:
            yield
        finally:
            self._claims.discard(request.get(_CLAIM))
            self._num_handled -= 1
            if not self._num_handled:
                self._is_empty.set()

    def claim(self, request: web.Request, request_id: str) -> bool:
        """Make the id that of `request` alone among its owner's; False if another one has it.

        Raises:
          ApiError: a 503, because the server is about to stop.
        """
        self._check_open()
        claim = (request[OWNER], request_id)
        if claim in self._claims:
            return False
        self._claims.add(claim)
        request[_CLAIM] = claim
        return True

    @contextmanager
    def admit(self, request: OpenRequest) -> Iterator[None]:
        """Count `request`, which has claimed its id, among the open ones for as long as the context lasts.

        Raises:
          ApiError: a 503, because the queue is full or the server is about to stop.
          InvalidRequestError: it alone is more than the queue ever takes.
        """
        self._check(request)
        key = (request.owner, request.id)
        assert key not in self._by_owner_and_id, "a claimed id is that of one request"
        self._by_owner_and_id[key] = request
        self._num_sequences += request.num_sequences
        self._num_prompt_tokens += request.num_prompt_tokens
        try:
            yield
        finally:
            del self._by_owner_and_id[key]
            self._num_sequences -= request.num_sequences
            self._num_prompt_tokens -= request.num_prompt_tokens

    def of_owner(self, owner: str) -> list[OpenRequest]:
        """Return the requests of one owner, oldest first."""
        return [request for request in self._by_owner_and_id.values() if request.owner == owner]

    def find(self, owner: str, request_id: str) -> OpenRequest | None:
        """Return one request; None if there is none, or it is somebody else's."""
        return self._by_owner_and_id.get((owner, request_id))

    def close(self) -> None:
        """Admit no more."""
        self._is_closed = True

    async def wait_empty(self) -> None:
        """Return when no request is handled: none is open, and none is read that may yet be."""
        await self._is_empty.wait()

    @property
    def num_handled(self) -> int:
        """How many HTTP requests of any kind have not been answered."""
        return self._num_handled

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def _check(self, request: OpenRequest) -> None:
        self._check_open()
        self._check_room(
            "max_num_queued_reqs", "completions", self._num_sequences, request.num_sequences, self._max_sequences
        )
        self._check_room(
            "max_num_queued_tokens",
            "prompt tokens",
            self._num_prompt_tokens,
            request.num_prompt_tokens,
            self._max_prompt_tokens,
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise ApiError(503, "the server is shutting down; ask another one", headers=RETRY)

    def _check_room(self, limit_name: str, unit: str, old: int, new: int, limit: int) -> None:
        flag = f"--{limit_name.replace('_', '-')}"
        if new > limit:
            raise InvalidRequestError(
                f"the request has {new} {unit}, the server never holds more than {limit}; send less or raise {flag}"
            )
        if old + new > limit:
            self._on_rejection(limit_name)
            raise ApiError(
                503,
                f"the queue is full: {old} {unit} of at most {limit} are in work; retry later or raise {flag}",
                headers=RETRY,
            )


def handling(open_requests: OpenRequests) -> Middleware:
    """Return the middleware that has `open_requests` know of every request while it is handled."""

    @web.middleware
    async def handle(request: web.Request, handler: Handler) -> web.StreamResponse:
        with open_requests.handle(request):
            return await handler(request)

    return handle
