"""What the host keeps of speculation: counts, and a trace of bounded size."""

from pagedjax.scheduling.step_plan import SchedulerOutput
from pagedjax.speculation import plan
from pagedjax.speculation.config import SpeculativeConfig
from pagedjax.speculation.plan import Speculation
from pagedjax.speculation.speculator import VerifiedDrafts
from tests.scheduling.fake_device import Driver, confirm

NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=2, is_adaptive=False)


def step(speculation, driver, *, num_right=2):
    """One step in which so many drafts of each request are right, if it has any; return its output."""
    speculation.plan(driver.scheduler.running, has_prompts=driver.scheduler.expects_prompts)
    output = driver.scheduler.schedule()
    speculation.note_dispatch(output)
    verified = [
        VerifiedDrafts(item.request.request_id, (1,) * item.num_draft_tokens, min(num_right, item.num_draft_tokens))
        for item in output.scheduled
        if item.num_draft_tokens
    ]
    speculation.note_result(output, verified, 0.01)
    sampled = {item.request.request_id: [1] * (1 + min(num_right, item.num_draft_tokens)) for item in output.scheduled}
    confirm(driver.scheduler, output, sampled)
    return output


def speculate(num_requests, num_steps):
    speculation, driver = Speculation(NGRAM, lambda request: 0, max_num_read=64), Driver(max_num_seqs=8)
    for number in range(num_requests):
        driver.add(str(number), [number], max_tokens=100)
    outputs: list[SchedulerOutput] = [step(speculation, driver) for _ in range(num_steps)]
    return speculation, outputs


def test_the_trace_is_bounded_by_what_it_holds_and_not_by_steps(monkeypatch):
    """10,000 steps of 256 requests took a gigabyte in a server that nobody traces."""
    monkeypatch.setattr(plan, "TRACE_RESULTS", 20)
    speculation, outputs = speculate(num_requests=4, num_steps=12)
    assert [output.num_draft_tokens for output in outputs] == [0] + [8] * 11
    trace = speculation.trace(clear=True)
    assert [len(step.verified) for step in trace] == [4] * 5
    assert speculation.trace() == []
    assert speculation.stats()["spec_decode_num_accepted_tokens"] == 88


def test_a_trace_begins_anew_after_it_was_cleared(monkeypatch):
    monkeypatch.setattr(plan, "TRACE_RESULTS", 20)
    speculation, driver = Speculation(NGRAM, lambda request: 0, max_num_read=64), Driver()
    driver.add("a", [1], max_tokens=100)
    for _ in range(19):
        step(speculation, driver)
    assert len(speculation.trace(clear=True)) == 18
    for _ in range(10):
        step(speculation, driver)
    assert len(speculation.trace()) == 10


def test_the_share_of_drafts_that_were_accepted_is_a_statistic_of_its_own():
    speculation, driver = Speculation(NGRAM, lambda request: 0, max_num_read=64), Driver()
    assert speculation.stats()["spec_decode_draft_acceptance_rate"] == 0
    driver.add("a", [1], max_tokens=100)
    step(speculation, driver)
    for num_right in (2, 1):
        step(speculation, driver, num_right=num_right)
    assert speculation.stats()["spec_decode_draft_acceptance_rate"] == 0.75
