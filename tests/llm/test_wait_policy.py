"""Whether threads spin or sleep, by what others use of the machine."""

import os
import subprocess

import psutil
import pytest

from penstock.llm import wait_policy
from penstock.llm.wait_policy import SLEEP, SPIN, VARIABLE, CpuLoad, choose


@pytest.mark.parametrize(
    ("load", "num_threads", "expected"),
    [
        (CpuLoad(2, 0.0), 2, SPIN),
        (CpuLoad(2, 0.2), 2, SPIN),
        (CpuLoad(2, 0.9), 2, SLEEP),
        (CpuLoad(8, 3.0), 4, SPIN),
        (CpuLoad(8, 5.0), 4, SLEEP),
        # One thread waits for nobody.
        (CpuLoad(1, 3.0), 1, SPIN),
        (CpuLoad(64, 0.0, quota=2.0), 64, SLEEP),
        (CpuLoad(64, 0.0, quota=64.0), 64, SPIN),
    ],
)
def test_threads_sleep_where_others_need_their_cores(load, num_threads, expected):
    policy, reason = choose(load, num_threads)
    assert policy == expected and "cores" in reason


def test_it_is_set_unless_the_operator_has():
    environment: dict[str, str] = {}
    told = wait_policy.apply(2, environment, lambda: CpuLoad(2, 1.5))
    assert environment == {VARIABLE: SLEEP} and told == "PASSIVE (others use 1.50 of 2 cores)"
    environment = {VARIABLE: "ACTIVE"}
    assert "set by" in wait_policy.apply(2, environment, lambda: CpuLoad(2, 1.5))
    assert environment == {VARIABLE: "ACTIVE"}


def test_times_of_cores_and_processes_are_read():
    one, every = wait_policy.busy_s([0]), wait_policy.busy_s(range(os.cpu_count() or 1))
    assert 0 < one <= every and wait_policy.busy_s([]) == 0
    gone = subprocess.Popen(["true"])
    process = psutil.Process(gone.pid)
    gone.wait()
    assert wait_policy.process_s([process]) == 0
    own = wait_policy.server_processes(os.getppid())
    assert os.getpid() in [each.pid for each in own]
    assert wait_policy.process_s(own) > 0


def test_this_machine_is_measured(monkeypatch):
    monkeypatch.setattr(wait_policy, "SAMPLE_S", 0.05)
    found = wait_policy.measure_load()
    assert found.num_cores == len(os.sched_getaffinity(0)) and found.others >= 0
