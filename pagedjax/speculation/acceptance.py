"""How likely a request's next drafts are accepted, learnt from what became of its earlier ones.

A draft is only looked at when those before it were accepted, so each position has a rate of its own: accepted out of
reached. Newer results count more. A request begins with the rates of all requests and departs from them as its own
results come in. Owns the counts; knows nothing of time.
"""

from collections.abc import Sequence

import numpy as np

PRIOR_RATE = 0.5  # before anything was verified
PRIOR_RESULTS = 2.0  # how many results that assumption is worth
SHARED_RESULTS = 4.0  # what the rate of all positions together is worth to one
OWN_RESULTS = 8.0  # what the shared rates are worth to a request
SHARED_MEMORY = 0.995  # weight of the older results of all requests, at each new one
OWN_MEMORY = 0.97  # and of a request's
IDLE_MEMORY = 0.99  # at each look, so that a request that was given up comes back to the shared rates


class Acceptance:
    """Decaying counts of reached and accepted drafts by position, 0 to `max_drafts` - 1. Works on whole batches."""

    def __init__(self, max_drafts: int) -> None:
        self._positions = np.arange(max_drafts)[:, None]
        self._shared = np.zeros((2, max_drafts, 1), np.float32)  # reached, accepted
        self._own = np.zeros((2, max_drafts, 64), np.float32)  # a column for each request
        self._columns: dict[str, int] = {}
        self._free = list(range(64))

    def chances(self, request_ids: Sequence[str]) -> np.ndarray:
        """Return [K, B]: the probability that a request's drafts are accepted up to and including this position."""
        columns = self._find(request_ids)
        reached, accepted = counts = self._own[:, :, columns] * np.float32(IDLE_MEMORY)
        self._own[:, :, columns] = counts
        chances = (accepted + np.float32(OWN_RESULTS) * self._shared_rates()) / (reached + np.float32(OWN_RESULTS))
        for position in range(1, len(chances)):
            chances[position] *= chances[position - 1]
        return chances

    def mean_rate(self) -> float:
        """Accepted of reached drafts, over all requests and positions."""
        reached, accepted = self._shared.sum(axis=(1, 2))
        return float((accepted + PRIOR_RATE * PRIOR_RESULTS) / (reached + PRIOR_RESULTS))

    def note(self, request_ids: Sequence[str], num_drafts: np.ndarray, num_accepted: np.ndarray) -> None:
        """Take note of how many of each request's drafts [B] were accepted; 0 drafts say nothing."""
        columns = self._find(request_ids)
        accepted = self._positions < num_accepted  # [K, B]
        reached = self._positions < np.minimum(num_accepted + 1, num_drafts)
        results = np.stack([reached, accepted]).astype(np.float32)  # [2, K, B]
        memory = np.where(num_drafts > 0, np.float32(OWN_MEMORY), np.float32(1.0))
        self._own[:, :, columns] = self._own[:, :, columns] * memory + results
        older = self._shared * np.float32(SHARED_MEMORY ** np.count_nonzero(num_drafts))
        self._shared = older + results.sum(axis=2, keepdims=True)

    def forget(self, request_id: str) -> None:
        """Drop a request that ended; its results stay in the shared rates."""
        column = self._columns.pop(request_id, None)
        if column is not None:
            self._own[:, :, column] = 0.0
            self._free.append(column)

    def _shared_rates(self) -> np.ndarray:
        reached, accepted = self._shared
        return (accepted + np.float32(SHARED_RESULTS * self.mean_rate())) / (reached + np.float32(SHARED_RESULTS))

    def _find(self, request_ids: Sequence[str]) -> np.ndarray:
        try:
            columns = [self._columns[request_id] for request_id in request_ids]
        except KeyError:
            columns = [self._column(request_id) for request_id in request_ids]
        return np.array(columns)

    def _column(self, request_id: str) -> int:
        if request_id not in self._columns:
            if not self._free:
                num_columns = self._own.shape[2]
                self._own = np.concatenate([self._own, np.zeros_like(self._own)], axis=2)
                self._free.extend(range(num_columns, 2 * num_columns))
            self._columns[request_id] = self._free.pop()
        return self._columns[request_id]
