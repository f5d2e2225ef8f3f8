"""`examples/kill_workers.py`, as a user runs it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.slow
def test_no_request_is_lost_when_every_worker_is_killed() -> None:
    command = [sys.executable, str(EXAMPLES / "kill_workers.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    [killed, lost, left] = re.findall(
        r"(\d+) workers killed, (\d+) of .*?exit code 0, (\d+) processes",
        " ".join(ended.stdout.split()),
    )[0]
    assert (int(killed), int(lost), int(left)) == (4, 0, 0)
