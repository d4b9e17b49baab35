"""POST /v1/responses: OpenAI's newer shape of a chat. Nothing is stored, so there is nothing to get or to go on from.

Reasoning, text and function calls become output items (`response_items`).
"""

import dataclasses
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from pagedjax import CompletionOutput, Logprob, RequestOutput, SamplingParams
from pagedjax.async_engine import RequestStream
from servers.answer_parser import MessagePart
from servers.call import Call, read_call
from servers.errors import ApiError, error_body
from servers.generation import checked, respond
from servers.logprobs import chat_logprobs
from servers.message_form import MessageForm
from servers.messages import render_messages
from servers.prompts import Prompt, Truncation, encode_prompt
from servers.protocol import RESPONSES
from servers.response_form import chat_fields, errors_in_these_words
from servers.response_input import to_messages
from servers.response_items import ItemEvent, OutputItems
from servers.sampling import sampling_params
from servers.streaming import Framing, to_json
from servers.usage import Usage

LOGPROBS = "message.output_text.logprobs"


async def responses(request: web.Request) -> web.StreamResponse:
    """Answer with one response object, or with the events by which it comes about."""
    call = await read_call(request, RESPONSES, id_prefix="resp_")
    chat = chat_fields(call.fields)
    with errors_in_these_words(chat):
        form = MessageForm.read(chat, call.state.config)
        params = _params(call, form)
        prompt = await _prompt(call, form)
        form = form.after(prompt.text or "", is_continued=False)
        params = form.constrain(params)
        return await respond(call, _Answer(call, prompt, params, form), [prompt], params, framing=FRAMING)


def _params(call: Call, form: MessageForm) -> SamplingParams:
    fields = call.fields
    wants_logprobs = LOGPROBS in (fields["include"] or ()) or fields["top_logprobs"] is not None
    given = {
        "max_tokens": fields["max_output_tokens"],
        "logprobs": fields["top_logprobs"] or 0 if wants_logprobs else None,
    }
    if form.is_parsed and fields["skip_special_tokens"] is None:
        given["skip_special_tokens"] = False  # in some vocabularies the tags that parsers look for are special
    return sampling_params(fields, call.engine.default_sampling_params, given=given, default_max_tokens=None)


async def _prompt(call: Call, form: MessageForm) -> Prompt:
    fields = call.fields
    chat = {
        "messages": to_messages(fields["input"], fields["instructions"]),
        "chat_template_kwargs": fields["chat_template_kwargs"],
        "chat_template": None,
        "continue_final_message": False,
        "add_generation_prompt": None,
    }
    text = await render_messages(call.state, chat, tools=form.tool_use.tools)
    return await encode_prompt(call.engine, text, Truncation(None, "left"), add_special_tokens=False, param="input")


class _Answer:
    """Builds one response, whole or event by event."""

    def __init__(self, call: Call, prompt: Prompt, params: SamplingParams, form: MessageForm):
        self._id = call.id
        self._created = int(time.time())
        self._engine, self._model = call.engine, call.state.model_name
        self._fields = call.fields
        self._params = params
        self._usage = Usage([prompt])
        self._num_events = 0
        self._items = OutputItems()
        self._form = form
        self._parser = form.new_parser() if form.is_parsed else None

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        self._usage.add(output)
        (completion,) = output.outputs
        if self._parser is not None and completion.logprobs is not None:
            completion = self._without_other_logprobs(completion, completion.logprobs)
        self._take(completion)
        self._items.finish(_STATUS[completion.finish_reason][0])
        return self.body(completion.finish_reason)

    async def events(self, streams: Sequence[RequestStream]) -> AsyncGenerator[str]:
        yield self._event("created", {"response": self.body(None)})
        yield self._event("in_progress", {"response": self.body(None)})
        for event in [] if self._parser else self._items.open("message"):  # unparsed, it can be nothing else
            yield self._event(*event)
        finish_reason = None
        async for output in streams[0]:
            self._usage.add(checked(output))
            for completion in output.outputs:
                finish_reason = completion.finish_reason
                for event in self._take(completion):
                    yield self._event(*event)
        for event in self._items.finish(_STATUS[finish_reason][0]):
            yield self._event(*event)
        body = self.body(finish_reason)
        yield self._event(body["status"], {"response": body})

    def body(self, finish_reason: str | None) -> dict[str, Any]:
        """Return the response object; a `finish_reason` of None is that of one in progress."""
        status, reason = _STATUS[finish_reason]
        is_over = finish_reason is not None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": None if reason is None else {"reason": reason},
            "model": self._model,
            "output": self._items.as_json(status) if is_over else [],
            "usage": _usage(self._usage) if is_over else None,
            "temperature": self._params.temperature,
            "top_p": self._params.top_p,
            "previous_response_id": None,
            "store": False,
            "background": False,
            "reasoning": None,
            "service_tier": "default",
            **{name: self._fields[name] for name in _ECHOED},
        }

    def _take(self, completion: CompletionOutput) -> list[ItemEvent]:
        """Add what is new to what there is; return the events that tell of it."""
        logprobs = chat_logprobs(completion, self._params.logprobs or 0)
        part = MessagePart(content=completion.text)
        if self._parser is not None:
            part = self._parser.push(completion.text, is_last=completion.finished)
        return self._items.add(part, [] if logprobs is None else logprobs["content"])

    def _without_other_logprobs(
        self, completion: CompletionOutput, logprobs: list[dict[int, Logprob]]
    ) -> CompletionOutput:
        """Leave out the tokens that a stream does not count to the message: before its text, and after a call began."""
        ids, options = completion.token_ids, {"skip_special_tokens": self._params.skip_special_tokens}

        def first(of_interest: Callable[[MessagePart], Any]) -> int:
            """The index of the token with which there is such a part; the number of tokens where there is none."""

            def is_there(index: int) -> bool:
                text, is_last = self._engine.decode(ids[: index + 1], **options), index + 1 == len(ids)
                return bool(of_interest(self._form.new_parser().push(text, is_last=is_last)))

            return bisect_left(range(len(ids)), True, key=is_there)

        kept = slice(first(lambda part: part.content), first(lambda part: part.calls) + 1)
        return dataclasses.replace(completion, token_ids=ids[kept], logprobs=logprobs[kept])

    def _event(self, kind: str, values: dict[str, Any]) -> str:
        number = self._num_events
        self._num_events += 1
        data = {"type": f"response.{kind}", "sequence_number": number, **values}
        return f"event: response.{kind}\ndata: {to_json(data)}\n\n"


_ECHOED = (
    "instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "tool_choice", "tools", "text",
    "top_logprobs", "truncation", "user",
)  # fmt: skip
_STATUS = {
    None: ("in_progress", None),
    "stop": ("completed", None),
    "length": ("incomplete", "max_output_tokens"),
    "abort": ("incomplete", "abort"),
}


def _usage(usage: Usage) -> dict[str, Any]:
    counts: Mapping[str, Any] = usage.as_json()
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        # Zero, whatever was thought: deltas may be joined, and the text's parser, which alone knows where the reasoning
        # ends, does not know in which of their tokens.
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }


def _error_event(error: ApiError) -> str:
    values = {"type": "error", "code": str(error.status), "message": error.message, "param": error.param}
    values |= error_body(error)  # the official client looks for it
    return f"event: error\ndata: {to_json(values)}\n\n"


FRAMING = Framing(frame=str, error=_error_event, end=b"")
