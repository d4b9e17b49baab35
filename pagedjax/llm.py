"""The offline interface: `LLM(...)`, then `generate`, `chat` or `stream`. Blocks until the answer is there.

Usable in scripts and notebooks: an interrupt ends the running call, not the engine.
"""

import itertools
import signal
import sys
import threading
import types
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

from tqdm import tqdm

from pagedjax.config import EngineConfig
from pagedjax.engine import LLMEngine
from pagedjax.errors import InvalidRequestError
from pagedjax.models.config import ModelConfig
from pagedjax.outputs import RequestOutput
from pagedjax.sampling_params import RequestOutputKind, SamplingParams

Prompt = str | Sequence[int]

# A notebook cell that is run again builds its LLM while the old one still holds the device memory, because the
# variable is only rebound afterwards. The engine that a cell made is therefore remembered by the place in the cell, and
# closed when the same place makes the next one. Module state, because a cell has no other place that outlives a run.
_made_in_notebook: "weakref.WeakValueDictionary[tuple[str, int], LLM]" = weakref.WeakValueDictionary()


class LLM:
    """A model ready to generate.

    Args:
      model: Hugging Face directory or hub name, .gguf file, Orbax directory, or "demo".
      params, model_config: a parameter pytree and the model's shape, in place of a checkpoint.
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
        _close_previous_run_of_cell(self)
        self.engine = LLMEngine(
            EngineConfig(model=model, **options), params=params, model_config=model_config, show_progress=show_progress
        )
        self._request_ids = (str(i) for i in itertools.count())
        self._is_open = True

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts and return one output for each, in order.

        Args:
          prompts: a text, a list of token ids, or a list of either.
          sampling_params: one for all or one for each; None is the model's own defaults.
          prompt_token_ids: the prompts as token ids, in place of `prompts`.

        Raises:
          InvalidRequestError: a prompt or a parameter is wrong; nothing was generated.
        """
        items = _prompt_list(prompts, prompt_token_ids)
        params = self._params_list(sampling_params, len(items), RequestOutputKind.FINAL_ONLY)
        priorities = priority if priority is not None else [0] * len(items)
        request_ids: list[str] = []
        try:
            for prompt, one, level in zip(items, params, priorities, strict=True):
                request_ids.append(next(self._request_ids))
                self.engine.add_request(request_ids[-1], prompt, one, priority=level)
            finished = {out.request_id: out for out in self._run(request_ids, use_tqdm=use_tqdm)}
        finally:
            self._end(request_ids)
        return [finished[request_id] for request_id in request_ids]

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        use_tqdm: bool = False,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [
            self.encode_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **template_kwargs,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self,
        prompt: Prompt | Sequence[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        **template_kwargs: Any,
    ) -> Iterator[RequestOutput]:
        """Generate for one prompt, or one conversation of messages, and yield each new piece of text (DELTA outputs).

        Leaving the iterator early ends the request.
        """
        text_or_ids: Any = self.encode_chat(prompt, **template_kwargs) if _is_chat(prompt) else prompt
        params = self._params_list(sampling_params, 1, RequestOutputKind.DELTA)[0]
        request_id = next(self._request_ids)
        self.engine.add_request(request_id, text_or_ids, params)
        try:
            yield from self._run([request_id], use_tqdm=False)
        finally:
            self._end([request_id])

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
        return self.engine.pin_prefix(prefix)

    def unpin(self, prompt: Prompt | Sequence[dict[str, Any]], **template_kwargs: Any) -> bool:
        """Let go of a prefix that `warm_prefix` kept; False if it was not kept."""
        return self.engine.unpin_prefix(self._encode_prefix(prompt, template_kwargs))

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks; False, with the reason in the log, while some are in use or pinned."""
        return self.engine.reset_prefix_cache(reset_running_requests=reset_running_requests)

    def shutdown(self) -> None:
        """End all requests and free the device memory. The object is of no use afterwards."""
        if self._is_open:
            self._is_open = False
            self.engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def _encode_prefix(self, prompt: Any, template_kwargs: dict[str, Any]) -> Prompt:
        if not _is_chat(prompt):
            return prompt
        return self.encode_chat(prompt, **{"add_generation_prompt": False, **template_kwargs})

    def _params_list(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int, kind: RequestOutputKind
    ) -> list[SamplingParams]:
        if params is None:
            params = self.engine.default_params()
        several = [params] * count if isinstance(params, SamplingParams) else list(params)
        if len(several) != count:
            raise InvalidRequestError(
                f"{len(several)} sampling parameters for {count} prompts; give one for all or one for each",
                param="sampling_params",
            )
        return [replace(one, output_kind=kind) for one in several]

    def _run(self, request_ids: list[str], *, use_tqdm: bool) -> Iterator[RequestOutput]:
        """Step until these requests are done and yield their outputs."""
        pending = set(request_ids)
        num_generated = self.engine.stats()["generation_tokens"]
        with tqdm(total=len(pending), desc="Generating", unit="request", disable=not use_tqdm) as progress:
            while pending:
                with _InterruptBetweenSteps():
                    outputs = list(self.engine.step())
                for output in outputs:
                    if output.request_id not in pending:
                        continue
                    if output.finished:
                        pending.discard(output.request_id)
                        progress.update()
                        seconds = max(progress.format_dict["elapsed"], 1e-6)
                        tokens = self.engine.stats()["generation_tokens"] - num_generated
                        progress.set_postfix_str(f"{tokens / seconds:.1f} tokens/s")
                    yield output

    def _end(self, request_ids: list[str]) -> None:
        """Abort what an error, an interrupt or a closed iterator left unfinished, and let the engine drain."""
        if not self._is_open:
            return
        left = set(request_ids) & self.engine.unfinished_request_ids()
        if left:
            self.engine.abort(left)
            while left & self.engine.unfinished_request_ids():
                self.engine.step()


class _InterruptBetweenSteps:
    """Holds back Ctrl-C during an engine step, which must not be torn in half; a second one goes through at once."""

    def __enter__(self) -> None:
        self._seen = False
        self._old = None
        if threading.current_thread() is threading.main_thread():
            self._old = signal.getsignal(signal.SIGINT)
            signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *exception: object) -> None:
        if self._old is not None:
            signal.signal(signal.SIGINT, self._old)
        if self._seen:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        if self._seen:
            raise KeyboardInterrupt
        self._seen = True


def _prompt_list(prompts: Any, prompt_token_ids: Any) -> list[Prompt]:
    if (prompts is None) == (prompt_token_ids is None):
        raise InvalidRequestError("give either prompts or prompt_token_ids", param="prompts")
    given = prompts if prompts is not None else prompt_token_ids
    if isinstance(given, str) or (len(given) and not isinstance(given[0], str | Sequence)):
        return [given]
    return list(given)


def _is_chat(prompt: Any) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], dict)


def _close_previous_run_of_cell(llm: LLM) -> None:
    frame = sys._getframe(2)  # whoever called LLM(...)
    if "get_ipython" not in frame.f_globals or frame.f_code.co_name != "<module>":
        return
    place = (frame.f_code.co_filename, frame.f_lineno)
    previous = _made_in_notebook.get(place)
    if previous is not None:
        previous.shutdown()
    _made_in_notebook[place] = llm
