"""Whether speculation is on at one size of batch: when to try it, to give it up, and to measure plain steps again.

It begins plain, tries a few drafts, and goes on if they are expected to gain ENTER, until they gain less than LEAVE or
have in truth lost more than MAX_LOSS plain steps. Then it waits and tries again, longer each time, and never so often
that tries cost more than BUDGET of the time. While it is on, plain steps are measured now and then, under the same
budget. Steps are counted as they are dispatched, losses in plain steps. Knows no requests.
"""

from pagedjax.speculation.step_costs import MIN_MEASURED, StepCosts

ENTER, LEAVE = 1.05, 1.01  # times the tokens a second of plain decoding
MAX_LOSS, MAX_STEP_LOSS = 8.0, 4.0  # a step that seems to have lost more was held up by something else
BUDGET = 0.005
TRY_MEASURED, TRY_STEPS = 4, 12  # steps to measure, and at most: host-made drafts wait for every second one
DECIDE_EVERY = 4  # steps
MIN_WAIT, MAX_DOUBLINGS = 64, 6  # steps between tries, and how often they double
LASTING = 256  # steps after which speculation counts as having worked


class Regime:
    """State of one size of batch.

    Attributes:
      costs: of its steps.
      is_on: whether it speculates, tries apart.
      lost: plain steps that speculation has lost of late.
    """

    def __init__(self, max_drafts: int) -> None:
        self.costs = StepCosts(max_drafts)
        self.is_on = False
        self.lost = 0.0
        self._now = 0
        self._next_decision = 0
        self._num_try_steps = 0  # left of the try that runs
        self._enough_measured = 0
        self._has_tried = False
        self._num_failures = 0
        self._switched = 0  # when
        self._plain_measured = 0  # when

    @property
    def is_trying(self) -> bool:
        """Whether the next step belongs to a try."""
        return self._num_try_steps > 0

    def begin_step(self) -> bool:
        """Count a step that is about to be dispatched; return whether `decide` is due before it."""
        self._now += 1
        if self._num_try_steps:
            has_enough = self.costs.num_measured >= self._enough_measured
            self._num_try_steps = 0 if has_enough else self._num_try_steps - 1
        return self.costs.is_plain_known and not self._num_try_steps and self._now >= self._next_decision

    def decide(self, gain: float) -> bool:
        """Go on, expecting `gain` times plain tokens a second; return whether it switched, or gave up a try."""
        was_on, had_tried = self.is_on, self._has_tried
        self._next_decision = self._now + DECIDE_EVERY
        if self.is_on:
            if gain < LEAVE or self.lost > MAX_LOSS:
                self._give_up(has_failed=self._now - self._switched < LASTING)
            elif self._now - self._plain_measured > max(MIN_WAIT, MIN_MEASURED * (gain - 1) / BUDGET):
                self.costs.plain.clear()
        elif gain > ENTER and self.costs.max_known:
            self.is_on, self.lost = True, 0.0
        elif self._has_tried:
            self._give_up(has_failed=True)
        else:
            self._has_tried, self._num_try_steps = True, TRY_STEPS + 1
            self._enough_measured = self.costs.num_measured + TRY_MEASURED
        if self.is_on != was_on:
            self._switched = self._now
        return self.is_on != was_on or (had_tried and not self._has_tried)

    def note_plain(self, seconds: float) -> None:
        """Take note of a step without drafts."""
        self.costs.plain.add(seconds)
        self._plain_measured = self._now

    def note_loss(self, seconds: float, extra_tokens: float) -> None:
        """Take note of a step that verified or made drafts, and gave each request so many tokens more than one."""
        if self.costs.plain.median:
            loss = seconds / self.costs.plain.median - 1 - extra_tokens
            self.lost = max(self.lost + min(loss, MAX_STEP_LOSS), 0.0)

    def _give_up(self, *, has_failed: bool) -> None:
        """Wait, for so long that what was lost is BUDGET of the time."""
        self.is_on = self._has_tried = False
        self._num_failures = self._num_failures + 1 if has_failed else 0
        wait = max(MIN_WAIT << min(self._num_failures, MAX_DOUBLINGS), round(self.lost / BUDGET))
        self._next_decision = self._now + wait
        self.lost = 0.0
