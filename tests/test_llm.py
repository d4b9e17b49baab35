"""The offline interface over the fake model: overlapping calls, interrupts, notebook cells, wrong arguments."""

import _thread
import gc
import signal
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pagedjax.llm
from pagedjax import LLM, EngineDeadError, InvalidRequestError, SamplingParams, interrupts
from tests.fakes import continuation, fake_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def make_llm(monkeypatch, engine):
    monkeypatch.setattr(pagedjax.llm, "LLMEngine", lambda config, **_: engine)
    return LLM("fake")


@pytest.fixture(scope="module")
def engine():
    return fake_engine()


@pytest.fixture
def llm(monkeypatch, engine):
    yield make_llm(monkeypatch, engine)
    assert not engine.unfinished_request_ids()
    monkeypatch.undo()
    engine.step()  # reads what was in flight and frees the blocks
    assert engine.stats()["num_blocks_used"] == 0


def tokens(outputs):
    return [token for output in outputs for token in output.outputs[0].token_ids]


def test_two_streams_read_in_turn_get_all_their_tokens(llm):
    """One stream's steps dropped the other's outputs, which then waited for ever."""
    prompts = [[1, 2, 3], [4, 5]]
    got = list(zip(*(llm.stream(prompt, GREEDY) for prompt in prompts), strict=True))
    assert [tokens(one) for one in zip(*got, strict=True)] == [continuation(prompt, 12) for prompt in prompts]


def test_a_batch_within_a_stream_leaves_the_stream_its_tokens(llm):
    got = []
    for output in llm.stream([1, 2, 3], GREEDY):
        got.append(output)
        if len(got) == 2:
            inner = llm.generate([[4, 5]], GREEDY, use_tqdm=False)
    assert tokens(got) == continuation([1, 2, 3], 12)
    assert tokens(inner) == continuation([4, 5], 12)


def test_threads_may_generate_at_the_same_time(llm):
    """Two threads stepped one engine at once."""
    results = {}

    def work(first):
        outs = llm.generate([[first, i] for i in range(5)], GREEDY, use_tqdm=False)
        results[first] = [out.outputs[0].token_ids for out in outs]

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {first: [continuation([first, i], 12) for i in range(5)] for first in range(4)}


def test_a_stream_that_the_garbage_collector_finds_during_a_step_is_ended(llm, engine, monkeypatch):
    """It stepped the engine within the step; later, what came of it until it ended was kept for ever."""
    held = [llm.stream([7], GREEDY)]
    next(held[0])
    held[0] = [held[0], held]  # a cycle: only the collector can end it
    step = engine.step

    def step_with_collection():
        if held:
            del held[:]
            gc.collect()
        return step()

    monkeypatch.setattr(engine, "step", step_with_collection)
    assert tokens(llm.generate([[1, 2]], GREEDY, use_tqdm=False)) == continuation([1, 2], 12)
    assert not llm._shared._arrived


def test_a_stream_that_the_garbage_collector_finds_while_a_request_is_added_is_ended(llm, engine, monkeypatch):
    """It waited for the lock that its own thread held."""
    held = [llm.stream([7], GREEDY)]
    next(held[0])
    held[0] = [held[0], held]
    add_request = engine.add_request

    def add_with_collection(*args, **options):
        del held[:]
        assert llm._shared._lock.locked()
        gc.collect()
        add_request(*args, **options)

    monkeypatch.setattr(engine, "add_request", add_with_collection)
    assert tokens(llm.generate([[1, 2]], GREEDY, use_tqdm=False)) == continuation([1, 2], 12)
    assert not llm._shared._arrived


def test_prefixes_are_kept_and_dropped_between_steps(llm, engine, monkeypatch):
    """Another thread's step may have been in the middle of its plan."""
    has_lock = []

    def noted(method):
        def call(*args, **options):
            has_lock.append(llm._shared._lock.locked())
            return method(*args, **options)

        return call

    for name in ("pin_prefix", "unpin_prefix", "reset_prefix_cache"):
        monkeypatch.setattr(engine, name, noted(getattr(engine, name)))
    prefix = list(range(20))
    assert (llm.warm_prefix(prefix), llm.reset_prefix_cache()) == (16, False)
    assert (llm.unpin(prefix), llm.reset_prefix_cache()) == (True, True)
    assert has_lock == [True] * 4


