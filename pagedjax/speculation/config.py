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

    @classmethod
    def parse(cls, value: Any) -> "SpeculativeConfig | None":
        """Return it, or None."""
        return cls(**value) if isinstance(value, dict) else value
