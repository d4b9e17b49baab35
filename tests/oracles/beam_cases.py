"""The beam searches that transformers and the engine are compared on: tiny models, widths, penalties, ways to stop.

Shared by the oracle script (another interpreter, with torch) and the tests: needs Python 3.11 only.
"""

from itertools import product
from typing import Any

MAX_TOKENS = 14
STOP_TOKEN_IDS = (57, 89, 11, 66, 120, 109, 14, 112, 102, 16)  # beside EOS, so that hypotheses of random models do end


def searches() -> list[dict[str, Any]]:
    """Return the parameters of every search; `prompt_length` names one of the tiny model's prompts."""
    grid = [
        _search("mistral", 40 if width % 2 else 7, width, penalty, early, stop_token_ids=STOP_TOKEN_IDS)
        for width, penalty, early in product((2, 3, 4, 8), (-1.0, 0.0, 1.0, 2.0), (True, False, "never"))
    ]
    families = [
        _search(case, 40, 4, 1.0, False, stop_token_ids=stop_token_ids)
        for case, stop_token_ids in product(("llama3_rope", "qwen3", "gemma3", "smollm2"), ((), STOP_TOKEN_IDS[:3]))
    ]
    lengths = [
        _search("mistral", 7, width, penalty, early, stop_token_ids=STOP_TOKEN_IDS, min_tokens=min_tokens)
        for width, penalty, early, min_tokens in product((2, 5), (0.0, 2.0), (True, "never"), (4, 14))
    ]
    ends = [_search("qwen3", 1, width, 1.0, False, max_tokens=tokens) for width, tokens in product((1, 3, 16), (1, 2))]
    return [*grid, *families, *lengths, *ends]


def _search(
    case: str, prompt_length: int, width: int, length_penalty: float, early_stopping: Any,
    *, stop_token_ids: tuple[int, ...] = (), min_tokens: int = 0, max_tokens: int = MAX_TOKENS,
) -> dict[str, Any]:  # fmt: skip
    return {
        "case": case, "prompt_length": prompt_length, "width": width, "length_penalty": length_penalty,
        "early_stopping": early_stopping, "stop_token_ids": list(stop_token_ids), "min_tokens": min_tokens,
        "max_tokens": max_tokens,
    }  # fmt: skip
