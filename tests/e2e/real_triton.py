"""A real Triton, as the benchmark installs and starts it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from overhead.process import StartError, free_port, running
from rivals.environment import InstallError
from rivals.triton import Triton


@dataclass(frozen=True)
class Oracle:
    port: int
    grpc_address: str


@contextmanager
def triton(repository: Path, work: Path, *, is_required: bool = False) -> Iterator[Oracle]:
    """Serving the repository; skips the test where Triton cannot be had, unless it is required."""
    end = pytest.fail if is_required else pytest.skip
    rival = Triton()
    try:
        rival.prepare()
    except InstallError as error:
        end(f"Triton cannot be installed here: {error}")
    grpc_port = free_port()
    launch = rival.serve(repository, work, grpc_port)
    try:
        with running(launch, work / "triton.log"):
            yield Oracle(launch.port, f"127.0.0.1:{grpc_port}")
    except StartError as error:
        end(f"Triton does not start here: {error}")
