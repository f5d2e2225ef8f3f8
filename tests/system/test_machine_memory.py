"""Memory of the machine or the container, of processes, and kills for lack of it."""

import os
import subprocess
import sys

import psutil

from penstock.system.memory import MachineMemory, read_memory, read_oom_kills, resident_bytes


def test_memory_is_that_of_the_container_where_it_has_less(tmp_path):
    machine = psutil.virtual_memory()
    assert read_memory(tmp_path).total == machine.total
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert read_memory(tmp_path).total == machine.total
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("3000000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 500000\n")
    assert read_memory(tmp_path) == MachineMemory(available=2_500_000, total=5_000_000)


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
