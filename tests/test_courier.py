"""Rounds to an event loop: at once while it keeps up, some time apart while it does not, everything in order."""

import asyncio

import pytest

from pagedjax.async_engine.courier import LAGGING_INTERVAL, Courier


class Loop:
    """An event loop that runs its callbacks when told to, on a clock of its own."""

    def __init__(self):
        self.now = 0.0
        self.ready = []
        self.later = []

    def time(self):
        return self.now

    def call_soon(self, callback):
        self.ready.append(callback)

    call_soon_threadsafe = call_soon

    def call_at(self, when, callback):
        self.later.append((when, callback))

    def run(self):
        while self.ready:
            self.ready.pop(0)()

    def run_later(self):
        ((self.now, callback),) = self.later
        self.later.clear()
        callback()
        self.run()


@pytest.fixture
def loop():
    return Loop()


def test_a_loop_that_keeps_up_gets_everything_at_once(loop):
    rounds = []
    courier = Courier(loop, rounds.append)
    for number in range(3):
        courier.carry([number])
        loop.run()
        loop.now += 0.001
    assert rounds == [[0], [1], [2]]
    assert not loop.later


def test_what_comes_before_a_round_begins_belongs_to_it(loop):
    rounds = []
    courier = Courier(loop, rounds.append)
    courier.carry(["a"])
    courier.carry(["b", "c"])
    assert len(loop.ready) == 1
    loop.run()
    assert rounds == [["a", "b", "c"]]
    assert not loop.later


def test_what_comes_while_consumers_are_busy_waits_until_the_next_round_is_due(loop):
    """Each step of the engine was handed over alone, and the event loop fell behind with all its time taken."""
    rounds = []

    def dispatch(parcels):
        rounds.append((loop.now, parcels))
        if len(parcels) == 1:
            loop.call_soon(consume)  # as a consumer that was woken

    def consume():
        for number in (1, 2):
            loop.now += 0.002
            courier.carry([number])

    courier = Courier(loop, dispatch)
    courier.carry([0])
    loop.run()
    assert rounds == [(0.0, [0])]
    courier.carry([3])
    loop.run_later()
    assert rounds[1] == (LAGGING_INTERVAL, [1, 2, 3])
    courier.carry([4, 5])
    loop.run()
    assert rounds[2] == (LAGGING_INTERVAL, [4, 5]), "nothing came in the round before, so nothing waits"


def test_a_dispatch_that_fails_holds_up_nothing(loop):
    rounds = []

    def dispatch(parcels):
        rounds.append(parcels)
        assert parcels != ["bad"], "as an observer may"

    courier = Courier(loop, dispatch)
    courier.carry(["bad"])
    with pytest.raises(AssertionError, match="as an observer may"):
        loop.run()
    loop.run()
    courier.carry(["good"])
    loop.run()
    assert rounds == [["bad"], ["good"]]


def test_a_loop_that_has_closed_is_an_error_of_whoever_sends():
    closed = asyncio.new_event_loop()
    closed.close()
    with pytest.raises(RuntimeError, match="closed"):
        Courier(closed, lambda parcels: None).carry([1])
