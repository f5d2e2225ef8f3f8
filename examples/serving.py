"""`penstock` as a user starts it, for the scripts beside this file and under benchmarks/."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]


def show(console: Console, arguments: Sequence[str]) -> None:
    console.print(f"\n[bold]$ penstock {shlex.join(arguments)}[/bold]", soft_wrap=True)


def penstock(arguments: Sequence[str]) -> int:
    """A command, run in the project's folder with its output seen; its exit status."""
    command = [sys.executable, "-m", "penstock", *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


class Server:
    """`penstock serve` on a free port, until `stop` or the end of the `with` block."""

    def __init__(self, console: Console, repository: Path) -> None:
        flags = ["--http-port", "0", "--no-grpc", "--no-metrics"]
        command = [sys.executable, "-m", "penstock", "serve", str(repository), *flags]
        show(console, ["serve", os.path.relpath(repository, ROOT)])
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            console.print(line.rstrip(), highlight=False, markup=False, soft_wrap=True)
            if match := re.search(r"http://([\d.:]+)/v2", line):
                self.address = match[1]
                return
        raise SystemExit("the server did not start")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.stop()

    def kill_workers(self) -> int:
        """SIGKILL to every worker; how many there were."""
        children = psutil.Process(self._process.pid).children()
        workers = [each for each in children if "penstock.serving.worker" in each.cmdline()]
        for worker in workers:
            os.kill(worker.pid, signal.SIGKILL)
        return len(workers)

    def stop(self) -> tuple[int, int]:
        """SIGTERM; the exit code and how many processes were left behind."""
        children = psutil.Process(self._process.pid).children()
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(timeout=40)
        return code, sum(child.is_running() for child in children)
