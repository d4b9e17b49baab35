"""Compile what a request says about the form of its output, once for each distinct form.

A form that was not seen before is compiled in a process of its own first, with a time limit and a memory limit, and
only what passes there is compiled for the model's vocabulary here. May be called from any thread; the lock is never
held while something compiles. Knows no requests and no devices.
"""

import importlib
import importlib.util
import json
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.errors import InvalidRequestError
from pagedjax.structured_outputs import StructuredOutputsParams
from pagedjax.text.structured_output import check_grammar
from pagedjax.text.structured_output.grammar import ALL_BITS, Grammar, Reasoning
from pagedjax.text.structured_output.vocabulary import llguidance_vocabulary
from pagedjax.text.tokenizer import Tokenizer

COMPILE_SECONDS = 5.0
CACHE_SIZE = 128  # forms, those refused included
MAX_ERROR_CHARS = 300
WHITESPACE_PATTERN = r"[ \n\r\t]{1,64}"  # between the tokens of JSON: models under a schema may pad without end
ONE_OF_OPTION = (
    "Enable 'coerce_one_of' option",
    'Set "x-guidance": {"coerce_one_of": true} at the schema\'s top level',
)
LIMITS = {  # llguidance's own, for compiling and for each mask; a step stays within some tens of milliseconds
    "max_lexer_states": 20_000,  # 1-2 kB each
    "verbose_errors": False,  # they would show the parser's state to clients and in logs
}


