"""AsyncEngine over the fake engine: order, refusals, aborts, death and shutdown."""

import asyncio
import gc
import threading
import weakref

import pytest

from pagedjax.async_engine import AsyncEngine
from pagedjax.async_engine.mailboxes import Mailboxes
from pagedjax.errors import EngineDeadError, InvalidRequestError
from pagedjax.sampling_params import RequestOutputKind, SamplingParams
from pagedjax.structured_outputs import StructuredOutputsParams
from tests.servers.fakes import FakeEngine

DELTA = RequestOutputKind.DELTA
FINAL_ONLY = RequestOutputKind.FINAL_ONLY


@pytest.fixture
def fake():
    return FakeEngine()


@pytest.fixture
async def engine(fake):
    engine = AsyncEngine(fake)
    yield engine
    fake.gate.set()
    await engine.shutdown()


async def drain(stream) -> None:
    async for _ in stream:
        pass


async def test_deltas_add_up_to_the_whole_output(engine):
    stream = engine.generate("abc", SamplingParams(max_tokens=7, output_kind=DELTA), "r")
    outputs = [output async for output in stream]
    assert "".join(output.outputs[0].text for output in outputs) == "abcabca"
    assert [output.finished for output in outputs][-1] is True
    assert outputs[-1].outputs[0].finish_reason == "length"


async def test_final_only_gives_one_output(engine):
    stream = engine.generate([97, 98], SamplingParams(max_tokens=3, output_kind=FINAL_ONLY), "r")
    outputs = [output async for output in stream]
    assert [output.outputs[0].text for output in outputs] == ["aba"]


async def test_many_requests_get_their_own_outputs(engine):
    async def text(prompt):
        params = SamplingParams(max_tokens=9, output_kind=DELTA)
        return "".join([out.outputs[0].text async for out in engine.generate(prompt, params, prompt)])

    prompts = [f"p{i}" for i in range(50)]
    texts = await asyncio.gather(*map(text, prompts))
    assert texts == [(prompt * 9)[:9] for prompt in prompts]


async def test_only_the_engine_thread_calls_the_engine(engine, fake):
    async for _ in engine.generate("abc", SamplingParams(), "r"):
        pass
    await engine.shutdown()
    assert fake.threads == {"pagedjax-engine"}


async def test_a_slow_consumer_finds_deltas_joined(engine, fake):
    fake.gate.clear()
    params = SamplingParams(max_tokens=6, logprobs=1, n=2, output_kind=DELTA)
    stream = await engine.generate("abc", params, "slow")
    finished = asyncio.Event()
    engine.add_observer(lambda output: finished.set() if output.finished else None)
    fake.gate.set()
    await finished.wait()
    outputs = [output async for output in stream]
    assert len(outputs) == 1
    assert [completion.text for completion in outputs[0].outputs] == ["abcabc", "bcdbcd"]
    assert [len(completion.logprobs) for completion in outputs[0].outputs] == [6, 6]
    assert outputs[0].outputs[1].finish_reason == "length"


async def test_joining_keeps_the_prompt_logprobs_of_the_first_delta(engine, fake):
    fake.gate.clear()
    stream = await engine.generate("abc", SamplingParams(max_tokens=4, prompt_logprobs=1, output_kind=DELTA), "r")
    finished = asyncio.Event()
    engine.add_observer(lambda output: finished.set() if output.finished else None)
    fake.gate.set()
    await finished.wait()
    output = await anext(stream)
    assert len(output.prompt_logprobs) == 3


async def test_awaiting_the_stream_waits_for_acceptance_not_for_a_token(engine, fake):
    fake.gate.clear()
    stream = await engine.generate("abc", SamplingParams(), "r")
    assert [added[0] for added in fake.added] == ["r"]
    await stream.aclose()


async def test_a_wrong_request_raises_before_the_first_item_and_leaves_the_engine_alone(engine, fake):
    with pytest.raises(InvalidRequestError, match="max_model_len is 64"):
        await engine.generate("x" * 100, SamplingParams(), "long")
    with pytest.raises(InvalidRequestError, match="9999"):
        await anext(engine.generate([9999], SamplingParams(), "ids"))
    assert fake.added == []
    assert engine.is_alive


async def test_a_crash_in_add_request_costs_only_that_request(engine):
    with pytest.raises(RuntimeError, match="add_request is broken"):
        await engine.generate("abc", SamplingParams(), "crash")
    outputs = [output async for output in engine.generate("abc", SamplingParams(max_tokens=1), "r")]
    assert outputs[-1].outputs[0].text == "a"


async def test_a_request_id_in_use_is_refused_and_free_again_afterwards(engine, fake):
    fake.gate.clear()
    stream = await engine.generate("abc", SamplingParams(max_tokens=1), "same")
    with pytest.raises(InvalidRequestError, match="'same' belongs to a request that is still running"):
        engine.generate("abc", SamplingParams(), "same")
    fake.gate.set()
    assert len([output async for output in stream]) == 1
    assert await engine.generate("abc", SamplingParams(max_tokens=1), "same")


