"""Structured output: tokens that would leave a JSON schema, regex, choice or grammar cannot be sampled.

The library is llguidance, the optional extra `structured`. What spoke for it, against xgrammar (versions 1.9
and 0.2 of November 2026; llguidance was measured, of xgrammar the package was read):

                      llguidance                               xgrammar
    licence           MIT                                      Apache-2.0
    needs             nothing, one wheel for every Python      torch, triton, pydantic, an FFI package
    tokenizer         its tokenizer.json; several EOS ids      transformers object
    masks             packed bits into any buffer, GIL free    packed bits, torch tensors first
    a new schema      about 1 ms, the lexer grows as it goes   compiled ahead, for schemas that are reused
    a mask            tens of microseconds, rarely 1-2 ms      not measured
    hostile input     limits on lexer, parser and each mask    a limit on recursion
    kinds             JSON schema, regex, Lark and GBNF        JSON schema, regex, EBNF

An engine without torch decides it; the limits would have too.
"""

from pagedjax.text.structured_output.compiler import GrammarCompiler
from pagedjax.text.structured_output.grammar import Grammar

__all__ = ["Grammar", "GrammarCompiler"]
