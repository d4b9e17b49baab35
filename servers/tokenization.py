"""POST /tokenize and /detokenize: the model's tokenizer as requests meet it."""

from typing import Any

from aiohttp import web

from pagedjax import InvalidRequestError
from servers.body import read_json
from servers.messages import render_messages
from servers.prompts import Truncation, encode_prompt
from servers.protocol import DETOKENIZE, TOKENIZE, parse
from servers.state import STATE, ServerState
from servers.streaming import json_answer
from servers.tools import check_tools

_KEEP_ALL = Truncation(None, "left")


async def tokenize(request: web.Request) -> web.Response:
    """Answer the ids of a text, or of a chat as its template renders it."""
    state = request.app[STATE]
    fields = parse(await read_json(request), TOKENIZE)
    state.check_model(fields["model"])
    token_ids = await _token_ids(state, fields)
    answer: dict[str, Any] = {"count": len(token_ids), "max_model_len": state.engine.config.max_model_len}
    answer |= {"tokens": token_ids, "token_strs": None}
    if fields["return_token_strs"]:
        answer["token_strs"] = await state.engine.decode_each(token_ids)
    return json_answer(answer)


async def detokenize(request: web.Request) -> web.Response:
    """Answer the text of token ids."""
    state = request.app[STATE]
    fields = parse(await read_json(request), DETOKENIZE)
    state.check_model(fields["model"])
    last = state.engine.model_config.vocab_size - 1
    for token_id in fields["tokens"]:
        if not 0 <= token_id <= last:
            raise InvalidRequestError(f"tokens holds {token_id!r:.40}, ids are 0..{last}; remove it", param="tokens")
    return json_answer({"prompt": await state.engine.decode_async(fields["tokens"])})


async def _token_ids(state: ServerState, fields: dict[str, Any]) -> list[int]:
    if (fields["prompt"] is None) == (fields["messages"] is None):
        raise InvalidRequestError("send either prompt or messages", param="prompt")
    special = fields["add_special_tokens"]
    if fields["messages"] is not None:
        text = await render_messages(state, fields, tools=check_tools(fields["tools"]))
        param, adds_special = "messages", bool(special)
    else:
        text, param, adds_special = fields["prompt"], "prompt", special is None or special
    prompt = await encode_prompt(state.engine, text, _KEEP_ALL, add_special_tokens=adds_special, param=param)
    return prompt.token_ids
