"""Write golden/beam_search.json: what transformers' beam search returns for each of `beam_cases.searches()`.

Run by an interpreter with torch and transformers: `python tests/oracles/make_beam_search.py [output.json]`.
Each search is run in float32 and in float64, which must agree: a result that hangs on rounding is of no use.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
import beam_cases
import tiny_models
from make_tiny_models import build

GOLDEN = Path(__file__).parent / "golden" / "beam_search.json"


def main(output: Path) -> None:
    """Run every search and write one file."""
    models: dict[tuple[str, torch.dtype], Any] = {}
    results, lengths = [], set()
    for search in beam_cases.searches():
        found = []
        for dtype in (torch.float32, torch.float64):
            key = (search["case"], dtype)
            if key not in models:
                models[key] = build(search["case"]).to(dtype)
            found.append(run(models[key], search))
        if found[0][0] != found[1][0]:
            raise SystemExit(f"{search} hangs on rounding; choose other stop tokens")
        sequences, scores = found[1]
        lengths |= {len(tokens) for tokens in sequences}
        results.append(search | {"sequences": sequences, "scores": scores})
    output.write_text("[\n" + ",\n".join(json.dumps(result) for result in results) + "\n]\n", encoding="utf-8")
    print(f"{output}: {len(results)} searches, output lengths {sorted(lengths)}")


def run(model: torch.nn.Module, search: dict[str, Any]) -> tuple[list[list[int]], list[float]]:
    """Return the output tokens of each hypothesis, best first, and their scores."""
    prompt = next(p for p in tiny_models.prompts(search["case"]) if len(p) == search["prompt_length"])
    eos = [tiny_models.CASES[search["case"]]["eos_token_id"], *search["stop_token_ids"]]
    width = search["width"]
    config = transformers.GenerationConfig(
        num_beams=width, num_return_sequences=width, max_new_tokens=search["max_tokens"],
        min_new_tokens=search["min_tokens"] or None, length_penalty=search["length_penalty"],
        early_stopping=search["early_stopping"], eos_token_id=eos, pad_token_id=0, do_sample=False, use_cache=True,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    if width == 1:  # transformers decodes greedily then, which is what a beam of one does
        config.length_penalty, config.early_stopping = None, None
    ids = torch.tensor([prompt])
    result = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    sequences = [_cut(tokens[len(prompt) :], eos) for tokens in result.sequences.tolist()]
    if width > 1:
        return sequences, result.sequences_scores.tolist()
    total = model.compute_transition_scores(result.sequences, result.scores, normalize_logits=True).sum()
    return sequences, [float(total) / len(sequences[0]) ** search["length_penalty"]]


def _cut(tokens: list[int], eos: list[int]) -> list[int]:
    """What comes before the padding."""
    end = next((i for i, token in enumerate(tokens) if token in eos), len(tokens) - 1)
    return tokens[: end + 1]


if __name__ == "__main__":
    torch.set_num_threads(1)  # the models are tiny
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN)
