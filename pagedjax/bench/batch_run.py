"""One run of a batch of requests that begin together, timed; and one with the profiler on while they decode."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import jax

from pagedjax.bench.decode_window import DecodeWindow, Decoding
from pagedjax.bench.trace import idle_share
from pagedjax.engine import LLMEngine, StepOutput
from pagedjax.sampling_params import SamplingParams

NUM_TRACED_STEPS = 10


@dataclass(frozen=True)
class BatchTiming:
    """One run of a batch, in seconds. `decoding` is None where no step decoded all requests and nothing else."""

    began: float
    latency: float
    decoding: Decoding | None


def run_batch(
    engine: LLMEngine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    on_step: Callable[[StepOutput], None] | None = None,
) -> BatchTiming:
    """Add all prompts, step until they are done, and check that every token came."""
    window = DecodeWindow(engine, len(prompts))
    num_generated = 0
    began = perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add_request(f"latency-{i}", prompt, params)
    while engine.has_unfinished_requests():
        step_began = perf_counter()
        output = engine.step()
        step_ended = perf_counter()
        window.observe(output, began=step_began, ended=step_ended)
        num_generated += sum(len(one.outputs[0].token_ids) for one in output if one.finished)
        if on_step is not None:
            on_step(output)
    latency = perf_counter() - began
    expected = len(prompts) * (params.max_tokens or 0)
    assert num_generated == expected, f"{num_generated} tokens came where {expected} were asked for"
    return BatchTiming(began, latency, window.decoding())


def traced_idle_share(
    engine: LLMEngine, prompts: Sequence[list[int]], params: SamplingParams, directory: Path
) -> float | None:
    """Run a batch once more with the profiler on for a few steps in the middle of decoding."""
    num_decode_steps = 0
    first = (params.max_tokens or 0) // 2
    is_tracing = False

    def on_step(output: StepOutput) -> None:
        nonlocal num_decode_steps, is_tracing
        if output.plan.num_tokens - output.plan.num_draft_tokens != len(prompts):
            return
        num_decode_steps += 1
        if num_decode_steps == first:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # it would slow the host down, and so leave the device idle
            jax.profiler.start_trace(str(directory), profiler_options=options)
            is_tracing = True
        elif is_tracing and num_decode_steps == first + NUM_TRACED_STEPS:
            jax.profiler.stop_trace()
            is_tracing = False

    run_batch(engine, prompts, params, on_step)
    if is_tracing:
        jax.profiler.stop_trace()
    return idle_share(directory)
