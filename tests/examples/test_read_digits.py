"""The example that finds and reads digits: its pictures, its detector, and the served ensemble."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from served import Served

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDER = EXAMPLES / "read_digits"


@pytest.mark.slow
def test_digits_in_pictures_are_found_and_read() -> None:
    with Served(
        FOLDER / "repository", "--model-repository", str(EXAMPLES / "repository")
    ) as served:
        command = [sys.executable, str(FOLDER / "read.py"), "--url", served.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found, pictures, total = map(int, re.findall(r"\d+", done.stdout.splitlines()[0]))
    assert pictures == 40 and abs(found - total) <= 0.02 * total
    right, of_total = map(int, re.search(r"(\d+) of (\d+) read", done.stdout).groups())
    assert of_total == total and right >= 0.95 * total