@pytest.fixture
def _heard():
    """Interrupts are heard, also where whoever began the tests in the background has them ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_heard")
def test_an_interrupt_ends_the_call_after_the_step_and_leaves_the_engine_usable(llm, engine, monkeypatch):
    step, num_steps = engine.step, []

    def interrupted_step():
        if len(num_steps) == 3:
            _thread.interrupt_main()
        num_steps.append(1)
        return step()

    monkeypatch.setattr(engine, "step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2]], GREEDY, use_tqdm=False)
    assert len(num_steps) > 3
    assert not engine.unfinished_request_ids()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert tokens(llm.generate([[1, 2]], GREEDY, use_tqdm=False)) == continuation([1, 2], 12)


@pytest.mark.usefixtures("_heard")
def test_a_second_interrupt_waits_for_the_step_too_unless_the_step_does_not_end(llm, engine, monkeypatch):
    """Two quick ones tore a step in half, and every later call failed with "Array has been deleted"."""
    step, num_went_on = engine.step, 0

    def interrupted_step():
        nonlocal num_went_on
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        num_went_on += 1
        return step()

    monkeypatch.setattr(engine, "step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2]], GREEDY, use_tqdm=False)
    assert num_went_on > 0
    monkeypatch.setattr(engine, "step", step)
    assert tokens(llm.generate([[1, 2]], GREEDY, use_tqdm=False)) == continuation([1, 2], 12)
    monkeypatch.setattr(interrupts, "PATIENCE", -1.0)
    num_held_back = 0

    def interrupted_for_long():
        nonlocal num_held_back
        with interrupts.InterruptAfterwards():
            while num_held_back < 3:
                signal.raise_signal(signal.SIGINT)
                num_held_back += 1

    with pytest.raises(KeyboardInterrupt):
        interrupted_for_long()
    assert num_held_back == 1


def test_a_call_works_inside_a_callers_debugging_contexts(monkeypatch):
    """Host arrays for executables are transfers, and executables are jitted: it failed in the middle of a step."""
    for context in (jax.transfer_guard("disallow"), jax.disable_jit()):
        llm = make_llm(monkeypatch, fake_engine())
        with context:
            assert tokens(llm.generate([[1, 2]], GREEDY, use_tqdm=False)) == continuation([1, 2], 12)
        llm.shutdown()


@pytest.mark.parametrize("failing", ["_fork_blocks", "_forward"])
def test_an_engine_whose_step_failed_says_so_to_all_and_stays_closed(failing, monkeypatch):
    """Prompts that had not been computed counted as cached, so that later calls gave other tokens; a stream hung."""
    llm = make_llm(monkeypatch, fake_engine())
    stream = llm.stream([7, 8, 9], GREEDY)
    next(stream)

    def fail(*arguments):
        raise MemoryError("no room")

    monkeypatch.setattr(llm.engine._runner, failing, fail)
    with pytest.raises(MemoryError):
        llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    for call in (lambda: list(stream), lambda: llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)):
        with pytest.raises(EngineDeadError, match=r"a step ended in MemoryError: no room; make a new one"):
            call()
    assert not llm.engine.has_unfinished_requests()
    llm.shutdown()


def test_a_callers_own_handler_hears_the_interrupt_and_an_ignored_one_stays_ignored(llm, engine, monkeypatch):
    """Both became a KeyboardInterrupt."""
    step, heard = engine.step, []

    def interrupted_step():
        _thread.interrupt_main()
        return step()

    monkeypatch.setattr(engine, "step", interrupted_step)
    old = signal.getsignal(signal.SIGINT)
    try:
        for handler in (lambda number, frame: heard.append(number), signal.SIG_IGN):
            signal.signal(signal.SIGINT, handler)
            assert len(tokens(llm.generate([[1]], GREEDY, use_tqdm=False))) == 12
    finally:
        signal.signal(signal.SIGINT, old)
    assert set(heard) == {signal.SIGINT}


def test_a_call_does_not_end_a_request_that_was_added_by_hand(llm, engine):
    """The ids of `generate` began at "0", which a caller uses too; the call failed and aborted the other request."""
    engine.add_request("0", [9], GREEDY)
    assert tokens(llm.generate([[1, 2]], GREEDY, use_tqdm=False)) == continuation([1, 2], 12)
    assert "0" not in engine.unfinished_request_ids()


def test_a_stream_whose_outputs_somebody_else_took_ends(llm, engine):
    stream = llm.stream([1, 2], GREEDY)
    next(stream)
    while engine.has_unfinished_requests():
        engine.step()
    with pytest.raises(EngineDeadError, match="another caller"):
        list(stream)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(5), "prompt is 5"),
        (lambda llm: llm.generate([None]), "prompt is None"),
        (lambda llm: llm.generate(jnp.int32(5)), r"prompt is np.int32\(5\); it must be a string or a list"),
        (lambda llm: llm.generate(jnp.array([1.0, 2.0])), r"prompt is np.float"),
        (lambda llm: llm.generate(jnp.array([True])), r"prompt is np.True_"),
        (lambda llm: llm.generate([jnp.array([[1, 2]])]), r"prompt holds token id \[1, 2\]"),
        (lambda llm: llm.generate(["a"], GREEDY, priority=1), "priority is 1; give one for each prompt"),
        (lambda llm: llm.generate({"prompt": "a"}), "prompt is {'prompt': 'a'}"),
        (lambda llm: llm.generate(), "either prompts or prompt_token_ids"),
        (lambda llm: llm.generate("a", {"temperature": 0}), "sampling_params holds {'temperature': 0}"),
        (lambda llm: llm.generate(["a", "b"], [GREEDY]), "1 sampling parameters for 2 prompts"),
        (lambda llm: llm.generate(["a", "b"], GREEDY, priority=[1]), "1 priorities for 2 prompts"),
        (lambda llm: llm.generate(["a"], GREEDY, priority=[1]), "first come first served"),
        (lambda llm: llm.generate(["good", ""], GREEDY), "prompt is empty"),
        (lambda llm: llm.chat([]), "at least one message"),
        (lambda llm: llm.chat("hello"), "must be a list"),
        (lambda llm: llm.chat({"role": "user"}), r"messages is \{'role': 'user'\}; it must be a list of messages"),
        (lambda llm: list(llm.stream("a", chat_template_kwargs={"x": 1})), "needs messages"),
    ],
)
def test_a_wrong_argument_is_refused(llm, call, message):
    with pytest.raises(InvalidRequestError, match=message):
        call(llm)


@pytest.mark.parametrize("option", ["temperature", "enable_thinking"])
def test_an_unknown_option_of_a_chat_is_an_error(llm, option):
    """It went to the template as a variable that no template has, and was ignored."""
    with pytest.raises(TypeError, match=option):
        llm.chat([{"role": "user", "content": "a"}], **{option: 0})


def test_variables_of_the_template_go_in_by_their_own_argument(llm):
    out = llm.chat(
        [{"role": "user", "content": "a"}], GREEDY, chat_template="{{ word }}", chat_template_kwargs={"word": "hello"}
    )
    assert out[0].prompt_token_ids == llm.engine.tokenizer.encode("hello")


@pytest.mark.parametrize("array", [np.array, jnp.array])
def test_arrays_are_prompts(llm, array):
    """JAX's were refused, "iteration over a 0-d array" or "prompt holds token id Array(1)"."""
    ids = array([1, 2])
    for prompts in (ids, array([[1, 2]]), [ids], list(ids), ([1, 2],), iter([ids])):
        assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == continuation([1, 2], 12)
    assert tokens(llm.stream(ids, GREEDY)) == continuation([1, 2], 12)
    several = llm.generate(array([[1, 2], [3, 4]]), GREEDY, use_tqdm=False, priority=array([0, 0]))
    assert tokens(several) == continuation([1, 2], 12) + continuation([3, 4], 12)


