"""POST /v1/chat/completions."""

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from aiohttp import web

from pagedjax import AsyncEngine, CompletionOutput, InvalidRequestError, RequestOutput, SamplingParams
from pagedjax.async_engine import RequestStream
from servers.answer_parser import AnswerParser
from servers.call import Call, read_call
from servers.generation import checked, respond
from servers.logprobs import chat_logprobs, prompt_logprobs
from servers.message_form import MessageForm
from servers.messages import check_messages, render_messages
from servers.output_form import errors_by_field
from servers.prompts import Prompt, encode_prompt, truncation
from servers.protocol import CHAT
from servers.sampling import sampling_params
from servers.streaming import TextTemplates, to_json
from servers.usage import Usage


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a chat, as one JSON object or as a stream of chunks."""
    call = await read_call(request, CHAT, id_prefix="chatcmpl-")
    with errors_by_field(call.fields):
        message = MessageForm.read(call.fields, call.state.config)
        params = _params(call.engine, call.fields, message)
        prompt, rendered = await _prompt(call, params, message)
        message = message.after(rendered, is_continued=call.fields["continue_final_message"])
        return await respond(call, _Answer(call, prompt, params.n, message), [prompt], message.constrain(params))


def _params(engine: AsyncEngine, fields: Mapping[str, Any], message: MessageForm) -> SamplingParams:
    max_tokens, max_completion_tokens = fields["max_tokens"], fields["max_completion_tokens"]
    if None not in (max_tokens, max_completion_tokens) and max_tokens != max_completion_tokens:
        raise InvalidRequestError(
            f"max_tokens is {max_tokens} and max_completion_tokens {max_completion_tokens}; send one of them",
            param="max_completion_tokens",
        )
    given = {"max_tokens": max_completion_tokens or max_tokens, "logprobs": _num_logprobs(engine, fields)}
    if message.is_parsed and fields["skip_special_tokens"] is None:
        given["skip_special_tokens"] = False  # in some vocabularies the tags that parsers look for are special
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


async def _prompt(call: Call, params: SamplingParams, message: MessageForm) -> tuple[Prompt, str]:
    """Return the prompt and the text that it ends with, which is empty where truncation cuts off the end."""
    text = await render_messages(call.state, call.fields, tools=message.tool_use.tools)
    truncated = truncation(call.engine, call.fields, max_tokens=params.max_tokens)
    special = bool(call.fields["add_special_tokens"])  # the template writes them
    prompt = await encode_prompt(call.engine, text, truncated, add_special_tokens=special, param="messages")
    is_end_cut_off = prompt.text is None and truncated.side == "right"
    return prompt, "" if is_end_cut_off else text


class _Answer:
    """Builds the parts of one answer."""

    def __init__(self, call: Call, prompt: Prompt, n: int, message: MessageForm):
        self._id = call.id
        self._created = int(time.time())
        self._model = call.state.model_name
        self._n = n
        self._usage = Usage([prompt])
        self._stream_options = call.stream_options
        self._fields = call.fields
        self._prompt_token_ids = prompt.token_ids
        self._echo = _echoed(call.fields)
        self._message = message
        self._parsers: dict[int, AnswerParser] = {}  # by choice, where the form of the message needs any

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        self._usage.add(output)
        choices = [self.choice(completion, "message", role="assistant") for completion in output.outputs]
        for choice in choices if self._echo else []:
            choice["message"]["content"] = self._echo + (choice["message"]["content"] or "")
        extra: dict[str, Any] = {"usage": self._usage.as_json()}
        if output.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self._fields["return_token_ids"]:
            extra["prompt_token_ids"] = self._prompt_token_ids
        return self._body("chat.completion", choices) | extra

    async def events(self, streams: Sequence[RequestStream]) -> AsyncGenerator[str]:
        with_usage, with_ids = self._stream_options.continuous_usage_stats, self._fields["return_token_ids"]
        templates = TextTemplates(lambda index, text: self.chunk(_delta(index, text)))
        for index in range(self._n):
            yield to_json(self._first_chunk(index, with_usage=with_usage))
            if self._echo:
                yield to_json(self.chunk(_delta(index, ""), with_usage=with_usage, content=self._echo))
        async for output in streams[0]:
            self._usage.add(checked(output))
            for completion in output.outputs:
                has_text = bool(completion.text)
                if completion.finished or completion.logprobs or with_ids or (has_text and with_usage):
                    yield to_json(self.chunk(completion, with_usage=with_usage))
                elif has_text and self._message.is_parsed:
                    chunk = self.chunk(completion)
                    if chunk["choices"][0]["delta"]:
                        yield to_json(chunk)
                elif has_text:
                    yield templates.fill(completion.index, completion.text)
        if self._stream_options.include_usage:
            yield to_json(self.chunk(None, with_usage=True))

    def _first_chunk(self, index: int, *, with_usage: bool) -> dict[str, Any]:
        chunk = self.chunk(_delta(index, ""), with_usage=with_usage, role="assistant", content="")
        return chunk | {"prompt_token_ids": self._prompt_token_ids} if self._fields["return_token_ids"] else chunk

    def chunk(self, completion: CompletionOutput | None, *, with_usage: bool = False, **role: str) -> dict[str, Any]:
        choices = [] if completion is None else [self.choice(completion, "delta", **role)]
        body = self._body("chat.completion.chunk", choices)
        return body | {"usage": self._usage.as_json()} if with_usage else body

    def choice(self, completion: CompletionOutput, kind: str, **role: str) -> dict[str, Any]:
        as_ids = self._fields["return_tokens_as_token_ids"]
        body, finish_reason = {"content": completion.text}, completion.finish_reason
        if self._message.is_parsed:
            body, finish_reason = self._parsed(completion, kind)
        choice = {
            "index": completion.index,
            kind: {**role, **body, **role},
            "logprobs": chat_logprobs(completion, self._fields["top_logprobs"] or 0, as_ids=as_ids),
            "finish_reason": finish_reason,
        }
        if self._fields["return_token_ids"]:
            choice["token_ids"] = completion.token_ids
        return choice | {"stop_reason": completion.stop_reason} if completion.finished else choice

    def _parsed(self, completion: CompletionOutput, kind: str) -> tuple[dict[str, Any], str | None]:
        parser = self._parsers.get(completion.index)
        if parser is None:
            parser = self._parsers[completion.index] = self._message.new_parser()
        part = parser.push(completion.text, is_last=completion.finished)
        body = part.as_delta() if kind == "delta" else part.as_message(with_reasoning=self._message.has_reasoning)
        is_call = completion.finish_reason == "stop" and parser.has_calls and self._message.calls_end_answers
        return body, "tool_calls" if is_call else completion.finish_reason

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}


def _delta(index: int, text: str) -> CompletionOutput:
    return CompletionOutput(index=index, text=text, token_ids=[])


def _echoed(fields: Mapping[str, Any]) -> str:
    """The text that the field echo puts before the answer: that of a last message which the answer goes on with."""
    last = check_messages(fields["messages"])[-1]
    if not fields["echo"] or last["role"] != "assistant":
        return ""
    content = last.get("content") or ""  # calls alone have none
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
