"""The synchronous engine: add requests, step, get outputs. One owner for each thing that changes.

    scheduler  queues and blocks          runner   device arrays and executables
    input      checks and tokenizes       running  text of each request

`step` dispatches iteration N+1 before it reads iteration N, so that the device always has work. Where rows are under a
grammar, only the forward pass of N+1 is dispatched before N is read: what N+1 may sample depends on N's tokens. Not
thread-safe: one thread drives an engine (`async_engine` gives it one).
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from flax import nnx

from pagedjax.config import EngineConfig, resolve
from pagedjax.device import check_devices, device_memory
from pagedjax.engine_view import EngineView
from pagedjax.errors import CheckpointError, ConfigError, EngineDeadError, InvalidRequestError
from pagedjax.execution.compilation import cache_directory, jax_cache_in
from pagedjax.execution.in_flight import InFlightStep, StepResult
from pagedjax.execution.model_runner import ModelRunner
from pagedjax.execution.phase_times import PhaseTimes
from pagedjax.execution.step import TokenLogprobs
from pagedjax.iteration_stats import Histogram, IterationStats
from pagedjax.length_hint import LengthHint
from pagedjax.loading import load_model
from pagedjax.loading.generation_config import generation_defaults
from pagedjax.loading.weights import LoadedModel
from pagedjax.models.config import ModelConfig
from pagedjax.outputs import RequestOutput
from pagedjax.request_input import RequestInput
from pagedjax.request_output import RunningCompletion, RunningRequest, TokenScores, scores_of
from pagedjax.sampling_params import SamplingParams
from pagedjax.scheduling.fair_share import Client
from pagedjax.scheduling.pacing import Pacing
from pagedjax.scheduling.preemption import PreemptionCosts
from pagedjax.scheduling.request import Request, RequestStatus
from pagedjax.scheduling.scheduler import Scheduler
from pagedjax.scheduling.step_plan import SchedulerOutput
from pagedjax.speculation.load_draft import load_draft
from pagedjax.speculation.plan import Speculation, SpeculationStep
from pagedjax.speculation.vocabulary import check_same_vocabulary
from pagedjax.text.chat import load_chat_template
from pagedjax.text.structured_output import Grammar
from pagedjax.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

LOOKAHEAD = 1  # steps in flight while the host works on the one before


@dataclass(frozen=True)
class ScheduledView:
    """One request's share of an iteration, for those who watch."""

    request_id: str
    num_scheduled_tokens: int
    context_len: int
    block_table: tuple[int, ...]


@dataclass(frozen=True)
class StepOutput:
    """What one `step` scheduled (iteration N+1) and the outputs of what it read (iteration N), it iterates over."""

    outputs: list[RequestOutput]
    plan: SchedulerOutput = field(repr=False)

    @property
    def scheduled(self) -> list[ScheduledView]:
        """Who computes how much of what in this iteration, with block tables; look before the next step."""
        return [
            ScheduledView(
                item.request.request_id, item.num_scheduled_tokens, item.context_len, tuple(item.request.block_ids)
            )
            for item in self.plan.scheduled
        ]

    @property
    def preempted(self) -> list[str]:
        """Requests that lost their blocks in this iteration."""
        return [request.request_id for request in self.plan.preempted]

    def __iter__(self) -> Iterator[RequestOutput]:
        return iter(self.outputs)

    def __len__(self) -> int:
        return len(self.outputs)


@contextmanager
def own_settings() -> Iterator[None]:
    """Allow what a caller's debugging context may forbid: host arrays for executables, and executables."""
    config = jax.config
    ways = ("host_to_device", "device_to_host", "device_to_device")
    guards = [getattr(config, f"jax_transfer_guard_{way}") for way in ways]
    if not (config.jax_disable_jit or any(guards)):  # there is none, and to enter our own takes several microseconds
        yield
        return
    with jax.transfer_guard("allow"), jax.disable_jit(False):
        yield


