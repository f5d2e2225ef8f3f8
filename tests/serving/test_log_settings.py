"""Log settings, checked as Triton does."""

import json

import pytest

from penstock.errors import InvalidRequest, PenstockError, Unsupported
from penstock.serving.log_settings import parse_log_changes, show_logging
from penstock.system.logs import LogSwitches

START = LogSwitches()


def test_only_what_is_given_changes() -> None:
    text = '{"log_info": false, "log_verbose_level": 2, "log_format": "ISO8601", "log_file": null}'
    expected = LogSwitches(log_info=False, log_verbose_level=2, log_format="ISO8601")
    assert parse_log_changes(text, START) == expected
    assert parse_log_changes('{"log_info": true}', expected) == LogSwitches(
        log_verbose_level=2, log_format="ISO8601"
    )
    assert parse_log_changes('{"log_info": null}', START) is None


def test_settings_are_shown_with_tritons_names() -> None:
    assert json.loads(show_logging(START)) == {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"log_file": "x"}, Unsupported, "can not be updated through network protocol"),
        ({"log_info": 1}, InvalidRequest, "expect boolean for 'log_info'"),
        ({"log_error": "no"}, InvalidRequest, "expect boolean for 'log_error'"),
        ({"log_verbose_level": True}, InvalidRequest, "expect int32 for 'log_verbose_level'"),
        ({"log_verbose_level": -1}, InvalidRequest, "must be 0 or more, got: -1"),
        ({"log_verbose_level": 1.5}, InvalidRequest, "expect int32"),
        ({"log_format": "xml"}, InvalidRequest, "invalid argument for log_format, got: xml"),
        ({"log_format": []}, InvalidRequest, "expect string for 'log_format'"),
        ({"log_level": 1}, InvalidRequest, "unknown log setting 'log_level'"),
    ],
)
def test_what_triton_refuses_is_refused(
    given: dict[str, object], error: type[PenstockError], text: str
) -> None:
    with pytest.raises(error) as found:
        parse_log_changes(json.dumps({"log_info": False} | given), START)
    assert text in str(found.value)
