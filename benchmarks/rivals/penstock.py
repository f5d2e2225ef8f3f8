"""Penstock as it comes: the example repository, default settings."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from typing import ClassVar

from overhead.process import Launch, free_port
from overhead.workload import Encoding, Model

from rivals import environment


class Penstock:
    name: ClassVar[str] = "penstock"
    title: ClassVar[str] = "Penstock"
    encodings: tuple[Encoding, ...] = ("v2-binary", "v2-json")
    variants = ("defaults",)

    def prepare(self) -> tuple[str, str]:
        if importlib.util.find_spec("penstock.cli") is None:
            raise environment.InstallError("penstock.cli cannot be imported")
        return importlib.metadata.version("penstock"), ""

    def launch(self, variant: str, model: Model) -> Launch:
        port = free_port()
        command = [sys.executable, "-m", "penstock", "serve", str(environment.REPOSITORY)]
        flags = [f"--http-port={port}", "--no-grpc", "--no-metrics"]
        return Launch([*command, *flags], port, ["/v2/health/ready"])
