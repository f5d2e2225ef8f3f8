"""The scripts under `examples/clients`, run as their readers run them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import EXAMPLES, Served

CLIENTS = EXAMPLES.parent / "clients"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    served = Served(EXAMPLES, grpc=True)
    yield served
    assert served.terminate() == 0


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("script", sorted(CLIENTS.glob("*.py")), ids=lambda path: path.name)
def test_a_script_gets_what_it_expects(server: Served, script: Path) -> None:
    url = server.grpc_address if script.name.startswith("grpc") else server.address
    done = run([sys.executable, str(script), "--url", url])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
    assert done.stderr == ""


def test_curl(server: Served) -> None:
    done = run([str(CLIENTS / "curl.sh"), f"http://{server.address}"])
    assert done.returncode == 0, done.stdout + done.stderr


WRONG = """
import triton_python_backend_utils as pb_utils
import numpy as np


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            names = {"INPUT0": ("OUTPUT0", "OUTPUT1"), "TEXT": ("LENGTH",)}
            for given, wanted in names.items():
                tensor = pb_utils.get_input_tensor_by_name(request, given)
                if tensor is not None:
                    zeros = np.zeros(tensor.as_numpy().shape, np.int32)
                    tensors = [pb_utils.Tensor(name, zeros) for name in wanted]
                    answers.append(pb_utils.InferenceResponse(tensors))
        return answers
"""


@pytest.mark.slow
def test_a_script_notices_wrong_answers(tmp_path: Path) -> None:
    for name in ("simple", "text_length"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.py").write_text(WRONG)
        config = (EXAMPLES / name / "config.pbtxt").read_text()
        (tmp_path / name / "config.pbtxt").write_text(config.replace("onnxruntime", "python"))
    served = Served(tmp_path, grpc=True)
    try:
        for script in CLIENTS.glob("*.py"):
            url = served.grpc_address if script.name.startswith("grpc") else served.address
            done = run([sys.executable, str(script), "--url", url])
            assert done.returncode == 1, (script.name, done.stdout)
        assert run([str(CLIENTS / "curl.sh"), f"http://{served.address}"]).returncode == 1
    finally:
        assert served.terminate() == 0
