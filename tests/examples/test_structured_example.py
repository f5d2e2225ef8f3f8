"""The example's schema and tool, asked of a server with random weights."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("llguidance")
pytest.importorskip("openai")

from text_server import NAME, WITH_TOOLS, served

SCRIPT = Path(__file__).parents[2] / "examples" / "structured_output.py"


def test_a_person_and_a_city_come(tmp_path):
    async def run():
        async with served(tmp_path, max_length=400, template=WITH_TOOLS) as server:
            command = [sys.executable, str(SCRIPT), NAME, "--url", server.address]
            async with asyncio.timeout(100):
                return await asyncio.to_thread(
                    subprocess.run, command, capture_output=True, text=True, check=False
                )

    done = asyncio.run(run())
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith('a person: {"name": ') and second.startswith("the weather is asked")
