"""Tasks that other processes lower are those that are lowered here."""

import logging
import os
from dataclasses import replace

import jax.numpy as jnp
import pytest
from flax import nnx

from pagedjax import LLM, SamplingParams
from pagedjax.execution import compilation, lowering_processes, model_runner
from pagedjax.execution.lowering_processes import LoweringProcesses, lower_all
from pagedjax.loading import LoadedModel
from pagedjax.models.llama import LlamaForCausalLM
from pallas_kernels import add_rms_norm, gated_matmul, hopper, matmul, rope_and_cache
from tests.fakes import FAKE_CONFIG, FakeModel
from tests.kept_executables import few_buckets
from tests.loading.tiny_checkpoints import write_config

pytestmark = pytest.mark.usefixtures("compiled_quickly")

OPTIONS = {"load_format": "dummy", "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}
APART = {"forward 16 tokens", "sample 4 full", "write rows 8"}
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=6, ignore_eos=True, logprobs=1)


@pytest.fixture
def path(tmp_path):
    return write_config(tmp_path, "llama3_rope")


def generate(path) -> list:
    with few_buckets(), LLM(str(path), **OPTIONS) as llm:
        (output,) = llm.generate(prompt_token_ids=[[5, 6, 7]], sampling_params=PARAMS)
    assert llm.engine.stats()["num_compilations_after_ready"] == 0
    return output.outputs[0].token_ids


@pytest.fixture
def _processes(monkeypatch):
    """As if the kernels were worth it, on a machine with four cores, for three tasks."""

    def lower_three(tasks, spec):
        return lower_all([replace(task, is_portable=task.name in APART) for task in tasks], spec)

    monkeypatch.setattr(model_runner, "_can_lower_apart", lambda loaded: True)
    monkeypatch.setattr(compilation, "lower_all", lower_three)
    monkeypatch.setattr(lowering_processes, "LEAST_TASKS", len(APART))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)


@pytest.mark.usefixtures("_processes")
def test_an_engine_of_programs_lowered_apart_generates_the_same(monkeypatch, path):
    lowered, lower = [], LoweringProcesses.lower

    def note(self, task):
        result = lower(self, task)
        lowered.append(task.name)
        return result

    monkeypatch.setattr(LoweringProcesses, "lower", note)
    tokens = generate(path)
    assert set(lowered) == APART
    monkeypatch.undo()
    assert generate(path) == tokens


@pytest.mark.usefixtures("_processes")
def test_what_a_process_cannot_lower_is_lowered_here(monkeypatch, caplog, path):
    begun = LoweringProcesses.__init__

    def begin_and_end(self, *args, **options):
        begun(self, *args, **options)
        for process in self._processes:
            process._popen.kill()

    monkeypatch.setattr(LoweringProcesses, "__init__", begin_and_end)
    with caplog.at_level(logging.WARNING):
        assert len(generate(path)) == PARAMS.max_tokens
    assert "a process that lowers has ended" in caplog.text


@pytest.mark.usefixtures("_processes")
def test_an_engine_starts_where_no_process_can(monkeypatch, caplog, path):
    def refuse(*args, **options):
        raise OSError("Resource temporarily unavailable")

    monkeypatch.setattr(lowering_processes.subprocess, "Popen", refuse)
    with caplog.at_level(logging.WARNING):
        assert len(generate(path)) == PARAMS.max_tokens
    assert "the start takes longer: Resource temporarily unavailable" in caplog.text


@pytest.mark.parametrize(("is_ours", "is_hopper"), [(True, True), (True, False), (False, True)])
def test_only_our_own_models_with_kernels_are_lowered_apart(monkeypatch, is_ours, is_hopper):
    monkeypatch.setattr(hopper, "unavailable", lambda: None if is_hopper else "no GPU")
    for op in (add_rms_norm, gated_matmul, matmul, rope_and_cache):
        monkeypatch.setattr(op, "is_sound", lambda: True)
    ours = replace(FAKE_CONFIG, architecture="LlamaForCausalLM", head_dim=2)
    model = nnx.eval_shape(lambda: LlamaForCausalLM(ours, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    loaded = LoadedModel(ours, model) if is_ours else LoadedModel(FAKE_CONFIG, FakeModel())
    assert model_runner._can_lower_apart(loaded) == (is_ours and is_hopper)


def test_a_process_lowers_the_kernels_for_a_gpu_that_it_does_not_have(monkeypatch, path):
    seen = []

    def note(tasks, spec):
        seen.append((tasks, spec))
        return lower_all(tasks, None)

    monkeypatch.setattr(compilation, "lower_all", note)
    monkeypatch.setattr(model_runner, "_can_lower_apart", lambda loaded: True)
    generate(path)
    received = []
    monkeypatch.setattr(lowering_processes, "_import", lambda task, parts, _: (received.append(parts), task.lower())[1])
    ((tasks, spec),) = seen
    task = next(task for task in tasks if task.name == "forward 16 tokens")
    processes = LoweringProcesses(spec, 1, is_hopper=True)
    try:
        processes.lower(task)
    finally:
        processes.close()
    assert received[0]["platforms"] == ("cuda",)
