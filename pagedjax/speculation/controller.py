"""How many drafts each request gets in the next step, so that speculation pays or does not happen.

    chances of acceptance (`acceptance`)  x  costs of steps (`step_costs`)  ->  drafts a request, if any (`regime`)

Drafts are taken in the order of their chances for as long as the tokens a second of the whole batch grow: that is a
number for each request, 0 for one whose drafts are refused. Sizes of batches are told apart by powers of two, as steps
are padded, and each learns for itself whether speculation pays. They share what is known of drafts, and how often they
may try.

It is told times and results and changes no output. It knows no clock, no device, and not who proposes.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagedjax.speculation.acceptance import Acceptance
from pagedjax.speculation.regime import Clock, Regime
from pagedjax.speculation.step_costs import StepCosts
from pagedjax.speculation.trial import SAMPLE

logger = logging.getLogger(__name__)

TRY_DRAFTS = 2  # a request, where nothing is known
CANDIDATES = 64  # numbers of drafts that are compared
MIN_CHANCE = 0.1  # of a draft to be verified, though it is made anyway
USAGE_MEMORY = 0.95  # a step
MANY_REQUESTS, MANY_STEPS = 64, 4  # of so many requests, the results of one step in these are telling enough


@dataclass(frozen=True)
class StepKind:
    """What a step did beside decoding: it computed prompts, a draft model read, few were drafted for in a try."""

    has_prompts: bool = False
    has_read: bool = False
    is_sample: bool = False


PLAIN = StepKind()


class Controller:
    """Chooses drafts for the requests of a batch, at most `num_speculative_tokens` each.

    Call `choose` for the requests that decode in the step that is about to be dispatched; `note_step` when a step's
    results were read, which may be some steps later; `forget` for each request that ended; `reset` when the weights
    changed.

    Args:
      num_speculative_tokens: the most drafts of one request.
      is_sequential: drafts are made one after another for the whole batch, as a draft model does, so that the longest
        request decides what they cost; otherwise it is their number.
      disable_by_batch_size: no drafts in batches of more requests.
      is_adaptive: False gives every request as many drafts as it may have, always.

    Attributes:
      is_trying, is_sample: whether the step that it chose for last belongs to a try, and to one with few requests.
      reason: why it does what it does, as it was last logged.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        *,
        is_sequential: bool,
        disable_by_batch_size: int | None = None,
        is_adaptive: bool = True,
    ) -> None:
        self._max_drafts = num_speculative_tokens
        self._is_sequential = is_sequential
        self._max_batch_size = disable_by_batch_size
        self._is_adaptive = is_adaptive
        self.reset()

    def reset(self) -> None:
        """Forget everything: with other weights, drafts fare differently."""
        self._acceptance = Acceptance(self._max_drafts)
        self._regimes: dict[int, Regime] = {}
        self._clock = Clock()
        self._sample: set[str] = set()  # of a batch, from one end to the other, and not always the same
        self._drafts: dict[str, int] = {}  # of the requests that were there at the last decision
        self._typical_drafts = 0  # of others
        self._num_results = 0
        self._usage = 1.0  # share of the drafts that were wanted that there were
        self.is_trying = self.is_sample = False
        self.reason = "speculation off: nothing is measured yet"

    def choose(
        self, request_ids: Sequence[str], *, limits: Sequence[int] | None = None, has_prompts: bool = False
    ) -> list[int]:
        """Return the number of drafts for each request to verify in the next step.

        `limits` are the most that each can have: 0 for one that its proposer has nothing for, say, fewer for one that
        is about to end. `has_prompts` says that the step is expected to compute prompts too.
        """
        num = len(request_ids)
        self.is_trying = self.is_sample = False
        if not num or (self._max_batch_size is not None and num > self._max_batch_size):
            return [0] * num
        limits = [self._max_drafts] * num if limits is None else limits
        if not self._is_adaptive:
            return [min(limit, self._max_drafts) for limit in limits]
        self._clock.now += 1
        regime, is_promising = self._regime(num), any(one.is_on for one in self._regimes.values())
        if regime.begin_step(has_prompts=has_prompts, is_promising=is_promising):
            self._decide(regime, request_ids, is_promising)
            self._sample = {request_ids[(self._clock.now + i * num // SAMPLE) % num] for i in range(SAMPLE)}
        is_typical = regime.is_typical(has_prompts)
        if regime.num_tried and is_typical:
            self.is_trying, self.is_sample = True, regime.num_tried < num
            return [
                min(limit, TRY_DRAFTS) if request_id in self._sample or not self.is_sample else 0
                for request_id, limit in zip(request_ids, limits, strict=True)
            ]
        if not regime.is_on or (is_typical and not regime.costs.is_plain_known):
            return [0] * num
        wanted = [self._drafts.get(request_id, self._typical_drafts) for request_id in request_ids]
        drafts = [min(pair) for pair in zip(wanted, limits, strict=True)]
        self._usage += (1 - USAGE_MEMORY) * (sum(drafts) / max(sum(wanted), 1) - self._usage)
        return drafts

    def note_step(
        self, request_ids: Sequence[str], num_drafts: Sequence[int], num_accepted: Sequence[int],
        *, num_proposed: int, seconds: float, kind: StepKind = PLAIN,
    ) -> None:  # fmt: skip
        """Take note of a step: the requests that decoded in it, and how many of each one's drafts were accepted.

        A row that was given room for drafts but had none counts as refused, for it cost as much. `num_proposed` is the
        number of drafts that were made in the same time, for later steps; where they are not made on the device, it is
        that of those verified. `seconds` is the time from the results before to these.
        """
        num_verified = sum(num_drafts)
        self._num_results += 1
        has_few = len(request_ids) < MANY_REQUESTS or kind.is_sample
        if num_verified and (has_few or self._num_results % MANY_STEPS == 0):
            self._acceptance.note(request_ids, np.array(num_drafts), np.array(num_accepted))
        if not request_ids:
            return
        regime, extra_tokens = self._regime(len(request_ids)), sum(num_accepted) / len(request_ids)
        regime.note_prompts(kind.has_prompts)
        if not regime.is_typical(kind.has_prompts):
            return
        is_measured = num_verified > 0 and num_proposed > 0
        if kind.has_read:
            regime.note_reading(seconds, extra_tokens)
        elif num_verified or num_proposed:
            if is_measured and not kind.is_sample:
                size = max(num_drafts) if self._is_sequential else num_verified / len(request_ids)
                regime.costs.add(size, seconds)
            regime.note_loss(seconds, extra_tokens, is_measured=is_measured)
        else:
            regime.note_plain(seconds)

    def forget(self, request_id: str) -> None:
        """Drop a request that ended."""
        self._acceptance.forget(request_id)
        self._drafts.pop(request_id, None)

    def _regime(self, batch_size: int) -> Regime:
        size = (batch_size - 1).bit_length()
        if size not in self._regimes:
            self._regimes[size] = Regime(self._max_drafts, self._clock, batch_size=1 << size)
        return self._regimes[size]

    def _decide(self, regime: Regime, request_ids: Sequence[str], is_promising: bool) -> None:
        """Find the drafts that give the most tokens a second, and whether these are enough."""
        num = len(request_ids)
        reach = min(max(2 * round(regime.costs.max_known), TRY_DRAFTS), self._max_drafts)
        chances = self._acceptance.chances(request_ids)[:reach]  # [K, B], falling along K
        gain, drafts = (self._by_length if self._is_sequential else self._by_number)(regime.costs, chances)
        self._drafts = dict(zip(request_ids, drafts.tolist(), strict=True))
        self._typical_drafts = round(float(drafts.mean()))
        if regime.decide(gain, is_promising=is_promising):
            self.reason = (
                f"speculation {'on' if regime.is_on else 'off'} at batch {num}: {gain:.2f} times the tokens/s of plain "
                f"decoding expected, {self._acceptance.mean_rate():.2f} of drafts accepted, {regime.costs.describe()}"
                + ("" if regime.is_on else f", {regime.lost:.1f} plain steps lost")
            )
            logger.info(self.reason)

    def _by_number(self, costs: StepCosts, chances: np.ndarray) -> tuple[float, np.ndarray]:
        """Return gain and drafts of each request where every draft costs the same: the likeliest ones, 1 to all."""
        ordered = np.sort(chances, axis=None)[::-1]
        counts = np.linspace(1, len(ordered), CANDIDATES).astype(int)
        extra = self._usage / chances.shape[1]  # of one draft, to each request
        gains = (1 + extra * np.cumsum(ordered)[counts - 1]) / costs.relative(extra * counts)
        best = int(gains.argmax())
        return float(gains[best]), np.sum(chances >= ordered[counts[best] - 1], axis=0)

    def _by_length(self, costs: StepCosts, chances: np.ndarray) -> tuple[float, np.ndarray]:
        """Return gain and drafts of each request where the longest decides: the others' are as good as free."""
        is_worth_it = chances >= MIN_CHANCE
        extra = np.cumsum(np.mean(chances * is_worth_it, axis=1))
        gains = (1 + self._usage * extra) / costs.relative(np.arange(1, len(chances) + 1))
        best = int(gains.argmax())
        return float(gains[best]), np.sum(is_worth_it[: best + 1], axis=0)
