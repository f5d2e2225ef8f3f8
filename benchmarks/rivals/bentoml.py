"""BentoML with and without batching, in one worker process and in two.

Its own JSON API. Access log and usage reports are off, as they would be in production; metrics
stay on, as they do everywhere here.
"""

from __future__ import annotations

from typing import ClassVar

from overhead.process import Launch, free_port
from overhead.workload import Encoding, Model

from rivals import environment

SETTINGS: dict[str, tuple[int, int]] = {  # batching, workers
    "single": (0, 1),
    "batching": (1, 1),
    "single, 2 workers": (0, 2),
    "batching, 2 workers": (1, 2),
}


class BentoML:
    name: ClassVar[str] = "bentoml"
    title: ClassVar[str] = "BentoML"
    encodings: tuple[Encoding, ...] = ("bentoml",)
    variants = tuple(SETTINGS)

    def prepare(self) -> tuple[str, str]:
        # Its HTTP server takes both when they are there; plain asyncio and h11 are slower.
        extras = ["uvloop", "httptools"]
        # The second is for registries that lack a release the first depends on.
        versions = ["1.4.40", "1.4.39"]
        self._environment = environment.ensure("bentoml", "bentoml", versions, extras)
        return self._environment.version, self._environment.note

    def launch(self, variant: str, model: Model) -> Launch:
        batch, workers = SETTINGS[variant]
        port = free_port()
        work = environment.work_folder("bentoml")
        command = [self._environment.script("bentoml"), "serve", "bentoml_app:Models"]
        command += ["--host=127.0.0.1", f"--port={port}", f"--working-dir={environment.APPS}"]
        env = {
            "BENTOML_HOME": str(work),
            "BENTOML_DO_NOT_TRACK": "True",
            "BENCH_BATCH": str(batch),
            "BENCH_WORKERS": str(workers),
            "BENCH_ONNX": str(environment.onnx_path("digits")),
        }
        return Launch(command, port, ["/readyz"], env, cwd=work)
