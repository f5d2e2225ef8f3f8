"""MLServer, with its adaptive batching on and off, and models in its own or in a worker process.

debug is off, as its documentation asks for in production; that also silences the access log.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from overhead.process import Launch, free_port
from overhead.workload import Encoding, Model

from rivals import environment

BATCHING = {"max_batch_size": 64, "max_batch_time": 0.001}
SETTINGS: dict[str, dict[str, Any]] = {
    "in process": {"workers": 0, "batch": {}},
    "in process, batching": {"workers": 0, "batch": BATCHING},
    "1 worker": {"workers": 1, "batch": {}},
    "1 worker, batching": {"workers": 1, "batch": BATCHING},
}


class MLServer:
    name: ClassVar[str] = "mlserver"
    title: ClassVar[str] = "MLServer"
    encodings: tuple[Encoding, ...] = ("v2-json",)
    variants = tuple(SETTINGS)

    def prepare(self) -> tuple[str, str]:
        # It does not start with uvloop 0.22. With httptools its HTTP server parses faster.
        extras = ["uvloop<0.22", "httptools"]
        self._environment = environment.ensure("mlserver", "mlserver", ["1.7.1"], extras)
        return self._environment.version, self._environment.note

    def launch(self, variant: str, model: Model) -> Launch:
        work = environment.work_folder("mlserver")
        port = free_port()
        settings = {
            "debug": False,
            "host": "127.0.0.1",
            "http_port": port,
            "grpc_port": free_port(),
            "metrics_port": free_port(),
            "parallel_workers": SETTINGS[variant]["workers"],
        }
        (work / "settings.json").write_text(json.dumps(settings))
        model_settings = {
            "name": model.name,
            "implementation": f"mlserver_models.{model.name.capitalize()}",
            "parameters": {"uri": str(environment.onnx_path(model.name))},
            **SETTINGS[variant]["batch"],
        }
        (work / "model-settings.json").write_text(json.dumps(model_settings))
        command = [self._environment.script("mlserver"), "start", str(work)]
        env = {"PYTHONPATH": str(environment.APPS)}
        ready = ["/v2/health/ready", f"/v2/models/{model.name}/ready"]
        return Launch(command, port, ready, env, cwd=work)
