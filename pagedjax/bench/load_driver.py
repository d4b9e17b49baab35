"""Sends requests to a server, each at its time, never more at once than allowed."""

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import aiohttp
import numpy as np
from tqdm import tqdm

from pagedjax.bench.client import Outcome, send
from pagedjax.bench.datasets import Sample
from pagedjax.bench.serve_flags import SAMPLING_FIELDS, ServerFlags
from pagedjax.errors import ConfigError
from pagedjax.text.tokenizer import Tokenizer


class LoadDriver:
    """Drives `model` of one server. Chats are given as texts, which token ids become through the tokenizer."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        server: ServerFlags,
        model: str,
        tokenizer: Tokenizer | None,
        max_concurrency: int | None,
    ):
        self._session, self._server, self._model, self._tokenizer = session, server, model, tokenizer
        self._turns = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)

    async def send_all(
        self, samples: Sequence[Sample], times: np.ndarray, description: str
    ) -> tuple[list[Outcome], float]:
        """Send each sample at its time after now, and return what became of them and the seconds until all were."""
        is_quiet = self._server.disable_tqdm or not samples or not sys.stderr.isatty()
        bodies = [self._body(sample) for sample in samples]
        prompt_lens = [len(sample.token_ids) for sample in samples]
        began, tasks = perf_counter(), []
        with tqdm(total=len(samples), desc=description, unit="request", disable=is_quiet, leave=False) as progress:
            for body, prompt_len, time in zip(bodies, prompt_lens, (began + times).tolist(), strict=True):
                delay = time - perf_counter()
                if delay > 0:
                    await asyncio.sleep(delay)
                tasks.append(asyncio.create_task(self._send(body, prompt_len, time, progress)))
            outcomes = await asyncio.gather(*tasks)
        return list(outcomes), perf_counter() - began

    async def _send(self, body: dict[str, Any], prompt_len: int, arrival_time: float, progress: tqdm) -> Outcome:
        async with self._turns:
            url, headers = self._server.url, self._server.headers
            outcome = await send(self._session, url, body, headers=headers, prompt_len=prompt_len)
        outcome.queue_time = outcome.start_time - arrival_time
        progress.update()
        return outcome

    def _body(self, sample: Sample) -> dict[str, Any]:
        given = {name: value for name in SAMPLING_FIELDS if (value := getattr(self._server, name)) is not None}
        options = {"stream": True, "stream_options": {"include_usage": True}, **given}
        if self._server.ignore_eos:
            options["ignore_eos"] = True
        return {
            "model": self._model,
            **self._prompt(sample),
            **options,
            **(self._server.extra_body or {}),
        }

    def _prompt(self, sample: Sample) -> dict[str, Any]:
        if not self._server.is_chat:
            return {"prompt": sample.token_ids or sample.text, "max_tokens": sample.output_len}
        text = sample.text
        if text is None:
            if self._tokenizer is None:
                raise ConfigError("a chat needs texts and the prompts are token ids; name a tokenizer: --tokenizer")
            text = self._tokenizer.decode(sample.token_ids, skip_special_tokens=True)
        return {"messages": [{"role": "user", "content": text}], "max_completion_tokens": sample.output_len}
