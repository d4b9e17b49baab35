"""What SamplingParams takes and refuses: every wrong value is an InvalidRequestError that names its field."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import InvalidRequestError, SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", float("nan"), "temperature is nan; it must be at least 0.0 and at most 2.0"),
        ("temperature", -1, "temperature is -1; it must be at least 0.0"),
        ("temperature", 10**400, "temperature is 1000"),
        ("temperature", "hot", "temperature is 'hot'; it must be a number"),
        ("top_p", 0, "top_p is 0; it must be above 0.0"),
        ("n", 0, "n is 0; it must be at least 1"),
        ("n", 1.5, "n is 1.5; it must be an integer"),
        ("max_tokens", True, "max_tokens is True; it must be an integer"),
        ("seed", 2**63, "seed is 9223372036854775808; it must be at least"),
        ("stop", 5, "stop is 5; it must be a list"),
        ("stop", {"a": 1}, "stop is {'a': 1}; it must be a list"),
        ("stop", [""], "stop holds ''"),
        ("stop_token_ids", 7, "stop_token_ids is 7; it must be a list"),
        ("seed", jnp.float32(3), "seed is Array.* it must be an integer"),
        ("seed", jnp.array(True), "seed is Array.* it must be an integer"),
        ("stop_token_ids", np.array([True]), "stop_token_ids holds True"),
        ("stop_token_ids", jnp.int32(7), "stop_token_ids is Array.* it must be a list"),
        ("stop_token_ids", [-1], "stop_token_ids holds -1"),
        ("allowed_token_ids", 5, "allowed_token_ids is 5; it must be a list"),
        ("allowed_token_ids", [], "allowed_token_ids is empty"),
        ("bad_words", "abc", "bad_words is 'abc'; it must be a list"),
        ("bad_words", 5, "bad_words is 5; it must be a list"),
        ("logit_bias", [1], r"logit_bias is \[1\]; it must be a dict"),
        ("logit_bias", {1: float("nan")}, r"logit_bias\[1\] is nan"),
        ("logit_bias", {1: True}, r"logit_bias\[1\] is True"),
        ("logit_bias", {"1": 1}, "logit_bias holds '1'"),
        ("ignore_eos", "no", "ignore_eos is 'no'; it must be True or False"),
        ("detokenize", None, "detokenize is None; it must be True or False"),
        ("output_kind", "delta", "output_kind is 'delta'; it must be a RequestOutputKind"),
    ],
)
def test_a_wrong_value_is_refused_by_name(field, value, message):
    """Several were TypeErrors or taken: one string of bad words banned each of its letters."""
    with pytest.raises(InvalidRequestError, match=message) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert len(str(caught.value)) < 300


def test_numbers_and_arrays_of_numpy_are_taken_as_pythons():
    given: dict[str, Any] = {
        "n": np.int64(2), "temperature": np.float32(0.5), "seed": np.int64(3), "stop_token_ids": np.array([1, 2]),
        "allowed_token_ids": np.arange(3), "logit_bias": {np.int64(4): np.float32(1)},
    }  # fmt: skip
    params = SamplingParams(**given)
    assert params == SamplingParams(
        n=2, temperature=0.5, seed=3, stop_token_ids=[1, 2], allowed_token_ids=[0, 1, 2], logit_bias={4: 1.0}
    )
    assert [type(value) for value in (params.n, params.temperature, params.seed)] == [int, float, int]


def test_integers_and_arrays_of_jax_are_taken_as_pythons():
    """They were refused: "seed is Array(3, dtype=int32); it must be an integer"."""
    given: dict[str, Any] = {
        "n": jnp.int32(2), "seed": jnp.int32(3), "stop_token_ids": jnp.array([1, 2]),
        "allowed_token_ids": [jnp.int32(0), np.int32(1)], "max_tokens": jnp.array(5),
    }  # fmt: skip
    params = SamplingParams(**given)
    assert params == SamplingParams(n=2, seed=3, stop_token_ids=[1, 2], allowed_token_ids=[0, 1], max_tokens=5)
    assert [type(value) for value in (params.n, params.seed, *params.stop_token_ids)] == [int] * 4


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="end").stop == ("end",)
