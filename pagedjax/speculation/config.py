"""Temporary stand-in until the parsed configuration is merged."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """What is read of speculative_config."""

    method: str
    num_speculative_tokens: int
    model: str | None = None
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 3
    rejection_sample_method: str = "coupled"
    forced_acceptance: float | None = None
    disable_by_batch_size: int | None = None
    is_adaptive: bool = False
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 100
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1

    @classmethod
    def parse(cls, value: Any) -> "SpeculativeConfig | None":
        """Return it, or None."""
        return cls(**value) if isinstance(value, dict) else value
