"""Triton 2.51 with its Python backend, from the nvidia-pytriton package (only the binary is used).

Dynamic batching as in the example repository. The identity copies its input; digits runs the same
ONNX file as Penstock by ONNX Runtime inside the backend's process, one run per batch.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import ClassVar

from overhead.process import Launch, free_port
from overhead.workload import Encoding, Model

from rivals import environment

VERSION = "2.51, Python backend"
OUTPUT_DIMS = {"identity": 16, "digits": 10}


class Triton:
    name: ClassVar[str] = "triton"
    title: ClassVar[str] = "Triton"
    encodings: tuple[Encoding, ...] = ("v2-binary",)
    variants = ("1 instance", "2 instances")

    def prepare(self) -> tuple[str, str]:
        self._environment = environment.ensure("triton", "nvidia-pytriton", ["0.7.0"])
        return VERSION, self._environment.note

    def launch(self, variant: str, model: Model) -> Launch:
        work = environment.work_folder("triton")
        return self.serve(make_repository(work, model, int(variant[0])), work, free_port())

    def serve(self, repository: Path, work: Path, grpc_port: int) -> Launch:
        """Any repository of Python models; `work` is a folder for Triton's own files."""
        site = self._environment.site_packages
        home = site / "pytriton" / "tritonserver"
        backends = _backends(home, work)
        port = free_port()
        command = [str(home / "bin" / "tritonserver")]
        command += [f"--model-repository={repository}", f"--backend-directory={backends}"]
        command += [f"--{kind}-address=127.0.0.1" for kind in ("http", "grpc", "metrics")]
        command += [f"--http-port={port}", f"--grpc-port={grpc_port}"]
        command += [f"--metrics-port={free_port()}"]
        env = {
            # The backend looks for its interpreter's packages from the first python3 on the path.
            "PATH": f"{self._environment.python.parent}{os.pathsep}{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{site / 'nvidia_pytriton.libs'}:{Path(sys.base_prefix) / 'lib'}",
            "DIGITS_ONNX": str(environment.onnx_path("digits")),
        }
        return Launch(command, port, ["/v2/health/ready"], env)


def _backends(home: Path, work: Path) -> Path:
    stub = f"{sys.version_info.major}.{sys.version_info.minor}"
    target = work / "backends"
    shutil.copytree(home / "backends" / "python", target / "python")
    shutil.copy(
        home / "python_backend_stubs" / stub / "triton_python_backend_stub", target / "python"
    )
    return target


def make_repository(work: Path, model: Model, num_instances: int) -> Path:
    version = work / "repository" / model.name / "1"
    version.mkdir(parents=True)
    shutil.copy(environment.APPS / f"triton_{model.name}.py", version / "model.py")
    shutil.copy(environment.APPS / "onnx_session.py", version)
    (version.parent / "config.pbtxt").write_text(_config(model, num_instances))
    return work / "repository"


def _config(model: Model, num_instances: int) -> str:
    return f"""
name: "{model.name}"
backend: "python"
max_batch_size: 64
input [ {{ name: "{model.input_name}" data_type: TYPE_FP32 dims: {list(model.row_shape)} }} ]
output [ {{
  name: "{model.output_name}" data_type: TYPE_FP32 dims: [ {OUTPUT_DIMS[model.name]} ]
}} ]
instance_group [ {{ count: {num_instances} kind: KIND_CPU }} ]
dynamic_batching {{ }}
"""
