"""POST /v1/responses: OpenAI's newer shape of a chat. Nothing is stored, so there is nothing to get or to go on from.

The model's text is one output item. Items of other kinds belong beside it, in `_Answer.items`.
"""

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from aiohttp import web

from pagedjax import CompletionOutput, RequestOutput, SamplingParams
from pagedjax.async_engine import RequestStream
from servers.call import Call, read_call
from servers.errors import ApiError, error_body
from servers.generation import checked, respond
from servers.logprobs import chat_logprobs
from servers.messages import render_messages
from servers.prompts import Prompt, Truncation, encode_prompt
from servers.protocol import RESPONSES
from servers.response_input import to_messages
from servers.sampling import sampling_params
from servers.streaming import Framing, to_json
from servers.usage import Usage

LOGPROBS = "message.output_text.logprobs"


async def responses(request: web.Request) -> web.StreamResponse:
    """Answer with one response object, or with the events by which it comes about."""
    call = await read_call(request, RESPONSES, id_prefix="resp_")
    params = _params(call)
    prompt = await _prompt(call)
    return await respond(call, _Answer(call, prompt, params), [prompt], params, framing=FRAMING)


def _params(call: Call) -> SamplingParams:
    fields = call.fields
    wants_logprobs = LOGPROBS in (fields["include"] or ()) or fields["top_logprobs"] is not None
    given = {
        "max_tokens": fields["max_output_tokens"],
        "logprobs": fields["top_logprobs"] or 0 if wants_logprobs else None,
    }
    return sampling_params(fields, call.engine.default_sampling_params, given=given, default_max_tokens=None)


async def _prompt(call: Call) -> Prompt:
    fields = call.fields
    chat = {
        "messages": to_messages(fields["input"], fields["instructions"]),
        "chat_template_kwargs": fields["chat_template_kwargs"],
        "chat_template": None,
        "continue_final_message": False,
        "add_generation_prompt": None,
    }
    text = await render_messages(call.state, chat)
    return await encode_prompt(call.engine, text, Truncation(None, "left"), add_special_tokens=False, param="input")


class _Answer:
    """Builds one response, whole or event by event."""

    def __init__(self, call: Call, prompt: Prompt, params: SamplingParams):
        self._id = call.id
        self._message_id = f"msg_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = call.state.model_name
        self._fields = call.fields
        self._params = params
        self._usage = Usage([prompt])
        self._num_events = 0
        self._text, self._logprobs = "", []

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        self._usage.add(output)
        (completion,) = output.outputs
        self._take(completion)
        return self.body(completion.finish_reason)

    async def events(self, streams: Sequence[RequestStream]) -> AsyncGenerator[str]:
        yield self._event("response.created", response=self.body(None))
        yield self._event("response.in_progress", response=self.body(None))
        yield self._event("response.output_item.added", output_index=0, item=self._message("in_progress", []))
        yield self._event("response.content_part.added", **self._place(), part=_part("", []))
        finish_reason = None
        async for output in streams[0]:
            self._usage.add(checked(output))
            for completion in output.outputs:
                logprobs = self._take(completion)
                finish_reason = completion.finish_reason
                if completion.text or logprobs:
                    delta = {"delta": completion.text, "logprobs": logprobs}
                    yield self._event("response.output_text.delta", **self._place(), **delta)
        done = {"text": self._text, "logprobs": self._logprobs}
        part = _part(self._text, self._logprobs)
        yield self._event("response.output_text.done", **self._place(), **done)
        yield self._event("response.content_part.done", **self._place(), part=part)
        body = self.body(finish_reason)
        yield self._event("response.output_item.done", output_index=0, item=body["output"][0])
        yield self._event(f"response.{body['status']}", response=body)

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
            "output": self.items(status) if is_over else [],
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

    def items(self, status: str) -> list[dict[str, Any]]:
        """Return the items of the output."""
        return [self._message(status, [_part(self._text, self._logprobs)])]

    def _take(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        """Add what is new to what there is; return the new logprobs."""
        logprobs = chat_logprobs(completion, self._params.logprobs or 0)
        new = [] if logprobs is None else logprobs["content"]
        self._text += completion.text
        self._logprobs += new
        return new

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": content,
        }  # fmt: skip

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **values: Any) -> str:
        number = self._num_events
        self._num_events += 1
        return f"event: {kind}\ndata: {to_json({'type': kind, 'sequence_number': number, **values})}\n\n"


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


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(usage: Usage) -> dict[str, Any]:
    counts: Mapping[str, Any] = usage.as_json()
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }


def _error_event(error: ApiError) -> str:
    values = {"type": "error", "code": str(error.status), "message": error.message, "param": error.param}
    values |= error_body(error)  # the official client looks for it
    return f"event: error\ndata: {to_json(values)}\n\n"


FRAMING = Framing(frame=str, error=_error_event, end=b"")
