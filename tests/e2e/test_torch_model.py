"""PyTorch and OpenVINO models behind a real server: the bits of the library, batched."""

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
import tritonclient.http as httpclient
from onnx import numpy_helper
from served import EXAMPLES, Served

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file

# The network of the `digits` example, its batch norms folded into the convolutions.
MODULE = """
import torch
from torch import nn


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.conv3 = nn.Conv2d(64, 64, 3, padding=1)
        self.dense1 = nn.Linear(256, 128)
        self.dense2 = nn.Linear(128, 10)

    def forward(self, image):
        pool = nn.functional.max_pool2d
        x = self.conv1(image).relu()
        x = pool(self.conv2(x).relu(), 2)
        x = pool(self.conv3(x).relu(), 2)
        return {"logits": self.dense2(self.dense1(x.flatten(1)).relu())}


def factory():
    return Digits()
"""
CONFIG = """
max_batch_size: 16
dynamic_batching {{ max_queue_delay_microseconds: 20000
  default_queue_policy {{ default_timeout_microseconds: 60000000 }} }}
input {{ name: "image" data_type: TYPE_FP32 dims: [ 1, 8, 8 ] }}
output {{ name: "logits" data_type: TYPE_FP32 dims: [ 10 ] }}
{}
"""
DIGITS = EXAMPLES / "digits" / "1" / "model.onnx"
ONE_THREAD = 'parameters { key: "intra_op_thread_count" value { string_value: "1" } }'


def digits_module() -> "torch.nn.Module":
    """The module above with the weights of the ONNX file."""
    scope: dict[str, object] = {}
    exec(MODULE, scope)
    module = scope["factory"]()
    graph = onnx.load(DIGITS).graph
    arrays = {tensor.name: numpy_helper.to_array(tensor).copy() for tensor in graph.initializer}
    weights = {name: torch.from_numpy(arrays[name]) for name in module.state_dict()}
    module.load_state_dict(weights)
    return module.eval()


class Logits(torch.nn.Module):
    def __init__(self, module: "torch.nn.Module") -> None:
        super().__init__()
        self.module = module

    def forward(self, image: "torch.Tensor") -> "torch.Tensor":
        return self.module(image)["logits"]


def add_version(root: Path, name: str, config: str) -> Path:
    folder = root / name / "1"
    folder.mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config)
    return folder


def add_eager(root: Path, weights: Mapping[str, "torch.Tensor"]) -> None:
    folder = add_version(root, "eager", CONFIG.format('backend: "pytorch"' + ONE_THREAD))
    (folder / "module.py").write_text(MODULE)
    save_file(dict(weights), folder / "model.safetensors")


def add_exported(root: Path, module: "torch.nn.Module") -> None:
    batch = torch.export.Dim("batch", min=1, max=16)
    program = torch.export.export(
        module, (torch.zeros(2, 1, 8, 8),), dynamic_shapes={"image": {0: batch}}
    )
    patient = "default_queue_policy { default_timeout_microseconds: 60000000 }"
    config = f"dynamic_batching {{ max_queue_delay_microseconds: 20000 {patient} }}"
    torch.export.save(program, add_version(root, "exported", config) / "model.pt2")


def add_scripted(root: Path, module: "torch.nn.Module") -> None:
    """As Triton's users have it: names by position, and the file of `torch.jit`."""
    config = CONFIG.format('platform: "pytorch_libtorch"' + ONE_THREAD)
    config = config.replace('"image"', '"INPUT__0"').replace('"logits"', '"OUTPUT__0"')
    folder = add_version(root, "scripted", config)
    with warnings.catch_warnings():
        # torch says that it is deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(Logits(module), torch.zeros(2, 1, 8, 8))
        traced.save(str(folder / "model.pt"))


def add_openvino(root: Path) -> None:
    folder = add_version(root, "vino", CONFIG.format('backend: "openvino"'))
    (folder / "model.onnx").write_bytes(DIGITS.read_bytes())


