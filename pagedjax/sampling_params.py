"""What one request asks of the sampler and of the stop rules.

Field names, defaults and meanings are vLLM's. Values are checked on construction, before a request
reaches any queue; what depends on a model (vocabulary, context length) is checked by `validate_for`.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from enum import Enum
from numbers import Real
from typing import Any, Literal

from pagedjax.errors import InvalidRequestError
from pagedjax.structured_outputs import StructuredOutputsParams

MAX_STOP_TOKEN_IDS = 16  # per request, EOS ids included
MAX_LOGIT_BIAS = 300
MAX_BAD_WORDS = 32
MAX_BAD_WORD_SEQUENCES = 2 * MAX_BAD_WORDS  # each word as it starts a text and as it follows a space
MAX_BAD_WORD_TOKENS = 16
MAX_N = 128
MAX_BEAM_WIDTH = 32
MAX_LENGTH_PENALTY = 10  # either way: an exponent
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
SWITCHES = (
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
    "use_beam_search",
)

# What a beam search takes, where it takes one value alone: its hypotheses are ranked by the model's own probabilities.
NEUTRAL_FOR_BEAMS: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 1.0),  # neither changes a probability
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None,),
    "stop": ((),),
    "structured_outputs": (None,),
}


class RequestOutputKind(Enum):
    """How much text each streamed `RequestOutput` carries."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request. Integers and arrays of numpy's and JAX's are kept as Python's.

    Raises:
      InvalidRequestError: a value is out of range; the message names value, limit and remedy.
    """

    n: int = 1
    best_of: int | None = None  # hypotheses of a beam search, of which the best n are returned; n if None
    use_beam_search: bool = False
    length_penalty: float = 1.0  # of a beam search: above 0 favours long hypotheses
    early_stopping: bool | Literal["never"] = False  # of a beam search
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    max_tokens: int | None = 16  # None: up to the context length
    min_tokens: int = 0  # a structured output that is complete ends earlier
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    output_kind: RequestOutputKind = field(default=RequestOutputKind.CUMULATIVE)

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_kinds(self)
        _check_lists(self)
        _check_beams(self)

    @property
    def beam_width(self) -> int:
        """Hypotheses of a beam search."""
        return self.best_of or self.n

    @property
    def num_requests(self) -> int:
        """Requests that are scheduled for it: one for each completion, or for each hypothesis of a beam search."""
        return self.beam_width if self.use_beam_search else self.n

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    def validate_for(self, *, vocab_size: int, max_logprobs: int) -> None:
        """Check what depends on the model: token ids below `vocab_size`, logprobs up to `max_logprobs`."""
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            for token_id in getattr(self, name) or ():
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequestError(
                        f"{name} holds token id {token_id}, the vocabulary is 0..{vocab_size - 1}; remove the id",
                        param=name,
                    )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value > max_logprobs:
                raise InvalidRequestError(
                    f"{name} is {value}, the limit is {max_logprobs}; ask for fewer or raise --max-logprobs", param=name
                )


def as_integer(value: Any) -> int | None:
    """The integer that one of Python, numpy or JAX is; None for anything else, a bool included."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _check_numbers(params: SamplingParams) -> None:
    _check(params, "n", int, 1, MAX_N)
    if params.best_of is not None:
        _check(params, "best_of", int, 1, MAX_N)
    _check(params, "length_penalty", float, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    _check(params, "temperature", float, 0.0, 2.0)
    _check(params, "top_p", float, 0.0, 1.0, exclusive_low=True)
    _check(params, "top_k", int, -1, 2**31 - 1)
    _check(params, "min_p", float, 0.0, 1.0)
    _check(params, "presence_penalty", float, -2.0, 2.0)
    _check(params, "frequency_penalty", float, -2.0, 2.0)
    _check(params, "repetition_penalty", float, 0.0, 1e6, exclusive_low=True)
    _check(params, "min_tokens", int, 0, 2**31 - 1)
    if params.seed is not None:
        _check(params, "seed", int, -(2**63), 2**63 - 1)
    if params.max_tokens is not None:
        _check(params, "max_tokens", int, 1, 2**31 - 1)
        if params.min_tokens > params.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens}, above max_tokens {params.max_tokens}; "
                "lower min_tokens or raise max_tokens",
                param="min_tokens",
            )
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            _check(params, name, int, 0, 2**31 - 1)


def _check(
    params: SamplingParams, name: str, kind: type, low: float, high: float, *, exclusive_low: bool = False
) -> None:
    value = getattr(params, name)
    number = as_integer(value) if kind is int else value if _is_real(value) else None
    bounds = f"{'above' if exclusive_low else 'at least'} {low} and at most {high}"
    if number is None:
        noun = "a number" if kind is float else "an integer"
        raise InvalidRequestError(f"{name} is {value!r:.80}; it must be {noun}, {bounds}", param=name)
    if not low <= number <= high or (exclusive_low and number == low):  # NaN is in no range
        raise InvalidRequestError(f"{name} is {value!s:.80}; it must be {bounds}", param=name)
    _set(params, name, kind(number))


def _is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _set(params: SamplingParams, name: str, value: Any) -> None:
    object.__setattr__(params, name, value)  # the dataclass is frozen for everybody else


def _check_kinds(params: SamplingParams) -> None:
    for name in SWITCHES:
        if not isinstance(getattr(params, name), bool):
            raise InvalidRequestError(f"{name} is {getattr(params, name)!r:.80}; it must be True or False", param=name)
    if not isinstance(params.output_kind, RequestOutputKind):
        raise InvalidRequestError(
            f"output_kind is {params.output_kind!r:.80}; it must be a RequestOutputKind", param="output_kind"
        )


