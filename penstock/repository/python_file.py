"""Facts about the file of a Python model: its tensors, and the modules beside it.

Tensors are known only by running the file, which `backends.python_reader` does in a child process:
the server never runs a model's code itself.
"""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

import msgspec

from penstock.errors import ConfigError
from penstock.processes.endings import describe_status
from penstock.repository.signature import Signature
from penstock.system import environment

READER = "penstock.backends.python_reader"
# Importing torch and loading weights takes seconds; code that takes longer should not do it when it
# is imported.
TIME_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class SignatureReport:
    """The answer of the child process: a signature, or problems."""

    signature: Signature | None
    problems: tuple[str, ...] = ()


def read_signature(path: Path) -> Signature:
    """Read the tensors that the model declares; ConfigError if it declares none. Runs the file in a
    child process, once as long as neither it nor the modules beside it change."""
    report = _report(path, tuple(map(_stamp, (path, *local_imports(path)))))
    if report.signature is None:
        raise ConfigError(list(report.problems))
    return report.signature


def _stamp(path: Path) -> tuple[int, int]:
    with suppress(OSError):
        status = path.stat()
        return status.st_mtime_ns, status.st_size
    return 0, 0


@lru_cache(maxsize=64)
def _report(path: Path, stamps: tuple[tuple[int, int], ...]) -> SignatureReport:
    return msgspec.json.decode(run_code(READER, str(path)), type=SignatureReport)


def run_code(module: str, *arguments: str) -> bytes:
    """Run `python -m MODULE FD ARGUMENT...` and return what it writes to the file descriptor. The
    child gets the environment of a model's code, and its time is limited."""
    what = "running its code to learn its tensors"
    ours, theirs = os.pipe()
    with os.fdopen(ours, "rb") as answer:
        with os.fdopen(theirs, "wb"):
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs), *arguments],
                pass_fds=[theirs],
                stdin=subprocess.DEVNULL,
                # Its prints belong to the log, not to the output of a command.
                stdout=2,
                process_group=0,
                env=environment.allowed(os.environ),
            )
        try:
            code = process.wait(TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{what} took more than {TIME_LIMIT_S:.0f} s") from None
        finally:
            # With everything that it started.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        text = answer.read()
    if not text:
        raise ConfigError(f"{what} failed: it {describe_status(code)}")
    return text


def report(fd: int, findings: object) -> NoReturn:
    """Answer `run_code` and end this process, even if the code has left threads running."""
    with os.fdopen(fd, "wb") as pipe:
        pipe.write(msgspec.json.encode(findings))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def local_imports(path: Path) -> list[Path]:
    """Return the modules beside a Python file that it imports, and those that they import."""
    found: dict[Path, None] = {}
    waiting = [path]
    while waiting:
        for module in _imported(waiting.pop()):
            if module != path and module not in found:
                found[module] = None
                waiting.append(module)
    return sorted(found)


def _imported(path: Path) -> list[Path]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    paths = [path.parent.joinpath(*name.split(".")) for each in names if (name := each.strip("."))]
    # The file of a module, and those of its packages.
    files = [(f"{each}.py", each / "__init__.py", each.parent / "__init__.py") for each in paths]
    return [Path(file) for some in files for file in some if os.path.isfile(file)]
