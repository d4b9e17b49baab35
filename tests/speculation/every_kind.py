"""Random requests for the fake model with everything that a request may ask for, and outputs in a form to compare.

Most are held to a few tokens, so that they repeat themselves and drafts are found.
"""

import random

from pagedjax import SamplingParams
from pagedjax.structured_outputs import StructuredOutputsParams
from tests.fakes import EOS, VOCAB_SIZE

FORMS = [
    StructuredOutputsParams(regex="(ab|cd){2,6}e?"),
    StructuredOutputsParams(regex="[a-d]{1,30}"),
    StructuredOutputsParams(choice=["aaaa", "aaab", "aaba"]),
]
STOPS = ["a", "ab", "b", "ba", "aa"]


def requests_of_every_kind(seed, count):
    """Return (request_id, prompt, params) triples; some prompts end a token after a chunk of 32 does."""
    rng = random.Random(seed)
    starts = [[rng.randrange(VOCAB_SIZE) for _ in range(40)] for _ in range(3)]
    return [(str(i), _prompt(rng, starts), _params(rng)) for i in range(count)]


def _prompt(rng, starts):
    start = rng.choice(starts)[: rng.randint(1, 40)]
    if rng.random() < 0.5:
        start = start[:4] * rng.randint(1, 8)
    return [*start, rng.randrange(VOCAB_SIZE)][: rng.choice([33, 65])]


def _params(rng):
    kind, max_tokens = rng.randrange(12), rng.choice([1, 2, 3, 9, 20, 40, 128])
    if kind == 0:
        options = {"temperature": 0.0, "max_tokens": min(max_tokens, 12), "n": 2, "logprobs": rng.choice([None, 1])}
        return SamplingParams(use_beam_search=True, ignore_eos=True, **options)
    options = {
        "temperature": rng.choice([0.0, 0.0, 0.5, 1.0, 2.0]),
        "seed": rng.randrange(10**6),
        "max_tokens": max_tokens,
        "ignore_eos": rng.random() < 0.7,
        "n": rng.choice([1, 1, 1, 1, 1, 2, 3]),
    }
    few = sorted(rng.sample(range(256), rng.choice([4, 6]))) + rng.choice([[], [EOS]])
    extras = [
        {"repetition_penalty": rng.choice([0.5, 1.3]), "presence_penalty": 0.4, "frequency_penalty": -0.2},
        {"logit_bias": {rng.randrange(VOCAB_SIZE): rng.choice([-100.0, 50.0, 3.0]) for _ in range(4)}},
        {"logprobs": rng.choice([0, 2])},
        {"prompt_logprobs": 1},
        {"stop": [rng.choice(STOPS)], "include_stop_str_in_output": rng.random() < 0.3},
        {"top_k": rng.choice([1, 3, 200])},
        {"top_p": 0.8},
        {"min_p": 0.1},
    ]
    if kind < 3:
        options["structured_outputs"] = rng.choice(FORMS)
    else:
        options |= {"allowed_token_ids": few} if kind < 8 else {}
        extras += [
            {"min_tokens": min(max_tokens, rng.randint(1, 12))},
            {"stop_token_ids": few[:1]},
            {"bad_words": [chr(97 + rng.randrange(26)) for _ in range(2)]},
        ]
    for extra in extras:
        options |= extra if rng.random() < 0.2 else {}
    return SamplingParams(**options)


def comparable(out):
    """All that a client sees of a finished request; log probabilities rounded, as batches differ in their last bits."""
    completions = [
        (
            one.token_ids, one.text, one.finish_reason, one.stop_reason, _rounded(one.logprobs),
            one.cumulative_logprob and round(one.cumulative_logprob, 2),
        )
        for one in out.outputs
    ]  # fmt: skip
    return completions, _rounded(out.prompt_logprobs), out.error


def _rounded(logprobs):
    return [
        entries and [(token_id, one.rank, round(one.logprob, 3)) for token_id, one in entries.items()]
        for entries in logprobs or ()
    ]
