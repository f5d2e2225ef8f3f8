"""The examples of docs/python-api.md run as they are."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "python-api.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_an_example_runs_and_prints(code: str) -> None:
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_page_names_every_public_function() -> None:
    for name in set(penstock.__all__) - {"__version__"}:
        assert f"penstock.{name}(" in PAGE, name
