"""What the HTTP server costs: many streams over an engine whose step takes a fixed time, against the engine alone.

Run: python tests/performance/server_overhead.py --streams 256 --step-ms 12 --tokens 300

Each token's text is the time at which the engine made it, so the client, in a process of its own, knows how long every
token was on its way. Two cores: one for server and engine, one for the client.
"""

import argparse
import asyncio
import cProfile
import gc
import json
import multiprocessing
import pstats
import re
import sys
import time
from types import SimpleNamespace

from aiohttp import web

from pagedjax import AsyncEngine, CompletionOutput, EngineConfig, RequestOutput, RequestOutputKind, SamplingParams
from pagedjax.engine_view import EngineView
from pagedjax.iteration_stats import Histogram
from pagedjax.outputs import RequestMetrics
from servers import ServerConfig, create_app
from servers.run import BACKLOG, SWITCH_INTERVAL

TIME = re.compile(rb"(\d+\.\d{6})")


class PacedEngine:
    """Gives every request one token a step; a step takes `step_seconds`, the making of its outputs included."""

    def __init__(self, step_seconds: float):
        self.config = EngineConfig(model="paced", max_model_len=1 << 20, max_num_seqs=1024, disable_log_stats=True)
        self.model_config = SimpleNamespace(vocab_size=1000)
        self.default_sampling_params: dict = {}
        self.tokenizer = SimpleNamespace(
            encode=lambda text, special=True: [1] * len(text), max_chars_per_token=1, decode=lambda ids, **_: "x"
        )
        self.step_seconds = step_seconds
        self.num_tokens = 0
        self.first_time = self.last_time = 0.0
        self._requests: dict[str, list] = {}
        self._due = 0.0

    def is_prepared(self, params):
        return True

    def add_request(
        self, request_id, prompt, params, *, priority=0, cache_salt=None, client=("", ""), arrival_time=None,
        timeout=None,
    ):  # fmt: skip
        self._requests[request_id] = [prompt, params, 0, RequestMetrics(arrival_time=arrival_time or time.monotonic())]

    def step(self):
        self._due = max(self._due + self.step_seconds, time.monotonic())
        outputs = [self._output(request_id) for request_id in list(self._requests)]
        time.sleep(max(0.0, self._due - time.monotonic()))
        self.last_time = time.monotonic()
        self.first_time = self.first_time or self.last_time
        text = f"{self.last_time:.6f} "
        for output in outputs:
            output.outputs[0].text = text
        self.num_tokens += len(outputs)
        return outputs

    def _output(self, request_id):
        request = self._requests[request_id]
        prompt, params, count, metrics = request
        request[2] = count + 1
        is_over = count + 1 == params.max_tokens
        if is_over:
            del self._requests[request_id]
        metrics.last_token_time = time.monotonic()
        metrics.first_token_time = metrics.first_token_time or metrics.last_token_time
        completion = CompletionOutput(index=0, text="", token_ids=[7], finish_reason="length" if is_over else None)
        return RequestOutput(
            request_id=request_id, prompt=None, prompt_token_ids=prompt, outputs=[completion], finished=is_over,
            metrics=metrics,
        )  # fmt: skip

    def abort(self, request_ids):
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def has_unfinished_requests(self):
        return bool(self._requests)

    def stats(self):
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions",
                 "prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "prompt_tokens_cached",
                 "generation_tokens")  # fmt: skip
        return dict.fromkeys(names, 0.0) | {"generation_tokens": float(self.num_tokens)}

    def histograms(self):
        return {"iteration_tokens_total": Histogram((1,))}

    def inspect(self):
        return EngineView((), (0,), (), ())

    def shutdown(self):
        pass

    @property
    def tokens_per_second(self):
        return self.num_tokens / max(self.last_time - self.first_time + self.step_seconds, 1e-9)


async def alone(step_seconds: float, num_streams: int, num_tokens: int) -> float:
    """Tokens a second that coroutines get from the engine without HTTP."""
    paced = PacedEngine(step_seconds)
    engine = AsyncEngine(paced)
    params = SamplingParams(max_tokens=num_tokens, output_kind=RequestOutputKind.DELTA)

    async def read(i: int) -> None:
        async for _ in engine.generate([1], params, str(i)):
            pass

    await asyncio.gather(*map(read, range(num_streams)))
    await engine.shutdown()
    return paced.tokens_per_second


