"""When requests arrive: all at once, or as a Poisson process or one that is burstier or smoother than that."""

import math

import numpy as np


def arrival_times(count: int, *, rate: float, burstiness: float, rng: np.random.Generator) -> np.ndarray:
    """Return `count` ascending times in seconds, [count], at `rate` requests a second; an infinite rate is all at 0.

    Intervals are drawn from a gamma distribution of shape `burstiness`: 1 is a Poisson process, less comes in bursts,
    infinity is even. They are scaled so that the last request arrives at count / rate, as in vLLM, which makes runs
    with different seeds comparable.
    """
    if math.isinf(rate):
        return np.zeros(count)
    if math.isinf(burstiness):
        return np.arange(1, count + 1) / rate
    times = np.cumsum(rng.gamma(burstiness, 1.0, count))
    return times * (count / rate / times[-1])
