"""Tokens per second of the embedded SmolLM2 on this CPU over HTTP: one request at a time, and sixteen at once.

    python tests/performance/smollm2_cpu.py [--torch-python PYTHON]

With an interpreter that has torch and transformers, transformers' own generate loop is timed right after, so that the
ratio is of one run on one machine. Float32 on both sides, greedy, 96 tokens a request.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp

from pagedjax.loading.hub import demo_path

PORT = 8431
NUM_TOKENS = 96
PROMPTS = [f"Write a short story about the number {i} and its friends." for i in range(16)]
TORCH = """
import sys, time, torch, transformers
from pathlib import Path
path, prompt, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
ids = tokenizer(prompt, return_tensors="pt").input_ids
model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
rates = []
for _ in range(3):
    began = time.perf_counter()
    model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
    rates.append(count / (time.perf_counter() - began))
print(max(rates))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", help="an interpreter with torch, transformers, gguf and accelerate")
    arguments = parser.parse_args()
    with server() as ready_seconds:
        result = {"ready_seconds": round(ready_seconds, 1)}
        result |= asyncio.run(measure())
    if arguments.torch_python:
        command = [arguments.torch_python, "-c", TORCH, str(demo_path()), PROMPTS[0], str(NUM_TOKENS)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        result["transformers_tokens_per_second"] = round(float(printed.split()[-1]), 1)
        result["ratio_to_transformers"] = round(result["alone"] / result["transformers_tokens_per_second"], 2)
    print(json.dumps(result))


@contextmanager
def server() -> Iterator[float]:
    """Run the server as a user would; yield the seconds until it was ready."""
    command = [sys.executable, "-m", "servers", "--model", "demo", "--port", str(PORT), "--max-model-len", "2048"]
    command += ["--max-num-seqs", "16", "--max-num-batched-tokens", "256"]
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    try:
        asyncio.run(wait_ready(process))
        yield time.perf_counter() - began
    finally:
        process.terminate()
        process.wait()


async def wait_ready(process: subprocess.Popen) -> None:
    async with aiohttp.ClientSession() as session:
        while process.poll() is None:
            try:
                async with session.get(f"http://127.0.0.1:{PORT}/health") as reply:
                    if reply.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.2)
    raise SystemExit("the server ended before it was ready")


async def measure() -> dict[str, float]:
    """Best of three rounds for each concurrency, in generated tokens per second of wall time."""
    async with aiohttp.ClientSession() as session:
        await complete(session, PROMPTS[0])
        alone = [await rate(session, PROMPTS[:1]) for _ in range(3)]
        together = [await rate(session, PROMPTS) for _ in range(3)]
    best = {"alone": max(alone), "sixteen": max(together)}
    return {name: round(value, 1) for name, value in best.items()} | {
        "sixteen_to_one": round(best["sixteen"] / best["alone"], 2)
    }


async def rate(session: aiohttp.ClientSession, prompts: list[str]) -> float:
    began = time.perf_counter()
    counts = await asyncio.gather(*(complete(session, prompt) for prompt in prompts))
    return sum(counts) / (time.perf_counter() - began)


async def complete(session: aiohttp.ClientSession, prompt: str) -> int:
    body = {"model": "demo", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    async with session.post(f"http://127.0.0.1:{PORT}/v1/completions", json=body) as reply:
        answer = await reply.json()
        assert reply.status == 200, answer
        return answer["usage"]["completion_tokens"]


if __name__ == "__main__":
    main()
