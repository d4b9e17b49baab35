"""What requests ask of a step, and the sampler that a batch of them gets."""

from functools import reduce
from operator import or_

import pytest

from pagedjax import SamplingParams, StructuredOutputsParams
from pagedjax.execution.filters import NUM_CANDIDATES
from pagedjax.execution.row_input import RowNeeds


def needs(*kinds):
    return reduce(or_, (RowNeeds.of(SamplingParams(**kind)) for kind in kinds), RowNeeds(0))


@pytest.mark.parametrize(
    ("kinds", "variant"),
    [
        ([{}], "plain"),
        ([{"temperature": 0.0}, {}], "plain"),
        ([{"temperature": 0.0, "top_p": 0.5, "top_k": 3}], "plain"),  # they change no greedy choice
        ([{"top_k": 5}], "top_k"),
        ([{"top_k": 5, "top_p": 0.5}, {"temperature": 0.0}], "top_k"),
        ([{"top_k": NUM_CANDIDATES + 1}], "full"),
        ([{"top_k": 5}, {}], "full"),
        ([{"min_p": 0.1}], "full"),
        ([{"temperature": 0.0, "logit_bias": {3: 1.0}}], "top_k"),
        ([{"presence_penalty": 1.0}], "full"),
        ([{"n": 2, "use_beam_search": True}], "plain"),  # of the others in the batch
    ],
)
def test_a_batch_gets_the_cheapest_sampler_that_covers_it(kinds, variant):
    assert needs(*kinds).variant == variant


def test_what_else_a_step_must_do():
    assert needs({"logprobs": 0}) & RowNeeds.LOGPROBS
    assert needs({"prompt_logprobs": 0}) & RowNeeds.PROMPT_LOGPROBS
    assert needs({"n": 2, "use_beam_search": True}) == RowNeeds.BEAMS
    form = needs({"structured_outputs": StructuredOutputsParams(choice=["a", "b"])})
    assert form & RowNeeds.GRAMMAR
    assert form & RowNeeds.WIDE_ROW  # its masks go into the row
    assert not needs({"temperature": 0.0})
    assert needs({}) == RowNeeds.WIDE_TOP_K  # counts only where another request filters
