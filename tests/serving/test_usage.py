"""What the operating system says of processes."""

import os
import subprocess
import sys

import psutil

from penstock.serving.usage import (
    Member,
    Memory,
    Usage,
    cpu_s,
    read_memory,
    read_oom_kills,
    resident_bytes,
)
from penstock.system.devices import GpuUse, Watch
from penstock.testing import FakeClock


def test_this_process_is_the_core_and_uses_something():
    [core] = Usage().read([]).processes
    assert (core.role, core.model) == ("core", "")
    assert core.resident_bytes > 1 << 20
    assert core.cpu_s > 0


def test_members_are_named_as_given_and_one_that_has_gone_is_left_out():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    members = [Member(gone.pid, "grpc_front"), Member(os.getppid(), "worker", "digits", "2", "1")]
    _, worker = Usage().read(members).processes
    assert (worker.role, worker.model, worker.version, worker.instance) == (
        "worker",
        "digits",
        "2",
        "1",
    )
    assert worker.resident_bytes > 0


def test_the_machine_has_memory_and_uses_part_of_it():
    host = Usage().read([])
    assert host.memory_total_bytes == psutil.virtual_memory().total
    assert 0 < host.memory_used_bytes < host.memory_total_bytes
    assert 0.0 <= host.cpu_utilization <= 1.0


def test_gpus_are_part_of_the_machine_and_their_energy_counts_from_the_beginning():
    joules = iter([70.0, 95.0])
    clock = FakeClock()
    usage = Usage(Watch(lambda: [GpuUse("GPU-a", 0.5, energy_joules=next(joules))], clock))
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


def test_memory_is_that_of_the_container_where_it_has_less(tmp_path):
    machine = psutil.virtual_memory()
    assert read_memory(tmp_path).total == machine.total
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert read_memory(tmp_path).total == machine.total
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("3000000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 500000\n")
    assert read_memory(tmp_path) == Memory(available=2_500_000, total=5_000_000)


def test_a_process_that_has_gone_takes_no_memory():
    assert resident_bytes(os.getpid()) > 1 << 20
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass
    assert resident_bytes(child.pid) == 0


def test_kills_for_lack_of_memory_are_those_of_the_group_or_else_of_the_machine(tmp_path):
    cgroups, proc = tmp_path / "cgroup", tmp_path / "proc"
    (cgroups / "system.slice" / "penstock").mkdir(parents=True)
    (proc / "self").mkdir(parents=True)
    assert read_oom_kills(cgroups, proc) is None
    (proc / "vmstat").write_text("nr_free_pages 5\noom_kill 7\n")
    (proc / "self" / "cgroup").write_text("4:memory:/other\n0::/system.slice/penstock\n")
    assert read_oom_kills(cgroups, proc) == 7
    (cgroups / "memory.events").write_text("oom 9\noom_kill 3\n")
    assert read_oom_kills(cgroups, proc) == 3
    (cgroups / "system.slice" / "penstock" / "memory.events").write_text("oom_kill 1\n")
    assert read_oom_kills(cgroups, proc) == 1
