"""One try of speculation at one size of batch: for whom it drafts, and what the steps since it began have shown.

A sample of a few requests shows whether drafts are any good, a try with all of them what that costs. Owns the counts of
one try; what follows from them is the regime's to say.
"""

MAX_STEP_LOSS = 4.0  # plain steps; a step that seems to have lost more was held up by something else
MAX_TRY_LOSS = 1.5  # ends a try early; the least that a step of it has lost counts for each, so that no pause ends it
SAMPLE, SAMPLE_MEASURED = 4, 2  # requests that are drafted for first, and steps
TRY_MEASURED, TRY_STEPS = 4, 12  # steps with drafts for all, and at most: host-made drafts wait for every second one


class Trial:
    """A try for `num_requests` of the requests there are, at most `batch_size`; for 0 it is over: none was made yet.

    Attributes:
      is_under_way: whether the next step belongs to it.
      is_judged: whether something has followed from it.
    """

    def __init__(self, num_requests: int, *, batch_size: int) -> None:
        self.num_requests = num_requests
        self.is_for_all = num_requests >= batch_size
        self.is_under_way = num_requests > 0
        self.is_judged = num_requests == 0
        self._num_steps = self._num_measured = 0
        self._least_loss = MAX_STEP_LOSS  # of the steps that were measured

    def note_step(self) -> None:
        """Take note of any step."""
        self._num_steps += 1

    def note_loss(self, loss: float) -> None:
        """Take note of what a step lost that made drafts and verified some, in plain steps."""
        self._num_measured += 1
        self._least_loss = min(self._least_loss, loss)

    @property
    def has_lost_much(self) -> bool:
        """Whether it cost too much for drafting to pay, whatever else is known."""
        return self._num_measured > 0 and self._num_measured * self._least_loss > MAX_TRY_LOSS

    @property
    def is_enough(self) -> bool:
        """Whether more steps of it would tell nothing new."""
        wanted = TRY_MEASURED if self.is_for_all else SAMPLE_MEASURED
        return self.has_lost_much or self._num_measured >= wanted or self._num_steps >= TRY_STEPS
