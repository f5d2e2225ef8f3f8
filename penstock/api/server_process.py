"""The child process of `penstock.serve`: reads a `ServeJob` from stdin, writes one `ServeOutcome`
to stdout, and serves until its parent stops it or ends, which closes stdin."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.api.endpoint import Endpoint
from penstock.api.serve_options import ServeOptions
from penstock.errors import CommandLineError, ConfigError, PenstockError
from penstock.system.exit_codes import ExitCode

if TYPE_CHECKING:
    from penstock.server import Server


class ServeJob(msgspec.Struct):
    model: str
    options: dict[str, Any]


class ServeOutcome(msgspec.Struct):
    """Where the server listens, or why it does not."""

    url: str = ""
    grpc_url: str = ""
    metrics_url: str = ""
    models: list[str] = []
    problems: list[str] = []
    is_usage: bool = False


def main() -> int:
    """Serve as the parent asks; the exit code is that of `penstock serve`."""
    # Unbuffered: a thread that waits in a buffered reader would block the interpreter's exit.
    with os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0) as line:
        job = msgspec.json.decode(line.readline(), type=ServeJob)
    # Output of models must not mix with the outcome.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    options = msgspec.convert(job.options, ServeOptions)

    def tell(outcome: ServeOutcome) -> None:
        with out:
            out.write(msgspec.json.encode(outcome) + b"\n")

    def started(running: Server, names: Sequence[str]) -> None:
        tell(addresses(running, options.host))

    from penstock.api import serving

    try:
        serving.run(job.model, options, serving.Listeners(started))
    except PenstockError as error:
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        tell(ServeOutcome(problems=list(problems), is_usage=isinstance(error, CommandLineError)))
        return ExitCode.FAILED
    return ExitCode.OK


def addresses(running: Server, host: str) -> ServeOutcome:
    scheme, grpc_port, port = running.scheme, running.grpc_port, running.metrics_port
    remote = "grpcs" if scheme == "https" else "grpc"
    return ServeOutcome(
        url=Endpoint(scheme, host, running.http_port).url,
        grpc_url="" if grpc_port is None else Endpoint(remote, host, grpc_port).url,
        metrics_url="" if port is None else f"{Endpoint(scheme, host, port).url}/metrics",
        models=sorted({model.config.name for model in running.catalog}),
    )


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
