"""ONNX Runtime's CUDA provider on a real GPU; `make test-gpu`, with onnxruntime-gpu installed. Its
code without one: tests/backends/test_onnxruntime_cuda.py."""

import json
import mmap
import urllib.request
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper
from served_builds import a_situation
from suites.backend import (
    MAX_BATCH,
    BackendContract,
    assert_same,
    echo_specs,
    model_config,
    run,
)
from suites.onnx_models import opened, workshop

import penstock
from penstock.backends import GPU_MEMORY, Batch, backend
from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import BackendFailed, ConfigError, PenstockError
from penstock.optimizer import trials
from penstock.optimizer.candidates import Step
from penstock.optimizer.facts import Facts, fallback_problem
from penstock.optimizer.machine import Machine
from penstock.optimizer.passes import find
from penstock.types import TensorSpec

torch = pytest.importorskip("torch")
ort = pytest.importorskip("onnxruntime")
CUDA = "CUDAExecutionProvider"
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.skipif(
        CUDA not in ort.get_available_providers(), reason="onnxruntime-gpu is not installed"
    ),
]

ENGINE = {"penstock.gpu_engine": "onnxruntime"}
GRAPHS = {"penstock.cuda_graphs": "on"}
IMAGE, CLASSES, NUM = (3, 64, 64), 10, 16
CONFIG = """
platform: "onnxruntime_onnx"
max_batch_size: 16
input [{ name: "x", data_type: TYPE_FP32, dims: [3, 64, 64] }]
output [{ name: "y", data_type: TYPE_FP32, dims: [10] }]
dynamic_batching { }
instance_group [{ count: 2, kind: KIND_GPU }]
"""
ACCELERATED = """
optimization { execution_accelerators { gpu_execution_accelerator [{
  name: "cuda"
  parameters { key: "cudnn_conv_use_max_workspace" value: "1" }
  parameters { key: "gpu_mem_limit" value: "2147483648" }
}] } }
"""
WriteOnnx = Callable[..., Path]


class Network(torch.nn.Module):
    """Convolutions, and a shape that is computed from the input's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 7, 2, 3),
            torch.nn.BatchNorm2d(32),
            torch.nn.ReLU(),
            torch.nn.Conv2d(32, 32, 3, 1, 1),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(2),
        )
        self.last = torch.nn.Linear(128, CLASSES)

    def forward(self, x: "torch.Tensor") -> "torch.Tensor":
        made = self.layers(x)
        return self.last(made.view(made.shape[0], -1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of one model."""
    root = tmp_path_factory.mktemp("repository")
    (root / "net" / "1").mkdir(parents=True)
    (root / "net" / "config.pbtxt").write_text(CONFIG + ACCELERATED)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Network().eval(),
            (torch.rand(2, *IMAGE),),
            root / "net" / "1" / "model.onnx",
            input_names=["x"],
            output_names=["y"],
            opset_version=17,
            dynamo=False,
            dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
        )
    return root


@pytest.fixture
def config(folder: Path) -> ModelConfig:
    return ModelConfig(
        name="net",
        version="1",
        backend="onnxruntime",
        artifact=str(folder / "net" / "1" / "model.onnx"),
        inputs=(TensorSpec("x", "FP32", IMAGE),),
        outputs=(TensorSpec("y", "FP32", (CLASSES,)),),
        max_batch_size=NUM,
        batching=BatchPolicy(NUM, is_dynamic=True),
        device="cuda:0",
        options=ENGINE,
    )


def with_options(config: ModelConfig, **options: str) -> ModelConfig:
    given = {key.replace("__", "."): text for key, text in options.items()}
    return replace(config, options={**config.options, **given})