class GrammarCompiler:
    """Compiles for one vocabulary.

    Args:
      tokenizer: the model's, read at once (up to a second for 150,000 tokens); None refuses every request.
      vocab_size: of the model's logits, which may be larger than the tokenizer's.
      eos_token_ids: what ends an output where its form allows an end.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        compile_seconds: float = COMPILE_SECONDS,
    ):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._compile_seconds = compile_seconds
        self._lock = threading.Lock()  # of the cache
        self._llguidance = _import_llguidance()
        if tokenizer is not None and self._eos_token_ids and self._llguidance is not None:
            self._view_size = max(vocab_size, tokenizer.vocab_size)
            self._vocabulary = llguidance_vocabulary(
                self._llguidance, tokenizer, size=self._view_size, eos_token_ids=self._eos_token_ids
            )
            self._executor = self._llguidance.LLExecutor()
        self._cache: OrderedDict[tuple, Any] = OrderedDict()  # matchers in their first state, or what is wrong

    def start(self, params: StructuredOutputsParams) -> Grammar:
        """Return the form of a new output, compiled.

        Raises:
          InvalidRequestError: it makes no sense, takes too long or too much, or structured output is not available.
        """
        matcher = self._compiled(params)
        reasoning = params.reasoning
        if reasoning is not None:
            ids = [self._token_id(text) for text in (reasoning.start, reasoning.end)]
            reasoning = Reasoning(*ids, is_open=reasoning.is_open)
        return Grammar(matcher.deep_copy(), self._eos_token_ids, reasoning)

    def is_compiled(self, params: StructuredOutputsParams) -> bool:
        """Whether `start` would answer at once."""
        with self._lock:
            return _key(params) in self._cache

    def compile(self, params: StructuredOutputsParams) -> None:
        """Do what `start` would have to wait for. Raises what it would raise."""
        self._compiled(params)

    def masks(self, grammars: Sequence[Grammar]) -> np.ndarray:
        """Return the tokens that may come next in each of B outputs, packed, [B, ceil(V / 32)] uint32.

        Computed in parallel, without the interpreter lock. A grammar that reached a limit has an `error` afterwards.
        """
        num_words = -(-self._view_size // 32)
        masks = np.zeros((len(grammars), num_words), np.uint32)
        found = [(matcher, i) for i, one in enumerate(grammars) if (matcher := one.masking_matcher) is not None]
        if found:
            self._executor.unsafe_compute_mask_ptr(found, masks.ctypes.data, 4 * num_words, len(grammars))
        for grammar, mask in zip(grammars, masks, strict=True):
            grammar.complete_mask(mask)
        return masks[:, : -(-self._vocab_size // 32)]

    def masks_along(
        self, grammars: Sequence[Grammar], drafts: Sequence[Sequence[int]], *, num_masks: int
    ) -> np.ndarray:
        """Return what may come after the first, second, .. of each output's drafts, [B, num_masks, ceil(V / 32)].

        The grammars stay where they are. Past a draft that a form does not allow, or that ends it, or of -1, which is
        none, all bits are set: what follows is not used.
        """
        masks = np.full((len(grammars), num_masks, -(-self._vocab_size // 32)), ALL_BITS, np.uint32)
        walking = [(i, grammar.copy()) for i, grammar in enumerate(grammars) if drafts[i]]
        for place in range(num_masks):
            walking = [(i, one) for i, one in walking if place < len(drafts[i]) and _goes_on(one, drafts[i][place])]
            if walking:
                masks[[i for i, _ in walking], place] = self.masks([one for _, one in walking])
        return masks

    def _compiled(self, params: StructuredOutputsParams) -> Any:
        key = _key(params)
        with self._lock:
            found = self._cache.get(key)
            if found is not None:
                self._cache.move_to_end(key)
        if found is None:
            found = self._compile(params)
            with self._lock:
                self._cache[key] = found
                while len(self._cache) > CACHE_SIZE:
                    self._cache.popitem(last=False)
        if isinstance(found, str):
            raise _invalid(found)
        return found

    def _compile(self, params: StructuredOutputsParams) -> Any:
        """Return a matcher, or the sentence that says what is wrong."""
        if self._tokenizer is None or not self._eos_token_ids:
            raise _invalid(
                "structured output needs a tokenizer and an end-of-sequence token, this engine lacks one; leave it out"
            )
        if self._llguidance is None:
            raise _invalid(
                "structured output needs the package llguidance, which is not installed; "
                "install pagedjax[structured] or leave it out"
            )
        kind, _ = params.source
        answer = self._check(params, self._tokenizer, Path(self._llguidance.__file__).parent.parent)
        if "error" in answer:
            return _refusal(kind, answer["error"])
        limits = self._llguidance.LLParserLimits(**LIMITS)
        matcher = self._llguidance.LLMatcher(self._vocabulary, answer["grammar"], log_level=0, limits=limits)
        probe = matcher.deep_copy()  # the vocabulary may lack what the form needs
        if not matcher.is_error():
            probe.compute_bitmask()
        return _refusal(kind, probe.get_error()) if probe.is_error() else matcher

    def _check(self, params: StructuredOutputsParams, tokenizer: Tokenizer, site: Path) -> dict[str, str]:
        """Compile in a process that is killed when it takes too long."""
        kind, text = params.source
        options: dict[str, Any] = {"whitespace_pattern": params.whitespace_pattern or WHITESPACE_PATTERN}
        if params.disable_any_whitespace:
            options = {"whitespace_flexible": False}
        special = list(tokenizer.pieces.added_tokens.values())
        request = {
            "kind": kind, "text": text, "json_options": options, "special_tokens": special, "limits": LIMITS,
        }  # fmt: skip
        command = [sys.executable, "-I", "-S", check_grammar.__file__, str(site)]
        try:
            ran = subprocess.run(
                command, input=json.dumps(request).encode(), capture_output=True, timeout=self._compile_seconds
            )
        except subprocess.TimeoutExpired:
            took = f"compiling it took more than {self._compile_seconds:g} s; simplify it"
            raise _invalid(f"structured_outputs.{kind} cannot be used: {took}") from None  # not kept: it may be load
        if ran.returncode != 0:
            return {"error": "compiling it took too much memory or too deep a recursion; simplify it"}
        return json.loads(ran.stdout)

    def _token_id(self, text: str) -> int:
        assert self._tokenizer is not None, "asked before"
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if len(token_ids) != 1:
            raise _invalid(
                f"{text!r} is {len(token_ids)} tokens of this model; structured output after reasoning needs it to be "
                "one: start the server without --reasoning-parser"
            )
        return token_ids[0]


def _goes_on(grammar: Grammar, token_id: int) -> bool:
    """Advance a form by a guess; return whether it allowed it and something may follow."""
    if token_id < 0 or grammar.is_finished or grammar.error is not None:
        return False
    grammar.accept(token_id)
    return grammar.error is None and not grammar.is_finished


def _key(params: StructuredOutputsParams) -> tuple:
    return (*params.source, params.disable_any_whitespace, params.whitespace_pattern)


def _import_llguidance() -> Any | None:
    """The library, or None where it is not installed."""
    return importlib.import_module("llguidance") if importlib.util.find_spec("llguidance") is not None else None


def _refusal(kind: str, problem: str) -> str:
    if problem.startswith("NoExtension"):
        problem = "no output can fulfil it"
    first = problem.strip().split("\n<state>")[0].replace("<non-verbose/>", "").strip().replace(*ONE_OF_OPTION)
    return f"structured_outputs.{kind} cannot be used: {first[:MAX_ERROR_CHARS]}"


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="structured_outputs")
