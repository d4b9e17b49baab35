"""In which order clients' requests are served so that each gets its share, however many one of them sends.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): a request is stamped, when it arrives, with the moment at which
it would start on a machine that serves all clients at once. Virtual time is in tokens. Stamps never change, so that
queues stay sorted, and those of one client never go back: a newcomer starts soon, and what a key sent before it had a
second user keeps its stamps. Owns the stamps of clients; knows no queues.

    user of a key, ahead of virtual time     starts where its own last request ends, 1 / users of the key as fast
    user of a key, not ahead: a newcomer     starts where its key's last newcomer ends, so that no key gets more than
                                             its share by naming another user with each request
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

type Client = tuple[str, str]  # an API key's name, and the user it speaks for


class Place(NamedTuple):
    """Where in line a request belongs, smallest `start` first, and what was charged for each of its tokens."""

    start: float = 0.0
    weight: int = 0  # users that its key had
    is_newcomer: bool = False


@dataclass(slots=True)
class _Account:
    """What was charged so far, and the latest stamp: tokens that come back may make room before it, for others."""

    end: float = 0.0
    last: float = 0.0

    def next_start(self, now: float) -> float:
        return max(now, self.end, self.last)

    def charge(self, start: float, amount: float) -> None:
        self.end, self.last = start + amount, start

    def is_ahead(self, now: float) -> bool:
        return max(self.end, self.last) > now


class FairShare:
    """Keys share equally, and within a key its users do."""

    def __init__(self) -> None:
        self._now = 0.0
        self._clients: dict[Client, _Account] = {}  # those that are ahead of virtual time, and some that were
        self._newcomers: dict[str, _Account] = {}  # by key
        self._num_users: Counter[str] = Counter()
        self._max_clients = 64

    def stamp(self, client: Client, num_tokens: int) -> Place:
        """Return where in line a new request of so many tokens belongs."""
        account, newcomers = self._clients.get(client), self._newcomers.setdefault(client[0], _Account())
        if account is None:
            account = self._clients[client] = _Account()
            self._num_users[client[0]] += 1
        is_newcomer, weight = not account.is_ahead(self._now), self._num_users[client[0]]
        start = (newcomers if is_newcomer else account).next_start(self._now)
        account.charge(start, num_tokens * weight)
        if is_newcomer:
            newcomers.charge(start, num_tokens)
        if len(self._clients) > self._max_clients:
            self._forget()
        return Place(start, weight, is_newcomer)

    def note_started(self, stamp: float) -> None:
        """Take note that a request with this stamp is served: who has been idle starts from here."""
        self._now = max(self._now, stamp)

    def give_back(self, client: Client, place: Place, num_tokens: int) -> None:
        """Take note that a request ended before it had all its tokens."""
        if client in self._clients:
            self._clients[client].end -= num_tokens * place.weight
        if place.is_newcomer and client[0] in self._newcomers:
            self._newcomers[client[0]].end -= num_tokens

    def _forget(self) -> None:
        """Drop clients that virtual time has caught up with, which is as if they had never come."""
        self._clients = {client: one for client, one in self._clients.items() if one.is_ahead(self._now)}
        self._newcomers = {key: one for key, one in self._newcomers.items() if one.is_ahead(self._now)}
        self._num_users = Counter(key for key, _ in self._clients)
        self._max_clients = max(64, 2 * len(self._clients))
