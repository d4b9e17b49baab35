"""Options of speculative decoding: vLLM's `speculative_config` and its older flags, checked before anything loads.

Owns names, defaults and refusals. Knows no models, and nothing of how drafts are made.
"""

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pagedjax.errors import ConfigError
from pagedjax.options import check_range, check_types, option

MAX_SPECULATIVE_TOKENS = 32
MAX_LOOKUP_TOKENS = 32

# Fields of one method alone; others must leave them at their defaults.
FIELDS_OF_METHOD = {
    "ngram": ("prompt_lookup_max", "prompt_lookup_min"),
    "draft_model": ("model", "revision"),
    "suffix": (
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
}

# Keys of vLLM that are not taken, and what to do instead.
REFUSED_KEYS = {
    "forced_acceptance": "it makes outputs wrong on purpose, to measure speed; pass it apart, as --forced-acceptance",
    "synthetic_acceptance_rates": "pass one rate as --forced-acceptance, apart from speculative_config",
    "synthetic_acceptance_length": "pass a rate as --forced-acceptance, apart from speculative_config",
    "num_speculative_tokens_per_batch_size": (
        "the number of drafts follows measured times by itself; disable_by_batch_size sets a limit"
    ),
    "enable_adaptive_verification": "the number of drafts always follows measured times; 'is_adaptive': false ends it",
    "draft_sample_method": "drafts are sampled as the target is, with the request's own noise; leave it out",
    "max_model_len": "the draft model serves what the target does; leave it out",
    "quantization": "draft weights are used as they are; leave it out",
    "kv_cache_dtype": "the draft's KV cache has the type of --dtype; leave it out",
    "attention_backend": "attention has one implementation for each kind of device; leave it out",
    "enforce_eager": "XLA compiles every step; leave it out",
    "tensor_parallel_size": "the draft's key is draft_tensor_parallel_size",
    "disable_logprobs": "log probabilities are exact with speculation too; leave it out",
    "disable_log_stats": "it is a flag of the server, --disable-log-stats",
}

OLDER_FLAGS = {
    "speculative_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
}


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made, how many, and by which rule they are accepted.

    Raises:
      ConfigError: a value is out of range, or two contradict each other.
    """

    method: Literal["ngram", "draft_model", "suffix"] = option(
        None,
        "Who drafts: 'ngram' looks up the last tokens in the request's own text, 'suffix' in recent outputs too, "
        "'draft_model' is a smaller model. By default draft_model where model is given.",
    )
    num_speculative_tokens: int = option(
        None,
        f"Most drafts of a request in a step, 1 to {MAX_SPECULATIVE_TOKENS}; only 'suffix' has a default, its depth.",
    )
    model: str | None = option(None, "Draft model, as --model; 'ngram' and '[ngram]' stand for the method.")
    revision: str | None = option(None, "Branch, tag or commit of the draft model on the hub.")
    draft_tensor_parallel_size: int = option(1, "GPUs that share each layer of the draft model; only 1.")
    prompt_lookup_max: int | None = option(None, "Most tokens that an n-gram look-up matches; 5 if neither is given.")
    prompt_lookup_min: int | None = option(None, "Fewest tokens; prompt_lookup_max if unset.")
    suffix_decoding_max_tree_depth: int = option(24, "Tokens of a matching context that count.")
    suffix_decoding_max_cached_requests: int = option(10_000, "Outputs that are kept for others; 0 keeps none.")
    suffix_decoding_max_spec_factor: float = option(1.0, "Most drafts for each token of the matching context.")
    suffix_decoding_min_token_prob: float = option(0.1, "Least share of the matches that go on with a draft.")
    rejection_sample_method: Literal["coupled", "standard"] = option(
        "coupled",
        "Rule of acceptance: 'coupled' gives the very tokens of plain decoding with the same seed; 'standard' keeps "
        "the distribution only and accepts a little more.",
    )
    disable_by_batch_size: int | None = option(None, "No drafts while more requests than this decode.")
    is_adaptive: bool = option(True, "Draft fewer tokens, or none, where measured times say that more do not pay.")
    forced_acceptance: float | None = option(
        None, "For benchmarks: accept each draft with this probability, whatever the target says. Outputs are wrong."
    )

    def __post_init__(self) -> None:
        self._complete()
        check_types(self)
        self._check_ranges()
        self._check_method()

    @property
    def is_sequential(self) -> bool:
        """Whether drafts are made one after another, so that each costs time for the whole batch."""
        return self.method == "draft_model"

    def _complete(self) -> None:
        """Fill in what follows from other values."""
        if self.method == "ngram":
            most, fewest = self.prompt_lookup_max, self.prompt_lookup_min
            most = most if most is not None else 5 if fewest is None else fewest
            object.__setattr__(self, "prompt_lookup_max", most)
            object.__setattr__(self, "prompt_lookup_min", most if fewest is None else fewest)
        depth = self.suffix_decoding_max_tree_depth
        if self.method == "suffix" and self.num_speculative_tokens is None and isinstance(depth, int):
            object.__setattr__(self, "num_speculative_tokens", min(depth, MAX_SPECULATIVE_TOKENS))
        if self.method is not None and self.num_speculative_tokens is None:
            raise ConfigError(
                f"num_speculative_tokens is not given, and {self.method!r} has no default; "
                f"set it to 1 to {MAX_SPECULATIVE_TOKENS}, for example 4"
            )

    def _check_ranges(self) -> None:
        check_range(self, "num_speculative_tokens", 1, MAX_SPECULATIVE_TOKENS)
        for name in FIELDS_OF_METHOD["ngram"]:
            check_range(self, name, 1, MAX_LOOKUP_TOKENS)
        check_range(self, "suffix_decoding_max_tree_depth", 3, 1024)
        check_range(self, "suffix_decoding_max_cached_requests", 0)
        check_range(self, "suffix_decoding_max_spec_factor", 0.01, 100)
        check_range(self, "suffix_decoding_min_token_prob", 0, 1)
        check_range(self, "disable_by_batch_size", 1)
        check_range(self, "forced_acceptance", 0, 1)
        if self.draft_tensor_parallel_size != 1:
            raise ConfigError(
                f"draft_tensor_parallel_size is {self.draft_tensor_parallel_size}, it must be 1: "
                "tensor parallelism is not built yet; leave it out"
            )

    def _check_method(self) -> None:
        """Refuse values that contradict the method."""
        for method, names in FIELDS_OF_METHOD.items():
            for field in dataclasses.fields(self):
                value = getattr(self, field.name)
                if method != self.method and field.name in names and value != field.default:
                    raise ConfigError(
                        f"{field.name} is {value!r}, but the method is {self.method!r}; "
                        f"it belongs to {method!r}: leave one out"
                    )
        if self.method == "draft_model" and not self.model:
            raise ConfigError(f"model is {self.model!r}; the method 'draft_model' needs one, or choose 'ngram'")
        if self.forced_acceptance is not None and self.rejection_sample_method == "standard":
            raise ConfigError(
                f"forced_acceptance is {self.forced_acceptance}, but rejection_sample_method is 'standard', "
                "which draws what is accepted itself; leave one out"
            )
        if (self.prompt_lookup_min or 0) > (self.prompt_lookup_max or 0):
            raise ConfigError(
                f"prompt_lookup_min is {self.prompt_lookup_min}, above prompt_lookup_max {self.prompt_lookup_max}; "
                "lower it or raise the other"
            )


def parse_speculative_config(
    value: "Mapping[str, Any] | str | SpeculativeConfig | None",
    *,
    older: Mapping[str, Any],
    forced_acceptance: float | None,
) -> SpeculativeConfig | None:
    """Return the options of speculation, None for none.

    Args:
      value: an object of options, the same as JSON text, or options that are complete.
      older: values of OLDER_FLAGS, None where not given.
      forced_acceptance: see the field.

    Raises:
      ConfigError: the text is no JSON object, a key is unknown or not taken, a value is wrong, or an older flag says
        what the object could say.
    """
    given = {name: setting for name, setting in older.items() if setting is not None}
    if value is None and not given:
        if forced_acceptance is not None:
            raise ConfigError(
                f"forced_acceptance is {forced_acceptance!r}, but nothing is drafted; it needs --speculative-config"
            )
        return None
    if isinstance(value, SpeculativeConfig):
        config = value
    elif value is not None:
        config = _from_keys(_json_object(value))
    else:
        config = _from_older_flags(given)
    if value is not None and given:
        name = next(iter(given))
        raise ConfigError(
            f"{name} is {given[name]!r}, but speculative_config is given too; "
            f"put it there as {OLDER_FLAGS[name]!r}, or leave one out"
        )
    return config if forced_acceptance is None else dataclasses.replace(config, forced_acceptance=forced_acceptance)


def _json_object(value: Mapping[str, Any] | str) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"speculative_config is {value!r:.80}, which is not JSON: {error}; "
                'give an object such as {"method": "ngram", "num_speculative_tokens": 4}'
            ) from error
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"speculative_config is {value!r:.80}; it must be an object such as "
            '{"method": "ngram", "num_speculative_tokens": 4}'
        )
    return value


def _from_keys(keys: Mapping[str, Any]) -> SpeculativeConfig:
    known = [field.name for field in dataclasses.fields(SpeculativeConfig) if field.name not in REFUSED_KEYS]
    for key in keys:
        if key in REFUSED_KEYS:
            raise ConfigError(f"speculative_config has {key!r}={keys[key]!r:.80}; {REFUSED_KEYS[key]}")
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.6)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(f"speculative_config has an unknown key {key!r}; {hint}known are {', '.join(known)}")
    values = {key: value for key, value in keys.items() if value is not None}
    if not values:
        raise ConfigError(
            "speculative_config is empty; it needs method and num_speculative_tokens, or leave it out for none"
        )
    return SpeculativeConfig(**_with_method(values))


def _from_older_flags(given: Mapping[str, Any]) -> SpeculativeConfig:
    if "speculative_model" not in given:
        name = next(iter(given))
        raise ConfigError(
            f"{name} is {given[name]!r}, but nothing is drafted; "
            "add --speculative-model ('[ngram]' for look-ups), or use --speculative-config"
        )
    return SpeculativeConfig(**_with_method({OLDER_FLAGS[name]: value for name, value in given.items()}))


def _with_method(values: Mapping[str, Any]) -> dict[str, Any]:
    """Infer the method as vLLM does: a model named ngram stands for it, any other is a draft model."""
    values = dict(values)
    if values.get("model") in ("ngram", "[ngram]") and values.get("method") in (None, "ngram"):
        values |= {"method": "ngram", "model": None}
    if "method" not in values:
        if "model" not in values:
            raise ConfigError(
                "speculative_config has neither method nor model; set method to 'ngram', 'suffix' or 'draft_model'"
            )
        values["method"] = "draft_model"
    return values
