"""The cache of whole executables, on a CPU with JAX's own cache off: see `PLATFORMS`."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from pagedjax import LLM, ConfigError, SamplingParams
from pagedjax.execution import compilation, executable_cache
from pagedjax.execution.compilation import cache_directory, compile_all, jax_cache_in
from pagedjax.execution.executable_cache import ExecutableCache
from pagedjax.execution.phase_times import PhaseTimes
from pagedjax.execution.tasks import Task, jit_with, shapes_of
from tests.kept_executables import few_buckets
from tests.loading.tiny_checkpoints import write_config

pytestmark = pytest.mark.usefixtures("compiled_quickly")

X = jnp.arange(4, dtype=jnp.float32)


@pytest.fixture(autouse=True)
def _no_jax_cache():
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def make(directory, parts=(), name="double", factor=2.0):
    """Compile x * factor as a task, or find it."""
    cache = ExecutableCache(directory, parts)
    task = Task(name, jit_with(lambda x: x * jnp.float32(factor)), (shapes_of(X),))
    executable = compile_all([task], PhaseTimes(), cache=cache, show_progress=False)[name]
    return cache, np.asarray(executable(X))


def test_an_executable_is_found_again(tmp_path):
    first, made = make(tmp_path)
    second, found = make(tmp_path, factor=3.0)  # found by name and shapes: the function is not looked at
    assert (first.num_hits, second.num_hits) == (0, 1)
    np.testing.assert_array_equal(found, made)


@pytest.mark.parametrize("change", [{"parts": ["another model"]}, {"name": "triple"}])
def test_what_differs_is_made(tmp_path, change):
    make(tmp_path)
    cache, made = make(tmp_path, factor=3.0, **change)
    assert cache.num_hits == 0
    np.testing.assert_array_equal(made, 3 * np.asarray(X))


def test_other_sources_make_other_keys(tmp_path, monkeypatch):
    source = tmp_path / "sources" / "step.py"
    source.parent.mkdir()
    source.write_text("a = 1")
    monkeypatch.setattr(executable_cache, "ROOTS", (source.parent,))
    hits = []
    for text in ("a = 1", "a = 1", "a = 2"):
        source.write_text(text)
        executable_cache._environment.cache_clear()
        hits.append(make(tmp_path / "cache")[0].num_hits)
    executable_cache._environment.cache_clear()
    assert hits == [0, 1, 0]


def test_a_damaged_entry_is_made_again(tmp_path, caplog):
    make(tmp_path)
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(entry.read_bytes()[:100])
    with caplog.at_level(logging.WARNING):
        cache, made = make(tmp_path)
    assert cache.num_hits == 0
    assert "made again" in caplog.text
    np.testing.assert_array_equal(made, 2 * np.asarray(X))
    assert make(tmp_path)[0].num_hits == 1


def test_nothing_is_read_from_a_directory_that_others_can_write_to(tmp_path, caplog):
    make(tmp_path)
    tmp_path.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        cache, _ = make(tmp_path)
    assert cache.num_hits == 0
    assert "written by others" in caplog.text


@pytest.fixture
def without_cache():
    """JAX as a program finds it that has set nothing."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def test_the_directory_follows_jax_and_the_engine(tmp_path):
    assert cache_directory("") is None
    assert cache_directory(None) is None  # the tests' own cache
    assert cache_directory(str(tmp_path / "a")) == tmp_path / "a"


@pytest.mark.usefixtures("without_cache")
def test_jax_has_a_cache_while_an_engine_is_made_and_none_afterwards(tmp_path):
    """Whatever the program compiled later was kept too, a second engine's directory was not used, and a program's own
    thresholds were lost."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    for name in ("a", "b"):
        directory = cache_directory(str(tmp_path / name))
        with jax_cache_in(directory):
            jax.jit(lambda x, name=name: x * 3 + len(name))(jnp.arange(5))
        kept = sorted(directory.iterdir())
        assert kept
        jax.jit(lambda x, name=name: x * 7 + len(name))(jnp.arange(6))
        assert sorted(directory.iterdir()) == kept
    assert jax.config.jax_compilation_cache_dir is None
    assert jax.config.jax_persistent_cache_min_compile_time_secs == before


@pytest.mark.usefixtures("without_cache")
def test_a_default_directory_that_cannot_be_written_to_is_a_warning_and_a_given_one_an_error(
    tmp_path, monkeypatch, caplog
):
    """Where the file system is read-only or there is no home, the start ended in a traceback, after the weights."""
    (tmp_path / "file").touch()
    nowhere = str(tmp_path / "file" / "cache")
    monkeypatch.setattr(compilation, "DEFAULT_CACHE_DIR", nowhere)
    with caplog.at_level(logging.WARNING):
        assert cache_directory(None) is None
    assert "set --compilation-cache-dir" in caplog.text
    with pytest.raises(ConfigError, match=r"compilation_cache_dir is .* choose a directory that can be written to"):
        cache_directory(nowhere)


def test_an_engine_starts_from_cached_executables_and_gives_the_same_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(executable_cache, "PLATFORMS", ("cpu",))
    write_config(tmp_path / "model", "llama3_rope")
    options = {
        "model": str(tmp_path / "model"), "load_format": "dummy", "max_model_len": 64,
        "max_num_seqs": 2, "max_num_batched_tokens": 16,
        "compilation_cache_dir": str(tmp_path / "cache"),
    }  # fmt: skip
    prompts, params = [[1, 2, 3], [4, 5, 6, 7]], [SamplingParams(max_tokens=8), SamplingParams(max_tokens=8, seed=3)]
    results = []
    for _ in range(2):
        with few_buckets():
            llm = LLM(**options)
        with llm:
            outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params)
            results.append([output.outputs[0].token_ids for output in outputs])
            phases = llm.engine.start_up_seconds
            assert llm.engine.stats()["num_compilations_after_ready"] == 0
    assert results[0] == results[1]
    assert phases["loading executables"] > phases["lowering"] + phases["compiling"]