@pytest.fixture(scope="module")
def module() -> "torch.nn.Module":
    return digits_module()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, module: "torch.nn.Module") -> Iterator[Served]:
    pytest.importorskip("penstock.backends.openvino")
    root = tmp_path_factory.mktemp("repository")
    add_eager(root, module.state_dict())
    add_exported(root, module)
    add_scripted(root, module)
    add_openvino(root)
    served = Served(root)
    yield served
    assert served.terminate() == 0


def ask(served: Served, model: str, images: list[np.ndarray]) -> list[np.ndarray]:
    """Each image as a request of its own, all at once."""
    names = ("INPUT__0", "OUTPUT__0") if model == "scripted" else ("image", "logits")
    with httpclient.InferenceServerClient(served.address, concurrency=len(images)) as client:
        pending = []
        for image in images:
            tensor = httpclient.InferInput(names[0], list(image.shape), "FP32")
            tensor.set_data_from_numpy(image)
            pending.append(client.async_infer(model, [tensor]))
        return [answer.get_result().as_numpy(names[1]) for answer in pending]


def images(count: int) -> list[np.ndarray]:
    generator = np.random.default_rng(count)
    return [generator.random((1, 1, 8, 8), np.float32) for _ in range(count)]


def statistics(served: Served, model: str) -> dict:
    [stats] = json.loads(served.get(f"/v2/models/{model}/stats")[1])["model_stats"]
    return stats


def in_torch(module: "torch.nn.Module", image: np.ndarray) -> np.ndarray:
    torch.set_num_threads(1)
    with torch.inference_mode():
        return module(torch.from_numpy(image))["logits"].numpy()


@pytest.mark.parametrize("model", ["eager", "exported", "scripted"])
def test_one_request_is_answered_with_the_bits_of_torch(served, module, model):
    [image] = images(1)
    [answer] = ask(served, model, [image])
    assert answer.tobytes() == in_torch(module, image).tobytes()


@pytest.mark.parametrize("model", ["eager", "exported", "scripted", "vino"])
def test_requests_are_batched_and_each_gets_its_own_answer(served, module, model):
    before = statistics(served, model)
    sent = images(64)
    answers = ask(served, model, sent)
    for image, answer in zip(sent, answers, strict=True):
        np.testing.assert_allclose(answer, in_torch(module, image), rtol=1e-4, atol=1e-5)
    after = statistics(served, model)
    assert after["inference_count"] - before["inference_count"] == 64
    assert after["execution_count"] - before["execution_count"] < 64


def test_answers_agree_with_the_onnx_model(served):
    import onnxruntime

    session = onnxruntime.InferenceSession(DIGITS, providers=["CPUExecutionProvider"])
    sent = images(8)
    [expected] = session.run(["logits"], {"image": np.concatenate(sent)})
    for model in ("eager", "exported", "vino"):
        got = np.concatenate(ask(served, model, sent))
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_core_process_never_loads_torch_or_openvino(served):
    core = Path(f"/proc/{served.process.pid}/maps").read_text()
    assert "libtorch" not in core and "libopenvino" not in core
    workers = [Path(f"/proc/{each.pid}/maps").read_text() for each in served.workers()]
    assert sum("libtorch" in text for text in workers) == 3
    assert sum("libopenvino" in text for text in workers) == 1


def test_wrong_weights_are_told_when_the_server_starts(tmp_path, module):
    weights = dict(module.state_dict())
    weights["dense2.weigth"] = weights.pop("dense2.weight")
    add_eager(tmp_path, weights)
    command = [sys.executable, "-m", "penstock", "serve", str(tmp_path)]
    command += ["--http-port", "0", "--no-grpc"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    text = " ".join((ended.stdout + ended.stderr).split())
    assert "1/model.safetensors: no weight for 'dense2.weight'" in text
    assert "'dense2.weigth': the module has no such weight" in text
