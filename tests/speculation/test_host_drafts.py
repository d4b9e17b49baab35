"""Drafts from a suffix tree cost a step a bounded time, however long the prompts are that begin."""

import pytest

from pagedjax.speculation import host_drafts
from pagedjax.speculation.config import SpeculativeConfig
from pagedjax.speculation.host_drafts import HostDrafts
from tests.scheduling.fake_device import make_request

LIMIT = 4


class Follower:
    """One request that counts to 20 again and again. It has a step in flight, as in engines, unless it waits."""

    def __init__(self, name, *, num_rounds):
        self.request = make_request(name, [*range(20)] * num_rounds, max_tokens=10_000)
        self.num_drafts = 0

    def step(self, drafts):
        """Ask for drafts before a step; then the step in flight, if there is one, is read."""
        next_token = (self.request.all_token_ids[-1] + 1) % 20
        self.num_drafts = drafts.find(self.request, LIMIT)
        drafts.settle(self.request, self.num_drafts)
        right = [(next_token + i) % 20 for i in range(LIMIT)]
        self.drafts_are_right = list(self.request.draft_token_ids) == right
        if self.request.num_in_flight:
            self.request.append(next_token)
            drafts.extend(self.request, next_token)
        if not self.request.is_drafted_from_output:
            self.request.num_tokens_bound += 1


@pytest.fixture
def reads(monkeypatch):
    """Numbers of tokens that were read at once."""
    monkeypatch.setattr(host_drafts, "MAX_READ", 64)
    sizes, read = [], host_drafts.SuffixTreeProposer.read
    monkeypatch.setattr(
        host_drafts.SuffixTreeProposer,
        "read",
        lambda tree, name, token_ids: (sizes.append(len(token_ids)), read(tree, name, token_ids))[1],
    )
    return sizes


def make_drafts():
    return HostDrafts(SpeculativeConfig(method="suffix", num_speculative_tokens=LIMIT))


def test_a_long_prompt_is_read_over_many_steps_and_its_request_runs_ahead_meanwhile(reads):
    """The tree of 100,000 tokens was built at once, and everybody's next token came half a second late."""
    drafts, one = make_drafts(), Follower("a", num_rounds=50)
    for _ in range(15):
        reads.clear()
        drafts.begin_step()
        one.step(drafts)
        assert sum(reads) == 64
        assert not one.request.is_drafted_from_output
        assert one.request.num_draft_tokens == 0
    found = 0
    for _ in range(25):
        drafts.begin_step()
        one.step(drafts)
        found = max(found, one.request.num_draft_tokens)
        if one.request.num_draft_tokens:
            assert one.drafts_are_right
    assert found == LIMIT
    assert sum(reads) < 64 * 12


def test_requests_that_begin_share_what_a_step_may_read(reads):
    drafts, several = make_drafts(), [Follower(name, num_rounds=5) for name in "abc"]
    for _ in range(12):
        reads.clear()
        drafts.begin_step()
        for one in several:
            one.step(drafts)
        assert sum(reads) <= 64
    assert all(one.num_drafts == LIMIT for one in several)


def test_a_long_output_that_ended_is_kept_over_many_steps(monkeypatch):
    monkeypatch.setattr(host_drafts, "MAX_KEPT", 16)
    drafts, request = make_drafts(), make_request("a", [1, 2, 3], max_tokens=200)
    drafts.begin_step()
    drafts.find(request, LIMIT)
    for token_id in range(100):
        request.append(token_id)
        drafts.extend(request, token_id)
    drafts.finish(request)
    ends = []
    for _ in range(8):
        drafts.begin_step()
        ends.append(drafts._tree._outputs.end)
    assert ends == [20, 36, 52, 68, 84, 100, 104, 104], "three tokens of the prompt before it, and a mark at its end"


def test_an_output_that_was_not_read_to_its_end_serves_nobody(reads, monkeypatch):
    drafts, one = make_drafts(), Follower("a", num_rounds=6)
    while len(one.request.output_token_ids) < 5:
        drafts.begin_step()
        one.step(drafts)
        monkeypatch.setattr(host_drafts, "MAX_READ", 1)
    drafts.finish(one.request)
    drafts.begin_step()
    assert drafts._tree._outputs.end == 0
    assert drafts._tree._readers == {}
