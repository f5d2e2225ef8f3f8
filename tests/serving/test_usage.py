"""What the operating system says of processes."""

import os
import subprocess
import sys

import psutil
from doubles import FakeClock

from penstock.serving.scrape import ProcessUsage, cpu_s
from penstock.system.devices import GpuUse, Watch


def test_this_process_is_the_core_and_uses_something():
    [core] = ProcessUsage().read([]).processes
    assert core.labels == {"process": "core"}
    assert core.resident_bytes > 1 << 20
    assert core.cpu_s > 0


def test_members_are_named_as_given_and_one_that_has_gone_is_left_out():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    labels = {"process": "worker", "model": "digits", "version": "2", "instance": "1"}
    members = [(gone.pid, {"process": "shard"}), (os.getppid(), labels)]
    _, worker = ProcessUsage().read(members).processes
    assert worker.labels == labels
    assert worker.resident_bytes > 0


def test_the_machine_has_memory_and_uses_part_of_it():
    host = ProcessUsage().read([])
    assert host.memory_total_bytes == psutil.virtual_memory().total
    assert 0 < host.memory_used_bytes < host.memory_total_bytes
    assert 0.0 <= host.cpu_utilization <= 1.0


def test_gpus_are_part_of_the_machine_and_their_energy_counts_from_the_beginning():
    joules = iter([70.0, 95.0])
    clock = FakeClock()
    usage = ProcessUsage(Watch(lambda: [GpuUse("GPU-a", 0.5, energy_joules=next(joules))], clock))
    usage.begin()
    clock.advance(1.0)
    [gpu] = usage.read([]).gpus
    assert (gpu.uuid, gpu.utilization, gpu.energy_joules) == ("GPU-a", 0.5, 25.0)


def test_cpu_time_is_that_of_each_process_that_is_there():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    before = cpu_s([os.getpid(), gone.pid])
    assert before.keys() == {os.getpid()}
    while cpu_s([os.getpid()]) == before:
        sum(range(10_000))