class LLMEngine:
    """Serves requests of one model on one device.

    Args:
      config: the options.
      params: the model's parameters as a pytree, which is copied, in place of a checkpoint; needs `model_config`.
      model_config: the model's shape, where it is not read from a checkpoint.
      loaded, tokenizer, draft: a model, its tokenizer and a draft model that exist already, in place of loading them.
      show_progress: progress bars for loading and compiling, on stderr.

    Attributes:
      start_up_seconds: how long each phase of the construction took, in order; the phases add up to all of it.

    Raises:
      ConfigError: the options, the checkpoint or the memory do not allow it.
    """

    @own_settings()
    def __init__(
        self,
        config: EngineConfig,
        *,
        params: Any = None,
        model_config: ModelConfig | None = None,
        loaded: LoadedModel | None = None,
        tokenizer: Tokenizer | None = None,
        draft: LoadedModel | None = None,
        show_progress: bool = False,
    ):
        phases = PhaseTimes()
        platform = check_devices()
        phases.end("starting the device")
        has_checkpoint = params is None and model_config is None and tokenizer is None
        # these three before the weights: a wrong path need not wait for them
        load_chat_template(config.chat_template)
        directory = cache_directory(config.compilation_cache_dir)
        self.default_sampling_params = generation_defaults(config) if has_checkpoint else {}
        loaded = loaded or load_model(config, params=params, model_config=model_config)
        jax.block_until_ready(nnx.state(loaded.model))
        phases.end("loading weights")
        self.config = resolve(config, max_position_embeddings=loaded.config.max_position_embeddings, platform=platform)
        self.model_config = loaded.config
        self.tokenizer = tokenizer or load_tokenizer(self.config, has_checkpoint=has_checkpoint)
        phases.end("loading the tokenizer")
        if draft is not None:
            if self.config.speculation is None:
                raise ConfigError("a draft model is given, but speculative_config is not; pass both or neither")
            check_same_vocabulary(loaded.config, draft.config)
        elif (draft := load_draft(self.config, loaded.config, self.tokenizer)) is not None:
            phases.end("loading the draft model")
        with jax_cache_in(directory):
            self._runner = ModelRunner(
                loaded, self.config, draft=draft, cache_directory=directory, phases=phases, show_progress=show_progress
            )
        if platform == "gpu":  # a CPU has nothing left to prepare
            self._runner.warm_up()
            phases.end("warm-up")
        max_model_len = self._runner.ledger.max_model_len
        self.config = replace(self.config, max_model_len=max_model_len, auto_concurrency=1)  # AUTO has been resolved
        self._input = RequestInput(self.config, loaded.config, self.tokenizer, self._eos_token_ids())
        target_itl_ms = self.config.target_itl_ms
        self._scheduler = Scheduler(
            num_blocks=self._runner.num_blocks,
            block_size=self.config.block_size,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self._runner.buckets.tokens[-1],
            max_model_len=max_model_len,
            enable_prefix_caching=self.config.enable_prefix_caching,
            policy=self.config.scheduling_policy,
            watermark=self.config.watermark,
            num_host_chunks=self._runner.host.plan.num_chunks,
            chunk_size=self._runner.host.plan.chunk_size,
            preemption_costs=PreemptionCosts(self.config.preemption_mode, self._runner.host.speed),
            pacing=Pacing(
                delay_factor=self.config.scheduler_delay_factor,
                target_seconds=None if target_itl_ms is None else target_itl_ms / 1000,
                token_buckets=self._runner.buckets.tokens,
            ),
        )
        self._speculation = None
        if self.config.speculation is not None:
            self._speculation = Speculation(
                self.config.speculation, self._runner.num_missing, max_num_read=self._runner.max_num_read
            )
        self._closed_because: str | None = None
        self._in_flight: deque[tuple[InFlightStep, float]] = deque()  # with the time of its dispatch
        ledger = self._runner.ledger
        self._iterations = IterationStats(
            weight_bytes=ledger.weights, kv_bytes_per_token=ledger.block / self.config.block_size
        )
        self._length_hint = LengthHint(max_model_len)
        self._running: dict[str, RunningRequest] = {}
        self._completions: dict[str, tuple[RunningRequest, RunningCompletion]] = {}  # by child request id
        self._due: dict[str, None] = {}  # requests with news for the next output
        self._counts = {"prompt_tokens": 0, "prompt_tokens_cached": 0, "generation_tokens": 0}
        self.start_up_seconds = phases.seconds
        for line in [*self.start_up_lines(), phases.line()]:
            logger.info("%s", line)

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        client: Client = ("", ""),
        arrival_time: float | None = None,
        timeout: float | None = None,
    ) -> None:
        """Queue a request. `prompt` is text or token ids; `arrival_time` is on `time.monotonic()`.

        `client` is a key and a user: keys have equal shares of the engine, and so have the users of one key. After
        `timeout` seconds from its arrival an unfinished request ends with finish_reason "timeout" and what it has.

        Raises:
          InvalidRequestError: it can never run; the engine is untouched.
          EngineDeadError: the engine was shut down.
        """
        self._check_open()
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        params = sampling_params if sampling_params is not None else self.default_params()
        new = self._input.build(
            request_id, prompt, params, arrival_time=arrival_time, priority=priority, cache_salt=cache_salt,
            client=client, timeout=timeout,
        )  # fmt: skip
        for taken in (request_id, *(child.request_id for child in new.children)):  # n > 1 has an id for each child
            if taken in self._running or taken in self._completions:
                raise InvalidRequestError(f"request_id {taken!r:.80} is in use; choose another", param="request_id")
        running = RunningRequest.start(new, self.tokenizer, arrival_time=arrival_time)
        self._scheduler.add_request(new.children[0], new.children[1:])
        self._running[request_id] = running
        for child, completion in running.followed():
            self._completions[child.request_id] = (running, completion)

    def step(self) -> StepOutput:
        """Run one iteration: schedule and dispatch the next step, then read the one before.

        An exception in the middle of it, an interrupt too, leaves requests and device at odds: the engine is closed.

        Raises:
          EngineDeadError: the engine was shut down, or an earlier step failed.
        """
        self._check_open()
        try:
            with own_settings():
                return self._step()
        except BaseException as error:
            self._close(f"was closed when a step ended in {type(error).__name__}: {error}")
            raise

    def _step(self) -> StepOutput:
        began, waited = time.perf_counter(), self._runner.times.wait
        if self._speculation is not None:
            self._speculation.plan(self._scheduler.running, has_prompts=self._scheduler.expects_prompts)
        output = self._scheduler.schedule(time.monotonic(), self._runner.host.progress())
        for request in output.timed_out:
            self._time_out(request)
        if output.copies:
            self._runner.copy_blocks(output.copies)
        if output.scheduled:
            self._note_scheduled(output)
            self._dispatch(output)
        elif not (self._in_flight or output.copies):
            self._runner.host.wait()
        while len(self._in_flight) > LOOKAHEAD:
            self._finish(*self._in_flight.popleft())
        if self._in_flight and self._in_flight[-1][0].awaits_masks:
            step, dispatched_time = self._in_flight.pop()
            self._in_flight.append((self._sample(step), dispatched_time))
        if not (self.config.async_scheduling and output.scheduled):
            while self._in_flight:
                self._finish(*self._in_flight.popleft())
        outputs = self._outputs()
        self._iterations.note_host(time.perf_counter() - began - (self._runner.times.wait - waited))
        return StepOutput(outputs, output)

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests early; unknown or finished ids are ignored. Their last output comes with the next step."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            running = self._running.get(request_id)
            if running is None:
                continue
            for completion in running.completions:
                if not completion.request.is_finished:
                    self._scheduler.abort(completion.request.request_id)
                    completion.flush()
            self._due[request_id] = None

    def is_prepared(self, sampling_params: SamplingParams) -> bool:
        """Whether `add_request` need not wait for a grammar to be compiled; may be called from any thread."""
        form = sampling_params.structured_outputs
        return form is None or self._input.grammar_compiler.is_compiled(form)

    def prepare(self, sampling_params: SamplingParams) -> None:
        """Compile a grammar that `add_request` would have to wait for; may be called from any thread.

        Raises:
          InvalidRequestError: it cannot be compiled.
        """
        if sampling_params.structured_outputs is not None:
            self._input.grammar_compiler.compile(sampling_params.structured_outputs)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do."""
        has_work = bool(self._running or self._in_flight or self._scheduler.has_work())
        return has_work and self._closed_because is None

    def unfinished_request_ids(self) -> set[str]:
        """Ids of requests whose last output has not been handed out."""
        return set(self._running)

    def stats(self) -> dict[str, float]:
        """Counters and gauges now; keys are vLLM's metric names without the prefix."""
        return {
            **self._scheduler.stats(),
            **self._runner.host.stats(),
            **self._counts,
            **self._iterations.counters(),
            **device_memory(),
            **({} if self._speculation is None else self._speculation.stats()),
            "num_compilations_after_ready": self._runner.num_compilations_after_ready,
        }

    def histograms(self) -> dict[str, Histogram]:
        """Distributions since the start, over iterations; keys are metric names without the prefix."""
        return self._iterations.histograms()

    def inspect(self) -> EngineView:
        """Requests, blocks and memory now."""
        return EngineView(
            requests=tuple(running.view() for running in self._running.values()),
            num_block_refs=tuple(self._scheduler.pool.num_refs()),
            cached_block_ids=tuple(self._scheduler.prefix_cache.block_ids()),
            ledger=tuple(self._runner.ledger.rows()),
        )

    def speculation_trace(self, *, clear: bool = False) -> list[SpeculationStep]:
        """Return what the latest steps proposed and accepted, request by request; empty without speculation.

        Args:
          clear: begin a new trace.
        """
        return [] if self._speculation is None else self._speculation.trace(clear=clear)

    def default_params(self) -> SamplingParams:
        """Sampling parameters of a request that names none: the model's own defaults."""
        return SamplingParams(**self.default_sampling_params)

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks. False, with the reason in the log, while some are in use by requests or pinned.

        Args:
          reset_running_requests: preempt running requests, which compute all their tokens again.
        """
        is_reset = self._scheduler.reset_prefix_cache(reset_running_requests=reset_running_requests)
        if not is_reset:
            stats = self._scheduler.stats()
            logger.warning(
                "prefix cache not reset: %d blocks are in use, %d requests run and %d blocks are pinned; "
                "let the requests end or pass reset_running_requests=True, and unpin prefixes",
                stats["num_blocks_used"], stats["num_requests_running"], stats["num_blocks_pinned"],
            )  # fmt: skip
        return is_reset

    def update_weights(self, params: Any) -> None:
        """Replace the target model's weights; nothing is compiled again, and nothing is cached of the old ones.

        Args:
          params: as for the constructor: an `nnx.State` of the model or its nested dict, or a flat dict of Hugging Face
            names, of the shapes of the old weights. They are copied to the engine's device, so that they may be
            sharded over a mesh, and that a training step may donate them; the copy and the old weights are both in
            device memory for a moment.

        Raises:
          CheckpointError: they do not fit the model, or are None; the old ones stay.
          ConfigError: requests are unfinished, or prefixes pinned, which were computed with the old ones.
        """
        self._check_open()
        if params is None:
            raise CheckpointError("params is None; pass the weights")
        if self._running or self._scheduler.pinned.num_blocks:
            raise ConfigError(
                f"the weights cannot change under {len(self._running)} unfinished requests and "
                f"{self._scheduler.pinned.num_blocks} pinned blocks; let the requests end and unpin prefixes"
            )
        with own_settings():
            loaded = load_model(self.config, params=params, model_config=self.model_config, device=self._runner.device)
            while self.has_unfinished_requests():
                self.step()  # nothing but what the last requests left in flight
            self._runner.replace_weights(loaded.model)
        self._scheduler.reset_prefix_cache()
        if self._speculation is not None:
            self._speculation.reset()

    def pin_prefix(self, prompt: str | Sequence[int], *, cache_salt: str | None = None) -> int:
        """Keep the full blocks of a prompt that was computed, whatever else needs room; return their tokens.

        Raises:
          InvalidRequestError: they are not cached, are none, or would leave less than a request of max_model_len.
        """
        return self._scheduler.pinned.pin(self._prefix(prompt, cache_salt))

    def unpin_prefix(self, prompt: str | Sequence[int], *, cache_salt: str | None = None) -> bool:
        """Let go of a pinned prefix, which stays cached until its blocks are needed; False if it was not pinned."""
        return self._scheduler.pinned.unpin(self._prefix(prompt, cache_salt))

    def shutdown(self) -> None:
        """Drop every request and free the device memory; harmless when repeated. The engine is of no use afterwards."""
        if self._closed_because is None:
            self.abort(list(self._running))
            while self._in_flight:
                self._runner.read(self._in_flight.popleft()[0])
            self._scheduler.schedule()  # frees the blocks
            self._close("was shut down")

    def check_integrity(self) -> None:
        """Assert that free, used and cached blocks add up."""
        self._scheduler.check_integrity()

    def start_up_lines(self) -> list[str]:
        """What is logged when the engine is ready, beside the times: ledger, kernels and executables."""
        runner = self._runner
        return [
            *runner.ledger.lines(),
            *runner.host.plan.lines(runner.host.speed, self.config.block_size),
            *runner.kernel_lines,
            f"{runner.num_executables} executables, {runner.num_full_model_executables} of the whole model",
        ]

    @property
    def host_times(self) -> Any:
        """Seconds of host work per phase, summed over iterations (`HostTimes`)."""
        return self._runner.times

    def _check_open(self) -> None:
        if self._closed_because is not None:
            raise EngineDeadError(f"the engine {self._closed_because}; make a new one")

    def _close(self, reason: str) -> None:
        self._closed_because = reason
        for held in (self._running, self._completions, self._due, self._in_flight):
            held.clear()
        self._runner.close()

    def _prefix(self, prompt: str | Sequence[int], cache_salt: str | None) -> Request:
        params = SamplingParams(max_tokens=1, seed=0)
        return self._input.build("prefix", prompt, params, arrival_time=0.0, cache_salt=cache_salt).children[0]

    def _eos_token_ids(self) -> frozenset[int]:
        ids = set(self.model_config.eos_token_ids) | set(self.default_sampling_params.pop("eos_token_ids", ()))
        if self.tokenizer is not None:
            ids |= set(self.tokenizer.eos_token_ids)
        return frozenset(ids)

    def _note_scheduled(self, output: SchedulerOutput) -> None:
        now = time.monotonic()
        for item in output.scheduled:
            if item.is_new_row:
                running, _ = self._completions[item.request.request_id]
                if running.metrics.first_scheduled_time is None:
                    running.metrics.first_scheduled_time = now
                    self._counts["prompt_tokens"] += item.request.num_prompt_tokens
                    self._counts["prompt_tokens_cached"] += item.request.num_cached_tokens

    def _sample(self, step: InFlightStep) -> InFlightStep:
        """Sample a step with rows under a grammar, whose earlier tokens are all known by now."""
        items = [item for item in step.sampling if not item.request.is_finished]
        found = [(item, *self._completions[item.request.request_id]) for item in items]
        found = [(item, running, one.grammar) for item, running, one in found if one.grammar is not None]
        grammars = [grammar for _, _, grammar in found]
        masks = self._input.grammar_compiler.masks(grammars)
        draft_masks = None
        if step.drafts is not None:
            drafts = self._runner.read_drafts(step)
            draft_masks = self._input.grammar_compiler.masks_along(
                grammars,
                [drafts.get(item.row, ()) for item, _, _ in found],
                num_masks=self._runner.buckets.max_draft_tokens,
            )
        for item, running, grammar in found:
            if grammar.error is not None:
                self._fail(item.request, running, grammar.error)
                self._due[running.new.request_id] = None
        return self._runner.sample(step, [item for item, _, _ in found], masks, draft_masks)

    def _fail(self, request: Request, running: RunningRequest, reason: str) -> None:
        running.error = reason
        self._scheduler.finish(request, RequestStatus.FINISHED_ERROR)

    def _time_out(self, request: Request) -> None:
        """Report a request that the scheduler has ended."""
        running, completion = self._completions[request.request_id]
        seconds, num_tokens = request.deadline - request.arrival_time, len(request.output_token_ids)
        running.error = (
            f"the request has reached its deadline of {seconds:g} s after {num_tokens} tokens; "
            "allow it more time or ask for fewer tokens"
        )
        completion.flush()
        self._due[running.new.request_id] = None

    def _dispatch(self, output: SchedulerOutput) -> None:
        is_starved = not self._in_flight or self._in_flight[-1][0].is_ready
        self._in_flight.append((self._runner.dispatch(output), time.perf_counter()))
        self._iterations.note_dispatch(output, is_starved=is_starved)
        if self._speculation is not None:
            self._speculation.note_dispatch(output)

    def _finish(self, step: InFlightStep, dispatched_time: float) -> None:
        """Read one step and give its tokens to their requests."""
        result = self._runner.read(step)
        num_tokens = step.output.num_tokens - step.output.num_draft_tokens
        num_accepted = sum([one.num_accepted for one in result.verified])
        seconds = self._iterations.note_result(dispatched_time, num_tokens=num_tokens + num_accepted)
        self._scheduler.note_step(num_requests=len(step.output.scheduled), num_tokens=num_tokens, seconds=seconds)
        if self._speculation is not None:
            self._speculation.note_result(step.output, result.verified, seconds)
        for scored in result.prompt_logprobs:
            known = self._completions.get(scored.request.request_id)
            if known is not None:
                known[0].push_prompt_logprobs(scored.first_position, list(_scores(scored.arrays)))
        confirmed = self._scheduler.confirm(step.output, result.token_ids, result.failed, result.candidates)
        for request, token_ids in confirmed:
            running, completion = self._completions[request.request_id]
            self._push(running, completion, token_ids, result)
            if running.wants_parts or request.is_finished:
                self._due[running.new.request_id] = None

    def _push(
        self, running: RunningRequest, completion: RunningCompletion, token_ids: list[int], result: StepResult
    ) -> None:
        request = completion.request
        if token_ids:
            self._counts["generation_tokens"] += len(token_ids)
            running.note_tokens(result.read_time)
            if self._speculation is not None:
                self._speculation.note_token(request, token_ids[-1])
            if completion.is_bare and not request.is_finished:
                return
        scores: list[TokenScores] = [] if request.hypothesis is None else scores_of(request.hypothesis)
        wants_logprobs = request.sampling_params.logprobs is not None and not request.is_beam
        if wants_logprobs and result.logprobs is not None and token_ids:
            scores = [_score_at(result.logprobs, next(result.logprob_rows[request.request_id]))]
        matched, grammar = completion.push(token_ids, scores), completion.grammar
        if matched is not None:
            self._scheduler.finish(request, RequestStatus.FINISHED_STOPPED, stop_reason=matched)
        elif request.is_finished:
            completion.flush()
        elif grammar is not None:
            self._follow(running, completion, grammar, token_ids)
        if request.status == RequestStatus.FINISHED_ERROR and running.error is None:
            running.error = _why_nothing_is_sampled(request.sampling_params)

    def _follow(
        self, running: RunningRequest, completion: RunningCompletion, grammar: Grammar, token_ids: list[int]
    ) -> None:
        """Advance the grammar of an unfinished request, which ends when nothing more can follow."""
        for token_id in token_ids:
            grammar.accept(token_id)
        if grammar.error is not None:
            self._fail(completion.request, running, grammar.error)
        elif grammar.is_finished:
            self._scheduler.finish(completion.request, RequestStatus.FINISHED_STOPPED)
            completion.flush()

    def _outputs(self) -> list[RequestOutput]:
        due, self._due = self._due, {}
        outputs = []
        for request_id in due:
            running = self._running.get(request_id)
            if running is None:
                continue
            output = running.output()
            if output is None:
                continue
            outputs.append(output)
            if output.finished:
                self._forget(request_id)
        return outputs

    def _forget(self, request_id: str) -> None:
        for child in self._running[request_id].new.children:
            del self._completions[child.request_id]
            if self._speculation is not None:
                self._speculation.forget(child)
        for completion in self._running.pop(request_id).completions:
            request = completion.request
            if request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH):
                hint = self._length_hint.note(request.num_tokens)
                if hint is not None:
                    logger.info("%s", hint)


def _why_nothing_is_sampled(params: SamplingParams) -> str:
    bans = [name for name in ("allowed_token_ids", "bad_words", "min_tokens") if getattr(params, name)]
    reason = "the model's logits were not finite (NaN or infinity); check the weights and the dtype"
    if bans:
        reason = f"{' and '.join(bans)} left no token to choose from; loosen them. If they do leave some, {reason}"
    return reason


def _scores(arrays: TokenLogprobs) -> Iterator[TokenScores]:
    for row in range(len(arrays.logprob)):
        yield _score_at(arrays, row)


def _score_at(arrays: TokenLogprobs, row: int) -> TokenScores:
    top_ids, top_logprobs = np.asarray(arrays.top_ids[row]), np.asarray(arrays.top_logprobs[row])
    return TokenScores(float(arrays.logprob[row]), int(arrays.rank[row]), top_ids, top_logprobs)
