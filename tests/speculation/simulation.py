"""A simulated engine: steps cost what a table says, drafts are accepted with given probabilities, results come late."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pagedjax.speculation.controller import Controller

NOISE = 0.05  # of a step's time, and one step in a hundred takes four times as long
LATE = 1  # steps dispatched before a step's results are read


@dataclass(frozen=True)
class Costs:
    """Milliseconds. `step(tokens, requests)` of the target, `draft(requests)` of one token of each from the draft."""

    step: Callable[[int, int], float]
    draft: Callable[[int], float] = lambda _: 0.0

    def plain(self, num_requests: int) -> float:
        return self.step(num_requests, num_requests)

    def speculating(self, drafts: list[int], num_proposed: int) -> float:
        """A step that verifies these drafts and makes new ones, as many as the longest request gets."""
        return self.step(len(drafts) + sum(drafts), len(drafts)) + num_proposed * self.draft(len(drafts))


@dataclass
class Run:
    """What a simulated run came to."""

    num_tokens: int = 0
    milliseconds: float = 0.0
    drafts: list[float] = field(default_factory=list)  # a request, step by step

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.milliseconds * 1000

    def share_of_steps_with_drafts(self, first: int = 0) -> float:
        return float(np.mean(np.array(self.drafts[first:]) > 0))


def expected_gain(costs: Costs, rate: float, num_requests: int, num_drafts: int) -> float:
    """Tokens a second with so many drafts for everybody always, times those of plain decoding."""
    tokens = sum(rate**position for position in range(num_drafts + 1))
    milliseconds = costs.speculating([num_drafts] * num_requests, num_drafts)
    return tokens * costs.plain(num_requests) / milliseconds


def best_gain(costs: Costs, rate: float, num_requests: int, max_drafts: int) -> float:
    """The same with the best number of drafts, at least one."""
    return max(expected_gain(costs, rate, num_requests, k) for k in range(1, max_drafts + 1))


def simulate(
    controller: Controller, costs: Costs, rates: Callable[[int, int], float], *, num_requests: int, num_steps: int,
    lifetime: int = 200, seed: int = 0,
) -> Run:  # fmt: skip
    """Decode with a batch that is always full; `rates(request, step)` is the chance of each draft, requests by number.

    Drafts are made in the step before the one that verifies them, so the first step of speculation has none.
    """
    rng = np.random.default_rng(seed)
    run, unread, num_proposed = Run(), deque(), 0
    ages = rng.integers(0, lifetime, num_requests)
    numbers = list(range(num_requests))
    for step in range(num_steps):
        ids = [str(number) for number in numbers]
        wanted = controller.choose(ids)
        drafts = [min(k, num_proposed) for k in wanted]
        num_proposed = max(wanted)
        milliseconds = costs.speculating(drafts, num_proposed)
        accepted = _accept(rng, [rates(number, step) for number in numbers], drafts)
        run.num_tokens += num_requests + sum(accepted)
        run.milliseconds += milliseconds
        run.drafts.append(sum(drafts) / num_requests)
        measured = milliseconds * rng.lognormal(0, NOISE) * (4 if rng.random() < 0.01 else 1) / 1000
        unread.append((ids, drafts, accepted, num_proposed * num_requests, measured))
        if len(unread) > LATE:
            ids, drafts, accepted, proposed, seconds = unread.popleft()
            controller.note_step(ids, drafts, accepted, num_proposed=proposed, seconds=seconds)
        ages += 1
        for row in np.flatnonzero(ages >= lifetime):
            controller.forget(str(numbers[row]))
            numbers[row], ages[row] = numbers[row] + num_requests, 0
    return run


def _accept(rng: np.random.Generator, rates: list[float], drafts: list[int]) -> list[int]:
    if not max(drafts):
        return [0] * len(drafts)
    accepted = rng.random((len(rates), max(drafts))) < np.array(rates)[:, None]
    return np.minimum(np.cumprod(accepted, axis=1).sum(axis=1), drafts).tolist()
