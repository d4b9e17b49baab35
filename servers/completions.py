"""POST /v1/completions."""

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web

from pagedjax import AsyncEngine, CompletionOutput, Logprob, RequestOutput, SamplingParams
from pagedjax.async_engine import RequestStream
from servers.call import Call, read_call
from servers.generation import interleave, respond
from servers.logprobs import completion_logprobs, prompt_logprobs
from servers.output_form import errors_by_field, output_form
from servers.prompts import Prompt, check_prompts, encode_prompt, of_token_ids, truncation
from servers.protocol import COMPLETION
from servers.sampling import sampling_params
from servers.streaming import TextTemplates, to_json
from servers.usage import Usage

DEFAULT_MAX_TOKENS = 16


async def completions(request: web.Request) -> web.StreamResponse:
    """Complete one or more prompts, as one JSON object or as a stream of chunks."""
    call = await read_call(request, COMPLETION, id_prefix="cmpl-")
    with errors_by_field(call.fields):
        params = _params(call.engine, call.fields)
        prompts = await _prompts(call, params)
        return await respond(call, _Answer(call, prompts, params.n), prompts, params)


def _params(engine: AsyncEngine, fields: Mapping[str, Any]) -> SamplingParams:
    given = {
        "max_tokens": fields["max_tokens"],
        "logprobs": fields["logprobs"],
        "structured_outputs": output_form(fields),
    }
    if fields["echo"] and fields["prompt_logprobs"] is None:
        given["prompt_logprobs"] = fields["logprobs"]  # the echoed tokens have theirs too
    defaults = engine.default_sampling_params
    return sampling_params(fields, defaults, given=given, default_max_tokens=DEFAULT_MAX_TOKENS)


async def _prompts(call: Call, params: SamplingParams) -> list[Prompt]:
    engine, special = call.engine, call.fields["add_special_tokens"]
    truncated = truncation(engine, call.fields, max_tokens=params.max_tokens)
    return [
        await encode_prompt(engine, one, truncated, add_special_tokens=special is None or special)
        if isinstance(one, str)
        else of_token_ids(engine, one, truncated)
        for one in check_prompts(call.fields["prompt"])
    ]


class _Answer:
    """Builds the parts of one answer. A choice's index is prompt number * n + completion index."""

    def __init__(self, call: Call, prompts: Sequence[Prompt], n: int):
        self._id = call.id
        self._created = int(time.time())
        self._engine, self._model = call.engine, call.state.model_name
        self._fields, self._stream_options = call.fields, call.stream_options
        self._prompts, self._n = prompts, n
        self._usage = Usage(prompts)
        self._prompt_entries: dict[int, list[dict[int, Logprob] | None]] = {}  # by prompt number
        self._num_chars: dict[int, int] = {}  # of the tokens so far, by choice

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = []
        for number, output in enumerate(outputs):
            extra = {}
            if self._fields["prompt_logprobs"] is not None:
                extra["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
            choices += [choice | extra for choice in self.choices(number, output)]
        return self.body(choices, with_usage=True)

    async def events(self, streams: Sequence[RequestStream]) -> AsyncGenerator[str]:
        with_usage = self._stream_options.continuous_usage_stats
        templates = TextTemplates(lambda index, text: self.body([self.plain_choice(index, text)], with_usage=False))
        with_ids = self._fields["return_token_ids"]
        async with aclosing(interleave(streams)) as outputs:
            async for number, output in outputs:
                for choice in self.choices(number, output):
                    has_text = bool(choice["text"])
                    if choice["finish_reason"] or choice["logprobs"] or with_ids or (has_text and with_usage):
                        yield to_json(self.body([choice], with_usage=with_usage))
                    elif has_text:
                        yield templates.fill(choice["index"], choice["text"])
        if self._stream_options.include_usage:
            yield to_json(self.body([], with_usage=True))

    def body(self, choices: list[dict[str, Any]], *, with_usage: bool) -> dict[str, Any]:
        body = {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model}
        usage = {"usage": self._usage.as_json()} if with_usage else {}
        return {**body, "choices": choices, **usage}

    def choices(self, number: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Return what `output`, of prompt `number`, adds to each of its choices."""
        self._usage.add(output)
        if output.prompt_logprobs is not None:
            self._prompt_entries[number] = output.prompt_logprobs
        return [self._choice(number, completion) for completion in output.outputs]

    def plain_choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def _choice(self, number: int, completion: CompletionOutput) -> dict[str, Any]:
        index, prompt = number * self._n + completion.index, self._prompts[number]
        is_first = index not in self._num_chars
        echo = prompt if self._fields["echo"] and is_first else None
        choice = self.plain_choice(index, completion.text if echo is None else self._text(echo) + completion.text)
        offset = self._num_chars.setdefault(index, 0)
        if completion.logprobs is not None:
            choice["logprobs"], self._num_chars[index] = self._logprobs(number, completion, echo, offset)
        if self._fields["return_token_ids"]:
            choice |= {"token_ids": completion.token_ids, "prompt_token_ids": prompt.token_ids if is_first else None}
        if completion.finished:
            choice |= {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
        return choice

    def _logprobs(
        self, number: int, completion: CompletionOutput, echo: Prompt | None, offset: int
    ) -> tuple[dict[str, Any], int]:
        token_ids, entries = completion.token_ids, completion.logprobs or []
        if echo is not None:
            token_ids, entries = echo.token_ids + token_ids, self._prompt_entries[number] + entries
        as_ids = self._fields["return_tokens_as_token_ids"]
        return completion_logprobs(token_ids, entries, offset, self._decode, as_ids=as_ids)

    def _text(self, prompt: Prompt) -> str:
        return self._decode(prompt.token_ids) if prompt.text is None else prompt.text

    def _decode(self, token_ids: list[int]) -> str:
        return self._engine.decode(token_ids, skip_special_tokens=False)
