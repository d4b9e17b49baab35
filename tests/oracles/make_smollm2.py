"""Write golden/smollm2.json: what transformers computes with SmolLM2-135M-Instruct, dequantised to float32.

Run by an interpreter with torch, transformers, gguf and accelerate: `python tests/oracles/make_smollm2.py MODEL.gguf
[output.json]`. Greedy tokens go on past an end-of-sequence token; `margins` are the gaps between the two best logits.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
import smollm2_prompts

GOLDEN = Path(__file__).parent / "golden" / "smollm2.json"
NUM_GREEDY_TOKENS = 40
NUM_TOP_LOGITS = 20


@torch.no_grad()
def main(gguf: Path, output: Path) -> None:
    """Compute every prompt and write one file."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompts = {name: _prompt(model, tokenizer, prompt) for name, prompt in smollm2_prompts.PROMPTS.items()}
    text = smollm2_prompts.PERPLEXITY_TEXT
    token_ids = tokenizer(text).input_ids
    loss = model(torch.tensor([token_ids]), labels=torch.tensor([token_ids])).loss
    perplexity = {"text": text, "token_ids": token_ids, "perplexity": round(float(loss.exp()), 6)}
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in prompts.items()]
    body = ",\n".join(lines)
    output.write_text(f'{{"perplexity": {json.dumps(perplexity)},\n"prompts": {{\n{body}\n}}}}\n')
    print(f"{output}: {len(prompts)} prompts, {output.stat().st_size} bytes, perplexity {perplexity['perplexity']}")


def _prompt(model: torch.nn.Module, tokenizer: Any, prompt: Any) -> dict[str, Any]:
    """Return the prompt as text and ids, its last logits in summary, and what follows greedily."""
    text = None
    if isinstance(prompt, str):
        text, token_ids = prompt, tokenizer(prompt).input_ids
    elif isinstance(prompt[0], dict):
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        token_ids = tokenizer(text).input_ids
    else:
        token_ids = prompt
    logits, greedy, margins = _greedy(model, token_ids)
    print(f"{len(token_ids)} prompt tokens, smallest margin {min(margins):.2g}", flush=True)
    top = logits.topk(NUM_TOP_LOGITS)
    return {
        "text": text,
        "token_ids": token_ids,
        "greedy": greedy,
        "margins": [float(f"{margin:.4g}") for margin in margins],
        "top_ids": top.indices.tolist(),
        "top_logits": [round(value, 5) for value in top.values.tolist()],
        "logits_mean": round(float(logits.double().mean()), 6),
        "logits_norm": round(float(logits.double().norm()), 4),
    }


def _greedy(model: torch.nn.Module, token_ids: list[int]) -> tuple[torch.Tensor, list[int], list[float]]:
    cache = transformers.DynamicCache(config=model.config)
    inputs, first, greedy, margins = token_ids, None, [], []
    for _ in range(NUM_GREEDY_TOKENS):
        logits = model(torch.tensor([inputs]), cache=cache, use_cache=True).logits[0, -1]
        first = logits if first is None else first
        best = logits.topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        greedy.append(int(best.indices[0]))
        inputs = greedy[-1:]
    return first, greedy, margins


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else GOLDEN)
