"""LitServe with and without batching, with one and two API servers and both of its queues.

Its own JSON API. The access log is off, as for the others.
"""

from __future__ import annotations

from typing import ClassVar

from overhead.process import Launch, free_port
from overhead.workload import Encoding, Model

from rivals import environment

BATCHING = ["--batch=64", "--batch-timeout=0.001"]
FLAGS: dict[str, list[str]] = {
    "single": [],
    "batching": BATCHING,
    "single, 2 API servers, fast queue": ["--api-servers=2", "--fast-queue"],
    "batching, 2 API servers": [*BATCHING, "--api-servers=2"],
    "batching, 2 API servers, fast queue": [*BATCHING, "--api-servers=2", "--fast-queue"],
}


class LitServe:
    name: ClassVar[str] = "litserve"
    title: ClassVar[str] = "LitServe"
    encodings: tuple[Encoding, ...] = ("litserve",)
    variants = tuple(FLAGS)

    def prepare(self) -> tuple[str, str]:
        self._environment = environment.ensure("litserve", "litserve", ["0.2.19"])
        return self._environment.version, self._environment.note

    def launch(self, variant: str, model: Model) -> Launch:
        port = free_port()
        command = [str(self._environment.python), str(environment.APPS / "litserve_app.py")]
        command += [model.name, str(environment.onnx_path(model.name)), f"--port={port}"]
        work = environment.work_folder("litserve")
        return Launch([*command, *FLAGS[variant]], port, ["/health"], cwd=work)
