"""When requests arrive: means and spreads of a fixed seed."""

import numpy as np
import pytest

from pagedjax.bench.arrivals import arrival_times


def intervals(burstiness, *, count=20_000, rate=50.0, seed=0):
    times = arrival_times(count, rate=rate, burstiness=burstiness, rng=np.random.default_rng(seed))
    return np.diff(times, prepend=0.0)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_the_rate_holds_and_the_spread_is_that_of_a_gamma_process(burstiness):
    """A gamma distribution of shape k has a coefficient of variation of 1 / sqrt(k)."""
    gaps = intervals(burstiness)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 50)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.03)


def test_a_burstiness_of_one_is_a_poisson_process():
    """Counts in a second have their mean as variance, and a share 1/e of intervals is longer than the mean."""
    gaps = intervals(1.0)
    counts = np.bincount(np.cumsum(gaps).astype(int))[:-1]
    assert counts.var() == pytest.approx(counts.mean(), rel=0.15)
    assert (gaps > 1 / 50).mean() == pytest.approx(np.exp(-1), abs=0.01)


def test_infinite_burstiness_is_even():
    assert intervals(float("inf"), count=5) == pytest.approx([1 / 50] * 5)


def test_an_infinite_rate_sends_all_at_once():
    times = arrival_times(3, rate=float("inf"), burstiness=1.0, rng=np.random.default_rng(0))
    assert times.tolist() == [0.0, 0.0, 0.0]


def test_every_seed_ends_at_the_same_time_and_differs_before():
    ends = [np.cumsum(intervals(1.0, count=100, seed=seed)) for seed in (0, 1)]
    assert ends[0][-1] == pytest.approx(2.0)
    assert ends[1][-1] == pytest.approx(2.0)
    assert not np.allclose(ends[0], ends[1])
