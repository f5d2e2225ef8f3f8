"""Statistics of responses by number."""

from penstock.serving.response_counts import KINDS, MAX_NUMBERED, ResponseCounts, ResponseTimes


def test_each_response_is_counted_under_its_number_with_the_time_since_the_last():
    counts = ResponseCounts()
    for start in (10.0, 20.0):
        times = ResponseTimes(start)
        counts.answered(times, start + 1.0, is_empty=False)
        counts.answered(times, start + 1.5, is_empty=False)
        counts.answered(times, start + 1.75, is_empty=True)
    found = counts.statistics()
    assert list(found) == ["0", "1", "2"]
    assert all(tuple(kinds) == KINDS for kinds in found.values())
    assert found["0"]["success"] == found["0"]["compute_infer"] == {"count": 2, "ns": 2 * 10**9}
    assert found["0"]["compute_output"] == {"count": 2, "ns": 0}
    assert found["1"]["success"] == {"count": 2, "ns": 10**9}
    assert found["2"]["empty_response"] == {"count": 2, "ns": 5 * 10**8}
    assert found["2"]["success"]["count"] == 0


def test_failed_and_cancelled_responses_are_counted_apart():
    counts, times = ResponseCounts(), ResponseTimes(0.0)
    counts.failed(times, 1.0)
    counts.cancelled(times, 3.0)
    found = counts.statistics()
    assert found["0"]["fail"] == found["0"]["compute_infer"] == {"count": 1, "ns": 10**9}
    assert found["1"]["cancel"] == {"count": 1, "ns": 2 * 10**9}


def test_long_streams_take_bounded_memory():
    counts, times = ResponseCounts(), ResponseTimes(0.0)
    for number in range(MAX_NUMBERED + 10):
        counts.answered(times, float(number), is_empty=False)
    assert len(counts.by_number) == MAX_NUMBERED
    assert counts.statistics()[str(MAX_NUMBERED - 1)]["success"]["count"] == 11