def _check_lists(params: SamplingParams) -> None:
    if not isinstance(params.structured_outputs, StructuredOutputsParams | None):
        raise InvalidRequestError(
            f"structured_outputs is {params.structured_outputs!r:.80}; it must be a StructuredOutputsParams",
            param="structured_outputs",
        )
    _set(params, "stop", (params.stop,) if isinstance(params.stop, str) else _entries(params, "stop"))
    _check_length("stop", params.stop, MAX_STOP_STRINGS)
    for text in params.stop:
        if not isinstance(text, str) or not text or len(text) > MAX_STOP_STRING_CHARS:
            raise InvalidRequestError(
                f"stop holds {text!r:.80}; each stop string has 1 to {MAX_STOP_STRING_CHARS} characters", param="stop"
            )
    if params.stop and not params.detokenize:
        raise InvalidRequestError("stop strings need text; set detokenize=True or use stop_token_ids", param="stop")
    _set(params, "stop_token_ids", _token_ids("stop_token_ids", _entries(params, "stop_token_ids")))
    _check_length("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS - 4)
    if params.allowed_token_ids is not None:
        allowed = _token_ids("allowed_token_ids", _entries(params, "allowed_token_ids"))
        if not allowed:
            raise InvalidRequestError(
                "allowed_token_ids is empty; name at least one id or leave it out", param="allowed_token_ids"
            )
        _set(params, "allowed_token_ids", list(allowed))
    if params.logit_bias is not None:
        _set(params, "logit_bias", _logit_bias(params.logit_bias))
    if params.bad_words is not None:
        _set(params, "bad_words", list(_entries(params, "bad_words")))
    _check_length("bad_words", params.bad_words or (), MAX_BAD_WORDS)
    for word in params.bad_words or ():
        if not isinstance(word, str) or not word:
            raise InvalidRequestError(
                f"bad_words holds {word!r:.80}; each must be a non-empty string", param="bad_words"
            )


def _entries(params: SamplingParams, name: str) -> tuple[Any, ...]:
    """The entries of a list; one string is not a list of its letters, a mapping not one of its keys."""
    value = getattr(params, name)
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping):
        raise InvalidRequestError(f"{name} is {value!r:.80}; it must be a list", param=name)
    try:
        return tuple(value.__array__().tolist() if hasattr(value, "__array__") else value)  # to the host at once
    except TypeError:
        raise InvalidRequestError(f"{name} is {value!r:.80}; it must be a list", param=name) from None


def _logit_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise InvalidRequestError(
            f"logit_bias is {bias!r:.80}; it must be a dict from token ids to numbers", param="logit_bias"
        )
    _check_length("logit_bias", bias, MAX_LOGIT_BIAS)
    token_ids = _token_ids("logit_bias", bias)
    for token_id, value in bias.items():
        if not _is_real(value) or not -100 <= value <= 100:
            raise InvalidRequestError(
                f"logit_bias[{token_id}] is {value!r:.80}; it must be a number, at least -100 and at most 100",
                param="logit_bias",
            )
    return dict(zip(token_ids, map(float, bias.values()), strict=True))


def _token_ids(name: str, ids: Iterable[Any]) -> tuple[int, ...]:
    token_ids = []
    for given in ids:
        token_id = as_integer(given)
        if token_id is None or token_id < 0:
            raise InvalidRequestError(f"{name} holds {given!r:.80}; token ids are integers of 0 or more", param=name)
        token_ids.append(token_id)
    return tuple(token_ids)


def _check_length(name: str, values: Sized, limit: int) -> None:
    if len(values) > limit:
        raise InvalidRequestError(f"{name} has {len(values)} entries, the limit is {limit}; remove some", param=name)


def _check_beams(params: SamplingParams) -> None:
    if not isinstance(params.early_stopping, bool) and params.early_stopping != "never":
        raise InvalidRequestError(
            f"early_stopping is {params.early_stopping!r:.80}; it must be True, False or 'never'",
            param="early_stopping",
        )
    if not params.use_beam_search:
        _check_no_beams(params)
        return
    if params.beam_width < params.n or params.beam_width > MAX_BEAM_WIDTH:
        name = "n" if params.best_of is None else "best_of"
        raise InvalidRequestError(
            f"{name} is {params.beam_width}, the width of a beam search is at least n ({params.n}) and at most "
            f"{MAX_BEAM_WIDTH}; change {name}",
            param=name,
        )
    for name, neutral in NEUTRAL_FOR_BEAMS.items():
        value = getattr(params, name)
        if value not in neutral:
            raise InvalidRequestError(
                f"{name} is {value!r:.80}, which a beam search cannot take; leave it out or set use_beam_search=False",
                param=name,
            )
    if params.output_kind is RequestOutputKind.DELTA:
        raise InvalidRequestError(
            "output_kind is DELTA, but a beam search has no token that is certain before its end; do not stream it",
            param="output_kind",
        )


def _check_no_beams(params: SamplingParams) -> None:
    for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
        if getattr(params, name) != neutral:
            raise InvalidRequestError(
                f"{name} is {getattr(params, name)!r:.80}, which only a beam search knows; leave it out or set "
                "use_beam_search=True",
                param=name,
            )
    if params.best_of not in (None, params.n):
        raise InvalidRequestError(
            f"best_of is {params.best_of}, n is {params.n}; only a beam search returns fewer than it makes: leave it "
            "out or set use_beam_search=True",
            param="best_of",
        )
