"""What this machine can do, as its own files say."""

import os
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from penstock.optimizer.machine import Machine
from penstock.optimizer.this_machine import CpuMeter, isa_of, read_machine

CPUINFO = """processor\t: 0
model name\t: A Processor
flags\t\t: fpu sse avx2 f16c avx512f avx512_vnni avx512fp

processor\t: 1
flags\t\t: fpu
"""


def test_this_machine_is_read() -> None:
    machine = read_machine()
    assert machine.num_cores == len(os.sched_getaffinity(0))
    assert machine.memory_bytes > 1 << 20
    assert machine.cpu
    assert machine.versions["numpy"] == np.__version__
    assert "onnx" in machine.versions


def test_instructions_are_whole_words_of_the_first_processor() -> None:
    assert isa_of(CPUINFO) == ("avx2", "f16c", "avx512f", "avx512_vnni")
    assert isa_of("") == ()


def test_arm_has_instructions_for_bytes_too() -> None:
    """As Graviton 2 and 3 say it."""
    older = "processor\t: 0\nFeatures\t: fp asimd evtstrm aes crc32 atomics fphp asimdhp asimddp\n"
    newer = older.replace("asimddp", "asimddp sve svebf16 i8mm bf16 dgh")
    before, after = (Machine("cpu", 2, 1 << 30, isa_of(text)) for text in (older, newer))
    assert (before.has_int8, before.has_bf16) == (True, False)
    assert (after.has_int8, after.has_bf16) == (True, True)


def test_what_instructions_are_good_for() -> None:
    plain = Machine("cpu", 2, 1 << 30, ("avx2", "avx512f"))
    assert not plain.has_int8
    assert not plain.has_bf16
    assert Machine("cpu", 2, 1 << 30, isa_of(CPUINFO)).has_int8


# How much of it a run used, and how much others did.

BUSY = "import time\nend = time.monotonic() + {s}\nwhile time.monotonic() < end: pass\n"


def test_what_descends_from_this_process_is_its_own() -> None:
    """The kernel counts it: the CPU time of a busy child is our own, not that of other programs."""
    meter = CpuMeter()
    before = psutil.cpu_times()
    subprocess.run([sys.executable, "-c", BUSY.format(s=1.0)], check=True)
    found = meter.read()
    after = psutil.cpu_times()
    assert found.own_cpu > 0
    assert found.num_cores == os.cpu_count()
    busy_s = (sum(after) - after.idle) - (sum(before) - before.idle)
    assert found.speed_s > 0 and found.load_average >= 0
    # Shares of one whole: whatever was busy was own, others' or stolen.
    assert 0 <= found.own_cpu + found.foreign_cpu <= 1.05
    assert busy_s > 0


@pytest.mark.verify
def test_other_programs_are_others() -> None:
    """A grandchild whose parent has ended counts as another program."""
    code = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {BUSY.format(s=4)!r}])"
    subprocess.run([sys.executable, "-c", code], check=True)
    meter = CpuMeter()
    time.sleep(2)
    assert meter.read().foreign_cpu > 0.5 / (os.cpu_count() or 1)