async def test_closing_a_stream_aborts_the_request(engine, fake):
    fake.gate.clear()
    stream = await engine.generate("abc", SamplingParams(max_tokens=40), "left")
    await stream.aclose()
    await fake.until(lambda: fake.aborted)
    assert fake.aborted == ["left"]
    assert [output async for output in stream] == []


async def test_breaking_out_of_the_loop_aborts_the_request(engine, fake):
    fake.config = type(fake.config)(model="fake", max_model_len=10**9)  # it must not end before it hears the abort
    async for _ in engine.generate("abc", SamplingParams(max_tokens=10**6, output_kind=DELTA), "left"):
        fake.gate.clear()
        break
    await fake.until(lambda: fake.aborted)
    assert fake.aborted == ["left"]


async def test_cancelling_the_consumer_aborts_the_request(engine, fake):
    fake.gate.clear()

    async def consume():
        async for _ in engine.generate("abc", SamplingParams(max_tokens=40), "cancelled"):
            pass

    task = asyncio.create_task(consume())
    await asyncio.sleep(0)  # let it start
    other = await engine.generate("abc", SamplingParams(), "other")  # accepted after the first: both are in
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await fake.until(lambda: fake.aborted)
    assert fake.aborted == ["cancelled"]
    await other.aclose()


async def test_a_finished_stream_aborts_nothing(engine, fake):
    stream = engine.generate("abc", SamplingParams(max_tokens=2), "done")
    assert [output async for output in stream][-1].finished
    await stream.aclose()
    del stream
    await engine.shutdown()
    assert fake.aborted == []


async def test_abort_by_id_ends_the_stream_with_that_reason(engine, fake):
    fake.gate.clear()
    stream = await engine.generate("abc", SamplingParams(max_tokens=40, output_kind=DELTA), "r")
    await engine.abort("r")
    outputs = [output async for output in stream]
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert outputs[-1].finished


async def test_a_step_that_raises_fails_every_waiting_request(engine, fake):
    fake.gate.clear()
    streams = [await engine.generate("abc", SamplingParams(), f"r{i}") for i in range(3)]
    fake.error = ValueError("device lost")
    for stream in streams:
        with pytest.raises(EngineDeadError, match="ValueError: device lost"):
            await anext(stream)
    assert not engine.is_alive
    assert "device lost" in str(engine.dead_error)
    with pytest.raises(EngineDeadError, match="device lost"):
        engine.generate("abc", SamplingParams(), "late")
    await engine.wait_stopped()
    assert fake.was_shut_down


async def test_shutdown_fails_what_still_waits_and_may_be_repeated():
    fake = FakeEngine(max_model_len=10**9, step_seconds=0.001)
    engine = AsyncEngine(fake)
    stream = await engine.generate("abc", SamplingParams(max_tokens=10**6), "r")
    await anext(stream)
    await engine.shutdown()
    with pytest.raises(EngineDeadError, match="was shut down"):
        await drain(stream)
    await engine.shutdown()
    assert fake.was_shut_down
    assert not engine.is_alive


async def test_the_thread_sleeps_when_idle(engine, fake):
    async for _ in engine.generate("abc", SamplingParams(max_tokens=3), "r"):
        pass
    steps = []
    fake.step = lambda: steps.append(1) or []
    await engine.abort("nobody")
    await engine.abort("nobody")
    await engine.shutdown()
    assert steps == []


async def test_observers_see_the_outputs_of_consumers_that_left(engine, fake):
    seen = []
    finished = asyncio.Event()

    def observe(output):
        seen.append(output)
        if output.finished:
            finished.set()

    engine.add_observer(observe)
    fake.gate.clear()
    stream = await engine.generate("abc", SamplingParams(max_tokens=40), "left")
    await stream.aclose()
    await asyncio.wait_for(finished.wait(), 10)
    assert seen[-1].outputs[0].finish_reason == "abort"


async def test_text_work_goes_to_the_tokenizer(engine, fake):
    assert await engine.encode("hé", False) == [104, 195, 169]
    assert await engine.render_chat([{"role": "user", "content": "x"}], add_generation_prompt=False) == "user:x"
    assert engine.decode([104, 105]) == "hi"
    assert fake.tokenizer.calls[0] == ("encode", "hé", False)


async def test_statistics_are_exact_when_idle(engine):
    async for _ in engine.generate("abc", SamplingParams(max_tokens=5), "r"):
        pass
    await engine.shutdown()
    assert engine.stats()["generation_tokens"] == 5.0
    assert engine.stats()["num_requests_running"] == 0.0


def test_one_engine_serves_one_event_loop_after_another():
    fake = FakeEngine()
    engine = AsyncEngine(fake)

    async def run(request_id):
        return [out async for out in engine.generate("abc", SamplingParams(max_tokens=2), request_id)][-1]

    assert asyncio.run(run("a")).outputs[0].text == "ab"
    assert asyncio.run(run("b")).outputs[0].text == "ab"
    asyncio.run(engine.shutdown())


