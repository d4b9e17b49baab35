"""Drafts from text that was seen before: a request's own prompt and output, and recent outputs of others.

A node of a suffix tree is a context, that is, the places where it occurs; its children are the tokens that follow it
there. Here a node is kept as just these places, a few of the most recent ones: reading a token keeps those that go on
with it, and when none is left the longest context that occurs is looked up anew. So a token costs a few operations on
short lists, however much text there is. Outputs of one key never propose for another. Knows no device and no model.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

CONTEXT = 3  # tokens that must agree before anything is proposed
LONG_CONTEXT = 8  # longer ones are not told apart: what followed them counts together
MAX_PLACES = 8  # of one context
MAX_TOKENS = 1 << 18  # of outputs that are kept, of about 200 bytes each; as many wait at most
END = -1  # of a text


class _Texts:
    """Texts one after another, and where each context of CONTEXT tokens occurred. The oldest give way to new ones.

    A place is the number of tokens before it since the beginning. The tokens in [begin, end) are there, and
    `token_ids[place - start]` is one of them.
    """

    def __init__(self, max_tokens: int | None = None) -> None:
        self._max_tokens = max_tokens
        self.token_ids: list[int] = []
        self._contexts: list[Hashable] = []  # before each place
        self._earlier: list[int] = []  # place after the same context, -1 for none
        self._latest: dict[Hashable, int] = {}  # place after each context
        self.start = self.begin = self.end = 0
        self._num_forgotten = 0  # tokens before `begin` that no context leads to any more

    def append(self, token_id: int, context: Hashable) -> None:
        """Add a token and remember that it follows `context`, None for one that is not to be found."""
        earlier = -1
        if context is not None:
            earlier, self._latest[context] = self._latest.get(context, -1), self.end
        self.token_ids.append(token_id)
        self._contexts.append(context)
        self._earlier.append(earlier)
        self.end += 1
        if self._max_tokens is not None and self.end - self.begin > self._max_tokens:
            self.begin += 1
        if self._num_forgotten < self.begin:
            self._forget(2)  # more than are added

    def take_back(self) -> None:
        """Remove the newest token, which no context leads to."""
        for values in (self.token_ids, self._contexts, self._earlier):
            values.pop()
        self.end -= 1

    def context(self, place: int, key: Hashable) -> Hashable:
        """Return what `append` and `places` know the tokens before a place by, None where there are too few."""
        i = place - self.start
        return (key, *self.token_ids[i - CONTEXT : i]) if place - self.begin >= CONTEXT else None

    def places(self, context: Hashable) -> list[int]:
        """Return the most recent places that follow `context`, newest first."""
        found: list[int] = []
        place = self._latest.get(context, -1)
        while place >= self.begin and len(found) < MAX_PLACES:
            found.append(place)
            place = self._earlier[place - self.start]
        return found

    def drop_before(self, begin: int) -> None:
        """Find the tokens before a place no longer. What they take is freed as others are added, a few at a time."""
        self.begin = max(self.begin, begin)

    def _forget(self, max_tokens: int) -> None:
        for place in range(self._num_forgotten, min(self._num_forgotten + max_tokens, self.begin)):
            context = self._contexts[place - self.start]
            self._contexts[place - self.start] = None
            if self._latest.get(context) == place:
                del self._latest[context]
            self._num_forgotten = place + 1
        num_dropped = self._num_forgotten - self.start
        if num_dropped > len(self.token_ids) // 2:  # seldom enough to cost little a token
            for values in (self.token_ids, self._contexts, self._earlier):
                del values[:num_dropped]
            self.start = self._num_forgotten


@dataclass
class _Node:
    """Where the newest tokens of a request occurred in some texts: before each of the places, `length` at most."""

    texts: _Texts
    places: list[int] = field(default_factory=list)
    length: int = 0
    num_read: int = 0  # since they were looked up

    def read(self, token_id: int) -> bool:
        """Go on to the places after `token_id`; return whether to look up again: none is left, or there may be more."""
        token_ids, start, begin = self.texts.token_ids, self.texts.start, self.texts.begin
        self.places = [p + 1 for p in self.places if p >= begin and token_ids[p - start] == token_id]
        self.length += 1
        self.num_read += 1
        return not self.places or self.num_read == LONG_CONTEXT

    def look_up(self, context: Hashable, own: _Texts) -> None:
        """Go to the places after the longest context that `own` ends with; `context` is its last part."""
        known = self.length if self.places else 0
        self.num_read, self.length = 0, CONTEXT
        self.places = self.texts.places(context)
        while self.places and self.length < LONG_CONTEXT and (longer := self._longer(own)):
            self.places = longer
            self.length += 1
        self.length = max(self.length, known)

    def _longer(self, own: _Texts) -> list[int]:
        """Return the places where one token more agrees."""
        if self.length >= own.end:
            return []
        token_ids, before = self.texts.token_ids, own.token_ids[-1 - self.length]
        offset = self.texts.start + 1 + self.length
        least = self.texts.begin + self.length
        return [p for p in self.places if p > least and token_ids[p - offset] == before]

    def walk(self, max_drafts: int, min_chance: float) -> tuple[list[int], float]:
        """Return the tokens that follow most often, and the sum of the shares of the places that lead to each."""
        texts, drafts, score, chance = self.texts, [], 0.0, 1.0
        token_ids, start, end = texts.token_ids, texts.start, texts.end
        places = [place for place in self.places if place >= texts.begin]
        while len(drafts) < max_drafts and places:
            # in one's own text a place may come to the end, where the drafts go on
            followers = [token_ids[p - start] if p < end else drafts[p - end] for p in places]
            best = followers[0]  # the newest
            if (num_best := followers.count(best)) < len(followers):
                best = max(followers, key=followers.count)
                num_best = followers.count(best)
                places = [p for p, token_id in zip(places, followers, strict=True) if token_id == best]
            chance *= num_best / len(followers)
            if best == END or chance < min_chance:
                break
            drafts.append(best)
            score += chance
            places = [p + 1 for p in places]
        return drafts, score


@dataclass
class _Reader:
    """A request: its key, its tokens, and where the newest of them occurred before, in them and in others' outputs."""

    key: Hashable
    num_prompt_tokens: int
    own: _Node
    shared: _Node
    context: Hashable = None  # of the next token

    def append(self, token_id: int) -> None:
        texts = self.own.texts
        texts.append(token_id, self.context)
        self.context = texts.context(texts.end, self.key)


