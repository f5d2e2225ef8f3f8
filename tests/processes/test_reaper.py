"""Groups of processes that end when the process that watches over them is killed."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import uvloop
from waiting import wait_until

from penstock.processes.reaper import Reaper, kill_group

# Watches two groups, forgets one of them, tells their ids, and waits.
CORE = """
import subprocess, sys, time
from penstock.processes.reaper import Reaper
reaper = Reaper()
kept, forgotten = (
    subprocess.Popen(["sleep", "3600"], process_group=0, stdout=subprocess.DEVNULL)
    for _ in range(2)
)
reaper.watch(kept.pid)
reaper.watch(forgotten.pid)
reaper.forget(forgotten.pid)
print(kept.pid, forgotten.pid, reaper.pid, flush=True)
time.sleep(3600)
"""


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def ignores(pid: int, number: signal.Signals) -> bool:
    (line,) = re.findall(r"^SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    return bool(int(line, 16) >> (number - 1) & 1)


def wait_for_end(pid: int) -> None:
    wait_until(lambda: has_ended(pid))


@pytest.mark.parametrize("is_whole_service_ended", [False, True])
def test_groups_end_with_a_process_that_is_killed(is_whole_service_ended: bool):
    core = subprocess.Popen([sys.executable, "-c", CORE], stdout=subprocess.PIPE)
    with core:
        kept, forgotten, reaper = map(int, core.stdout.readline().split())
        if is_whole_service_ended:
            wait_until(lambda: ignores(reaper, signal.SIGTERM))
            os.kill(reaper, signal.SIGTERM)  # As a service manager does to all its processes.
        core.kill()
    wait_for_end(kept)
    wait_for_end(reaper)
    assert not has_ended(forgotten)
    kill_group(forgotten)
    wait_for_end(forgotten)


def test_it_runs_while_there_is_a_group_and_is_replaced_when_it_dies():
    reaper = Reaper()
    assert reaper.pid == 0
    before = len(os.listdir("/proc/self/fd"))
    sleepers = [subprocess.Popen(["sleep", "3600"], process_group=0) for _ in range(2)]
    reaper.watch(sleepers[0].pid)
    first = reaper.pid
    psutil.Process(first).kill()
    psutil.Process(first).wait()
    reaper.watch(sleepers[1].pid)
    assert reaper.pid not in (0, first)
    for sleeper in sleepers:
        assert sleeper.poll() is None, "a reaper that is replaced ends nothing"
        sleeper.kill()
        sleeper.wait()
        reaper.forget(sleeper.pid)
    assert reaper.pid == 0
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_the_event_loop_replaces_it_when_it_dies(new_loop: Callable[[], asyncio.AbstractEventLoop]):
    reaper = Reaper()
    loop = new_loop()
    sleeper = subprocess.Popen(["sleep", "3600"], process_group=0)
    try:
        reaper.watch(sleeper.pid, loop)
        for _ in range(2):
            first = reaper.pid
            os.kill(first, signal.SIGKILL)

            async def replaced(first: int = first) -> None:
                while reaper.pid in (0, first):
                    await asyncio.sleep(0.01)

            loop.run_until_complete(asyncio.wait_for(replaced(), 20))
        assert sleeper.poll() is None, "a reaper that is replaced ends nothing"
    finally:
        loop.close()
        sleeper.kill()
        sleeper.wait()
        reaper.forget(sleeper.pid)
    assert reaper.pid == 0


def test_a_group_is_killed_with_all_its_members(tmp_path: Path):
    script = "import subprocess; print(subprocess.Popen(['sleep', '3600']).pid, flush=True)"
    leader = subprocess.Popen(
        [sys.executable, "-c", script + "; input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
    )
    with leader:
        member = int(leader.stdout.readline())
        kill_group(leader.pid)
    wait_for_end(member)
    kill_group(leader.pid)  # There is none any more, which is no error.


def test_without_a_process_to_be_had_nothing_fails(monkeypatch: pytest.MonkeyPatch):
    def no_process(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    reaper = Reaper()
    monkeypatch.setattr("subprocess.Popen", no_process)
    reaper.watch(1 << 22)
    assert reaper.pid == 0
    reaper.forget(1 << 22)
