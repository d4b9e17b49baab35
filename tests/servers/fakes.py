"""An engine without a model: the public surface of LLMEngine over bytes, with arithmetic in place of logits.

Token k of completion i is the prompt's byte number k, counted round, plus i. A token id is a byte; the ids
256 and above exist but mean nothing. Every step gives each running request one token.
"""

import asyncio
import math
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

from pagedjax.config import EngineConfig
from pagedjax.engine_view import EngineView, RequestView
from pagedjax.errors import InvalidRequestError
from pagedjax.iteration_stats import Histogram
from pagedjax.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from pagedjax.sampling_params import RequestOutputKind, SamplingParams
from pagedjax.text.chat import validate_messages

VOCAB_SIZE = 260
ERRORS = {"error": "the logits are not finite", "timeout": "the request has reached its deadline"}


class ByteTokenizer:
    """Token ids are the bytes of the text; a chat is `role:content` lines."""

    eos_token_ids = (259,)
    vocab_size = VOCAB_SIZE
    max_chars_per_token = 4
    chat_template = "fake"

    def __init__(self):
        self.calls = []

    def encode(self, text, add_special_tokens=True):
        self.calls.append(("encode", text, add_special_tokens))
        return list(text.encode())

    def decode(self, token_ids, skip_special_tokens=True):
        return bytes(token_id for token_id in token_ids if token_id < 256).decode(errors="replace")

    def render_chat(self, messages, *, add_generation_prompt=True, continue_final_message=False, **kwargs):
        self.calls.append(("render_chat", messages, add_generation_prompt, continue_final_message, kwargs))
        messages = validate_messages(messages)
        text = "\n".join(f"{message['role']}:{message['content']}" for message in messages)
        return text + "\nassistant:" if add_generation_prompt else text


@dataclass
class FakeRequest:
    request_id: str
    prompt: str | None
    prompt_token_ids: list
    params: SamplingParams
    metrics: RequestMetrics
    deadline: float
    generated: list = field(default_factory=list)
    num_reported: int = 0
    finish_reason: str | None = None


