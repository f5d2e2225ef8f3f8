"""Trace settings: Triton's checks, the fallback to the global ones, and exact counts."""

import pytest

from penstock.errors import InvalidRequest, PenstockError, Unsupported
from penstock.serving.trace_settings import GLOBAL, Change, TraceLayers, parse_changes
from penstock.wire.trace_records import TENSORS, TIMESTAMPS, TraceSetting

START = TraceSetting((TIMESTAMPS,), 100, -1, 0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"trace_level": ["TIMESTAMPS"]}, (TIMESTAMPS,)),
        ({"trace_level": ["TENSORS", "TIMESTAMPS"]}, (TIMESTAMPS, TENSORS)),
        ({"trace_level": ["OFF"]}, ()),
        ({"trace_level": None}, None),
        ({"trace_level": []}, None),
        ({"trace_rate": "7"}, 7),
        ({"trace_rate": 7}, 7),
        ({"trace_rate": ["7"]}, 7),
        ({"trace_count": "-1"}, -1),
        ({"log_frequency": None}, None),
    ],
)
def test_changes_are_read(given: dict[str, object], expected: Change) -> None:
    [changed] = parse_changes(given).values()
    assert changed == expected


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"trace_file": "/tmp/x"}, Unsupported, "can not be updated through network protocol"),
        ({"trace_level": ["OFF", "TENSORS"]}, InvalidRequest, "Expect only one trace level 'OFF'"),
        ({"trace_level": ["MAX"]}, InvalidRequest, "'trace_level' is a list of OFF"),
        ({"trace_level": {"a": 1}}, InvalidRequest, "'trace_level' is a list of OFF"),
        ({"trace_rate": "x"}, InvalidRequest, "Unable to parse 'trace_rate', got: x"),
        ({"trace_rate": True}, InvalidRequest, "Unable to parse 'trace_rate', got: True"),
        ({"trace_rate": "-1"}, InvalidRequest, "out of range [ 0, 4294967295 ], got: -1"),
        ({"trace_rate": ["1", "2"]}, InvalidRequest, "expect only 1 value for 'trace_rate'"),
        ({"trace_count": "-2"}, InvalidRequest, "out of range [ -1, 2147483647 ], got: -2"),
        ({"trace_count": "9" * 5000}, InvalidRequest, "out of range"),
        ({"trace_rates": "1"}, InvalidRequest, "unknown trace setting 'trace_rates'"),
    ],
)
def test_what_triton_refuses_is_refused(
    given: dict[str, object], error: type[PenstockError], text: str
) -> None:
    with pytest.raises(error) as found:
        parse_changes(given)
    assert text in str(found.value)


def test_a_model_has_the_global_settings_but_for_its_own() -> None:
    layers = TraceLayers(START)
    layers.change("m", {"trace_rate": 5})
    layers.change(GLOBAL, {"trace_rate": 9, "trace_level": (TENSORS,)})
    assert layers.setting("m") == TraceSetting((TENSORS,), 5)
    assert layers.setting("other") == TraceSetting((TENSORS,), 9)
    assert layers.table().models.keys() == {"m"}
    layers.change("m", {"trace_rate": None})
    assert layers.setting("m") == layers.setting(GLOBAL)
    assert layers.table().models == {}
    layers.change(GLOBAL, {"trace_rate": None, "trace_level": None})
    assert layers.setting("m") == START


def test_a_level_that_is_off_overrides_the_global_one() -> None:
    layers = TraceLayers(START)
    layers.change("m", {"trace_level": ()})
    assert not layers.setting("m").is_sampling and layers.setting("n").is_sampling


def test_counts_are_of_who_has_the_settings() -> None:
    layers = TraceLayers(START)
    layers.change(GLOBAL, {"trace_count": 2})
    layers.change("m", {"trace_rate": 1})
    assert [layers.take("m") for _ in range(3)] == [True, True, False]
    assert layers.setting("m").count == 0 and layers.setting(GLOBAL).count == 2
    assert layers.is_exhausted("m") and not layers.is_exhausted(GLOBAL)
    # Other changes do not start it anew; a count does, also for models that have none.
    layers.change("m", {"trace_rate": 2})
    assert layers.setting("m").count == 0
    layers.change(GLOBAL, {"trace_count": 5})
    assert layers.setting("m").count == 5
    layers.change(GLOBAL, {"trace_count": None})
    assert [layers.take(GLOBAL) for _ in range(9)] == [True] * 9


def test_a_trace_of_settings_that_are_gone_is_not_wanted() -> None:
    layers = TraceLayers(START)
    layers.change("m", {"trace_rate": 1})
    layers.change("m", {"trace_rate": None})
    assert not layers.take("m")
