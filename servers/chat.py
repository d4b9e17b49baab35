"""POST /v1/chat/completions."""

import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from aiohttp import web

from pagedjax import AsyncEngine, CompletionOutput, InvalidRequestError, RequestOutput, SamplingParams
from pagedjax.async_engine import RequestStream
from servers.body import read_json
from servers.generation import checked, final_outputs, new_request_id, submit
from servers.logprobs import chat_logprobs, prompt_logprobs
from servers.messages import check_messages
from servers.prompts import Prompt, encode_prompt
from servers.protocol import CHAT, parse, parse_stream_options
from servers.sampling import sampling_params
from servers.state import STATE, ServerState
from servers.streaming import TextTemplates, json_answer, send_events, to_json
from servers.usage import Usage

# Arguments of the rendering itself, which a request must not reach through chat_template_kwargs.
_RENDER_ARGUMENTS = {
    "self", "tokenizer", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message",
}  # fmt: skip


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a chat, as one JSON object or as a stream of chunks."""
    arrival_time = time.monotonic()
    state = request.app[STATE]
    fields = parse(await read_json(request), CHAT)
    state.check_model(fields["model"])
    usage_options = parse_stream_options(fields)
    params = _params(state.engine, fields)
    prompt = await _prompt(state.engine, fields)
    answer = _Answer(state, fields, prompt)
    started = submit(state.engine, state.metrics, answer.id, [prompt], params, fields=fields, arrival_time=arrival_time)
    async with started as (stream,):
        if fields["stream"]:
            return await send_events(request, _chunks(answer, stream, params.n, usage_options))
        (output,) = await final_outputs([stream])
        return json_answer(answer.whole(output))


def _params(engine: AsyncEngine, fields: Mapping[str, Any]) -> SamplingParams:
    max_tokens, max_completion_tokens = fields["max_tokens"], fields["max_completion_tokens"]
    if None not in (max_tokens, max_completion_tokens) and max_tokens != max_completion_tokens:
        raise InvalidRequestError(
            f"max_tokens is {max_tokens} and max_completion_tokens {max_completion_tokens}; send one of them",
            param="max_completion_tokens",
        )
    given = {"max_tokens": max_completion_tokens or max_tokens, "logprobs": _num_logprobs(engine, fields)}
    return sampling_params(fields, engine.default_sampling_params, given=given, default_max_tokens=None)


def _num_logprobs(engine: AsyncEngine, fields: Mapping[str, Any]) -> int | None:
    num_top, limit = fields["top_logprobs"], engine.config.max_logprobs
    if num_top is not None and not 0 <= num_top <= limit:
        raise InvalidRequestError(
            f"top_logprobs is {num_top}; it must be at least 0 and at most {limit} (--max-logprobs)",
            param="top_logprobs",
        )
    if num_top and not fields["logprobs"]:
        raise InvalidRequestError("top_logprobs needs logprobs: true; set it", param="top_logprobs")
    return num_top or 0 if fields["logprobs"] else None


async def _prompt(engine: AsyncEngine, fields: Mapping[str, Any]) -> Prompt:
    messages = check_messages(fields["messages"])
    variables = fields["chat_template_kwargs"] or {}
    for name in sorted(_RENDER_ARGUMENTS & variables.keys()):
        raise InvalidRequestError(
            f"chat_template_kwargs holds {name!r}, which is not a variable of templates; remove it",
            param="chat_template_kwargs",
        )
    is_continued, adds_prompt = fields["continue_final_message"], fields["add_generation_prompt"]
    text = await engine.render_chat(
        messages,
        add_generation_prompt=not is_continued if adds_prompt is None else adds_prompt,
        continue_final_message=is_continued,
        **variables,
    )
    return await encode_prompt(engine, text, add_special_tokens=fields["add_special_tokens"], param="messages")


async def _chunks(
    answer: "_Answer", stream: RequestStream, n: int, usage_options: tuple[bool, bool]
) -> AsyncGenerator[str]:
    include_usage, continuous_usage = usage_options
    templates = TextTemplates(lambda index, text: answer.chunk(CompletionOutput(index=index, text=text, token_ids=[])))
    for index in range(n):
        first = CompletionOutput(index=index, text="", token_ids=[])
        yield to_json(answer.chunk(first, with_usage=continuous_usage, role="assistant"))
    async for output in stream:
        answer.usage.add(checked(output))
        for completion in output.outputs:
            if completion.finished or completion.logprobs or (completion.text and continuous_usage):
                yield to_json(answer.chunk(completion, with_usage=continuous_usage))
            elif completion.text:
                yield templates.fill(completion.index, completion.text)
    if include_usage:
        yield to_json(answer.chunk(None, with_usage=True))


class _Answer:
    """Builds the parts of one answer."""

    def __init__(self, state: ServerState, fields: Mapping[str, Any], prompt: Prompt):
        self.id = new_request_id("chatcmpl")
        self.usage = Usage([prompt])
        self._created = int(time.time())
        self._model = state.model_name
        self._num_top_logprobs = fields["top_logprobs"] or 0

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        self.usage.add(output)
        choices = [self.choice(completion, "message", role="assistant") for completion in output.outputs]
        extra: dict[str, Any] = {"usage": self.usage.as_json()}
        if output.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return self._body("chat.completion", choices) | extra

    def chunk(self, completion: CompletionOutput | None, *, with_usage: bool = False, **role: str) -> dict[str, Any]:
        choices = [] if completion is None else [self.choice(completion, "delta", **role)]
        body = self._body("chat.completion.chunk", choices)
        return body | {"usage": self.usage.as_json()} if with_usage else body

    def choice(self, completion: CompletionOutput, kind: str, **role: str) -> dict[str, Any]:
        choice = {
            "index": completion.index,
            kind: {**role, "content": completion.text},
            "logprobs": chat_logprobs(completion, self._num_top_logprobs),
            "finish_reason": completion.finish_reason,
        }
        return choice | {"stop_reason": completion.stop_reason} if completion.finished else choice

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model, "choices": choices}
