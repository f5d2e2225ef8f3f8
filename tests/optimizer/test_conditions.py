"""How much of the machine a run used, and how much others did."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from penstock.optimizer.conditions import CpuMeter

BUSY = "import time\nend = time.monotonic() + {s}\nwhile time.monotonic() < end: pass\n"


def test_what_descends_from_this_process_is_its_own() -> None:
    """In the account of the kernel, not by the clock: a busy child is none of the others."""
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
    """A grandchild whose parent is gone belongs to nobody here."""
    code = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {BUSY.format(s=4)!r}])"
    subprocess.run([sys.executable, "-c", code], check=True)
    meter = CpuMeter()
    time.sleep(2)
    assert meter.read().foreign_cpu > 0.5 / (os.cpu_count() or 1)
