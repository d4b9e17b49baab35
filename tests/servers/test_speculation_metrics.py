"""Speculation under vLLM's metric names: counters, and accepted tokens by position as one metric with a label."""

from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from servers.engine_metrics import EngineMetrics


class Engine:
    def __init__(self, **stats):
        self._stats = {"num_requests_waiting": 0, "prompt_tokens": 5, "prompt_tokens_cached": 0, **stats}

    def stats(self):
        return self._stats

    def histograms(self):
        return {}


def scrape(engine):
    registry = CollectorRegistry()
    registry.register(EngineMetrics(engine, ("fake", "0")))
    return generate_latest(registry).decode()


def test_drafts_and_accepted_tokens_have_their_names():
    text = scrape(
        Engine(
            spec_decode_num_drafts=4, spec_decode_num_draft_tokens=12, spec_decode_num_accepted_tokens=7,
            spec_decode_draft_acceptance_rate=7 / 12,
            spec_decode_num_accepted_tokens_per_pos_0=4, spec_decode_num_accepted_tokens_per_pos_1=3,
        )
    )  # fmt: skip
    labels = 'engine="0",model_name="fake"'
    for line in (
        f"vllm:spec_decode_num_drafts_total{{{labels}}} 4.0",
        f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} 12.0",
        f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} 7.0",
        f"vllm:spec_decode_draft_acceptance_rate{{{labels}}} {7 / 12}",
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="0"}} 4.0',
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="1"}} 3.0',
    ):
        assert line in text.splitlines()
    assert "per_pos_0" not in text


def test_without_speculation_there_is_none_of_them():
    assert "spec_decode" not in scrape(Engine())
