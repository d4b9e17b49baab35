"""A program of its own: compiles one grammar that came from outside, where that can be killed and costs nobody memory.

Reads a JSON object from standard input and writes one: `{"grammar": text}`, in llguidance's own notation, or
`{"error": text}`. Run as a file by `compiler`, with the folder that llguidance is in as its argument; imports nothing
of this project, so that it starts within tens of milliseconds.
"""

import json
import resource
import sys
from typing import Any

MAX_MEMORY = 2 << 30  # bytes of address space


class ByteVocabulary:
    """One token a byte, and the model's special tokens, which a grammar may name: all that compiling depends on."""

    bos_token_id = None

    def __init__(self, special_tokens: list[str]):
        self.tokens = [*(bytes([value]) for value in range(256)), b"<eos>", *map(str.encode, special_tokens)]
        self.eos_token_id = 256
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def to_grammar(kind: Any, text: str, json_options: Any) -> str:
    """Return `text` in llguidance's notation."""
    from llguidance import LLMatcher, grammar_from

    if kind == "json":
        return LLMatcher.grammar_from_json_schema(text, overrides=json_options)
    return grammar_from(kind, text)


def check(request: dict[str, Any]) -> dict[str, str]:
    """Compile, and build the first mask."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    try:
        grammar = to_grammar(request["kind"], request["text"], request["json_options"])
    except ValueError as error:
        return {"error": str(error)}
    tokenizer = LLTokenizer(TokenizerWrapper(ByteVocabulary(request["special_tokens"])))
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**request["limits"]))
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        return {"error": matcher.get_error()}
    return {"grammar": grammar}


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path.append(sys.argv[1])
    json.dump(check(json.load(sys.stdin)), sys.stdout)
