"""The engine swaps to host memory and brings back, on a fake model that reads every token from the KV cache.

`test_identity` has the same with a real one. Chunks are one block and one copy is under way at a time, so that
requests can be caught on their way.
"""

import math

import jax
import pytest

from pagedjax import EngineConfig, SamplingParams
from pagedjax.errors import ConfigError
from pagedjax.execution import host_chunks
from tests.fakes import continuation, fake_engine

GREEDY = {"temperature": 0.0, "ignore_eos": True}
STATES = ["RUNNING", "SWAPPING_OUT", "SWAPPED", "SWAPPING_IN"]
PROMPTS = {str(i): [10 * i + j % 7 for j in range(30)] for i in range(6)}


@pytest.fixture(scope="module")
def engine():
    """Four requests at a time want 64 blocks, there are 24."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_chunks, "MAX_CHUNK_BLOCKS", 1)
        patch.setattr(host_chunks, "MAX_COPIES", 1)
        engine = fake_engine(num_gpu_blocks_override=25, swap_space=0.0001, preemption_mode="swap")
        yield engine
        engine.shutdown()


@pytest.fixture
def started(engine):
    """Requests that outgrow the pool, with a cold prefix cache."""
    assert engine.reset_prefix_cache()
    for request_id, prompt in PROMPTS.items():
        engine.add_request(request_id, prompt, SamplingParams(max_tokens=80, **GREEDY))
    yield engine
    for _ in run(engine):
        pass


def run(engine):
    """Step until everything is done, and yield the finished outputs."""
    num_steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                yield output
        engine.check_integrity()
        num_steps += 1
        assert num_steps < 5000, "the engine does not come to an end"
    engine.step()  # blocks of the last ones
    stats = engine.stats()
    assert (stats["num_blocks_used"], stats["cpu_cache_usage_perc"], stats["num_requests_swapped"]) == (0, 0, 0)
    assert stats["num_compilations_after_ready"] == 0


def assert_right(outputs, *, but=()):
    expected = {request_id: continuation(prompt, 80) for request_id, prompt in PROMPTS.items()}
    got = {output.request_id: output.outputs[0].token_ids for output in outputs if output.request_id not in but}
    assert got == {request_id: token_ids for request_id, token_ids in expected.items() if request_id not in but}


def grown(engine, before, name):
    return engine.stats()[name] - before[name]


def catch(engine, state):
    """Step until a request is in this state; return it, and the outputs that were finished before."""
    finished = []
    for _ in range(1000):
        finished += [output for output in engine.step() if output.finished]
        for _, completion in engine._completions.values():
            if completion.request.status.name == state:
                return completion.request, finished
    raise AssertionError(f"no request was {state}")


def test_what_was_swapped_out_and_in_generates_what_it_would_have(started):
    before = started.stats()
    assert_right(run(started))
    for name in ("num_preemptions_swapped", "swap_out_blocks", "swap_in_blocks", "swap_out_bytes", "swap_in_bytes"):
        assert grown(started, before, name) > 0, name
    assert grown(started, before, "swap_out_bytes") == 64 * grown(started, before, "swap_out_blocks")
    assert grown(started, before, "swap_failures") == 0


@pytest.mark.parametrize("state", STATES)
def test_a_request_that_is_aborted_in_any_state_gives_everything_back(started, state):
    request, outputs = catch(started, state)
    seen = {"SWAPPING_OUT": "swapped", "SWAPPED": "swapped", "SWAPPING_IN": "swapped"}.get(state, "running")
    views = {view.request_id: view.status for view in started.inspect().requests}
    assert views[request.request_id] == seen
    started.abort(request.request_id)
    outputs += run(started)
    ended = next(output for output in outputs if output.request_id == request.request_id)
    assert ended.outputs[0].finish_reason == "abort"
    num_tokens = len(ended.outputs[0].token_ids)
    assert ended.outputs[0].token_ids == continuation(PROMPTS[request.request_id], num_tokens)
    assert_right(outputs, but=[request.request_id])


def test_a_prefix_that_has_left_the_device_comes_back_from_the_host(engine, monkeypatch):
    monkeypatch.setattr(host_chunks, "MAX_COPIES", 8)  # one an iteration does not keep up with a prompt
    assert engine.reset_prefix_cache()
    prompt, params = list(range(100, 190)), SamplingParams(max_tokens=2, **GREEDY)
    before = engine.stats()
    engine.add_request("first", prompt, params)
    list(run(engine))
    for i in range(3):
        engine.add_request(f"other {i}", [i] * 100, params)
        list(run(engine))
    engine.add_request("again", prompt, params)
    (output,) = run(engine)
    assert output.outputs[0].token_ids == continuation(prompt, 2)
    assert grown(engine, before, "external_prefix_cache_hits") >= 8
    assert output.num_cached_tokens >= grown(engine, before, "external_prefix_cache_hits")
    assert grown(engine, before, "num_preemptions") == 0


def test_a_request_that_is_preempted_before_its_prefix_has_come_back_counts_once(engine, monkeypatch):
    """It never had a time at which it was first scheduled, and its prompt was not counted."""
    monkeypatch.setattr(host_chunks, "MAX_COPIES", 8)
    assert engine.reset_prefix_cache()
    prompt, params = list(range(100, 190)), SamplingParams(max_tokens=2, **GREEDY)
    for request_id, ids in [("first", prompt), *((f"other {i}", [i] * 100) for i in range(3))]:
        engine.add_request(request_id, ids, params)
        list(run(engine))
    before = engine.stats()
    engine.add_request("again", prompt, params)
    catch(engine, "SWAPPING_IN")
    assert engine.reset_prefix_cache(reset_running_requests=True)
    (output,) = run(engine)
    assert grown(engine, before, "num_preemptions") == 1
    assert output.metrics.first_scheduled_time is not None
    assert grown(engine, before, "prompt_tokens") == len(prompt)


class Breaks:
    """In place of a transfer: the first ones raise, as JAX does where there is no pinned memory left."""

    def __init__(self, num_failing):
        self.num_failing, self.transfer = num_failing, host_chunks.transfer

    def __call__(self, array, sharding):
        self.num_failing -= 1
        if self.num_failing >= 0:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of host memory")
        return self.transfer(array, sharding)


@pytest.mark.parametrize("num_failing", [1, 3, 10**6])
def test_copies_that_fail_cost_time_and_nothing_else(started, monkeypatch, num_failing):
    monkeypatch.setattr(host_chunks, "transfer", Breaks(num_failing))
    before = started.stats()
    assert_right(run(started))
    assert grown(started, before, "swap_failures") >= min(num_failing, 3)
    assert grown(started, before, "num_preemptions") > 0


def test_blocks_that_cannot_be_gathered_are_computed_again(started, monkeypatch):
    """The device had no memory left for the staging buffer: all requests ended with the engine."""
    executables, num_failing = started._runner.host._executables, iter(range(3))
    gather = executables["gather blocks"]

    def fails_at_first(*args):
        if next(num_failing, None) is not None:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return gather(*args)

    monkeypatch.setitem(executables, "gather blocks", fails_at_first)
    before = started.stats()
    assert_right(run(started))
    assert grown(started, before, "swap_failures") >= 3
    assert grown(started, before, "swap_in_blocks") > 0


@pytest.mark.parametrize("state", ["WAITING", *STATES])
def test_a_deadline_ends_a_request_in_any_state_with_what_it_has(engine, state):
    assert engine.reset_prefix_cache()
    for request_id, prompt in PROMPTS.items():
        engine.add_request(request_id, prompt, SamplingParams(max_tokens=80, **GREEDY), timeout=3600.0)
    request, outputs = catch(engine, state)
    deadlines = engine._scheduler._deadlines
    deadlines._heap = [(0.0, *entry[1:]) if entry[2] is request else entry for entry in deadlines._heap]
    deadlines._heap.sort()
    outputs += run(engine)
    ended = next(output for output in outputs if output.request_id == request.request_id)
    num_tokens = len(ended.outputs[0].token_ids)
    assert ended.outputs[0].finish_reason == "timeout"
    assert f"its deadline of 3600 s after {num_tokens} tokens; allow it more time" in ended.error
    assert ended.outputs[0].token_ids == continuation(PROMPTS[request.request_id], num_tokens)
    assert_right(outputs, but=[request.request_id])


def test_a_deadline_that_has_passed_ends_all_completions_of_a_request(engine):
    engine.add_request("late", [1, 2, 3], SamplingParams(n=2, max_tokens=5, **GREEDY), timeout=0.5, arrival_time=1.0)
    (output,) = run(engine)
    assert [one.finish_reason for one in output.outputs] == ["timeout", "timeout"]
    assert [one.token_ids for one in output.outputs] == [[], []]


@pytest.mark.parametrize(
    ("swap_space", "message"),
    [
        (
            10**6,
            r"swap_space is 1e\+06 GiB, this host has .* GiB and 70% of it may be pinned; set --swap-space to .* or",
        ),
        (math.inf, "swap_space is inf GiB, this host has"),
        (
            0.001,
            r"swap_space is 0.001 GiB, one copy takes 0.0078125 GiB \(1 blocks of 8388608 bytes\); raise --swap-space",
        ),
    ],
)
def test_swap_space_that_cannot_be_is_refused_with_numbers(swap_space, message):
    with pytest.raises(ConfigError, match=message):
        host_chunks.HostPlan.build(EngineConfig(swap_space=swap_space), block_bytes=8 << 20)


@pytest.mark.parametrize(("swap_space", "chunk_size", "num_chunks"), [(0, 1, 0), (1.0, 32, 16), (0.1, 4, 12)])
def test_swap_space_is_divided_into_chunks_that_are_no_large_part_of_it(
    monkeypatch, swap_space, chunk_size, num_chunks
):  # fmt: skip
    monkeypatch.setattr(host_chunks, "CHUNK_BYTES", {jax.default_backend(): 64 << 20})
    monkeypatch.setattr(host_chunks, "MAX_CHUNK_BLOCKS", 64)
    monkeypatch.setattr(host_chunks, "MAX_COPIES", 2)
    plan = host_chunks.HostPlan.build(EngineConfig(swap_space=swap_space), block_bytes=2 << 20)
    assert (plan.chunk_size, plan.num_chunks) == (chunk_size, num_chunks)
    assert plan.staging_bytes == (4 * chunk_size * (2 << 20) if num_chunks else 0)
