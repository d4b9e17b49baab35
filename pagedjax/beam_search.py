"""Beam search as `LLM.beam_search` takes and returns it: vLLM's names, over a RequestOutput like any other."""

from dataclasses import dataclass, field
from typing import Literal

from pagedjax.outputs import Logprob, RequestOutput
from pagedjax.sampling_params import RequestOutputKind, SamplingParams


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search; those of `SamplingParams` under the same names have the same meaning.

    Raises:
      InvalidRequestError: a value is out of range; the message names value, limit and remedy.
    """

    beam_width: int
    max_tokens: int | None = 16
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self.sampling_params()

    def sampling_params(self) -> SamplingParams:
        """Return what the engine is asked for."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "beam_width"}
        kind = RequestOutputKind.FINAL_ONLY
        return SamplingParams(n=self.beam_width, use_beam_search=True, output_kind=kind, **fields)


@dataclass(kw_only=True)
class BeamSearchSequence:
    """One hypothesis. `tokens` begin with the prompt's, and `text` with its text where there is a tokenizer."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] | None
    cum_logprob: float
    text: str | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(kw_only=True)
class BeamSearchOutput(RequestOutput):
    """The answer to one prompt: `outputs` are the hypotheses, best first, and `sequences` the same in vLLM's form."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)
