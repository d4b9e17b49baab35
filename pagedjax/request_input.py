"""From what a caller asks to requests the scheduler can take: tokenize, check, fill in, split n > 1.

Everything that can be wrong with a request is found here, before it reaches any queue.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagedjax.config import EngineConfig
from pagedjax.errors import InvalidRequestError
from pagedjax.models.config import ModelConfig
from pagedjax.sampling_params import MAX_BAD_WORD_TOKENS, MAX_STOP_TOKEN_IDS, SamplingParams
from pagedjax.scheduling.fair_share import Client
from pagedjax.scheduling.request import Request
from pagedjax.text.structured_output import Grammar, GrammarCompiler
from pagedjax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class NewRequest:
    """A checked request and its n children, which are scheduled like any other request."""

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
    ) -> NewRequest:
        """Check and tokenize.

        Raises:
          InvalidRequestError: the prompt or a parameter does not fit this model; nothing was queued.
        """
        params.validate_for(vocab_size=self._model.vocab_size, max_logprobs=self._config.max_logprobs)
        text = prompt if isinstance(prompt, str) else None
        token_ids = self._encode(prompt) if isinstance(prompt, str) else self._check_ids(prompt)
        max_tokens = self._max_tokens(len(token_ids), params)
        seed = params.seed if params.seed is not None else int(self._seeds.integers(2**62))
        bad_words = self._bad_words(params.bad_words or ())
        num_ending = len(self._eos_token_ids | set(params.stop_token_ids))
        if params.min_tokens and num_ending > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"min_tokens holds back {num_ending} EOS and stop tokens, the limit is {MAX_STOP_TOKEN_IDS}; "
                "name fewer stop_token_ids",
                param="stop_token_ids",
            )
        children = [
            Request(
                request_id if params.n == 1 else f"{request_id}-{index}",
                token_ids,
                params,
                max_tokens=max_tokens,
                eos_token_ids=self._eos_token_ids,
                arrival_time=arrival_time,
                priority=priority,
                cache_salt=cache_salt,
                client=client,
                seed=seed + index,
                bad_word_token_ids=bad_words,
                skip_reading_prefix_cache=params.prompt_logprobs is not None,
            )
            for index in range(params.n)
        ]
        return NewRequest(request_id, text, token_ids, params, children, self._grammars(params))

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

    def _check_ids(self, prompt: Sequence[int]) -> list[int]:
        token_ids = list(prompt)
        if not token_ids:
            raise InvalidRequestError("prompt is empty; send at least one token", param="prompt")
        last = self._model.vocab_size - 1
        for token_id in token_ids:
            is_id = isinstance(token_id, int | np.integer) and not isinstance(token_id, bool)
            if not is_id or not 0 <= token_id <= last:
                raise InvalidRequestError(
                    f"prompt holds token id {token_id!r:.80}, the vocabulary is 0..{last}; remove it", param="prompt"
                )
        return [int(token_id) for token_id in token_ids]

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