class FakeEngine:
    """LLMEngine's public surface. While `gate` is cleared steps give no tokens; `error` makes the next step fail.

    Deadlines are kept between two steps, unless it `is_stuck`.
    """

    def __init__(self, *, max_model_len=64, default_sampling_params=None, step_seconds=0.0, **config):
        self.config = EngineConfig(model="fake", max_model_len=max_model_len, **config)
        self.model_config = SimpleNamespace(vocab_size=VOCAB_SIZE)
        self.tokenizer = ByteTokenizer()
        self.default_sampling_params = default_sampling_params or {}
        self.requests = {}
        self.added = []  # (request_id, prompt_token_ids, params, priority, cache_salt) of every accepted request
        self.clients = []
        self.gate = threading.Event()
        self.gate.set()
        self.error = None
        self.is_stuck = False
        self.aborted = []
        self.prepared = []  # (structured_outputs, name of the thread)
        self._changed = threading.Condition()
        self.was_shut_down = False
        self.threads = set()
        self.step_seconds = step_seconds
        self.num_prompt_tokens = self.num_generation_tokens = 0

    def add_request(
        self, request_id, prompt, sampling_params, *, priority=0, cache_salt=None, client=("", ""), arrival_time=None,
        timeout=None,
    ):  # fmt: skip
        self._note_thread()
        ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
        if request_id == "crash":
            raise RuntimeError("add_request is broken")
        if not ids:
            raise InvalidRequestError("the prompt is empty; send at least one token", param="prompt")
        if len(ids) >= self.config.max_model_len:
            raise InvalidRequestError(
                f"prompt has {len(ids)} tokens, max_model_len is {self.config.max_model_len}; "
                "shorten it or raise --max-model-len",
                param="prompt",
            )
        if any(not 0 <= token_id < VOCAB_SIZE for token_id in ids):
            raise InvalidRequestError(f"prompt is {ids}; ids are 0..{VOCAB_SIZE - 1}", param="prompt")
        sampling_params.validate_for(vocab_size=VOCAB_SIZE, max_logprobs=self.config.max_logprobs)
        metrics = RequestMetrics(arrival_time=time.monotonic() if arrival_time is None else arrival_time)
        text = prompt if isinstance(prompt, str) else None
        self.requests[request_id] = FakeRequest(
            request_id, text, ids, sampling_params, metrics, metrics.arrival_time + (timeout or math.inf)
        )  # fmt: skip
        self.clients.append(client)
        self.added.append((request_id, ids, sampling_params, priority, cache_salt))
        self._notify()

    def is_prepared(self, sampling_params):
        form = sampling_params.structured_outputs
        return form is None or (form.regex != "(" and any(form == prepared for prepared, _ in self.prepared))

    def prepare(self, sampling_params):
        """Refuse the regex "("; whatever else is asked of the form of the output has no effect here."""
        self.prepared.append((sampling_params.structured_outputs, threading.current_thread().name))
        if sampling_params.structured_outputs.regex == "(":
            raise InvalidRequestError("structured_outputs.regex cannot be used", param="structured_outputs")

    def step(self):
        self._note_thread()
        if self.step_seconds:
            time.sleep(self.step_seconds)  # a step of a real engine takes time
        is_held = not self.gate.wait(0.001)
        if self.error is not None:
            raise self.error
        for request in self.requests.values():
            if request.deadline <= time.monotonic() and not self.is_stuck:
                request.finish_reason = "timeout"
        moving = [request for request in self.requests.values() if request.finish_reason is not None or not is_held]
        outputs = [output for request in moving if (output := self._advance(request))]
        self.requests = {key: request for key, request in self.requests.items() if request.finish_reason is None}
        self._notify()
        return outputs

    def abort(self, request_ids):
        self._note_thread()
        for request_id in request_ids:
            if request_id in self.requests:
                self.requests[request_id].finish_reason = "abort"
                self.aborted.append(request_id)
        self._notify()

    def has_unfinished_requests(self):
        self._note_thread()
        return bool(self.requests)

    def stats(self):
        return {
            "num_requests_running": float(len(self.requests)),
            "num_requests_waiting": 0.0,
            "num_requests_swapped": 0.0,
            "cpu_cache_usage_perc": 0.0,
            **dict.fromkeys(("swap_out_blocks", "swap_in_blocks", "swap_out_bytes", "swap_in_bytes"), 0.0),
            "kv_cache_usage_perc": len(self.requests) / 100,
            "num_preemptions": 0.0,
            "prefix_cache_queries": float(self.num_prompt_tokens),
            "prefix_cache_hits": 0.0,
            "prompt_tokens": float(self.num_prompt_tokens),
            "prompt_tokens_cached": 0.0,
            "generation_tokens": float(self.num_generation_tokens),
        }

    def histograms(self):
        return {"iteration_tokens_total": Histogram((1, 8))}

    def inspect(self):
        requests = tuple(
            RequestView(key, "running", len(one.prompt_token_ids), len(one.generated), 9, 1, 0, 0)
            for key, one in self.requests.items()
        )
        refs = (0, *(1 for _ in requests), 2, 0, 0)
        return EngineView(requests, refs, (len(refs) - 2,), (("weights", 1 << 20), ("KV cache", 1 << 21)))

    def reset_prefix_cache(self, *, reset_running_requests=False):
        self._note_thread()
        return reset_running_requests or not self.requests

    def shutdown(self):
        self.was_shut_down = True

    async def until(self, condition):
        """Wait until what the engine has heard (`added`, `aborted`) or still has (`requests`) fulfils `condition`."""

        def wait():
            with self._changed:
                return self._changed.wait_for(condition, timeout=60)

        assert await asyncio.to_thread(wait), "the engine never heard it"

    def _notify(self):
        with self._changed:
            self._changed.notify_all()

    def _note_thread(self):
        self.threads.add(threading.current_thread().name)

    def _advance(self, request):
        if request.finish_reason is None:
            self._generate(request)
        if request.finish_reason is not None:
            request.metrics.finished_time = time.monotonic()
        kind = request.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and request.finish_reason is None:
            return None
        first = request.num_reported if kind is RequestOutputKind.DELTA else 0
        is_first_report = request.num_reported == 0
        request.num_reported = len(request.generated)
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[self._completion(request, index, first) for index in range(request.params.n)],
            finished=request.finish_reason is not None,
            prompt_logprobs=self._prompt_logprobs(request) if is_first_report or first == 0 else None,
            num_cached_tokens=0,
            error=ERRORS.get(request.finish_reason),
            metrics=request.metrics.copy(),  # the event loop reads it while the engine goes on
        )

    def _generate(self, request):
        now = time.monotonic()
        if not request.generated:
            request.metrics.first_scheduled_time = request.metrics.first_token_time = now
            self.num_prompt_tokens += len(request.prompt_token_ids)
        request.metrics.last_token_time = now
        token_id = request.prompt_token_ids[len(request.generated) % len(request.prompt_token_ids)]
        request.generated.append(token_id)
        self.num_generation_tokens += request.params.n
        params = request.params
        room = self.config.max_model_len - len(request.prompt_token_ids)
        if token_id in params.stop_token_ids:
            request.finish_reason = "stop"
        elif token_id == ord("!") and request.params.seed == 666:
            request.finish_reason = "error"
        elif len(request.generated) == min(params.max_tokens or 10**9, room):
            request.finish_reason = "length"

    def _completion(self, request, index, first):
        ids = [(token_id + index) % 256 for token_id in request.generated[first:]]
        is_stop = request.finish_reason == "stop"
        return CompletionOutput(
            index=index,
            text=self.tokenizer.decode(ids),
            token_ids=ids,
            logprobs=None if request.params.logprobs is None else [self._logprobs(i, request.params) for i in ids],
            finish_reason=request.finish_reason,
            stop_reason=request.generated[-1] if is_stop else None,
        )

    def _logprobs(self, token_id, params):
        """The sampled token has rank 2; rank 1 is the next byte and so on."""
        entries = {token_id: Logprob(-1.0, 2, chr(token_id))}
        for rank in range(1, (params.logprobs or 0) + 1):
            if rank != 2:
                entries[(token_id + rank) % 256] = Logprob(-0.5 * rank, rank, chr((token_id + rank) % 256))
        return entries

    def _prompt_logprobs(self, request):
        if request.params.prompt_logprobs is None:
            return None
        return [None] + [{i: Logprob(-2.0, 1, chr(i))} for i in request.prompt_token_ids[1:]]