def test_requests_of_a_closed_event_loop_are_aborted():
    """A loop that closes without closing its streams must not leave their requests running."""
    fake = FakeEngine(max_model_len=10**9, step_seconds=0.001)
    engine = AsyncEngine(fake)
    kept = []

    async def leave_behind():
        params = SamplingParams(max_tokens=10**6, output_kind=DELTA)
        kept.append(await engine.generate("abc", params, "orphan"))
        fake.gate.clear()

    asyncio.run(leave_behind())
    fake.gate.set()
    asyncio.run(fake.until(lambda: fake.aborted))
    assert fake.aborted == ["orphan"]
    asyncio.run(engine.shutdown())


def test_a_loop_that_closes_while_outputs_are_handed_over_costs_nobody_else(monkeypatch, caplog):
    """The way to a closed loop was forgotten when another one came, and the engine thread missed it."""
    mailboxes, loops = Mailboxes(), []

    async def open_one(request_id):
        loops.append(asyncio.get_running_loop())
        mailboxes.open(request_id, is_delta=True)

    asyncio.run(open_one("a"))
    asyncio.run(open_one("b"))
    for loop in loops:
        monkeypatch.setattr(loop, "is_closed", lambda: False)  # as it looked a moment ago
    assert mailboxes.deliver([("a", None), ("b", None)]) == []
    assert caplog.text.count("an event loop closed with 1 outputs on their way to it") == 2


def test_dropping_the_engine_stops_its_thread_and_frees_it():
    fake = FakeEngine()
    engine = AsyncEngine(fake)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    assert fake.was_shut_down


async def test_a_grammar_is_compiled_in_a_thread_of_its_own_before_the_engine_hears_of_the_request(engine, fake):
    form = StructuredOutputsParams(regex="a+")
    stream = engine.generate("abc", SamplingParams(max_tokens=2, structured_outputs=form), "r")
    assert fake.added == []
    await drain(stream)
    ((prepared, thread),) = fake.prepared
    assert prepared == form
    assert thread.startswith("pagedjax-grammar")
    assert len(fake.added) == 1
    fake.prepare = None  # the second time it is known, and waits for nobody's grammar
    await drain(engine.generate("abc", SamplingParams(max_tokens=2, structured_outputs=form), "again"))
    assert len(fake.added) == 2


async def test_a_grammar_that_is_refused_never_reaches_the_engine(engine, fake):
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
    with pytest.raises(InvalidRequestError, match="regex cannot be used"):
        await engine.generate("abc", bad, "r")
    assert fake.added == []
    await drain(engine.generate("abc", SamplingParams(max_tokens=1), "r"))  # its id is free again


async def test_a_request_whose_consumer_leaves_while_its_grammar_compiles_never_starts(engine, fake):
    compiles = threading.Event()
    fake.prepare = lambda sampling_params: compiles.wait(10)
    form = SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(regex="a"))
    await engine.generate("abc", form, "r").aclose()
    compiles.set()
    while True:  # until the id is free again
        try:
            await drain(engine.generate("abc", SamplingParams(max_tokens=1), "r"))
            break
        except InvalidRequestError:
            await asyncio.sleep(0)
    assert [request_id for request_id, *_ in fake.added] == ["r"]


async def test_a_shutdown_while_a_grammar_compiles_fails_the_request(fake):
    engine, compiles = AsyncEngine(fake), threading.Event()
    fake.prepare = lambda sampling_params: compiles.wait(10)
    form = SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(regex="a"))
    streams = [engine.generate("abc", form, f"r{i}") for i in range(5)]  # more than there are threads
    await engine.shutdown()
    compiles.set()
    for stream in streams:
        with pytest.raises(EngineDeadError):
            await drain(stream)
    assert fake.added == []


async def test_the_prefix_cache_is_reset_in_the_engine_thread_and_the_answer_comes_back(engine, fake):
    assert await engine.reset_prefix_cache()
    fake.gate.clear()
    stream = await engine.generate("ab", SamplingParams(max_tokens=3), "r")
    assert not await engine.reset_prefix_cache()
    assert await engine.reset_prefix_cache(reset_running_requests=True)
    assert fake.threads == {"pagedjax-engine"}
    fake.gate.set()
    await drain(stream)


async def test_a_question_that_fails_says_why(engine, fake, caplog):
    """Whoever asked waited for seconds, and heard of a deadline."""
    fake.inspect = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        await engine.inspect()
    assert "inspect of the engine failed" in caplog.text
    assert engine.is_alive


async def test_a_question_hears_that_the_engine_has_stopped(engine, fake):
    """It waited for seconds, and said nothing of the engine's end."""
    is_stepping, goes_on = threading.Event(), threading.Event()

    def step():
        is_stepping.set()
        goes_on.wait(60)
        raise ValueError("device lost")

    fake.step = step
    stream = await engine.generate("abc", SamplingParams(), "r")
    await asyncio.to_thread(is_stepping.wait, 60)
    question = asyncio.create_task(engine.inspect())
    await asyncio.sleep(0)  # let it ask
    goes_on.set()
    with pytest.raises(EngineDeadError, match="device lost"):
        await question
    with pytest.raises(EngineDeadError, match="device lost"):
        await drain(stream)


async def test_a_dead_engine_resets_nothing(engine):
    await engine.shutdown()
    with pytest.raises(EngineDeadError):
        await engine.reset_prefix_cache()
