"""Log probabilities of tokens whose texts are not their own."""

from pagedjax import CompletionOutput, Logprob
from servers.logprobs import chat_logprobs, completion_logprobs

PARTS = {7: Logprob(-0.1, 1, "\ufffd", b"\xf0\x9f"), 8: Logprob(-3.0, 2, "\ufffd", b"\xe4"), 9: Logprob(-5.0, 3, "a")}
COMPLETION = CompletionOutput(index=0, text="", token_ids=[7], logprobs=[PARTS])


def decode(token_ids):
    raise AssertionError("every token has its text")


def test_the_best_of_tokens_with_one_text_stands_in_a_completion():
    """The last and worst one did, so that a greedy token seemed to be an unlikely one."""
    found, _ = completion_logprobs([7, 8], [PARTS, {8: PARTS[8], **PARTS}], 0, decode)
    assert found["top_logprobs"] == [{"\ufffd": -0.1, "a": -5.0}] * 2
    assert found["token_logprobs"] == [-0.1, -3.0]
    by_id, _ = completion_logprobs([7], [PARTS], 0, decode, as_ids=True)
    assert by_id["top_logprobs"] == [{"token_id:7": -0.1, "token_id:8": -3.0, "token_id:9": -5.0}]


def test_parts_of_characters_have_their_own_bytes_in_a_chat():
    """All of them had those of U+FFFD, and a client could not put the text together."""
    (entry,) = chat_logprobs(COMPLETION, 3)["content"]
    assert (entry["token"], entry["bytes"]) == ("\ufffd", [0xF0, 0x9F])
    assert [top["bytes"] for top in entry["top_logprobs"]] == [[0xF0, 0x9F], [0xE4], [97]]
