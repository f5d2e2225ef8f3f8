"""A server in a child process, as `penstock.serve` returns it: where it listens, and how to stop
it. The server ends with this process, however that ends."""

from __future__ import annotations

import contextlib
import html
import signal
import subprocess
import sys
from dataclasses import asdict, replace

import msgspec

from penstock.api.client import Client
from penstock.api.serve_options import ServeOptions
from penstock.api.server_process import ServeJob, ServeOutcome
from penstock.errors import BackendFailed, CommandLineError, ConfigError

CHILD = "penstock.api.server_process"
# Time for the process to end after its requests had their time to finish.
GRACE_S = 10.0


class ServerHandle:
    """A running server. Stop it, or use it in a `with` block."""

    def __init__(self, model: str, options: ServeOptions) -> None:
        self._options = options
        # Quiet unless asked: the caller's program has an output of its own.
        asked = replace(options, log_level=options.log_level or "WARNING")
        self._process = subprocess.Popen(
            [sys.executable, "-m", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            outcome = self._ask(ServeJob(model, asdict(asked)))
        except BaseException:
            self._process.kill()
            self._close()
            raise
        self.url = outcome.url
        self.grpc_url = outcome.grpc_url
        self.metrics_url = outcome.metrics_url
        self.models = tuple(outcome.models)

    def __enter__(self) -> ServerHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "running" if self.is_running else "stopped"
        return f"<ServerHandle {self.url} {state}: {', '.join(self.models)}>"

    def _repr_html_(self) -> str:
        state = "running" if self.is_running else "stopped"
        url, models = html.escape(self.url), html.escape(", ".join(self.models))
        return f'<p>Penstock server <a href="{url}">{url}</a>: {models} ({state})</p>'

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def client(self, model: str = "", *, grpc: bool = False, api_key: str = "") -> Client:
        """Return a client of this server; for a server with one model, that model is the default.
        `grpc` speaks gRPC instead of HTTP."""
        url = self.grpc_url if grpc else self.url
        if not url:
            raise ConfigError(["this server was started without gRPC; use client() over HTTP"])
        if not model and len(self.models) == 1:
            model = self.models[0]
        # The server's own certificate, or the chain up to its issuer.
        return Client(url, model=model, api_key=api_key, ca_file=self._options.tls_cert)

    def stop(self) -> None:
        """Finish requests in flight and stop. Stopping again does nothing."""
        if self.is_running:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(self._options.drain_s + GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._close()

    def _ask(self, job: ServeJob) -> ServeOutcome:
        """Hand over the job and wait until models are loaded; ConfigError says why not."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(job) + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise BackendFailed(f"the server ended with status {code} before it served")
        outcome = msgspec.json.decode(line, type=ServeOutcome)
        if outcome.problems:
            kind = CommandLineError if outcome.is_usage else ConfigError
            raise kind(outcome.problems)
        return outcome

    def _close(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