async def served(step_seconds: float, num_streams: int, num_tokens: int) -> tuple[float, dict]:
    """Tokens a second that the engine makes for clients of another process behind the server, and what they saw."""
    paced = PacedEngine(step_seconds)
    engine = AsyncEngine(paced)
    runner = web.AppRunner(create_app(engine, ServerConfig()), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=BACKLOG).start()
    port = runner.addresses[0][1]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_clients, args=(theirs, port, num_streams, num_tokens))
    process.start()
    theirs.close()  # so that a client that dies is noticed
    cpu_seconds = time.process_time()
    seen = await asyncio.to_thread(ours.recv)
    seen["cpu"] = 1e6 * (time.process_time() - cpu_seconds) / seen["tokens"]
    process.join()
    await runner.cleanup()
    await engine.shutdown()
    return paced.tokens_per_second, seen


def run_clients(connection, port: int, num_streams: int, num_tokens: int) -> None:
    freeze()
    connection.send(asyncio.run(clients(port, num_streams, num_tokens)))


async def clients(port: int, num_streams: int, num_tokens: int) -> dict:
    body = json.dumps({"prompt": "x", "max_tokens": num_tokens, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    delays: list[tuple[float, float]] = []  # when a token was made, and how long it was on its way
    begins: list[float] = []  # when each stream's first token was made
    counts = {"tokens": 0, "chunks": 0}

    class Stream(asyncio.Protocol):
        def __init__(self):
            self.over = asyncio.get_running_loop().create_future()
            self.has_begun = False

        def connection_made(self, transport):
            transport.write(request)

        def data_received(self, data):
            now = time.monotonic()
            times = TIME.findall(data)
            counts["tokens"] += len(times)
            counts["chunks"] += data.count(b"data: {")
            made = [float(one) for one in times]
            if made and not self.has_begun:
                self.has_begun = True
                begins.append(made[0])
            delays.extend((one, now - one) for one in made)

        def connection_lost(self, error):
            self.over.set_result(None)

    loop = asyncio.get_running_loop()
    streams = [(await loop.create_connection(Stream, "127.0.0.1", port))[1] for _ in range(num_streams)]
    await asyncio.gather(*(stream.over for stream in streams))
    of_all = percentiles([delay for _, delay in delays])
    later = percentiles([delay for made, delay in delays if made > max(begins)])
    return counts | {"delays": of_all, "delays once all have begun": later, "begin": max(begins) - min(begins)}


def freeze() -> None:
    """Keep the garbage collector from what was imported, as the server does when it starts."""
    gc.collect()
    gc.freeze()


def percentiles(seconds: list[float]) -> dict[int, float]:
    """Return percentiles in milliseconds."""
    ordered = sorted(seconds)
    return {p: 1000 * ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 90, 99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=12.0)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--switch-interval", type=float, default=SWITCH_INTERVAL, help="seconds a thread keeps the GIL")
    parser.add_argument("--profile", action="store_true", help="profile the event loop")
    flags = parser.parse_args()
    sys.setswitchinterval(flags.switch_interval)
    freeze()
    load = (flags.step_ms / 1000, flags.streams, flags.tokens)
    without = asyncio.run(alone(*load))
    profile = cProfile.Profile()
    if flags.profile:
        profile.enable()
    with_http, seen = asyncio.run(served(*load))
    if flags.profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    print(f"{flags.streams} streams, a step of {flags.step_ms:g} ms, {flags.tokens} tokens each")
    print(f"ideal {flags.streams / flags.step_ms * 1000:,.0f} tokens/s; without HTTP {without:,.0f}; "
          f"with HTTP {with_http:,.0f}, {100 * with_http / without:.1f} %")  # fmt: skip
    for which in ("delays", "delays once all have begun"):
        values = ", ".join(f"p{p} {one:.1f}" for p, one in seen[which].items())
        print(f"added latency a token, {which}: {values} ms")
    print(f"streams begin within {1000 * seen['begin']:.0f} ms; {seen['tokens']} tokens in {seen['chunks']} chunks")
    budget = 1000 * flags.step_ms / flags.streams
    print(f"server and engine take {seen['cpu']:.1f} us of CPU a token; one core has {budget:.1f} us at this pace")


if __name__ == "__main__":
    main()
