"""Joining tensors into parameters: one tensor in host memory at a time, whatever the source."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.loading.hf_config import model_config_from_hf
from pagedjax.loading.weights import load_weights
from tests.oracles import tiny_models


class WatchedSource:
    """Counts how many of the arrays it has handed out are alive."""

    origin = "watched"

    def __init__(self, case):
        self.model_config = model_config_from_hf(tiny_models.CASES[case])
        self.tensors = tiny_models.weights(case)
        self.alive = weakref.WeakSet()
        self.most_alive = 0

    def names(self):
        return list(self.tensors)

    def shape(self, name):
        return self.tensors[name].shape

    def load(self, name):
        array = self.tensors[name].view(_Watched)
        self.alive.add(array)
        self.most_alive = max(self.most_alive, len(self.alive))
        return array

    def close(self):
        pass


class _Watched(np.ndarray):
    __hash__ = object.__hash__  # so that a WeakSet can hold it

    def __eq__(self, other):
        return self is other


def test_host_arrays_are_dropped_before_the_next_is_read():
    source = WatchedSource("gemma3")
    load_weights(source, jnp.float32)
    assert source.most_alive == 1


def test_loaded_arrays_do_not_share_memory_with_the_source():
    source = WatchedSource("smollm2")
    model = load_weights(source, jnp.float32).model
    before = np.array(model.embed.embedding[...])
    for tensor in source.tensors.values():
        tensor[...] = np.nan
    np.testing.assert_array_equal(np.asarray(model.embed.embedding[...]), before)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.tree.map(np.asarray, model)) if leaf.ndim)


def test_progress_goes_to_stderr_where_that_is_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    load_weights(WatchedSource("smollm2"), jnp.float32)
    captured = capsys.readouterr()
    assert "Loading weights: 100%" in captured.err
    assert captured.out == ""
