"""The client keeps to the timetable while the target is busy, counts its places, and goes on with conversations."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from specbench.arrivals import ClosedLoad, OpenLoad
from specbench.generate import GenerateRequest, GenerateResult, SamplingParams
from specbench.records import RequestRecord
from specbench.submission import Client, Submission


class HandClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def request(name: str, *, follows: str | None = None, text: str = "q") -> GenerateRequest:
    messages = ({"role": "user", "content": text},)
    return GenerateRequest(name, name, SamplingParams(4), messages=messages, follows=follows)


def ended(submission: Submission, answer: str = "a", error: str | None = None) -> GenerateResult:
    one = submission.request
    reason = "stop" if error is None else "error"
    record = RequestRecord(
        one.request_id, one.sample_id, 0, 0, False, None, 1, 0, 1, reason, submission.arrival_s, 0, 0, 0, 0, error
    )
    return GenerateResult(record, [], [1], [2], answer)


def names(submissions: list[Submission]) -> list[str]:
    return [submission.request.request_id for submission in submissions]


def wait_for(condition: Callable[[], bool]) -> None:
    """The client's thread has its turn."""
    for _ in range(2000):
        if condition():
            return
        time.sleep(1e-3)
    raise AssertionError("it never came true")


def test_a_closed_load_fills_the_places_that_are_freed() -> None:
    with Client([request(name) for name in "abcd"], ClosedLoad(2), HandClock()) as client:
        first = client.take()
        assert names(first) == ["a", "b"] and client.take() == []
        result = client.finished(ended(first[1]))
        assert (result.record.scheduled_s, result.record.client_queue_s) == (None, None)
        assert names(client.take()) == ["c"] and not client.is_done


def test_what_is_due_at_once_is_submitted_at_once() -> None:
    """Not when the target first asks, which may take it a while."""
    clock = HandClock()
    with Client([request(name) for name in "ab"], OpenLoad(None, (0.0, 1e6)), clock) as client:
        began_s = clock.now_s
        clock.now_s += 5.0
        (first,) = client.take()
        assert first.arrival_s == first.scheduled_s == began_s


def test_everything_that_is_due_is_submitted_and_nothing_before() -> None:
    clock = HandClock()
    with Client([request(name) for name in "abc"], OpenLoad(None, (0.0, 0.0, 1e6)), clock) as client:
        assert names(client.take()) == ["a", "b"]
        clock.now_s += 1e6
        (late,) = client.take()
        assert (late.arrival_s, late.scheduled_s, late.client_queue_s) == (clock.now_s, clock.now_s, 0.0)


def test_arrivals_do_not_slip_while_the_target_computes() -> None:
    """Nobody asks the client for a while, as during a long step: requests are out when they fell due all the same."""
    load = OpenLoad(None, (0.0, 0.02, 0.04, 0.06))
    with Client([request(name) for name in "abcd"], load, time.perf_counter) as client:
        before = client.take()
        wait_for(lambda: len(client._submitted) == 3)
        came = [*before, *client.take()]
    arrivals = np.array([submission.arrival_s for submission in came])
    scheduled = np.array([submission.scheduled_s for submission in came])
    assert names(came) == list("abcd") and (arrivals >= scheduled).all()
    # They came one after the other, not all when the target asked again.
    assert len(set(arrivals.tolist())) == 4 and arrivals[-1] < time.perf_counter()


def test_waiting_for_a_place_is_told_from_the_lag_of_the_client() -> None:
    clock = HandClock()
    with Client([request(name) for name in "abc"], OpenLoad(1, (0.0, 1.0, 2.0)), clock) as client:
        (first,) = client.take()
        clock.now_s = 103.0
        assert client.take() == []
        clock.now_s = 104.0
        client.finished(ended(first))
        (second,) = client.take()
        assert (second.scheduled_s, second.arrival_s, second.client_queue_s) == (101.0, 104.0, 3.0)
        clock.now_s = 109.0
        client.finished(ended(second))
        (third,) = client.take()
        assert (third.scheduled_s, third.client_queue_s) == (102.0, 7.0)
        recorded = client.finished(ended(third)).record
        assert (recorded.scheduled_s, recorded.client_queue_s) == (102.0, 7.0)
        assert client.is_done


