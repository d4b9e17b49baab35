"""Measure decoding of a model with random weights: time per output token, host time per iteration, device idle share.

    python tests/performance/dummy_decode.py --shape llama-8b --batch 64 --prompt-len 512 --output-len 128

Prints the ledger, then one line of figures. Device idle share is read from a profiler trace of the last steps when
`--trace DIR` is given: one minus the union of kernel intervals over the traced time.
"""

import argparse
import gzip
import json
import time
from pathlib import Path

import jax
import numpy as np

from pagedjax import LLM, RequestOutputKind, SamplingParams
from pagedjax.models.config import ModelConfig, RopeConfig

SHAPES = {
    "llama-8b": ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32,
        num_heads=32, num_kv_heads=8, head_dim=128, max_position_embeddings=8192, rms_norm_eps=1e-5,
        rope=RopeConfig(theta=500000.0), dtype="bfloat16",
    ),
    "qwen3-0.6b": ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_layers=28,
        num_heads=16, num_kv_heads=8, head_dim=128, max_position_embeddings=8192, rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1000000.0), tie_word_embeddings=True, qk_norm=True, dtype="bfloat16",
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--batch", type=int, nargs="+", default=[64])
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick check")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--trace", type=Path)
    arguments = parser.parse_args()
    config = SHAPES[arguments.shape]
    if arguments.layers:
        config = ModelConfig(**{**config.__dict__, "num_layers": arguments.layers})
    llm = LLM(
        model=arguments.shape, load_format="dummy", model_config=config, max_model_len=8192,
        max_num_seqs=arguments.max_num_seqs, max_num_batched_tokens=arguments.max_num_batched_tokens,
        enable_prefix_caching=False, generation_config="vllm",
    )  # fmt: skip
    print("\n".join(llm.engine.start_up_lines()))
    for batch in arguments.batch:
        measure(llm, batch, arguments, warm_up=True)
        print(json.dumps(measure(llm, batch, arguments)), flush=True)


def measure(llm: LLM, batch: int, arguments: argparse.Namespace, *, warm_up: bool = False) -> dict:
    """Run one batch to the end; time the steps in which every request decodes."""
    engine, rng = llm.engine, np.random.default_rng(0)
    max_tokens = 8 if warm_up else arguments.output_len
    final = RequestOutputKind.FINAL_ONLY
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens, output_kind=final)
    for i in range(batch):
        prompt = rng.integers(0, engine.model_config.vocab_size, arguments.prompt_len).tolist()
        engine.add_request(f"{i}{warm_up}", prompt, params)
    began, steps = time.perf_counter(), []
    times = engine.host_times
    trace_at = arguments.output_len // 2
    while engine.has_unfinished_requests():
        if arguments.trace and not warm_up and len(steps) == trace_at:
            jax.profiler.start_trace(str(arguments.trace))
        before, started = (times.pack, times.dispatch, times.wait), time.perf_counter()
        output = engine.step()
        ended = time.perf_counter()
        if arguments.trace and not warm_up and len(steps) == trace_at + 10:
            jax.profiler.stop_trace()
        scheduled = output.plan.scheduled
        if len(scheduled) == batch and all(item.num_scheduled_tokens == 1 for item in scheduled):
            after = (times.pack, times.dispatch, times.wait)
            steps.append((ended - started, *(b - a for a, b in zip(before, after, strict=True))))
    total = time.perf_counter() - began
    if not steps:
        return {}
    median = np.median(np.array(steps), axis=0) * 1e3  # the first row of a step includes tracing when it is on
    result = {
        "shape": arguments.shape, "batch": batch, "seconds": round(total, 3),
        "tpot_ms": round(float(median[0]), 3), "dispatch_ms": round(float(median[2]), 3),
        "host_without_dispatch_ms": round(float(median[0] - median[2] - median[3]), 3),
        "wait_ms": round(float(median[3]), 3), "steps": len(steps),
    }  # fmt: skip
    if arguments.trace and not warm_up:
        result["device_idle_share"] = idle_share(arguments.trace)
    return result


def idle_share(directory: Path) -> float | None:
    """One minus the union of all kernel intervals on the device's streams over the span they cover."""
    files = sorted(directory.rglob("*.trace.json.gz"))
    if not files:
        return None
    events = json.loads(gzip.decompress(files[-1].read_bytes()))["traceEvents"]
    devices = {e["pid"] for e in events if e.get("name") == "process_name" and "/device:GPU" in e["args"]["name"]}
    streams = {
        (e["pid"], e["tid"]) for e in events
        if e.get("name") == "thread_name" and e["pid"] in devices and "Stream" in e["args"]["name"]
    }  # fmt: skip
    spans = sorted(
        (e["ts"], e["ts"] + e.get("dur", 0)) for e in events if e.get("ph") == "X" and (e["pid"], e["tid"]) in streams
    )
    if not spans:
        return None
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return round(1 - busy / (end - spans[0][0]), 4)


if __name__ == "__main__":
    main()