@dataclass
class _Output:
    """What a request leaves to others: the end of its `texts`, which is copied from `place` on."""

    key: Hashable
    texts: _Texts
    place: int
    is_begun: bool = False


class SuffixTreeProposer:
    """Proposes what followed the longest context that occurred before, as far as it is likely enough.

    Args:
      max_tree_depth: tokens of a context that count.
      max_cached_requests: outputs that are kept for others, of MAX_TOKENS tokens in all; 0 keeps none.
      max_spec_factor: drafts for each token of the context.
      min_token_prob: least share of the places where the context occurred that goes on with a draft.
    """

    def __init__(
        self, *, max_tree_depth: int, max_cached_requests: int, max_spec_factor: float, min_token_prob: float
    ) -> None:
        self._max_depth = max_tree_depth
        self._max_outputs = max_cached_requests
        self._max_spec_factor = max_spec_factor
        self._min_token_prob = min_token_prob
        self._outputs = _Texts(MAX_TOKENS)
        self._begins: deque[int] = deque()  # of the outputs that are kept
        self._waiting: deque[_Output] = deque()  # to be kept
        self._num_waiting = 0  # tokens of these
        self._readers: dict[str, _Reader] = {}

    def start(self, request_id: str, num_prompt_tokens: int, key: Hashable) -> None:
        """Begin a request; those with an equal key that ended serve it, and it will serve later ones."""
        self._readers[request_id] = _Reader(key, num_prompt_tokens, _Node(_Texts()), _Node(self._outputs))

    def read(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Add tokens of the request, its prompt first; nothing is to be proposed before the last of them."""
        reader = self._readers[request_id]
        for token_id in token_ids:
            reader.append(token_id)
        for node in (reader.own, reader.shared):
            node.places.clear()
            node.look_up(reader.context, reader.own.texts)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Add tokens to what was read of the request, which may be drafted for between any two of them."""
        reader = self._readers[request_id]
        for token_id in token_ids:
            nodes = [node for node in (reader.own, reader.shared) if node.read(token_id)]
            reader.append(token_id)
            for node in nodes:
                node.look_up(reader.context, reader.own.texts)

    def propose(self, request_id: str, max_tokens: int) -> list[int]:
        """Return the likely next tokens, none to `max_tokens`."""
        reader = self._readers[request_id]
        own, own_score = self._walk(reader.own, max_tokens)
        shared, shared_score = self._walk(reader.shared, max_tokens)
        return own if own_score >= shared_score else shared

    def finish(self, request_id: str, *, is_read: bool = True) -> None:
        """End a request; `keep` has its output serve others, if all of it was read."""
        reader = self._readers.pop(request_id)
        texts, first = reader.own.texts, reader.num_prompt_tokens
        num_tokens = min(texts.end - first, MAX_TOKENS)
        if self._max_outputs and is_read and 0 < num_tokens <= MAX_TOKENS - self._num_waiting:
            self._waiting.append(_Output(reader.key, texts, texts.end - num_tokens))
            self._num_waiting += num_tokens

    def keep(self, max_tokens: int) -> None:
        """Have the outputs of requests that ended serve others, so many tokens of them and no more at once."""
        while self._waiting and max_tokens > 0:
            output = self._waiting[0]
            end = min(output.place + max_tokens, output.texts.end)
            max_tokens -= end - output.place
            self._num_waiting -= end - output.place
            self._copy(output, end)
            if end == output.texts.end:
                self._waiting.popleft()

    def _copy(self, output: _Output, end: int) -> None:
        """Copy an output up to `end`. What is copied of it always has an END, which gives way to what follows."""
        texts = output.texts
        if output.is_begun:
            self._outputs.take_back()
        else:
            output.is_begun = True
            self._begins.append(self._outputs.end)
            if len(self._begins) > self._max_outputs:
                self._begins.popleft()
                self._outputs.drop_before(self._begins[0])
            for place in range(max(0, output.place - CONTEXT), output.place):
                self._outputs.append(texts.token_ids[place], None)  # the prompt is not proposed
        for place in range(output.place, end):
            self._outputs.append(texts.token_ids[place], texts.context(place, output.key))
        self._outputs.append(END, texts.context(end, output.key) if end == texts.end else None)
        output.place = end
        while self._begins and self._begins[0] < self._outputs.begin:
            self._begins.popleft()  # it gave way for want of room, however many outputs may be kept

    def _walk(self, node: _Node, max_tokens: int) -> tuple[list[int], float]:
        max_drafts = min(max_tokens, int(self._max_spec_factor * min(node.length, self._max_depth)))
        return node.walk(max_drafts, self._min_token_prob)