def test_a_late_client_has_lag_and_no_queue() -> None:
    clock = HandClock()
    with Client([request("a"), request("b")], OpenLoad(2, (0.0, 1e6)), clock) as client:
        client.take()
        clock.now_s += 1e6 + 5.0
        (late,) = client.take()
        assert late.arrival_s - late.scheduled_s == 5.0 and late.client_queue_s == 0.0


def test_waiting_ends_when_a_request_falls_due() -> None:
    with Client([request("a")], OpenLoad(None, (0.02,)), time.perf_counter) as client:
        client.wait()
        assert names(client.take()) == ["a"]


def test_an_interrupted_load_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), Client([request("a")], OpenLoad(None, (1e6,)), time.perf_counter):
        assert threading.active_count() == before + 1
        raise KeyboardInterrupt
    assert threading.active_count() == before


CONVERSATION = [request("a", text="q0"), request("a1", follows="a", text="q1"), request("a2", follows="a1", text="q2")]


def test_a_turn_is_submitted_when_the_one_before_ends_with_the_answer_that_came() -> None:
    with Client([*CONVERSATION, request("b")], ClosedLoad(1), HandClock()) as client:
        said = []
        while not client.is_done:
            (submission,) = client.take()
            said.append(submission)
            client.finished(ended(submission, f"answer to {submission.request.request_id}"))
    assert names(said) == ["a", "a1", "a2", "b"]
    assert said[2].request.messages == (
        {"role": "user", "content": "q0"},
        {"role": "assistant", "content": "answer to a"},
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "answer to a1"},
        {"role": "user", "content": "q2"},
    )


def test_a_turn_behind_one_that_failed_fails_too() -> None:
    with Client(CONVERSATION, ClosedLoad(1), HandClock()) as client:
        (first,) = client.take()
        client.finished(ended(first, error="lost"))
        (second,) = client.take()
        assert second.error is not None and "a, failed" in second.error
        client.finished(ended(second, error=second.error))
        (third,) = client.take()
        assert third.error is not None and "a1, failed" in third.error


def test_a_turn_whose_predecessor_is_not_among_the_requests_fails() -> None:
    """A resumed run whose earlier segment lost the turn before."""
    orphan = dataclasses.replace(CONVERSATION[1], follows="gone")
    with Client([orphan], ClosedLoad(1), HandClock()) as client:
        (submission,) = client.take()
        assert submission.error is not None
        client.finished(ended(submission, error=submission.error))
        assert client.is_done


@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_events_sends_every_request_once_and_in_time(seed: int, limit: int | None) -> None:
    """Conversations of one to three turns by a timetable, in real time, on a target that answers when it likes."""
    generator = np.random.default_rng(seed)
    requests: list[GenerateRequest] = []
    for index in range(40):
        turns = [f"{index}-{turn}" for turn in range(generator.integers(1, 4))]
        requests += [request(name, follows=turns[turn - 1] if turn else None) for turn, name in enumerate(turns)]
    num_firsts = sum(one.follows is None for one in requests)
    times = np.cumsum(generator.gamma(0.3, 0.01, num_firsts))
    running: list[Submission] = []
    records: list[RequestRecord] = []
    with Client(requests, OpenLoad(limit, tuple(times.tolist())), time.perf_counter) as client:
        while not client.is_done:
            running += client.take()
            assert limit is None or len(running) <= limit
            if not running:
                client.wait()
            while running and generator.random() < 0.5:
                chosen = running.pop(generator.integers(len(running)))
                records.append(client.finished(ended(chosen)).record)
    assert sorted(one.request_id for one in records) == sorted(one.request_id for one in requests)
    timed = [one for one in records if one.scheduled_s is not None]
    assert len(timed) == num_firsts
    for one in timed:
        assert one.client_queue_s is not None and one.scheduled_s is not None
        assert 0 <= one.client_queue_s <= one.arrival_s - one.scheduled_s
        assert limit is not None or one.client_queue_s == 0
