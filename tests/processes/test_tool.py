"""Child processes that do one job: their output, their end, and the end of what they forked."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from penstock.processes.tool import TAIL_BYTES, TAIL_LINES, ToolProcess

WAIT = "import time\nprint('waiting', flush=True)\ntime.sleep(600)\n"
FORKS = (
    "import os, time\n"
    "pid = os.fork()\n"
    "if pid:\n    print('forked', pid, '.', flush=True)\n"
    "time.sleep(600)\n"
)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def write(code: str) -> str:
        (tmp_path / "made_up_tool.py").write_text(code)
        return "made_up_tool"

    return write


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_its_end_and_output_are_told(module: Callable[[str], str]) -> None:
    code = "import sys\nprint('out', sys.argv[1])\nprint('err', file=sys.stderr)\nsys.exit(3)\n"
    with ToolProcess(module(code), ["x"]) as tool:
        assert tool.wait(60) == 3
        assert sorted(tool.output.split()) == ["err", "out", "x"]
        assert tool.describe_end().startswith("exited with status 3; it wrote: ")
        assert not tool.is_running


def test_a_signal_is_named(module: Callable[[str], str]) -> None:
    with ToolProcess(module("import os\nos.kill(os.getpid(), 11)\n")) as tool:
        assert tool.describe_end() == "was killed by SIGSEGV"


def test_waiting_is_limited_and_the_end_of_the_block_kills(module: Callable[[str], str]) -> None:
    with ToolProcess(module(WAIT)) as tool:
        until(lambda: "waiting" in tool.output)
        with pytest.raises(TimeoutError):
            tool.wait(0.01)
        assert tool.is_running
    assert not is_alive(tool.pid)


def test_what_it_forked_is_killed_too(module: Callable[[str], str]) -> None:
    with ToolProcess(module(FORKS)) as tool:
        until(lambda: tool.output.endswith(".\n"))
        pid = int(tool.output.split()[1])
        assert is_alive(pid)
    until(lambda: not is_alive(pid))


def test_one_that_ignores_sigterm_is_killed(module: Callable[[str], str]) -> None:
    code = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT
    tool = ToolProcess(module(code))
    until(lambda: "waiting" in tool.output)
    tool.stop(0.01)
    assert not is_alive(tool.pid) and tool.wait() == -signal.SIGKILL


def test_one_that_stops_when_asked_ends_by_itself(module: Callable[[str], str]) -> None:
    code = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n" + WAIT
    tool = ToolProcess(module(code))
    until(lambda: "waiting" in tool.output)
    tool.stop(60)
    assert tool.wait() == 5


def test_it_dies_with_its_parent(module: Callable[[str], str]) -> None:
    script = (
        "import time\n"
        "from penstock.processes.tool import ToolProcess\n"
        f"tool = ToolProcess({module(WAIT)!r})\n"
        "while 'waiting' not in tool.output:\n    time.sleep(0.01)\n"
        "print(tool.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
    until(lambda: not is_alive(pid))


def test_a_module_that_cannot_be_started_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_open = len(os.listdir("/proc/self/fd"))

    def fail(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", fail)
    with pytest.raises(BlockingIOError):
        ToolProcess("made_up_tool")
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_reading_does_not_disturb_the_writer(module: Callable[[str], str]) -> None:
    code = "import sys, time\nprint('one ', end='', flush=True)\nsys.stdin.read()\nprint('two')\n"
    with ToolProcess(module(code)) as tool:
        until(lambda: tool.output.startswith("one "))
        tool.wait(60)
        assert tool.output == "one two\n"
        assert tool.tail() == "; it wrote: one two"


NUMBERED = [f"warning {number}" for number in range(TAIL_BYTES)]
LONG = "b" * (TAIL_BYTES - 10)


@pytest.mark.parametrize(
    ("text", "tail"),
    [
        pytest.param("a" * 3 * TAIL_BYTES + "end", "a" * (TAIL_BYTES - 3) + "end", id="long line"),
        pytest.param("\n".join(NUMBERED), "\n".join(NUMBERED[-TAIL_LINES:]), id="many lines"),
        pytest.param(f"{'a' * 100}\n{LONG}\nend", f"{LONG}\nend", id="whole lines"),
        pytest.param(" \n", "", id="nothing"),
    ],
)
def test_the_tail_is_short_and_of_whole_lines(
    module: Callable[[str], str], text: str, tail: str
) -> None:
    code = f"import sys\nsys.stdout.write({text!r})\n"
    with ToolProcess(module(code)) as tool:
        tool.wait(60)
        assert tool.tail("the child") == (f"; the child wrote: {tail}" if tail else "")