def images(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((rows, *IMAGE), np.float32)


def expected(config: ModelConfig, array: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(config.artifact, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": array})
    return found


def assert_near(found: np.ndarray, wanted: np.ndarray, tolerance: float = 1e-3) -> None:
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() < tolerance * np.abs(wanted).max()


class TestContract(BackendContract):
    backend_name = "onnxruntime"

    @pytest.fixture(autouse=True)
    def writers(self, write_onnx: WriteOnnx, write_identity: WriteOnnx) -> None:
        self.write_onnx, self.write_identity = write_onnx, write_identity

    def echo_config(
        self,
        folder: Path,
        datatype: str = "FP32",
        row_shape: Sequence[int] = (3,),
        max_batch_size: int = MAX_BATCH,
        num_tensors: int = 1,
    ) -> ModelConfig:
        if datatype == "BYTES":
            pytest.skip("BYTES are not for GPUs")
        sizes = [f"size{i}" if size < 0 else size for i, size in enumerate(row_shape)]
        shape = ["batch", *sizes] if max_batch_size else sizes
        artifact = self.write_identity(folder / "model.onnx", datatype, shape, num_tensors)
        specs = echo_specs(datatype, row_shape, num_tensors)
        config = model_config("onnxruntime", artifact, *specs, max_batch_size, dict(ENGINE))
        # Answers are views of an instance's memory until that runs its next batch.
        return replace(config, device="cuda:0", num_instances=2)

    def failing_model(self, folder: Path) -> tuple[ModelConfig, Batch, Batch]:
        # Shapes that do not fit, which only this batch has.
        artifact = self.write_onnx(
            folder / "model.onnx",
            [helper.make_node("Add", ["a", "b"], ["y"])],
            {"a": ("FP32", ["n", "s"]), "b": ("FP32", ["n", "t"])},
            {"y": ("FP32", ["n", "s"])},
        )
        inputs = [TensorSpec(name, "FP32", (-1,)) for name in "ab"]
        config = model_config(
            "onnxruntime", artifact, inputs, [TensorSpec("y", "FP32", (-1,))], 4, dict(ENGINE)
        )
        bad, good = (
            Batch({"a": np.ones((2, 3), np.float32), "b": np.ones((2, size), np.float32)}, 2)
            for size in (4, 3)
        )
        return replace(config, device="cuda:0"), bad, good


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize(
    "options",
    [
        {"penstock__dtype": "fp32"},
        {"penstock__memory_format": "channels_last"},
        {"penstock__cuda_graphs": "on"},
        {"penstock__cuda_graphs": "on", "penstock__memory_format": "channels_last"},
    ],
)
def test_answers_are_those_of_the_cpu(
    config: ModelConfig, rows: int, options: dict[str, str]
) -> None:
    runner = backend("onnxruntime")(with_options(config, **options))
    for seed in range(3):
        array = images(rows, seed)
        assert_near(run(runner, {"x": array}, rows)["y"], expected(config, array), 5e-3)
    runner.close()


def test_every_layer_is_on_the_gpu_and_shapes_are_told_apart(config: ModelConfig) -> None:
    runner = backend("onnxruntime")(with_options(config, penstock__cuda_graphs="on"))
    run(runner, {"x": images(3)}, 3)
    built = runner.built()
    print(json.dumps(dict(built), indent=1))
    assert built["providers"].startswith(CUDA)
    assert int(built[f"nodes.{CUDA}"]) > 4
    assert built["nodes_fallen_back_to_cpu"] == "0"
    assert built["cuda_graphs"] == "1"
    assert built[f"provider_options.{CUDA}.enable_cuda_graph"] == "1"
    assert built[f"provider_options.{CUDA}.arena_extend_strategy"] == "kSameAsRequested"
    assert int(built[GPU_MEMORY]) > 1 << 20


def test_graphs_are_of_the_warm_up_only(config: ModelConfig) -> None:
    runner = backend("onnxruntime")(with_options(config, penstock__cuda_graphs="on"))
    for rows in (1, 4, 1, 4):
        array = images(rows, rows)
        assert_near(run(runner, {"x": array}, rows)["y"], expected(config, array), 5e-3)
    runner.settle()
    for rows in (8, 4, 8, 1):
        array = images(rows, 10 + rows)
        assert_near(run(runner, {"x": array}, rows)["y"], expected(config, array), 5e-3)
    assert runner.built()["cuda_graphs"] == "2"


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_batches_from_pinned_memory_are_in_flight_at_once(config: ModelConfig, graphs: str) -> None:
    asked = with_options(replace(config, num_instances=2), penstock__cuda_graphs=graphs)
    runner = backend("onnxruntime")(asked)
    memory = mmap.mmap(-1, 4 * images(NUM).nbytes)
    runner.pin(memoryview(memory))
    slab = np.frombuffer(memory, np.float32).reshape(4, NUM, *IMAGE)
    for place in range(4):
        slab[place] = images(NUM, place)
    wanted = [expected(config, slab[place]) for place in range(4)]
    run(runner, {"x": slab[0]}, NUM)
    for _ in range(20):
        for first in (0, 2):
            begun = [runner.start(Batch({"x": slab[first + n]}, NUM)) for n in range(2)]
            for place, execution in enumerate(begun):
                (outputs,) = execution.wait()
                assert_near(outputs["y"], wanted[first + place], 5e-3)
    assert runner.built()["copies"] == "from shared memory"


def test_layers_without_a_kernel_are_told(tmp_path: Path, write_onnx: WriteOnnx) -> None:
    artifact = write_onnx(
        tmp_path / "model.onnx",
        [
            helper.make_node("Mul", ["x", "x"], ["m"], name="square"),
            # Only CPUs have it.
            helper.make_node("Det", ["m"], ["y"], name="det"),
        ],
        {"x": ("FP32", ["n", 3, 3])},
        {"y": ("FP32", ["n"])},
    )
    inputs, outputs = [TensorSpec("x", "FP32", (3, 3))], [TensorSpec("y", "FP32", ())]
    config = model_config("onnxruntime", artifact, inputs, outputs, 4, dict(ENGINE))
    config = replace(config, device="cuda:0")
    runner = backend("onnxruntime")(config)
    array = np.random.default_rng(0).random((2, 3, 3), np.float32)
    found = run(runner, {"x": array}, 2)["y"]
    np.testing.assert_allclose(found, np.linalg.det(array * array), rtol=1e-3)
    built = runner.built()
    assert built["nodes_fallen_back_to_cpu"] == "1: 1 Det"
    problem = fallback_problem(Facts("pytorch"), Facts("onnxruntime", built=dict(built)))
    assert problem == "nodes fell back to the CPU: 1: 1 Det"
    # The library refuses graphs around it.
    with pytest.raises(PenstockError):
        backend("onnxruntime")(with_options(config, penstock__cuda_graphs="on"))


def test_an_output_may_have_any_shape(tmp_path: Path, write_onnx: WriteOnnx) -> None:
    artifact = write_onnx(
        tmp_path / "model.onnx",
        [helper.make_node("NonZero", ["x"], ["where"])],
        {"x": ("FP32", ["rows", "columns"])},
        {"where": ("INT64", [2, "found"])},
    )
    config = model_config(
        "onnxruntime",
        artifact,
        [TensorSpec("x", "FP32", (-1, -1))],
        [TensorSpec("where", "INT64", (2, -1))],
        0,
        dict(ENGINE),
    )
    runner = backend("onnxruntime")(replace(config, device="cuda:0"))
    for array in (np.eye(3), np.zeros((2, 2)), np.ones((1, 5)), np.eye(40)):
        array = array.astype(np.float32)
        wanted = np.array(np.nonzero(array), np.int64)
        assert_same(run(runner, {"x": array}, 1)["where"], wanted, "INT64")


def test_bf16_goes_in_and_out_as_bits(tmp_path: Path, write_onnx: WriteOnnx) -> None:
    artifact = write_onnx(
        tmp_path / "model.onnx",
        [
            helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT),
            helper.make_node("Add", ["f", "f"], ["g"]),
            helper.make_node("Cast", ["g"], ["y"], to=TensorProto.BFLOAT16),
        ],
        {"x": ("BF16", ["n", 4])},
        {"y": ("BF16", ["n", 4])},
    )
    specs = [TensorSpec("x", "BF16", (4,))], [TensorSpec("y", "BF16", (4,))]
    config = model_config("onnxruntime", artifact, *specs, 4, dict(ENGINE))
    runner = backend("onnxruntime")(replace(config, device="cuda:0"))
    # 1, 2, -0.5 and 0.
    bits = np.array([[0x3F80, 0x4000, 0xBF00, 0]], np.uint16)
    found = run(runner, {"x": bits}, 1)["y"]
    assert found.tolist() == [[0x4000, 0x4080, 0xBF80, 0]]


def test_memory_has_a_limit(config: ModelConfig) -> None:
    with pytest.raises(PenstockError, match="memory"):
        runner = backend("onnxruntime")(with_options(config, gpu_mem_limit="100000"))
        run(runner, {"x": images(16)}, 16)


def test_an_unknown_option_of_the_provider_is_refused(config: ModelConfig) -> None:
    asked = with_options(config, **{f"provider_options.{CUDA}.nonsense": "1"})
    with pytest.raises((BackendFailed, ConfigError), match="nonsense|asked for CUDA"):
        backend("onnxruntime")(asked)


def test_a_triton_repository_with_an_accelerator_is_served(folder: Path) -> None:
    array = images(3)
    with penstock.serve(folder, http_port=0, grpc_port=0) as server:
        tensor = {"name": "x", "shape": [3, *IMAGE], "datatype": "FP32"}
        body = {"inputs": [{**tensor, "data": array.ravel().tolist()}]}
        request = urllib.request.Request(
            f"{server.url}/v2/models/net/infer",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            (output,) = json.load(response)["outputs"]
    found = np.array(output["data"], np.float32).reshape(3, CLASSES)
    path = folder / "net" / "1" / "model.onnx"
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert_near(found, session.run(None, {"x": array})[0], 5e-3)


@pytest.mark.parametrize("dtype", ["", "fp16"])
def test_the_candidate_of_optimize_passes_its_gate(
    folder: Path, tmp_path: Path, dtype: str
) -> None:
    model = tmp_path / "net"
    (model / "1").mkdir(parents=True)
    option = f'parameters {{ key: "penstock.dtype" value {{ string_value: "{dtype}" }} }}'
    (model / "config.pbtxt").write_text(CONFIG + (option if dtype else ""))
    source = folder / "net" / "1" / "model.onnx"
    (model / "1" / "model.onnx").write_bytes(source.read_bytes())
    parent, made_by = opened(model), find("onnxruntime-gpu")
    machine = Machine("", 2, 1 << 33, (), versions={"onnxruntime-gpu": ort.__version__})
    context = replace(a_situation(parent.config), machine=machine, build=parent)
    steps = [each for each in made_by.propose(context) if isinstance(each, Step)]
    assert [step.settings["graphs"] for step in steps] == ["on", "off"]
    for step in steps:
        target = tmp_path / step.settings["graphs"] / "net"
        made_by.build(parent, step, target, workshop(tmp_path))
        facts = trials.inspect(opened(target))
        before = Facts("pytorch")
        assert made_by.check(step, before, facts) == []
        assert fallback_problem(before, facts) == ""
