"""Write golden/tiny_models.npz: logits and greedy tokens of every tiny model as transformers computes them.

Run by an interpreter with torch and transformers: `python tests/oracles/make_tiny_models.py [output.npz]`.
Every token is computed from the whole sequence, without a cache.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
import tiny_models

GOLDEN = Path(__file__).parent / "golden" / "tiny_models.npz"
SMALLEST_MARGIN = 3e-4  # below it, greedy tokens would depend on rounding


def main(output: Path) -> None:
    """Compute every case and write one file."""
    torch.manual_seed(0)
    arrays, smallest = {}, np.inf
    for case in tiny_models.CASES:
        model = build(case)
        for prompt in tiny_models.prompts(case):
            key = f"{case}/{len(prompt)}"
            positions = [position for position in tiny_models.LOGIT_POSITIONS if position < len(prompt)]
            arrays[f"{key}/logits"] = all_logits(model, prompt)[positions]
            arrays[f"{key}/greedy"], margin = greedy(model, prompt)
            print(f"{key}: smallest margin {margin:.4f}")
            smallest = min(smallest, margin)
    if smallest < SMALLEST_MARGIN:
        raise SystemExit(
            f"the smallest margin is {smallest}, below {SMALLEST_MARGIN}; rename that case (names are seeds)"
        )
    np.savez_compressed(output, **arrays)
    print(f"{output}: {output.stat().st_size} bytes")


def build(case: str) -> torch.nn.Module:
    """Build the transformers model of one case, with its reproducible weights."""
    hf = dict(tiny_models.CASES[case])
    config = transformers.AutoConfig.for_model(**hf)
    config._attn_implementation = "eager"
    model = getattr(transformers, hf["architectures"][0])(config).to(torch.float32).eval()
    state = {name: torch.from_numpy(array) for name, array in tiny_models.weights(case).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or [name for name in missing if not (hf["tie_word_embeddings"] and name == "lm_head.weight")]:
        raise SystemExit(f"{case}: tensors do not match transformers': {missing=} {unexpected=}")
    model.tie_weights()
    return model


@torch.no_grad()
def all_logits(model: torch.nn.Module, token_ids: list[int]) -> np.ndarray:
    """Return the logits at every position, [T, V]."""
    return model(torch.tensor([token_ids]), use_cache=False).logits[0].float().numpy()


def greedy(model: torch.nn.Module, prompt: list[int]) -> tuple[np.ndarray, float]:
    """Continue `prompt` greedily; return the new ids and the smallest gap between the two best logits."""
    token_ids, margins = list(prompt), []
    for _ in range(tiny_models.NUM_GREEDY_TOKENS):
        logits = all_logits(model, token_ids)[-1]
        second, best = np.sort(logits)[-2:]
        margins.append(float(best - second))
        token_ids.append(int(logits.argmax()))
    return np.array(token_ids[len(prompt) :], np.int32), min(margins)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN)
