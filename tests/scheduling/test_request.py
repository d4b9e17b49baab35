"""A request knows its token counts and which token ends it."""

import pytest

from pagedjax.scheduling.request import RequestStatus, finish_reason
from tests.scheduling.fake_device import EOS, make_request


def test_counts_follow_confirmed_tokens():
    request = make_request("a", [1, 2, 3])
    request.num_tokens_bound += 1
    assert (request.num_prompt_tokens, request.num_tokens, request.num_in_flight) == (3, 3, 1)
    assert request.append(1) is None
    assert (request.num_tokens, request.num_tokens_bound, request.num_in_flight) == (4, 4, 0)
    assert request.output_token_ids == [1]
    assert request.all_token_ids == [1, 2, 3, 1]


def test_the_callers_prompt_is_not_changed():
    prompt = [1, 2]
    make_request("a", prompt).append(3)
    assert prompt == [1, 2]


def test_eos_stops_without_a_reason():
    request = make_request("a", [1], ignore_eos=False)
    assert request.append(EOS) == RequestStatus.FINISHED_STOPPED
    assert request.stop_reason_of(RequestStatus.FINISHED_STOPPED, EOS) is None


def test_ignored_eos_does_not_stop():
    assert make_request("a", [1], ignore_eos=True).append(EOS) is None


def test_a_stop_token_stops_and_is_the_reason():
    request = make_request("a", [1], stop_token_ids=[2])
    assert request.append(2) == RequestStatus.FINISHED_STOPPED
    assert request.stop_reason_of(RequestStatus.FINISHED_STOPPED, 2) == 2


def test_eos_named_as_stop_token_stops_although_eos_is_ignored():
    request = make_request("a", [1], stop_token_ids=[EOS], ignore_eos=True)
    assert request.append(EOS) == RequestStatus.FINISHED_STOPPED
    assert request.stop_reason_of(RequestStatus.FINISHED_STOPPED, EOS) == EOS


def test_no_token_stops_before_min_tokens():
    request = make_request("a", [1], ignore_eos=False, stop_token_ids=[2], min_tokens=3)
    assert [request.append(token_id) for token_id in (EOS, 2, EOS)] == [None, None, RequestStatus.FINISHED_STOPPED]


def test_the_last_token_is_a_stop_rather_than_the_length_limit():
    request = make_request("a", [1], max_tokens=1, ignore_eos=False)
    assert request.append(EOS) == RequestStatus.FINISHED_STOPPED


def test_max_tokens_ends_by_length():
    request = make_request("a", [1], max_tokens=2)
    assert [request.append(1), request.append(1)] == [None, RequestStatus.FINISHED_LENGTH]
    assert request.stop_reason_of(RequestStatus.FINISHED_LENGTH, 1) is None


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (RequestStatus.WAITING, None),
        (RequestStatus.RUNNING, None),
        (RequestStatus.PREEMPTED, None),
        (RequestStatus.FINISHED_STOPPED, "stop"),
        (RequestStatus.FINISHED_LENGTH, "length"),
        (RequestStatus.FINISHED_ABORTED, "abort"),
        (RequestStatus.FINISHED_ERROR, "error"),
    ],
)
def test_only_finished_requests_have_a_finish_reason(status, reason):
    request = make_request("a", [1])
    request.status = status
    assert finish_reason(status) == reason
    assert request.is_finished == (reason is not None)
