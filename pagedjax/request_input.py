"""From what a caller asks to requests the scheduler can take: tokenize, check, fill in, split n > 1.

Everything that can be wrong with a request is found here, before it reaches any queue.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedjax.config import EngineConfig
from pagedjax.errors import InvalidRequestError
from pagedjax.execution.step import NUM_BEAM_CANDIDATES
from pagedjax.models.config import ModelConfig
from pagedjax.sampling_params import MAX_BAD_WORD_TOKENS, MAX_STOP_TOKEN_IDS, SamplingParams, as_integer
from pagedjax.scheduling.fair_share import Client
from pagedjax.scheduling.request import Request
from pagedjax.text.structured_output import Grammar, GrammarCompiler
from pagedjax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class NewRequest:
    """A checked request and its children, which are scheduled like any other request: n, or the beams of a search."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    children: list[Request]
    grammars: list[Grammar | None]  # of the children's outputs, None where they are free


class RequestInput:
    """Turns prompts into requests for one model. Gives a seed to those that have none."""

    def __init__(
        self, config: EngineConfig, model: ModelConfig, tokenizer: Tokenizer | None, eos_token_ids: frozenset[int]
    ):
        self._config = config
        self._model = model
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self.grammar_compiler = GrammarCompiler(tokenizer, vocab_size=model.vocab_size, eos_token_ids=eos_token_ids)
        self._seeds = np.random.default_rng(config.seed)

    def build(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        arrival_time: float,
        priority: int = 0,
        cache_salt: str | None = None,
        client: Client = ("", ""),
        timeout: float | None = None,
    ) -> NewRequest:
        """Check and tokenize.

        Raises:
          InvalidRequestError: the prompt or a parameter does not fit this model; nothing was queued.
        """
        _check_params(params)
        priority = self._check_order(priority, arrival_time)
        _check_timeout(timeout)
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise InvalidRequestError(
                f"cache_salt is {cache_salt!r:.80}; it must be a string that is not empty", param="cache_salt"
            )
        params.validate_for(vocab_size=self._model.vocab_size, max_logprobs=self._config.max_logprobs)
        text = prompt if isinstance(prompt, str) else None
        token_ids = self._encode(prompt) if isinstance(prompt, str) else self._check_ids(prompt)
        max_tokens = self._max_tokens(len(token_ids), params)
        if params.stop and self._tokenizer is None:
            raise InvalidRequestError("stop needs a tokenizer, this engine has none; use stop_token_ids", param="stop")
        bad_words = self._bad_words(params.bad_words or ())
        self._check_bans(params, bad_words)
        self._check_beams(params)
        grammars = self._grammars(params)
        # drawn when nothing can be refused here any more: others' tokens do not depend on what is
        seed = params.seed if params.seed is not None else int(self._seeds.integers(2**62))
        children = [
            Request(
                request_id if params.num_requests == 1 else f"{request_id}-{index}",
                token_ids,
                params,
                max_tokens=max_tokens,
                eos_token_ids=self._eos_token_ids,
                arrival_time=arrival_time,
                deadline=math.inf if timeout is None else arrival_time + timeout,
                priority=priority,
                cache_salt=cache_salt,
                client=client,
                seed=seed + index,
                bad_word_token_ids=bad_words,
                skip_reading_prefix_cache=params.prompt_logprobs is not None,
            )
            for index in range(params.num_requests)
        ]
        return NewRequest(request_id, text, token_ids, params, children, grammars)

    def _check_beams(self, params: SamplingParams) -> None:
        """Check that the vocabulary, and what is read back of it, goes round for all hypotheses of a beam search."""
        if not params.use_beam_search:
            return
        num_ending = len((frozenset() if params.ignore_eos else self._eos_token_ids).union(params.stop_token_ids))
        limit = min(NUM_BEAM_CANDIDATES, self._model.vocab_size) - num_ending
        if params.beam_width > limit:
            raise InvalidRequestError(
                f"a beam search of width {params.beam_width} needs as many tokens to choose from beside {num_ending} "
                f"EOS and stop tokens, here there are {limit}; lower the width or name fewer stop_token_ids",
                param="n" if params.best_of is None else "best_of",
            )

    def _grammars(self, params: SamplingParams) -> list[Grammar | None]:
        wanted = params.structured_outputs
        return [None if wanted is None else self.grammar_compiler.start(wanted) for _ in range(params.n)]

    def _encode(self, prompt: str) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequestError(
                "the prompt is text, but this engine has no tokenizer; send token ids", param="prompt"
            )
        limit = self._limit * self._tokenizer.max_chars_per_token
        if len(prompt) > limit:
            raise InvalidRequestError(
                f"prompt has {len(prompt)} characters, more than {limit} never fit max_model_len {self._limit}; "
                "shorten it or raise --max-model-len",
                param="prompt",
            )
        token_ids = self._tokenizer.encode(prompt)
        if not token_ids:
            raise InvalidRequestError("prompt is empty; send at least one token", param="prompt")
        return token_ids

    def _check_order(self, priority: Any, arrival_time: float) -> int:
        """Check what requests are sorted by: a value that does not compare would put the queues out of order."""
        level = as_integer(priority)
        if level is None:
            raise InvalidRequestError(f"priority is {priority!r:.80}; it must be an integer", param="priority")
        if level and self._config.scheduling_policy != "priority":
            raise InvalidRequestError(
                f"priority is {priority}, but this engine serves first come first served; leave it out or set "
                "--scheduling-policy priority",
                param="priority",
            )
        if not isinstance(arrival_time, int | float) or not math.isfinite(arrival_time):
            raise InvalidRequestError(
                f"arrival_time is {arrival_time!r:.80}; it must be seconds on time.monotonic()", param="arrival_time"
            )
        return level

    def _check_bans(self, params: SamplingParams, bad_words: Sequence[tuple[int, ...]]) -> None:
        """Check that the sampler has room for the tokens that min_tokens bans, and that a first token is left."""
        ending = (frozenset() if params.ignore_eos else self._eos_token_ids).union(params.stop_token_ids)
        held_back = ending if params.min_tokens else frozenset()
        if len(held_back) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"min_tokens holds back {len(held_back)} EOS and stop tokens, the limit is {MAX_STOP_TOKEN_IDS}; "
                "name fewer stop_token_ids",
                param="stop_token_ids",
            )
        banned = held_back.union(word[0] for word in bad_words if len(word) == 1)
        if params.allowed_token_ids is not None and banned.issuperset(params.allowed_token_ids):
            raise InvalidRequestError(
                f"bad_words and min_tokens ban each of the {len(params.allowed_token_ids)} allowed_token_ids; "
                "allow more or ban less",
                param="allowed_token_ids",
            )

    def _check_ids(self, prompt: Any) -> list[int]:
        prompt = on_host(prompt)
        if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
            raise InvalidRequestError(
                f"prompt is {prompt!r:.80}; it must be a string or a list of token ids", param="prompt"
            )
        token_ids, last = [], self._model.vocab_size - 1
        for given in prompt.tolist() if isinstance(prompt, np.ndarray) else prompt:
            token_id = as_integer(given)
            if token_id is None or not 0 <= token_id <= last:
                raise InvalidRequestError(
                    f"prompt holds token id {given!r:.80}, the vocabulary is 0..{last}; remove it", param="prompt"
                )
            token_ids.append(token_id)
        if not token_ids:
            raise InvalidRequestError("prompt is empty; send at least one token", param="prompt")
        return token_ids

    @property
    def _limit(self) -> int:
        assert self._config.max_model_len is not None, "the engine resolves it"
        return self._config.max_model_len

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        if num_prompt_tokens >= self._limit:
            raise InvalidRequestError(
                f"prompt has {num_prompt_tokens} tokens, max_model_len is {self._limit} and one is needed for the "
                "output; shorten it or raise --max-model-len",
                param="prompt",
            )
        room = self._limit - num_prompt_tokens
        if params.min_tokens > room:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens}, after {num_prompt_tokens} prompt tokens max_model_len "
                f"{self._limit} leaves {room}; lower it or raise --max-model-len",
                param="min_tokens",
            )
        return room if params.max_tokens is None else min(params.max_tokens, room)

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of each word, as it starts a text and as it follows a space (vLLM's two forms)."""
        if not words:
            return ()
        if self._tokenizer is None:
            raise InvalidRequestError(
                "bad_words needs a tokenizer, this engine has none; use logit_bias", param="bad_words"
            )
        found: dict[tuple[int, ...], None] = {}
        for word, prefix in itertools.product(words, ("", " ")):
            token_ids = tuple(self._tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False))
            if len(token_ids) > MAX_BAD_WORD_TOKENS:
                raise InvalidRequestError(
                    f"bad_words entry {word!r:.40} is {len(token_ids)} tokens, the limit is {MAX_BAD_WORD_TOKENS}; "
                    "shorten it",
                    param="bad_words",
                )
            found[token_ids] = None
        return tuple(found)


def on_host(value: Any) -> Any:
    """Bring an array of JAX to the host in one transfer, as numpy's, and leave what is no array as it is."""
    return np.asarray(value)[()] if hasattr(value, "__array__") and not isinstance(value, str) else value


def _check_timeout(timeout: float | None) -> None:
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and 0 < timeout < math.inf):
        raise InvalidRequestError(
            f"timeout is {timeout!r:.80}; it must be a number of seconds above 0, or None", param="timeout"
        )


def _check_params(params: SamplingParams) -> None:
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(
            f"sampling_params is {params!r:.80}; it must be a SamplingParams", param="sampling_params"
        )
