"""In which order clients' requests are served so that each gets its share, however many one of them sends.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): a request is stamped, when it arrives, with the moment at which
it would start on a machine that serves all clients at once. Virtual time is in tokens. Stamps never change, so that
queues stay sorted: a newcomer starts at once, and what a key sent before it had a second user keeps its stamps. Owns
the stamps of clients; knows no queues.
"""

from collections import Counter

type Client = tuple[str, str]  # an API key's name, and the user it speaks for


class FairShare:
    """Keys share equally, and within a key its users do."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[Client, float] = {}  # of clients that are ahead of virtual time
        self._num_users: Counter[str] = Counter()
        self._max_clients = 64

    def stamp(self, client: Client, num_tokens: int) -> float:
        """Return where in line a new request of so many tokens belongs, smallest first."""
        if client not in self._ends:
            self._num_users[client[0]] += 1
        start = max(self._now, self._ends.get(client, 0.0))
        self._ends[client] = start + num_tokens * self._num_users[client[0]]
        if len(self._ends) > self._max_clients:
            self._forget()
        return start

    def note_started(self, stamp: float) -> None:
        """Take note that a request with this stamp is served: who has been idle starts from here."""
        self._now = max(self._now, stamp)

    def give_back(self, client: Client, num_tokens: int) -> None:
        """Take note that a request ended before it had all its tokens."""
        if client in self._ends:
            self._ends[client] -= num_tokens * self._num_users[client[0]]

    def _forget(self) -> None:
        """Drop clients that virtual time has caught up with, which is as if they had never come."""
        self._ends = {client: end for client, end in self._ends.items() if end > self._now}
        self._num_users = Counter(key for key, _ in self._ends)
        self._max_clients = max(64, 2 * len(self._ends))