def test_a_prefix_may_come_from_an_iterator(llm):
    """It was computed, and empty when it was to be kept."""
    prefix = list(range(30, 50))
    assert llm.warm_prefix(iter(prefix)) == 16
    assert llm.unpin(iter(prefix))


def run_cell(shell, code, **names):
    """Run code as a notebook does; returns the cell's variables."""
    cell = {"get_ipython": lambda: shell, "LLM": LLM, **names}
    try:
        exec(compile(code, "cell-1", "exec"), cell)
    finally:
        shell.execution_count += 1
    return cell


def test_running_a_cell_again_closes_what_it_made_and_nothing_of_the_same_run(monkeypatch):
    """A second LLM made on the same line, in a loop, closed the first one."""
    open_engines = []

    class Engine:
        def __init__(self, config, **_):
            open_engines.append(self)

        def shutdown(self):
            if self in open_engines:  # harmless when repeated, as the real one
                open_engines.remove(self)

    monkeypatch.setattr(pagedjax.llm, "LLMEngine", Engine)
    shell = SimpleNamespace(execution_count=1)
    first = run_cell(shell, "llms = [LLM('a') for _ in range(2)]")
    assert len(open_engines) == 2
    second = run_cell(shell, "llms = [LLM('a') for _ in range(2)]")
    assert [llm.engine for llm in second["llms"]] == open_engines
    assert all(llm.engine not in open_engines for llm in first["llms"])


def test_a_cell_that_was_edited_is_known_by_its_id(monkeypatch):
    closed = []
    monkeypatch.setattr(
        pagedjax.llm, "LLMEngine", lambda config, **_: SimpleNamespace(shutdown=lambda: closed.append(config.model))
    )
    shell = SimpleNamespace(execution_count=1, get_parent=lambda: {"metadata": {"cellId": "7"}})
    kept = [run_cell(shell, f"llm = LLM('{name}')") for name in "ab"]
    assert closed == ["a"]
    del kept


def test_a_cell_whose_engine_did_not_start_can_be_run_again(monkeypatch):
    """The half-made object, which a traceback keeps alive, was shut down and had no engine."""
    shell, kept = SimpleNamespace(execution_count=1), []

    def fail(config, **_):
        raise RuntimeError("no memory")

    for _ in range(2):
        monkeypatch.setattr(pagedjax.llm, "LLMEngine", fail)
        with pytest.raises(RuntimeError, match="no memory") as caught:
            run_cell(shell, "llm = LLM('a')")
        kept.append(caught)


def test_after_shutdown_a_call_says_so(monkeypatch):
    with make_llm(monkeypatch, fake_engine()) as llm:
        stream = llm.stream([1, 2], GREEDY)
        next(stream)
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="was shut down"):
        list(stream)
    with pytest.raises(EngineDeadError, match="was shut down"):
        llm.generate("a")
