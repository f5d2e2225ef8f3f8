"""Freed memory is kept for the next arrays."""

import subprocess
import sys

import pytest

from penstock.system import allocator

# Arrays of a megabyte, all freed before the next round.
CODE = """
import resource, sys
import numpy as np
from penstock.system import allocator
kept = allocator.keep_freed_memory() if sys.argv[1] == "keep" else False
def round():
    arrays = [np.ones(1 << 18, np.float32) for _ in range(8)]
for _ in range(5):
    round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    round()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(how: str, **environment: str) -> tuple[str, int]:
    command = [sys.executable, "-c", CODE, how]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    kept, faults = done.stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(not hasattr(allocator.ctypes.CDLL(None), "mallopt"), reason="no glibc")
def test_pages_are_not_asked_for_again() -> None:
    kept, faults = run("keep")
    assert kept == "True" and faults < 1000
    # 8 MB in pages of 4 kB, 20 times.
    assert run("leave")[1] > 10 * max(faults, 100)


@pytest.mark.parametrize("name", allocator.OPTIONS)
def test_the_environment_has_the_last_word(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "131072")
    assert not allocator.keep_freed_memory()
