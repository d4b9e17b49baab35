"""What a step took where several of them were waited for at once."""

from pagedjax.iteration_stats import StepTimes


def test_the_time_of_steps_that_nobody_waited_for_is_shared_by_tokens():
    times = StepTimes()
    assert times.share(32, 0.001, is_awaited=False) is None
    assert times.share(32, 0.001, is_awaited=False) is None
    assert times.share(16, 0.078, is_awaited=True) == 0.08 * 16 / 80
    assert times.share(16, 0.02, is_awaited=True) == 0.02
