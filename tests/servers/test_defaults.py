"""Sampling defaults: the request over the model over the endpoint."""

from pagedjax.sampling_params import RequestOutputKind, SamplingParams
from servers.protocol import COMPLETION, parse
from servers.sampling import sampling_params


def params(body, model_defaults, *, given=None, default_max_tokens=16):
    fields = parse({"prompt": "x", **body}, COMPLETION)
    return sampling_params(fields, model_defaults, given=given or {}, default_max_tokens=default_max_tokens)


def test_the_models_defaults_hold_where_the_request_says_nothing():
    got = params({"top_k": 3}, {"temperature": 0.6, "top_k": 20, "max_tokens": 100})
    assert (got.temperature, got.top_k, got.max_tokens) == (0.6, 3, 100)


def test_the_request_wins_even_with_zero():
    got = params({"temperature": 0}, {"temperature": 0.6}, given={"max_tokens": 5})
    assert (got.temperature, got.max_tokens) == (0.0, 5)


def test_what_nobody_sets_is_vllms_default():
    final_only = RequestOutputKind.FINAL_ONLY
    assert params({}, {}, default_max_tokens=None) == SamplingParams(max_tokens=None, output_kind=final_only)


def test_a_stream_asks_for_deltas():
    assert params({"stream": True}, {}).output_kind is RequestOutputKind.DELTA
