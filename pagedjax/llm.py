"""The offline interface: `LLM(...)`, then `generate`, `chat` or `stream`. Blocks until the answer is there.

Usable in scripts and notebooks; calls may overlap, see `shared_engine`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, Literal, Self

from pagedjax.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from pagedjax.config import EngineConfig
from pagedjax.engine import LLMEngine
from pagedjax.errors import InvalidRequestError
from pagedjax.models.config import ModelConfig
from pagedjax.notebook_cell import NotebookCell
from pagedjax.outputs import RequestOutput
from pagedjax.request_input import on_host
from pagedjax.sampling_params import RequestOutputKind, SamplingParams
from pagedjax.shared_engine import SharedEngine

Prompt = str | Iterable[int]  # arrays of numpy and JAX among them


class LLM:
    """A model ready to generate.

    Args:
      model: Hugging Face directory or hub name, .gguf file, Orbax directory, or "demo".
      params, model_config: a parameter pytree, which is copied, and the model's shape, in place of a checkpoint.
      options: the other fields of `EngineConfig`.

    Raises:
      ConfigError: an option, the checkpoint or the memory do not allow it.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        params: Any = None,
        model_config: ModelConfig | None = None,
        show_progress: bool = True,
        **options: Any,
    ):
        cell = NotebookCell.of_caller(1)
        if cell is not None:
            cell.close_earlier()
        self.engine = LLMEngine(
            EngineConfig(model=model, **options), params=params, model_config=model_config, show_progress=show_progress
        )
        self._shared = SharedEngine(self.engine)
        if cell is not None:
            cell.remember(self)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Iterable[int] | Iterable[Iterable[int]] | None = None,
        use_tqdm: bool = True,
        priority: Iterable[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts and return one output for each, in order.

        Args:
          prompts: a text, a list or array of token ids, a list of either, or an array of one prompt a row.
          sampling_params: one for all or one for each; None is the model's own defaults.
          prompt_token_ids: the prompts as token ids, in place of `prompts`.

          priority: one for each prompt, under `scheduling_policy="priority"`; the lowest goes first.

        Raises:
          InvalidRequestError: a prompt or a parameter is wrong; nothing was generated.
        """
        items = _prompt_list(prompts, prompt_token_ids)
        params = self._params_list(sampling_params, len(items), RequestOutputKind.FINAL_ONLY)
        given = on_host(priority) if priority is not None else [0] * len(items)
        if not isinstance(given, Iterable):
            raise InvalidRequestError(f"priority is {priority!r:.80}; give one for each prompt", param="priority")
        priorities: list[Any] = list(given)
        if len(priorities) != len(items):
            raise InvalidRequestError(
                f"{len(priorities)} priorities for {len(items)} prompts; give one for each", param="priority"
            )
        with self._shared.call() as call:
            for prompt, one, level in zip(items, params, priorities, strict=True):
                call.add(prompt, one, priority=level)
            finished = {out.request_id: out for out in call.outputs(use_tqdm=use_tqdm)}
        return [finished[request_id] for request_id in call.request_ids]

    def beam_search(
        self,
        prompts: Prompt | Iterable[Prompt],
        width: BeamSearchParams | int,
        max_tokens: int | None = 16,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        *,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """Find the most likely completions of each prompt, by the rules of transformers' beam search.

        Args:
          prompts: a text, a list of token ids, or a list of either.
          width: how many hypotheses go on and are returned, or a BeamSearchParams that says all there is to say.
          length_penalty: a hypothesis' score is its log probability / its length ** length_penalty.
          early_stopping: True stops at `width` finished hypotheses, False when none of the present length can be
            better, "never" when none of any length can.

        Raises:
          InvalidRequestError: a prompt or a parameter is wrong; nothing was generated.
        """
        params = width
        if not isinstance(params, BeamSearchParams):
            params = BeamSearchParams(
                beam_width=params, max_tokens=max_tokens, length_penalty=length_penalty, early_stopping=early_stopping
            )
        outputs = self.generate(prompts, params.sampling_params(), use_tqdm=use_tqdm)
        return [self._with_sequences(output) for output in outputs]

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        use_tqdm: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template.

        Args:
          tools: described to the model by the template; the answer is text all the same.
          chat_template: Jinja text in place of the model's own.
          chat_template_kwargs: further variables of the template, such as `enable_thinking`.

        Raises:
          InvalidRequestError: a message or a parameter is wrong, or the template refuses; nothing was generated.
        """
        if isinstance(messages, Mapping):
            raise InvalidRequestError(f"messages is {messages!r:.80}; it must be a list of messages", param="messages")
        conversations = messages if messages and isinstance(messages[0], list | tuple) else [messages]
        prompts = [
            self.encode_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template=chat_template,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self,
        prompt: Prompt | Sequence[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[RequestOutput]:
        """Generate for one prompt, or one conversation of messages, and yield each new piece of text (DELTA outputs).

        Leaving the iterator early ends the request. `chat_template_kwargs` are further variables of the template.
        """
        is_chat = _is_chat(prompt)
        if chat_template_kwargs and not is_chat:
            raise InvalidRequestError(
                "chat_template_kwargs needs messages, the prompt is none; leave it out", param="chat_template_kwargs"
            )
        text_or_ids: Any = self.encode_chat(prompt, **(chat_template_kwargs or {})) if is_chat else prompt
        params = self._params_list(sampling_params, 1, RequestOutputKind.DELTA)[0]
        with self._shared.call() as call:
            call.add(text_or_ids, params)
            yield from call.outputs()

    def encode_chat(self, messages: Any, **template_kwargs: Any) -> list[int]:
        """Token ids of a conversation under the model's chat template."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise InvalidRequestError("chat needs a tokenizer, this engine has none; send token ids", param="messages")
        return tokenizer.encode_chat(messages, **template_kwargs)

    def warm_prefix(self, prompt: Prompt | Sequence[dict[str, Any]], **template_kwargs: Any) -> int:
        """Compute a prefix that many prompts share, a system prompt say, and keep its full blocks until `unpin`.

        Args:
          prompt: text, token ids, or the first messages of a conversation.

        Returns:
          How many of its tokens are kept: whole blocks.

        Raises:
          InvalidRequestError: it is shorter than a block, or would leave less than a request of max_model_len.
        """
        prefix = self._encode_prefix(prompt, template_kwargs)
        self.generate(prefix, SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
        with self._shared.alone() as engine:
            return engine.pin_prefix(prefix)

    def unpin(self, prompt: Prompt | Sequence[dict[str, Any]], **template_kwargs: Any) -> bool:
        """Let go of a prefix that `warm_prefix` kept; False if it was not kept."""
        prefix = self._encode_prefix(prompt, template_kwargs)
        with self._shared.alone() as engine:
            return engine.unpin_prefix(prefix)

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks; False, with the reason in the log, while some are in use or pinned."""
        with self._shared.alone() as engine:
            return engine.reset_prefix_cache(reset_running_requests=reset_running_requests)

    def update_weights(self, params: Any) -> None:
        """Replace the model's weights between calls, as `LLMEngine.update_weights` says: a training loop's next ones.

        They are copied, so that the loop may donate its own arrays to its next step.

        Raises:
          CheckpointError: they do not fit the model; the old ones stay.
          ConfigError: requests of other threads or unread streams are unfinished, or prefixes kept warm.
        """
        with self._shared.alone() as engine:
            engine.update_weights(params)

    def shutdown(self) -> None:
        """End all requests and free the device memory. The object is of no use afterwards."""
        with self._shared.alone() as engine:
            engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def _with_sequences(self, output: RequestOutput) -> BeamSearchOutput:
        tokenizer, sequences = self.engine.tokenizer, []
        for one in output.outputs:
            tokens = output.prompt_token_ids + one.token_ids
            sequences.append(
                BeamSearchSequence(
                    tokens=tokens,
                    logprobs=one.logprobs,
                    cum_logprob=one.cumulative_logprob or 0.0,
                    text=None if tokenizer is None else tokenizer.decode(tokens),
                    finish_reason=one.finish_reason,
                    stop_reason=one.stop_reason,
                )
            )
        return BeamSearchOutput(**vars(output), sequences=sequences)

    def _encode_prefix(self, prompt: Any, template_kwargs: dict[str, Any]) -> Any:
        if not _is_chat(prompt):
            return list(prompt) if isinstance(prompt, Iterator) else prompt  # it is read more than once
        return self.encode_chat(prompt, **{"add_generation_prompt": False, **template_kwargs})

    def _params_list(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int, kind: RequestOutputKind
    ) -> list[SamplingParams]:
        if params is None:
            params = self.engine.default_params()
        several: list[Any] = list(params) if isinstance(params, list | tuple) else [params] * count
        for one in several:
            if not isinstance(one, SamplingParams):
                raise InvalidRequestError(
                    f"sampling_params holds {one!r:.80}; give a SamplingParams, or one for each prompt",
                    param="sampling_params",
                )
        if len(several) != count:
            raise InvalidRequestError(
                f"{len(several)} sampling parameters for {count} prompts; give one for all or one for each",
                param="sampling_params",
            )
        return [replace(one, output_kind=kind) for one in several]


def _prompt_list(prompts: Any, prompt_token_ids: Any) -> list[Any]:
    if (prompts is None) == (prompt_token_ids is None):
        raise InvalidRequestError("give either prompts or prompt_token_ids", param="prompts")
    given: Any = on_host(prompts if prompts is not None else prompt_token_ids)
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        return [given]  # the engine refuses what is no prompt
    items: list[Any] = list(given)
    return [items] if items and isinstance(on_host(items[0]), Integral) else items


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], dict)
