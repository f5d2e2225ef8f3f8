"""`--host-policy`: which cores and which NUMA node, and what is wrong with a flag."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.system.host_policy import (
    HostPolicy,
    cores_of,
    machine_problems,
    read_host_policies,
)

USABLE = sorted(os.sched_getaffinity(0))
CORE = USABLE[0]


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    for node, cores in ((0, f"{CORE}"), (1, "4000-4001,4003")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cores}\n")
    return tmp_path


def test_settings_of_one_name_are_one_policy():
    flags = ["a,numa-node=0", f"a,cpu-cores={CORE}-{CORE}", f"b,cpu-cores={CORE}"]
    policies, problems = read_host_policies(flags)
    assert problems == []
    assert policies == {"a": HostPolicy((CORE,), 0), "b": HostPolicy((CORE,))}


@pytest.mark.parametrize(
    "flag",
    ["a", "a,", ",numa-node=0", "a,numa-node=", "a,numa-node=0-1", "a,numa-node=-1", "a,x=1"]
    + ["a,cpu-cores=3-1", "a,cpu-cores=1,2", "a,cpu-cores=one", "a,numa-node=9999"],
)
def test_what_is_no_setting_is_refused(flag: str):
    policies, [problem] = read_host_policies([flag])
    assert policies == {}
    assert problem.startswith(f"--host-policy {flag}: expected NAME,numa-node=N or")


def test_nodes_and_cores_that_the_machine_lacks_are_named(nodes: Path):
    assert machine_problems(HostPolicy((CORE,), 1), nodes) == []
    [problem] = machine_problems(HostPolicy((), 7), nodes)
    assert problem == "there is no NUMA node 7 on this machine"
    [problem] = machine_problems(HostPolicy((90000, 90001)), nodes)
    assert problem.startswith("the server may use none of the cores 90000-90001; it has ")


def test_cores_of_a_node_are_those_that_the_server_may_use(nodes: Path):
    assert cores_of(HostPolicy((), 0), nodes) == (CORE,)
    assert cores_of(HostPolicy((), 1), nodes) == ()
    assert cores_of(HostPolicy((CORE, 90000), 1), nodes) == (CORE,)
    assert cores_of(HostPolicy(), nodes) == ()


def test_every_thread_of_a_process_is_pinned():
    code = f"""
import os, threading
from penstock.system.host_policy import HostPolicy, apply
stop = threading.Event()
thread = threading.Thread(target=stop.wait)
thread.start()
apply(HostPolicy(({CORE},), 0))
late = []
other = threading.Thread(target=lambda: late.append(os.sched_getaffinity(0)))
other.start()
other.join()
print(os.sched_getaffinity(0), os.sched_getaffinity(thread.native_id), late[0])
stop.set()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"{{{CORE}}}"] * 3
