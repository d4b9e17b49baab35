"""The part of one batch in which every request decodes and nothing else happens: what TPOT is measured on.

    all requests added | prompts | window: every step gives each request one token | first finish | ends
                                 ^ every request has its first token               ^

It opens after the step whose plan is the first to be one token of every request, drafts apart: by then all prompts were
computed. With drafts a step gives several tokens, and TPOT is the time of all steps by the tokens of a request.
"""

from dataclasses import dataclass

import numpy as np

from pagedjax.engine import LLMEngine, StepOutput


@dataclass(frozen=True)
class Decoding:
    """What the window showed, in seconds: each step's interval, and host work of a mean step by kind."""

    opened: float  # on perf_counter
    steps: np.ndarray  # [n] from one step's end to the next one's
    tokens_per_step: float  # of each request; 1 without speculation
    host: float  # scheduling, packing, stop rules, outputs
    dispatch: float  # handing the step to JAX
    wait: float  # for the device

    @property
    def tpot(self) -> float:
        return float(self.steps.mean()) / self.tokens_per_step


class DecodeWindow:
    """Shown every step of a batch of `batch_size` requests that begin together, finds the window."""

    def __init__(self, engine: LLMEngine, batch_size: int):
        self._engine = engine
        self._batch_size = batch_size
        self._ends: list[float] = []
        self._busy = 0.0
        self._has_drafts = False
        self._before: np.ndarray | None = None
        self._after: np.ndarray | None = None

    def observe(self, output: StepOutput, *, began: float, ended: float) -> None:
        """Take in one step, that began and ended at these times on `perf_counter`."""
        if self._after is not None:
            return
        plan = output.plan
        self._has_drafts |= plan.num_draft_tokens > 0
        if self._before is not None:
            self._ends.append(ended)
            self._busy += ended - began
        elif plan.num_tokens - plan.num_draft_tokens == len(plan.scheduled) == self._batch_size:
            self._ends.append(ended)
            self._before = self._counters()
        if self._before is not None and any(one.finished for one in output):
            self._after = self._counters()

    def decoding(self) -> Decoding | None:
        """Return the measurement; None if there is no such window or a request did not decode in every step of it."""
        num_steps = len(self._ends) - 1
        if self._before is None or self._after is None or num_steps < 1:
            return None
        dispatch, wait, num_tokens = self._after - self._before
        tokens_per_step = num_tokens / (num_steps * self._batch_size)
        if not num_tokens or (tokens_per_step != 1 and not self._has_drafts):
            return None
        host = self._busy - dispatch - wait
        per_step = (seconds / num_steps for seconds in (host, dispatch, wait))
        return Decoding(self._ends[0], np.diff(self._ends), tokens_per_step, *per_step)

    def _counters(self) -> np.ndarray:
        times = self._engine.host_times
        return np.array([times.dispatch, times.wait, self._engine.stats()["generation_tokens"]])
