"""Whether speculation is on at one size of batch: when to try it, to give it up, and to measure plain steps again.

It begins plain. A try drafts for a few requests first, which costs little and shows whether drafts are any good, and
then for all, which shows what that costs. Speculation goes on if it is expected to gain ENTER, until it gains less than
LEAVE or has in truth lost more than MAX_LOSS plain steps.

Tries wait: for steps without prompts, as long as there are enough of them; for more plain steps the larger the batch
is, unless speculation pays at another size; after a failure, at all sizes until what was lost is BUDGET of the time,
and at this size longer each time. While it is on, plain steps are measured now and then, under the same budget.

Steps are counted as they are dispatched, losses in plain steps. Knows no requests.
"""

from dataclasses import dataclass

from pagedjax.speculation.step_costs import MIN_MEASURED, StepCosts
from pagedjax.speculation.trial import MAX_STEP_LOSS, SAMPLE, Trial

ENTER, LEAVE = 1.05, 1.01  # times the tokens a second of plain decoding
MAX_LOSS = 12.0
MAX_DEBT = 256.0  # as MAX_LOSS, of what pays later: reading prompts with a draft model
BUDGET = 0.005
PLAIN_STEPS, MAX_PLAIN_STEPS = 4, 256  # before the first try, for each request of a batch, and at most
DECIDE_EVERY = 4  # steps
MIN_WAIT, MAX_DOUBLINGS = 64, 6  # steps between tries, and how often they double
LASTING = 256  # steps after which speculation counts as having worked
PROMPTS_MEMORY, MANY_PROMPTS = 0.99, 0.8  # of the share of steps with prompts; with more there are too few others


@dataclass
class Clock:
    """What all sizes of batches share: the number of steps, and when the next try may begin."""

    now: int = 0
    next_try: int = 0


class Regime:
    """State of one size of batch: at most `batch_size` requests, and more than half of it.

    Attributes:
      costs: of its steps.
      is_on: whether it speculates, tries apart.
      lost: plain steps that speculation had lost when it, or a try, was given up.
    """

    def __init__(self, max_drafts: int, clock: Clock, *, batch_size: int) -> None:
        self.costs = StepCosts(max_drafts)
        self.is_on = False
        self.lost = 0.0
        self._clock = clock
        self._batch_size = batch_size
        self._next_decision = 0
        self._wanted_plain = min(PLAIN_STEPS * batch_size, MAX_PLAIN_STEPS)  # before the first try
        self._trial = Trial(0, batch_size=batch_size)  # the newest
        self._num_failures = 0
        self._lost = self._debt = 0.0  # of late, in drafting and before it
        self._switched = 0  # when
        self._plain_measured = 0  # when
        self._share_with_prompts = 0.0

    @property
    def num_tried(self) -> int:
        """Requests that the next step drafts for in a try; 0 if there is none under way."""
        return self._trial.num_requests if self._trial.is_under_way else 0

    def is_typical(self, has_prompts: bool) -> bool:
        """Whether such a step can belong to a try, and its time tells something."""
        return not has_prompts or self._share_with_prompts > MANY_PROMPTS

    def begin_step(self, *, has_prompts: bool, is_promising: bool) -> bool:
        """Return whether `decide` is due before the step that is about to be dispatched.

        `is_promising` says that speculation pays at another size.
        """
        trial = self._trial
        if trial.is_under_way and (trial.is_enough or self._debt > MAX_DEBT):
            trial.is_under_way = False
        if trial.is_under_way or not self.costs.is_plain_known or self._clock.now < self._next_decision:
            return False
        may_try = self._clock.now >= self._clock.next_try and (is_promising or self._wanted_plain <= 0)
        return self.is_on or not trial.is_judged or (may_try and self.is_typical(has_prompts))

    def decide(self, gain: float, *, is_promising: bool) -> bool:
        """Go on, expecting `gain` times plain tokens a second; return whether it switched, or gave up a try."""
        was_on, trial, has_ended = self.is_on, self._trial, False
        self._next_decision = self._clock.now + DECIDE_EVERY
        pays = gain > ENTER and not trial.has_lost_much
        if self.is_on:
            if gain < LEAVE or self._lost > MAX_LOSS or self._debt > MAX_DEBT:
                self._give_up(has_failed=self._clock.now - self._switched < LASTING)
            elif self._clock.now - self._plain_measured > max(MIN_WAIT, MIN_MEASURED * (gain - 1) / BUDGET):
                self.costs.plain.clear()
        elif pays and self.costs.max_known:
            self.is_on, self._lost, self._debt = True, 0.0, 0.0
        elif trial.is_judged:
            self._try(self._batch_size if is_promising else SAMPLE)
        elif pays and not trial.is_for_all:
            self._try(self._batch_size)
        else:
            self._give_up(has_failed=True)
            has_ended = True
        if self.is_on != was_on:
            self._switched, trial.is_judged = self._clock.now, True
        return self.is_on != was_on or has_ended

    def note_prompts(self, has_prompts: bool) -> None:
        """Take note of whether a step computed prompts."""
        self._share_with_prompts += (1 - PROMPTS_MEMORY) * (has_prompts - self._share_with_prompts)

    def note_plain(self, seconds: float) -> None:
        """Take note of a step without drafts."""
        self.costs.plain.add(seconds)
        self._plain_measured = self._clock.now
        self._wanted_plain -= 1
        self._trial.note_step()

    def note_loss(self, seconds: float, extra_tokens: float, *, is_measured: bool) -> None:
        """Take note of a step that made or verified drafts, and gave each request so many tokens more than one."""
        loss = self._loss(seconds, extra_tokens)
        self._trial.note_step()
        if is_measured:
            self._trial.note_loss(loss)
        loss += self._lost
        self._lost = max(loss, 0.0)
        self._debt = max(self._debt + min(loss, 0.0), 0.0)  # gains pay for it

    def note_reading(self, seconds: float, extra_tokens: float) -> None:
        """Take note of a step in which a draft model read what it had missed."""
        self._debt += max(self._loss(seconds, extra_tokens), 0.0)

    def _try(self, num_requests: int) -> None:
        """Draft for so many requests; what the sample before has lost stays with what the whole try loses."""
        self._trial = Trial(num_requests, batch_size=self._batch_size)
        self._debt, self._lost = self._debt + self._lost, 0.0

    def _give_up(self, *, has_failed: bool) -> None:
        """Wait, for so long that what was lost is BUDGET of the time."""
        self.is_on, self._trial.is_judged = False, True
        self._num_failures = self._num_failures + 1 if has_failed else 0
        self.lost = self._lost + self._debt
        wait = round(self.lost / BUDGET)
        self._clock.next_try = self._clock.now + max(MIN_WAIT, wait)
        self._next_decision = self._clock.now + max(MIN_WAIT << min(self._num_failures, MAX_DOUBLINGS), wait)
        self._lost = self._debt = 0.0

    def _loss(self, seconds: float, extra_tokens: float) -> float:
        plain = self.costs.plain.median
        return min(seconds / plain - 1 - extra_tokens, MAX_STEP_LOSS) if plain else 0.0
