"""Beam search over one prompt, by the rules of transformers: which hypotheses go on, which are finished, when to stop.

Each iteration ranks all extensions of the running hypotheses by the sum of their log probabilities:

    ranked   [ 0 ............ width ) [ width ...... )
             finished if they end     go on if better ones end
             otherwise they go on

The first `width` that do not end go on. The best `width` finished ones are kept, by sum / length ** length_penalty.
Owns the hypotheses of one search; knows nothing of requests, blocks and devices.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

EarlyStopping = bool | Literal["never"]


class Candidates(NamedTuple):
    """The most likely tokens after one hypothesis, best first, with their log probabilities."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """Output tokens so far: the newest one and the hypothesis that it extends, None for the empty one."""

    parent: "Hypothesis | None" = None
    token_id: int = -1
    logprob: float = 0.0  # of the newest token
    rank: int = 0  # of the newest token among the candidates, from 1
    candidates: Candidates | None = None  # that it was chosen from
    total: float = 0.0  # log probability of all tokens
    length: int = 0

    def tokens(self) -> list["Hypothesis"]:
        """Return the hypotheses that end with the first token, the second, and so on up to this one."""
        found, one = [], self
        while one.parent is not None:
            found.append(one)
            one = one.parent
        return found[::-1]


class Finished(NamedTuple):
    """A hypothesis that ended, and its length-normalised score."""

    hypothesis: Hypothesis
    score: float


class BeamSearch:
    """One search of `width` hypotheses.

    Args:
      max_tokens: a hypothesis of so many output tokens ends.
      ending_token_ids: EOS and stop tokens; they belong to the hypothesis that they end.
      min_tokens: output tokens before which none of those can be chosen.
      length_penalty: exponent of the length that a finished hypothesis' sum is divided by; above 0 favours long ones.
      early_stopping: True stops at `width` finished hypotheses; False when none of the present length can be better;
        "never" when none of any length can.
    """

    def __init__(
        self,
        width: int,
        *,
        max_tokens: int,
        ending_token_ids: Collection[int],
        min_tokens: int = 0,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
    ) -> None:
        self.width = width
        self.ending_token_ids = ending_token_ids
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self.running = [Hypothesis()]  # best first
        self.finished: list[Finished] = []  # best first
        self.is_over = False

    @property
    def num_candidates(self) -> int:
        """How many tokens after each hypothesis can matter: as many as go on, beside those that end."""
        return self.width + len(self.ending_token_ids)

    def advance(self, candidates: Sequence[Candidates]) -> list[int]:
        """Extend the running hypotheses by one token.

        Args:
          candidates: of each running hypothesis, at least `num_candidates`, fewer only if the vocabulary has no more.

        Returns:
          The number of the old hypothesis that each of the new `running` extends; [] when the search is over.
        """
        length = self.running[0].length + 1
        is_last = length >= self._max_tokens
        ranked = sorted(self._extensions(candidates), key=_total, reverse=True)  # stable: the better parent's first
        for _, hypothesis in ranked[: self.width]:
            if is_last or hypothesis.token_id in self.ending_token_ids:
                self._finish(hypothesis)
        goes_on = [both for both in ranked if both[1].token_id not in self.ending_token_ids][: self.width]
        if is_last or self._stops(best=goes_on[0][1].total, length=length):
            self.is_over, self.running = True, []
            return []
        assert len(goes_on) == self.width, "too few candidates for the width of the search"
        self.running = [hypothesis for _, hypothesis in goes_on]
        return [number for number, _ in goes_on]

    def _extensions(self, candidates: Sequence[Candidates]) -> Iterator[tuple[int, Hypothesis]]:
        for number, (parent, found) in enumerate(zip(self.running, candidates, strict=True)):
            banned = self.ending_token_ids if parent.length < self._min_tokens else ()
            pairs = zip(found.token_ids[: self.num_candidates], found.logprobs, strict=False)
            for rank, (token_id, logprob) in enumerate(pairs, 1):
                if token_id not in banned:
                    total = parent.total + logprob
                    yield number, Hypothesis(parent, token_id, logprob, rank, found, total, parent.length + 1)

    def _finish(self, hypothesis: Hypothesis) -> None:
        self.finished.append(Finished(hypothesis, self._normalised(hypothesis.total, hypothesis.length)))
        self.finished.sort(key=lambda one: one.score, reverse=True)  # stable: the earlier of equals first
        del self.finished[self.width :]

    def _stops(self, *, best: float, length: int) -> bool:
        """Whether running hypotheses of this length, the best of which has this sum, are not worth going on with."""
        if len(self.finished) < self.width:
            return False
        if self._early_stopping is True:
            return True
        longest = self._early_stopping == "never" and self._length_penalty > 0
        return self._normalised(best, self._max_tokens if longest else length) <= self.finished[-1].score

    def _normalised(self, total: float, length: int) -> float:
        return total / length**self._length_penalty


def _total(extension: tuple[int, Hypothesis]) -> float:
    return extension[1].total
