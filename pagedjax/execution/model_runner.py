"""Owns every device array of the engine and runs the steps that the scheduler decides.

`dispatch` starts a step and returns at once; `read` waits for its few ids. The engine dispatches step N+1 before it
reads step N, so the device never waits for the host. Knows nothing of text, stop rules or queues.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from pagedjax.config import AUTO, EngineConfig
from pagedjax.errors import ConfigError
from pagedjax.execution import executable_cache, kv_cache
from pagedjax.execution.block_copy import COPY_BUCKETS, pack_copies
from pagedjax.execution.buckets import ROW_WRITER_BUCKETS, SCORE_ROWS, BucketTable, StepShape, bucket_for, in_parts
from pagedjax.execution.compilation import CompilationCounter, compile_all
from pagedjax.execution.executable_cache import ExecutableCache
from pagedjax.execution.executables import (
    PLAIN_VARIANTS,
    WIDE_VARIANTS,
    TaskSpec,
    forward_name,
    temporary_bytes,
)
from pagedjax.execution.host_chunks import HostChunks, HostPlan, copy_tasks
from pagedjax.execution.in_flight import HostTimes, InFlightStep, PromptScore, StepResult, read_step
from pagedjax.execution.kernel_choice import have_kernels, kernel_lines
from pagedjax.execution.model_input import pack_changes, padded_rows
from pagedjax.execution.phase_times import PhaseTimes
from pagedjax.execution.request_state import empty_rows, neutral_sampler_row, neutral_sampler_rows
from pagedjax.execution.row_input import RowNeeds, bit_mask, pack_rows, wide_row
from pagedjax.execution.step import StepFunctions
from pagedjax.execution.tasks import shapes_of
from pagedjax.loading import LoadedModel, resolve_dtype
from pagedjax.models import MODEL_CLASSES
from pagedjax.scheduling.request import Request
from pagedjax.scheduling.step_plan import ScheduledRequest, SchedulerOutput
from pagedjax.scheduling.swapping import BlockCopies
from pagedjax.speculation.draft_proposer import max_num_read
from pagedjax.speculation.speculator import Speculator


class ModelRunner:
    """Device side of one engine. Construction allocates and compiles everything, and times that in `phases`."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        *,
        draft: LoadedModel | None = None,
        cache_directory: Path | None = None,
        phases: PhaseTimes | None = None,
        show_progress: bool = False,
    ):
        assert config.max_model_len is not None, "the engine resolves it"
        assert config.max_num_batched_tokens is not None, "the engine resolves it"
        self._cache_directory = None if cache_directory is None else cache_directory / "executables"
        speculative = config.speculation
        self.times = HostTimes()
        self._compilations = CompilationCounter()
        self._config = config
        self._vocab_size = loaded.config.vocab_size
        self._draft: LoadedModel | None = draft
        self._hidden_size = loaded.config.hidden_size
        self._dtype = resolve_dtype(config.dtype, loaded.config)
        one_block = kv_cache.block_bytes(loaded.config, block_size=config.block_size, dtype=self._dtype)
        self._host_plan = HostPlan.build(config, one_block)
        self.kernel_lines = kernel_lines(loaded.config, self._dtype, config.block_size)
        self.buckets = BucketTable.build(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            platform=jax.default_backend(),
            max_draft_tokens=speculative.num_speculative_tokens if speculative else 0,
        )
        self._wide = neutral_sampler_rows(config.max_num_seqs, self._vocab_size)
        self._max_blocks = -(-self._longest(loaded) // config.block_size)
        self._rows = empty_rows(config.max_num_seqs, self._max_blocks, max_draft_tokens=self.buckets.max_draft_tokens)
        self._speculator: Speculator | None = None
        if speculative is not None:
            self._speculator = Speculator(
                speculative, self.buckets, draft, max_model_len=self._max_blocks * config.block_size,
                vocab_size=self._vocab_size, max_logprobs=config.max_logprobs, dtype=self._dtype,
            )  # fmt: skip
        self._dirty_rows: set[int] = set()  # wide rows that change something
        self._needs = np.zeros(config.max_num_seqs, np.uint8)  # of each row's request
        self._neutral = neutral_sampler_row(self._vocab_size)
        self._build(loaded, phases or PhaseTimes(), show_progress)
        self.num_compilations_after_ready = 0  # anything else is a bug

    @property
    def num_blocks(self) -> int:
        return self.ledger.num_blocks

    @property
    def device(self) -> Any:
        """Where the weights are."""
        return jax.tree.leaves(self._leaves)[0].device

    @property
    def num_executables(self) -> int:
        return len(self._executables)

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Start the copies that come before a step; none of them is waited for."""
        num_compilations = self._compilations.count
        self._kv_cache = self.host.carry_out(self._kv_cache, copies)
        if self._speculator is not None:
            self._speculator.note_copies(copies)
        self.num_compilations_after_ready += self._compilations.count - num_compilations

    def dispatch(self, output: SchedulerOutput) -> InFlightStep:
        """Start one step; the arrays in what it returns are not ready yet."""
        began, num_compilations = time.perf_counter(), self._compilations.count
        self._fork_blocks(output.forked_blocks)
        self._admit([item for item in output.scheduled if item.is_new_row])
        drafts = None
        if self._speculator is not None:
            self._rows, drafts = self._speculator.propose(self._rows, output.scheduled)
        batch = output.scheduled
        if 0 < output.num_sampling < len(batch):
            batch = sorted(batch, key=lambda item: not item.samples)  # stable: sampling rows first
        sampling = batch[: output.num_sampling]
        needs = self._needs_of(sampling)
        if output.is_decode and self.buckets.is_fused and not needs & ~RowNeeds.WIDE_TOP_K:
            step = InFlightStep(output, sampling, self._decode(batch, needs.variant, began), None, [])
        else:
            last_hidden, picked, scores = self._forward(output, batch, began)
            beams = self._run_beams(last_hidden, len(sampling)) if needs & RowNeeds.BEAMS else None
            is_left = sampling and not all(item.request.is_beam for item in sampling)
            left = (last_hidden if picked is None else picked) if is_left else None
            computed = None if sampling else last_hidden
            step = InFlightStep(output, sampling, None, None, scores, beams, left, drafts, computed)
            if is_left and not needs & RowNeeds.GRAMMAR:
                step = self._sample(step, needs)
        _start_copies(step)
        self.times.num_steps += 1
        self.num_compilations_after_ready += self._compilations.count - num_compilations
        return step

    def sample(
        self,
        step: InFlightStep,
        items: Sequence[ScheduledRequest],
        masks: np.ndarray,
        draft_masks: np.ndarray | None = None,
    ) -> InFlightStep:
        """Start the second part of a step that awaits masks: `items[i]` may sample the tokens of `masks[i]`.

        `masks` is [n, ceil(V / 32)] uint32, `draft_masks` [n, K, ceil(V / 32)] for the tokens after its drafts. Nothing
        may be dispatched between the two parts.
        """
        num_compilations = self._compilations.count
        if draft_masks is not None and self._speculator is not None:
            self._speculator.write_masks(items, self._allowed(items, draft_masks))
        for start in range(0, len(items), ROW_WRITER_BUCKETS[-1]):
            self._write_masks(items[start : start + ROW_WRITER_BUCKETS[-1]], masks[start:])
        step = self._sample(step, self._needs_of(step.sampling))
        _start_copies(step)
        self.num_compilations_after_ready += self._compilations.count - num_compilations
        return step

    def num_missing(self, request: Request) -> int:
        """Tokens of a running request that a draft model has to read before it can draft for it."""
        return 0 if self._speculator is None else self._speculator.num_missing(request)

    @property
    def max_num_read(self) -> int:
        """Tokens that a draft model reads in one step at most."""
        return max_num_read(self.buckets)

    def read_drafts(self, step: InFlightStep) -> dict[int, list[int]]:
        """Wait for the drafts that a dispatched step verifies, by row; -1 and all after it are none."""
        drafting = [item for item in step.output.scheduled if item.num_draft_tokens]
        drafts = np.asarray(step.drafts)
        return {item.row: drafts[i, : item.num_draft_tokens].tolist() for i, item in enumerate(drafting)}

    def read(self, step: InFlightStep) -> StepResult:
        """Wait for a step and hand its arrays over by request."""
        began = time.perf_counter()
        result = read_step(step)
        self.times.wait += time.perf_counter() - began
        return result

    def warm_up(self) -> None:
        """Run every executable once, on padding alone, which writes nothing.

        The first run of an executable on a GPU loads its kernels and records its CUDA graph, which no request should
        wait for. The engine calls this before it takes any.
        """
        no_rows = self._config.max_num_seqs
        hidden, last_hidden = [self._warm_up_forward(shape) for shape in self.buckets.forward_shapes][-1]
        for shape in self.buckets.decode_shapes if self.buckets.is_fused else []:
            packed = pack_changes([], shape, max_num_seqs=no_rows)
            for variant in PLAIN_VARIANTS:
                run = self._executables[f"decode {shape.num_rows} {variant}"]
                self._kv_cache, self._rows, _ = run(self._leaves, self._kv_cache, self._rows, packed)
        for bucket in self.buckets.sample:
            rows = np.full(bucket, no_rows, np.int32)
            results = [self._run_sample(variant, last_hidden, rows) for variant in (*PLAIN_VARIANTS, *WIDE_VARIANTS)]
            self._executables[f"logprobs {bucket}"](self._leaves, last_hidden, results[-1])
            self._executables[f"beam {bucket}"](self._leaves, last_hidden)
        for bucket in ROW_WRITER_BUCKETS:
            packed = pack_rows([], bucket, max_blocks=self._max_blocks, max_num_seqs=no_rows)
            self._rows = self._executables[f"write rows {bucket}"](self._rows, packed)
            masks = np.zeros((bucket, self._wide.allowed_mask.shape[1]), np.uint32)
            self._wide = self._executables[f"write masks {bucket}"](
                self._wide, np.full(bucket, no_rows, np.int32), masks
            )
        for bucket in COPY_BUCKETS:
            self._run_copies(pack_copies([], bucket, num_blocks=self.num_blocks))
        self._write_wide(no_rows, self._neutral)
        if self._speculator is not None:
            self._rows, self._wide = self._speculator.warm_up(self._leaves, self._rows, self._wide, hidden)
        jax.block_until_ready((self._kv_cache, self._rows, self._wide))

    def _warm_up_forward(self, shape: StepShape) -> tuple[jax.Array, jax.Array]:
        packed = pack_changes([], shape, max_num_seqs=self._config.max_num_seqs)
        run = self._executables[forward_name(shape)]
        self._kv_cache, self._rows, hidden, last_hidden = run(self._leaves, self._kv_cache, self._rows, packed)
        if not (shape.is_decode or shape.is_verify):
            index = np.zeros(SCORE_ROWS, np.int32)
            self._executables[f"score {shape.num_tokens}"](self._leaves, hidden, index, index)
        if self._speculator is not None:
            self._speculator.pick(hidden, [])
        return hidden, last_hidden

    def replace_weights(self, model: nnx.Module) -> None:
        """Run steps with the weights of another model of the same shapes from now on."""
        leaves = tuple(jax.tree.leaves(nnx.state(model)))
        assert shapes_of(leaves) == shapes_of(self._leaves), "loading checks shapes"
        self._leaves = leaves

    def close(self) -> None:
        """Free the device arrays now rather than when the last reference goes."""
        for array in jax.tree.leaves((self._kv_cache, self._rows, self._wide, self._speculation_arrays)):
            array.delete()
        self.host.close()
        self._leaves, self._draft, self._speculator = (), None, None  # which hold weights

    def _decode(self, batch: list[ScheduledRequest], variant: str, began: float) -> jax.Array:
        shape = self.buckets.decode_shape(len(batch))
        packed = pack_changes(batch, shape, max_num_seqs=self._config.max_num_seqs)
        run = self._executables[f"decode {shape.num_rows} {variant}"]
        dispatched = self._note_packed(began)
        self._kv_cache, self._rows, result = run(self._leaves, self._kv_cache, self._rows, packed)
        self.times.dispatch += time.perf_counter() - dispatched
        return result

    def _needs_of(self, items: Sequence[ScheduledRequest]) -> RowNeeds:
        return RowNeeds(int(np.bitwise_or.reduce(self._needs[[item.row for item in items]])) if items else 0)

    def _forward(
        self, output: SchedulerOutput, batch: list[ScheduledRequest], began: float
    ) -> tuple[jax.Array, jax.Array | None, list[PromptScore]]:
        """Run the model; return last hidden states, those that are sampled after if there are drafts, and scores."""
        shape = self._forward_shape(output)
        packed = pack_changes(batch, shape, max_num_seqs=self._config.max_num_seqs)
        forward = self._executables[forward_name(shape)]
        dispatched = self._note_packed(began)
        self._kv_cache, self._rows, hidden, last_hidden = forward(self._leaves, self._kv_cache, self._rows, packed)
        scores, picked = [], None
        if self._needs_of(batch) & RowNeeds.PROMPT_LOGPROBS:
            scores = list(self._score(batch, hidden))
        if self._speculator is not None and output.num_draft_tokens:
            picked = self._speculator.pick(hidden, batch)
        self.times.dispatch += time.perf_counter() - dispatched
        return last_hidden, picked, scores

    def _forward_shape(self, output: SchedulerOutput) -> StepShape:
        num_rows = len(output.scheduled)
        if output.is_decode and not self.buckets.is_fused:
            return self.buckets.decode_shape(num_rows)
        is_verify = output.num_sampling == num_rows == output.num_tokens - output.num_draft_tokens
        if is_verify and output.num_draft_tokens:
            return self.buckets.verify_shape(num_rows, output.num_tokens)
        return self.buckets.forward_shape(output.num_tokens)

    def _run_beams(self, last_hidden: jax.Array, num_rows: int) -> jax.Array:
        return self._executables[f"beam {bucket_for(num_rows, self.buckets.sample)}"](self._leaves, last_hidden)

    def _sample(self, step: InFlightStep, needs: RowNeeds) -> InFlightStep:
        began, sampling, last_hidden = time.perf_counter(), step.sampling, step.last_hidden
        assert last_hidden is not None, "a step samples once"
        if step.output.num_draft_tokens and self._speculator is not None:
            self._rows, self._wide, result, logprobs = self._speculator.verify(
                self._leaves, self._rows, self._wide, last_hidden, sampling
            )
            self.times.dispatch += time.perf_counter() - began
            return replace(step, result=result, logprobs=logprobs, last_hidden=None)
        bucket = bucket_for(len(sampling), self.buckets.sample)
        rows = padded_rows(sampling, bucket, no_row=self._config.max_num_seqs)
        result = self._run_sample(needs.variant, last_hidden, rows)
        logprobs = None
        if needs & RowNeeds.LOGPROBS:
            logprobs = self._executables[f"logprobs {bucket}"](self._leaves, last_hidden, result)
        self.times.dispatch += time.perf_counter() - began
        return replace(step, result=result, logprobs=logprobs, last_hidden=None)

    def _write_masks(self, items: Sequence[ScheduledRequest], masks: np.ndarray) -> None:
        began, bucket = time.perf_counter(), bucket_for(len(items), ROW_WRITER_BUCKETS)
        rows = padded_rows(items, bucket, no_row=self._config.max_num_seqs)
        padded = np.zeros((bucket, masks.shape[1]), np.uint32)
        padded[: len(items)] = self._allowed(items, masks[: len(items)])
        dispatched = self._note_packed(began)
        self._wide = self._executables[f"write masks {bucket}"](self._wide, rows, padded)
        self.times.dispatch += time.perf_counter() - dispatched

    def _allowed(self, items: Sequence[ScheduledRequest], masks: np.ndarray) -> np.ndarray:
        """Take from each item's masks what its allowed_token_ids rule out."""
        for item, mask in zip(items, masks, strict=True):
            allowed = item.request.sampling_params.allowed_token_ids
            if allowed is not None:
                mask &= bit_mask(allowed, self._vocab_size)
        return masks

    def _run_sample(self, variant: str, last_hidden: jax.Array, rows: np.ndarray) -> jax.Array:
        wide = self._wide if variant in WIDE_VARIANTS else None
        run = self._executables[f"sample {len(rows)} {variant}"]
        self._rows, wide, result = run(self._leaves, self._rows, wide, last_hidden, rows)
        if wide is not None:
            self._wide = wide
        return result

    def _score(self, batch: list[ScheduledRequest], hidden: jax.Array) -> Iterator[PromptScore]:
        """Score each prompt token whose predecessor is in this step, SCORE_ROWS at a time."""
        start = 0
        for item in batch:
            request, first = item.request, item.context_len
            end = min(first + item.num_scheduled_tokens, request.num_prompt_tokens - 1)
            if request.sampling_params.prompt_logprobs is not None:
                for position in range(first, end, SCORE_ROWS):
                    count = min(SCORE_ROWS, end - position)
                    index = np.zeros(SCORE_ROWS, np.int32)
                    index[:count] = np.arange(count) + start + position - first
                    targets = np.zeros(SCORE_ROWS, np.int32)
                    targets[:count] = request.all_token_ids[position + 1 : position + 1 + count]
                    run = self._executables[f"score {hidden.shape[0]}"]
                    yield PromptScore(request, position + 1, count, run(self._leaves, hidden, index, targets))
            start += item.num_scheduled_tokens

    def _fork_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for part, bucket in in_parts(copies, COPY_BUCKETS):
            self._run_copies(pack_copies(part, bucket, num_blocks=self.num_blocks))

    def _run_copies(self, packed: np.ndarray) -> None:
        self._kv_cache = self._executables[f"copy blocks {packed.shape[1]}"](self._kv_cache, packed)

    def _admit(self, items: Sequence[ScheduledRequest]) -> None:
        """Write the device rows of requests that enter the batch."""
        for part, bucket in in_parts(items, ROW_WRITER_BUCKETS):
            packed = pack_rows(part, bucket, max_blocks=self._max_blocks, max_num_seqs=self._config.max_num_seqs)
            self._rows = self._executables[f"write rows {bucket}"](self._rows, packed)
        for item in items:
            needs = RowNeeds.of(item.request.sampling_params)
            self._needs[item.row] = needs
            if needs & RowNeeds.WIDE_ROW:
                self._write_wide(item.row, wide_row(item.request, self._vocab_size))
                self._dirty_rows.add(item.row)
            elif item.row in self._dirty_rows:
                self._write_wide(item.row, self._neutral)
                self._dirty_rows.discard(item.row)

    def _write_wide(self, row: int, values: Any) -> None:
        self._wide = self._executables["write sampler row"](self._wide, np.int32(row), values)

    def _note_packed(self, began: float) -> float:
        now = time.perf_counter()
        self.times.pack += now - began
        return now

    def _build(self, loaded: LoadedModel, phases: PhaseTimes, show_progress: bool) -> None:
        """Size the pool, allocate it and compile every executable."""
        dtype = self._dtype
        config = self._config
        request_state = _num_bytes(jax.tree.leaves((self._rows, self._wide, self._speculation_arrays)))
        planned = self._plan(loaded, request_state, kv_cache.estimate_temporaries(config, loaded.config, dtype))
        while True:
            spec = TaskSpec(
                loaded.config, dtype, self.buckets, planned.num_blocks, self._max_blocks, config.max_logprobs,
                state=shapes_of((self._rows, self._wide, self._neutral)),
            )  # fmt: skip
            functions = spec.functions(loaded.model)
            self._leaves = functions.leaves
            tasks = spec.tasks(functions)
            if self._speculator is not None:
                tasks += self._speculator.tasks(
                    functions, num_blocks=planned.num_blocks, hidden_size=self._hidden_size, dtype=dtype,
                    state=shapes_of(self._rows), wide=shapes_of(self._wide),
                )  # fmt: skip
            pool = kv_cache.shapes(
                loaded.config, num_blocks=planned.num_blocks, block_size=config.block_size, dtype=dtype
            )
            tasks += copy_tasks(self._host_plan, pool)
            cache = self._executable_cache(loaded, functions)
            self._executables = compile_all(
                tasks, phases, cache=cache, spec=spec if _can_lower_apart(loaded) else None, show_progress=show_progress
            )
            ledger = self._plan(loaded, request_state, temporary_bytes(tasks, self._executables))
            if ledger.num_blocks >= planned.num_blocks:
                break
            planned = ledger  # the estimate was too low: these executables leave no room for the pool
        ledger = replace(ledger, num_blocks=planned.num_blocks, max_model_len=planned.max_model_len)
        self.ledger = ledger
        self.num_full_model_executables = sum(task.is_full_model for task in tasks)
        try:
            self._kv_cache = kv_cache.allocate(
                loaded.config, num_blocks=ledger.num_blocks, block_size=config.block_size, dtype=dtype
            )
            if self._speculator is not None:
                self._speculator.allocate(ledger.num_blocks, self._executables)
            jax.block_until_ready((self._kv_cache, self._speculation_arrays))
        except jax.errors.JaxRuntimeError as error:
            raise ConfigError(kv_cache.not_allocated(ledger, str(error))) from error
        phases.end("pool allocation")
        self.host = HostChunks(self._host_plan, self._executables, num_pool_blocks=ledger.num_blocks)
        if self._host_plan.num_chunks:
            self._kv_cache = self.host.prepare(self._kv_cache)
            phases.end("pinning swap space")

    def _executable_cache(self, loaded: LoadedModel, functions: StepFunctions) -> ExecutableCache | None:
        """Return the cache of this engine's programs; None where it is off, or they hold code that is not our own."""
        kind = type(loaded.model)
        is_ours = kind.__module__.startswith("pagedjax.")
        if self._cache_directory is None or jax.default_backend() not in executable_cache.PLATFORMS or not is_ours:
            return None
        parts: list[object] = [kind, loaded.config, functions, self.kernel_lines]
        if self._draft is not None:
            parts += [type(self._draft.model), self._draft.config]
        return ExecutableCache(self._cache_directory, [*parts, self._config.speculation])

    @property
    def _speculation_arrays(self) -> list[jax.Array]:
        return [] if self._speculator is None else self._speculator.arrays

    def _longest(self, loaded: LoadedModel) -> int:
        """The longest request that block tables must hold; where it is AUTO, compiling can only lower it."""
        assert self._config.max_model_len is not None, "the engine resolves it"
        if self._config.max_model_len != AUTO:
            return self._config.max_model_len
        temporaries = kv_cache.estimate_temporaries(self._config, loaded.config, self._dtype)
        return self._plan(loaded, _num_bytes(jax.tree.leaves(self._wide)), temporaries).max_model_len

    def _plan(self, loaded: LoadedModel, request_state: int, temporaries: int) -> kv_cache.Ledger:
        return kv_cache.plan(
            self._config, loaded.config, dtype=self._dtype, max_model_len=self._config.max_model_len or 0,
            weights=_num_bytes(jax.tree.leaves(nnx.state(loaded.model))), request_state=request_state,
            temporaries=temporaries, swap_staging=self._host_plan.staging_bytes, **self._draft_bytes(),
        )  # fmt: skip

    def _draft_bytes(self) -> dict[str, int]:
        """What a draft model adds to the ledger."""
        if self._draft is None:
            return {}
        block = kv_cache.block_bytes(self._draft.config, block_size=self._config.block_size, dtype=self._dtype)
        return {
            "draft_weights": _num_bytes(jax.tree.leaves(nnx.state(self._draft.model))), "draft_block": block,
        }  # fmt: skip


def _can_lower_apart(loaded: LoadedModel) -> bool:
    """Whether another process can make the model's tasks, and it pays: lowering Hopper kernels is most of a start."""
    return have_kernels() and type(loaded.model) is MODEL_CLASSES.get(loaded.config.architecture)


def _start_copies(step: InFlightStep) -> None:
    arrays = (step.result, step.beams, step.drafts, step.logprobs, [score.logprobs for score in step.scores])
    for array in jax.tree.leaves(arrays):
        array.copy_to_host_async()


def _num_bytes(arrays: Sequence[Any]) -> int:
    return sum(array.size * array.dtype.itemsize for array in arrays)
