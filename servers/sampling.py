"""From request fields to SamplingParams: what the request gives, over the model's defaults, over the endpoint's."""

from collections.abc import Mapping
from typing import Any

from pagedjax import InvalidRequestError, RequestOutputKind, SamplingParams
from pagedjax.sampling_params import NEUTRAL_FOR_BEAMS
from servers import protocol

_NAMES = tuple(field.name for field in protocol.SAMPLING)


def sampling_params(
    fields: Mapping[str, Any],
    model_defaults: Mapping[str, Any],
    *,
    given: Mapping[str, Any],
    default_max_tokens: int | None,
) -> SamplingParams:
    """Build the parameters of one request. `given` holds what the endpoint read from fields of other names.

    Raises:
      InvalidRequestError: a value is out of range, or prompt_logprobs or a beam search meets stream.
    """
    is_stream, is_beam = fields["stream"], fields["use_beam_search"]
    if is_stream and is_beam:
        raise InvalidRequestError(
            "a beam search cannot be streamed: no token is certain before its end; set stream: false", param="stream"
        )
    if is_stream and fields["prompt_logprobs"] is not None:
        raise InvalidRequestError(
            "prompt_logprobs cannot be streamed; leave it out or set stream: false", param="prompt_logprobs"
        )
    asked = {name: fields[name] for name in _NAMES} | dict(given)
    asked = {name: value for name, value in asked.items() if value is not None}
    if is_beam:  # the model's defaults are for sampling
        model_defaults = {name: value for name, value in model_defaults.items() if name not in NEUTRAL_FOR_BEAMS}
    kind = RequestOutputKind.DELTA if is_stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**{"max_tokens": default_max_tokens, **model_defaults, **asked, "output_kind": kind})
