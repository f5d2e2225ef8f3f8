"""Lines of text and of JSON, and what they can never do."""

import json
import logging
import os
import subprocess
import sys
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.system import logs
from penstock.system.logs import JsonLines, LogSettings, LogSwitches, TextLines


def record(message: str = "hello", *args: object, **extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord(
        {"name": "penstock.test", "levelno": 20, "levelname": "INFO", "msg": message, "args": args}
    )
    vars(made).update(extra)
    return made


def as_json(made: logging.LogRecord) -> dict:
    line = JsonLines().format(made)
    assert "\n" not in line
    return json.loads(line)


def test_a_line_of_json_says_when_who_and_what():
    made = record("%s loads", "digits", model="digits", version="1")
    line = as_json(made)
    moment = datetime.fromisoformat(line.pop("ts"))
    assert abs(moment - datetime.fromtimestamp(made.created, UTC)).total_seconds() < 0.001
    assert line == {
        "level": "INFO",
        "logger": "penstock.test",
        "msg": "digits loads",
        "pid": os.getpid(),
        "model": "digits",
        "version": "1",
    }


def test_time_is_rfc_3339_in_utc():
    assert JsonLines().format(record())[:8] == '{"ts": "'
    assert as_json(record())["ts"].endswith("Z")


def test_an_exception_is_a_field():
    try:
        raise ValueError("no")
    except ValueError:
        made = record("failed", exc_info=sys.exc_info())
    line = as_json(made)
    assert line["exception"].startswith("Traceback") and "ValueError: no" in line["exception"]


@given(st.text())
def test_any_text_is_one_line_of_json_and_comes_back(text):
    made = record("%s", text, reason=text)
    line = as_json(made)
    assert line["msg"] == line["reason"] == text


def test_what_json_cannot_say_is_said_in_words():
    assert as_json(record("x", thing=object()))["thing"].startswith("<object")


def test_a_terminal_gets_no_orders_from_a_line_of_text():
    text = TextLines("%(message)s").format(record("a\x1b[2Jb\rc\x9b31m\td\ne"))
    assert text == "a\\x1b[2Jb\\rc\\x9b31m\td\ne"


@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ({}, LogSettings("INFO", "text")),
        ({"PENSTOCK_LOG": "debug", "PENSTOCK_LOG_FORMAT": "JSON"}, LogSettings("DEBUG", "json")),
    ],
)
def test_settings_come_from_the_environment(environment, settings):
    assert logs.from_environment(environment) == settings


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"PENSTOCK_LOG": "chatty"}, "PENSTOCK_LOG: 'CHATTY' is not one of DEBUG, INFO"),
        ({"PENSTOCK_LOG_FORMAT": "xml"}, "PENSTOCK_LOG_FORMAT: 'xml' is not one of text, json"),
    ],
)
def test_settings_that_make_no_sense_are_told(environment, complaint):
    with pytest.raises(ValueError, match=complaint):
        logs.from_environment(environment)


def run(script: str, **environment: str) -> list[str]:
    """The lines that a process of its own writes to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", "import logging; from penstock.system import logs\n" + script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr.splitlines()


def test_the_level_is_for_our_loggers_and_libraries_speak_from_warning_on():
    lines = run(
        "logs.configure(logs.from_environment())\n"
        "logging.getLogger('penstock.x').info('ours')\n"
        "logging.getLogger('penstock.x').debug('too much')\n"
        "logging.getLogger('library').info('theirs')\n"
        "logging.getLogger('library').warning('beware')\n",
        PENSTOCK_LOG_FORMAT="json",
        PENSTOCK_LOG="info",
    )
    assert [json.loads(line)["msg"] for line in lines] == ["ours", "beware"]


def test_a_process_says_whom_its_lines_concern():
    [line] = run(
        "logs.configure(logs.LogSettings(format='json')); logs.describe('digits', '3')\n"
        "logging.getLogger('penstock').info('x')\n"
    )
    assert (json.loads(line)["model"], json.loads(line)["version"]) == ("digits", "3")


def test_settings_are_handed_down():
    lines = run(
        "import os; logs.hand_down(logs.LogSettings('ERROR', 'json'))\n"
        "logs.configure(logs.from_environment(os.environ))\n"
        "logging.getLogger('penstock').warning('no'); logging.getLogger('penstock').error('yes')\n"
    )
    assert [json.loads(line)["msg"] for line in lines] == ["yes"]


def test_lines_go_to_whatever_is_stderr_at_the_moment():
    lines = run(
        "import io, sys; logs.configure(logs.LogSettings())\n"
        "real, sys.stderr = sys.stderr, io.StringIO()\n"
        "logging.getLogger('penstock').info('caught')\n"
        "caught, sys.stderr = sys.stderr.getvalue(), real\n"
        "assert 'caught' in caught\n"
    )
    assert lines == []


def test_switches_are_the_levels_of_the_start() -> None:
    assert LogSwitches.of_level("INFO") == LogSwitches()
    assert LogSwitches.of_level("DEBUG") == LogSwitches(log_verbose_level=1)
    assert LogSwitches.of_level("ERROR") == LogSwitches(log_info=False, log_warning=False)


def test_each_level_is_switched_by_itself() -> None:
    sieve = logs.Sieve()
    sieve.switches = LogSwitches(log_info=True, log_warning=False, log_verbose_level=1)

    def passes(level: int, name: str = "penstock.model") -> bool:
        record = logging.LogRecord(name, level, "", 0, "text", (), None)
        return bool(sieve.filter(record))

    assert passes(logging.DEBUG) and passes(logging.INFO)
    assert not passes(logging.WARNING) and passes(logging.ERROR)
    # Others are not Penstock's, or have switches of their own.
    for name in ("asyncio", "penstock.audit", "penstock.requests"):
        assert passes(logging.WARNING, name)
    sieve.switches = LogSwitches(log_error=False)
    assert not passes(logging.CRITICAL)


def test_times_of_lines_follow_the_format() -> None:
    lines = logs.TextLines("%(asctime)s %(message)s")
    record = logging.LogRecord("penstock", logging.INFO, "", 0, "text", (), None)
    record.created = 0.0
    assert not lines.format(record).startswith("1970-01-01T00:00:00Z")
    lines.is_iso = True
    assert lines.format(record) == "1970-01-01T00:00:00Z text"
