"""The PyTorch backend: modules and exported programs made here, whatever is wrong told in full."""

import json
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import dedent, indent
from types import SimpleNamespace

import numpy as np
import pytest
from fake_gpu import FakeGpu
from suites.backend import (
    MAX_BATCH,
    ArtifactContract,
    BackendContract,
    MakeFileWhenUnpickled,
    assert_same,
    echo_specs,
    model_config,
    run,
)

from penstock.backends import Batch, PinnedTensor, PlacedPieces, backend
from penstock.config import ModelConfig, PadAxis, Padding, ladder
from penstock.errors import BackendFailed, ConfigError, PenstockError
from penstock.serving.proof import apply_proof
from penstock.types import TensorSpec
from penstock.wire.frames import Proof

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file
pytorch = pytest.importorskip("penstock.backends.pytorch")
TORCH_TYPES, TorchRunner = pytorch.TORCH_TYPES, pytorch.TorchRunner

X, Y = TensorSpec("x", "FP32", (3,)), TensorSpec("y", "FP32", (2,))
LINEAR = """
import torch

def factory():
    return torch.nn.Linear(3, 2)
"""


@pytest.fixture
def fake_gpu(monkeypatch) -> FakeGpu:
    gpu = FakeGpu()
    monkeypatch.setattr("penstock.backends.pytorch.open_device", lambda name: gpu)
    return gpu


def torch_config(
    artifact: Path,
    inputs: Sequence[TensorSpec] = (X,),
    outputs: Sequence[TensorSpec] = (Y,),
    max_batch_size: int = MAX_BATCH,
    options: Mapping[str, str] | None = None,
) -> ModelConfig:
    return model_config("pytorch", artifact, inputs, outputs, max_batch_size, dict(options or {}))


@pytest.mark.parametrize("num_rows", [1, 3, 4, 5])
def test_a_batch_is_filled_up_to_a_rung_on_a_gpu(tmp_path, fake_gpu, num_rows):
    """The module says how many rows it saw."""
    path = tmp_path / "module.py"
    path.write_text(
        "import torch\n"
        "class Echo(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return {'y': x[:, :2] * 2, 'n': torch.full((len(x), 1), float(len(x)))}\n"
        "factory = Echo\n"
    )
    config = torch_config(path, outputs=(Y, TensorSpec("n", "FP32", (1,))))
    rows = np.arange(num_rows * 3, dtype=np.float32).reshape(num_rows, 3)

    def num_run(runner) -> int:
        (outputs,) = runner.start(Batch({"x": rows}, num_rows)).wait()
        np.testing.assert_array_equal(outputs["y"], rows[:, :2] * 2)
        (count,) = {int(count) for [count] in outputs["n"]}
        return count

    batched = replace(config, batching=replace(config.batching, is_dynamic=True))
    runner = backend("pytorch")(batched)
    assert num_run(runner) == next(rung for rung in ladder(MAX_BATCH) if rung >= num_rows)
    # Where rows influence each other, or nobody has looked, only those that were sent are run.
    apply_proof(runner, Proof(unbatched="rows influence each other"))
    assert num_run(runner) == num_rows
    assert num_run(backend("pytorch")(config)) == num_rows


def test_rows_that_lie_apart_in_pinned_memory_are_gathered(tmp_path, fake_gpu):
    """BF16 has only its bits in numpy."""
    path = tmp_path / "module.py"
    path.write_text(
        "import torch\n"
        "class Sum(torch.nn.Module):\n"
        "    def forward(self, x, b):\n"
        "        return x[:, :2] + b.float()\n"
        "factory = Sum\n"
    )
    config = torch_config(path, inputs=(X, TensorSpec("b", "BF16", (2,))))
    x, b = np.arange(60, dtype=np.float32), np.full(40, 0x4000, np.uint16)
    places = {
        name: [
            PinnedTensor(memory.data.cast("B"), at, nbytes, memory.ctypes.data + at)
            for at, nbytes in spans
        ]
        for name, memory, spans in (("x", x, ((120, 24), (0, 12))), ("b", b, ((0, 8), (40, 4))))
    }
    forms = {"x": (x.dtype, (3,)), "b": (b.dtype, (2,))}
    batch = Batch.of(PlacedPieces(places, [2, 1], forms), 3)
    (outputs,) = backend("pytorch")(config).start(batch).wait()
    assert outputs["y"].tolist() == [[32, 33], [35, 36], [2, 3]]
    assert fake_gpu.num_gathers == 2


def test_a_padded_input_that_is_optional_may_be_absent_under_a_budget(tmp_path, fake_gpu):
    path = tmp_path / "module.py"
    path.write_text(
        "import torch\n"
        "class Lengths(torch.nn.Module):\n"
        "    def forward(self, ids, x=None):\n"
        "        return torch.full((len(ids), 2), float(len(ids)))\n"
        "factory = Lengths\n"
    )
    inputs = TensorSpec("x", "INT64", (-1,), is_optional=True), TensorSpec("ids", "INT64", (-1,))
    config = torch_config(path, inputs=inputs, max_batch_size=8)
    config = replace(
        config,
        batching=replace(config.batching, is_dynamic=True, max_tokens=48),
        padding=Padding((PadAxis("x", 0), PadAxis("ids", 0)), (16,)),
    )
    runner = backend("pytorch")(config)
    # Three rows of 16 are the budget; four would be the next rung.
    for num_rows, num_run in ((1, 1), (3, 3), (5, 5)):
        ids = np.ones((num_rows, 16), np.int64)
        (outputs,) = runner.start(Batch({"ids": ids}, num_rows)).wait()
        np.testing.assert_array_equal(outputs["y"], np.full((num_rows, 2), num_run))


def problems_of(config: ModelConfig) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        backend("pytorch")(config)
    return caught.value.problems


def write_module(
    folder: Path, code: str, weights: Mapping[str, torch.Tensor] | None = None
) -> Path:
    artifact = folder / "module.py"
    artifact.write_text(dedent(code))
    if weights is not None:
        save_file(dict(weights), folder / "model.safetensors")
    return artifact


def write_forward(folder: Path, forward: str) -> Path:
    """A module without weights whose class body is this."""
    body = indent(dedent(forward), "    ")
    return write_module(folder, f"import torch\n\nclass factory(torch.nn.Module):\n{body}")


def linear_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(2, 3, generator=generator),
        "bias": torch.randn(2, generator=generator),
    }


def linear(array: np.ndarray, weights: Mapping[str, torch.Tensor]) -> np.ndarray:
    with torch.inference_mode():
        x = torch.from_numpy(array.copy())
        return torch.nn.functional.linear(x, weights["weight"], weights["bias"]).numpy()


def echo_module(num_tensors: int) -> "torch.nn.Module":
    names = ", ".join(f"x{i}" for i in range(num_tensors))
    code = f"""
    import torch

    class Echo(torch.nn.Module):
        def forward(self, {names}):
            return ({names},)
    """
    scope: dict[str, type] = {}
    exec(dedent(code), scope)
    return scope["Echo"]()


def export(
    path: Path,
    module: "torch.nn.Module",
    arguments: tuple["torch.Tensor", ...],
    dynamic_shapes: object = None,
    keywords: dict[str, "torch.Tensor"] | None = None,
) -> Path:
    program = torch.export.export(module.eval(), arguments, keywords, dynamic_shapes=dynamic_shapes)
    torch.export.save(program, path)
    return path


def export_echo(
    path: Path, datatype: str, row_shape: Sequence[int], has_batch: bool, num_tensors: int = 1
) -> Path:
    sizes = [4 if size < 0 else size for size in row_shape]
    shape = [2, *sizes] if has_batch else sizes
    wide = [-1, *row_shape] if has_batch else list(row_shape)
    dims = {i: torch.export.Dim(f"d{i}", min=1, max=64) for i, s in enumerate(wide) if s < 0}
    example = tuple(torch.zeros(shape, dtype=TORCH_TYPES[datatype]) for _ in range(num_tensors))
    return export(path, echo_module(num_tensors), example, tuple(dims for _ in example))


class TestModule(BackendContract, ArtifactContract):
    """`module.py`, inputs by name."""

    backend_name = "pytorch"

    def echo_config(
        self,
        folder: Path,
        datatype: str = "FP32",
        row_shape: Sequence[int] = (3,),
        max_batch_size: int = MAX_BATCH,
        num_tensors: int = 1,
    ) -> ModelConfig:
        if datatype == "BYTES":
            pytest.skip("torch has no text")
        names = ", ".join(f"x{i}" for i in range(num_tensors))
        artifact = write_forward(folder, f"def forward(self, {names}): return ({names},)")
        specs = echo_specs(datatype, row_shape, num_tensors)
        return torch_config(artifact, *specs, max_batch_size)

    def failing_model(self, folder: Path) -> tuple[ModelConfig, Batch, Batch]:
        artifact = write_forward(
            folder, "def forward(self, index): return torch.arange(4.0)[index]"
        )
        index, value = TensorSpec("index", "INT64", (1,)), TensorSpec("value", "FP32", (1,))
        bad, good = (
            Batch({"index": np.array([[0], [last]], np.int64)}, 2) for last in (4_000_000, 3)
        )
        return torch_config(artifact, [index], [value]), bad, good

    def good_artifact(self, folder: Path) -> Path:
        return export_echo(folder / "good.pt2", "FP32", (3,), has_batch=True)

    def artifact_config(self, artifact: Path) -> ModelConfig:
        return torch_config(artifact, *echo_specs("FP32", (3,)))


class TestPt2(BackendContract):
    """`model.pt2`, outputs as a tuple."""

    backend_name = "pytorch"

    def echo_config(
        self,
        folder: Path,
        datatype: str = "FP32",
        row_shape: Sequence[int] = (3,),
        max_batch_size: int = MAX_BATCH,
        num_tensors: int = 1,
    ) -> ModelConfig:
        if datatype == "BYTES":
            pytest.skip("torch has no text")
        artifact = export_echo(
            folder / "model.pt2", datatype, row_shape, max_batch_size > 0, num_tensors
        )
        return torch_config(artifact, *echo_specs(datatype, row_shape, num_tensors), max_batch_size)

    def failing_model(self, folder: Path) -> tuple[ModelConfig, Batch, Batch]:
        class Gather(torch.nn.Module):
            def forward(self, index):
                return torch.arange(4.0)[index]

        dims = ({0: torch.export.Dim("b", min=1, max=64)},)
        example = (torch.zeros(2, 1, dtype=torch.int64),)
        artifact = export(folder / "model.pt2", Gather(), example, dims)
        index, value = TensorSpec("index", "INT64", (1,)), TensorSpec("value", "FP32", (1,))
        bad, good = (
            Batch({"index": np.array([[0], [last]], np.int64)}, 2) for last in (4_000_000, 3)
        )
        return torch_config(artifact, [index], [value]), bad, good


# Weights


def test_weights_beside_the_module_are_its_weights(tmp_path: Path) -> None:
    weights = linear_weights()
    runner = backend("pytorch")(torch_config(write_module(tmp_path, LINEAR, weights)))
    array = np.random.default_rng(0).random((3, 3), np.float32)
    assert_same(run(runner, {"x": array}, 3)["y"], linear(array, weights), "FP32")
    assert runner.inputs == runner.outputs == ()


def write_shards(folder: Path, weight_map: Mapping[str, str] | None = None) -> Path:
    weights = linear_weights()
    save_file({"weight": weights["weight"]}, folder / "model-00001-of-00002.safetensors")
    save_file({"bias": weights["bias"]}, folder / "model-00002-of-00002.safetensors")
    weight_map = weight_map or {
        "weight": "model-00001-of-00002.safetensors",
        "bias": "model-00002-of-00002.safetensors",
    }
    index = {"metadata": {"total_size": 32}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return write_module(folder, LINEAR)


def test_weights_may_lie_in_several_files_with_an_index(tmp_path: Path) -> None:
    runner = backend("pytorch")(torch_config(write_shards(tmp_path)))
    array = np.random.default_rng(0).random((3, 3), np.float32)
    assert_same(run(runner, {"x": array}, 3)["y"], linear(array, linear_weights()), "FP32")


def test_every_wrong_file_of_an_index_is_told(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    save_file(linear_weights(), tmp_path / "outside.safetensors")
    weight_map = {
        "weight": "../outside.safetensors",
        "bias": "missing.safetensors",
        "scale": "model-00002-of-00002.safetensors",
    }
    problems = problems_of(torch_config(write_shards(tmp_path / "1", weight_map)))
    text = "\n".join(problems)
    assert len(problems) == 3
    assert "1/../outside.safetensors: leaves the version folder" in text
    assert "1/missing.safetensors: cannot be read" in text
    assert "'scale' should be in it" in text


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"weight": 1}}'])
def test_index_that_makes_no_sense_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    [problem] = problems_of(torch_config(write_module(tmp_path, LINEAR)))
    assert problem.startswith("1/model.safetensors.index.json: cannot be read: ")


def test_missing_and_unexpected_weights_are_named_together(tmp_path: Path) -> None:
    weights = {"weight": linear_weights()["weight"], "extra": torch.zeros(1)}
    problems = problems_of(torch_config(write_module(tmp_path, LINEAR, weights)))
    assert problems == (
        "1/model.safetensors: no weight for 'bias'",
        "1/model.safetensors: 'extra': the module has no such weight",
    )


def test_only_the_first_of_many_missing_weights_are_named(tmp_path: Path) -> None:
    code = """
    import torch

    def factory():
        return torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(10)))
    """
    artifact = write_module(tmp_path, code, {"0.bias": torch.zeros(3)})
    [problem] = problems_of(torch_config(artifact))
    assert "'0.weight', '1.weight', '1.bias'" in problem
    assert problem.endswith("and 14 more")


def test_shapes_and_kinds_that_do_not_fit_are_named(tmp_path: Path) -> None:
    weights = {"weight": torch.zeros(3, 2), "bias": torch.zeros(2, dtype=torch.int8)}
    assert problems_of(torch_config(write_module(tmp_path, LINEAR, weights))) == (
        "1/model.safetensors: 'bias' is torch.int8, the module wants torch.float32",
        "1/model.safetensors: 'weight' has shape [3, 2], the module wants [2, 3]",
    )


TYPED = """
import torch

class Typed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.zeros(2, dtype=torch.{dtype}))
    def forward(self, x):
        return x * self.weight.sum()

def factory():
    return Typed()
"""


@pytest.mark.parametrize(
    ("values", "found", "wanted", "text"),
    [
        ([300, -200], "int64", "int8", "is torch.int64, the module wants torch.int8"),
        ([1, 2], "int32", "int64", "is torch.int32, the module wants torch.int64"),
        ([0, 1], "uint8", "bool", "is torch.uint8, the module wants torch.bool"),
        (
            [1.0, 1e6],
            "float32",
            "float16",
            "is torch.float32 with values too large for torch.float16, which the module wants",
        ),
        (
            [1.0, 1e4],
            "float8_e5m2",
            "float8_e4m3fn",
            "is torch.float8_e5m2 with values too large for torch.float8_e4m3fn, "
            "which the module wants",
        ),
    ],
)
def test_weights_that_would_change_when_cast_are_refused(
    tmp_path: Path, values: list[float], found: str, wanted: str, text: str
) -> None:
    weights = {"weight": torch.tensor(values, dtype=getattr(torch, found))}
    artifact = write_module(tmp_path, TYPED.format(dtype=wanted), weights)
    assert problems_of(torch_config(artifact)) == (f"1/model.safetensors: 'weight' {text}",)


@pytest.mark.parametrize(
    ("values", "found", "wanted"),
    [
        ([1.0, 65504.0], "float32", "float16"),
        ([1.0, float("inf")], "float32", "bfloat16"),
        ([1.0, 2.0], "float16", "float32"),
        ([1.0, 2.0], "float64", "float32"),
    ],
)
def test_floats_that_fit_are_cast(
    tmp_path: Path, values: list[float], found: str, wanted: str
) -> None:
    weights = {"weight": torch.tensor(values, dtype=getattr(torch, found))}
    artifact = write_module(tmp_path, TYPED.format(dtype=wanted), weights)
    runner = backend("pytorch")(torch_config(artifact))
    assert runner.built()["dtype"] == wanted


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    code = """
    import torch

    class factory(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
            self.two.weight, self.two.bias = self.one.weight, self.one.bias

        def forward(self, x):
            return self.two(self.one(x))
    """
    weights = {"one.weight": 2 * torch.eye(3), "one.bias": torch.ones(3)}
    artifact = write_module(tmp_path, code, weights)
    runner = backend("pytorch")(torch_config(artifact, [X], [TensorSpec("y", "FP32", (3,))]))
    assert run(runner, {"x": np.ones((1, 3), np.float32)}, 1)["y"].tolist() == [[7, 7, 7]]


def test_module_with_weights_and_no_file_is_not_served_with_random_ones(tmp_path: Path) -> None:
    [problem] = problems_of(torch_config(write_module(tmp_path, LINEAR)))
    assert problem.startswith("1/model.safetensors: no such file")
    assert "'weight', 'bias'" in problem


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickled_weights_are_not_read_and_the_way_out_is_told(tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary"
    (tmp_path / name).write_bytes(pickle.dumps(MakeFileWhenUnpickled(canary)))
    [problem] = problems_of(torch_config(write_module(tmp_path, LINEAR)))
    assert f"{name} is a pickle" in problem
    assert "save_file(torch.load(file, weights_only=True), 'model.safetensors')" in problem
    assert not canary.exists()


@pytest.mark.parametrize("size", [0, 7, 60, 120])
def test_truncated_weights_are_refused(tmp_path: Path, size: int) -> None:
    artifact = write_module(tmp_path, LINEAR, linear_weights())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    [problem] = problems_of(torch_config(artifact))
    assert problem.startswith("1/model.safetensors: cannot be read as safetensors: ")


def test_weights_may_not_be_a_link_out_of_the_version_folder(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    save_file(linear_weights(), tmp_path / "outside.safetensors")
    artifact = write_module(tmp_path / "1", LINEAR)
    (tmp_path / "1" / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    assert problems_of(torch_config(artifact)) == (
        "1/model.safetensors: leaves the version folder",
    )


# The factory


@pytest.mark.parametrize("factory", ["build", "module.py:build"])
def test_factory_may_have_another_name(tmp_path: Path, factory: str) -> None:
    artifact = write_module(tmp_path, LINEAR.replace("factory", "build"), linear_weights())
    backend("pytorch")(torch_config(artifact, options={"penstock.factory": factory})).close()


def test_factory_in_another_file_is_refused(tmp_path: Path) -> None:
    artifact = write_module(tmp_path, LINEAR, linear_weights())
    [problem] = problems_of(torch_config(artifact, options={"penstock.factory": "other.py:build"}))
    assert "'other.py:build' is not in module.py; default_model_filename says" in problem


def test_factory_that_asks_for_options_gets_the_parameters(tmp_path: Path) -> None:
    code = """
    import torch

    class Scale(torch.nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def forward(self, x):
            return x[:, :2] * self.factor

    def factory(options):
        return Scale(float(options["factor"]))
    """
    artifact = write_module(tmp_path, code)
    runner = backend("pytorch")(torch_config(artifact, options={"factor": "3"}))
    assert run(runner, {"x": np.ones((1, 3), np.float32)}, 1)["y"].tolist() == [[3, 3]]


def test_files_beside_the_module_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "layers.py").write_text(LINEAR)
    artifact = write_module(tmp_path, "from .layers import factory", linear_weights())
    backend("pytorch")(torch_config(artifact)).close()
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            "x = 1",
            "1/module.py: no function factory(); expected one that returns a torch.nn.Module",
        ),
        ("def factory(): return 3", "1/module.py: factory(): expected a torch.nn.Module, got int"),
        ("def factory(): return 1 / 0", "1/module.py: factory(): line 1: ZeroDivisionError"),
        ("def factory(size): pass", "1/module.py: factory(): TypeError: factory() missing 1"),
        ("def factory(:", "1/module.py: line 1: invalid syntax"),
        ("import no_such_thing", "1/module.py: line 1: needs the module 'no_such_thing'"),
    ],
)
def test_code_that_makes_no_module_is_refused_in_one_line(
    tmp_path: Path, code: str, text: str
) -> None:
    [problem] = problems_of(torch_config(write_module(tmp_path, code)))
    assert problem.startswith(text)
    assert "\n" not in problem


# Calls and answers


def test_inputs_go_by_position_where_names_are_not_parameters(tmp_path: Path) -> None:
    artifact = write_forward(tmp_path, "def forward(self, a, b): return a - b")
    inputs = [TensorSpec("INPUT__0", "FP32", (2,)), TensorSpec("INPUT__1", "FP32", (2,))]
    runner = backend("pytorch")(torch_config(artifact, inputs))
    one, two = np.full((1, 2), 5, np.float32), np.full((1, 2), 3, np.float32)
    outputs = run(runner, {"INPUT__1": two, "INPUT__0": one}, 1)
    assert outputs["y"].tolist() == [[2, 2]]


def test_inputs_go_by_name_whatever_the_order_of_parameters(tmp_path: Path) -> None:
    artifact = write_forward(tmp_path, "def forward(self, b, *, unused=None, a): return a - b")
    inputs = [TensorSpec("a", "FP32", (2,)), TensorSpec("b", "FP32", (2,))]
    runner = backend("pytorch")(torch_config(artifact, inputs))
    one, two = np.full((1, 2), 5, np.float32), np.full((1, 2), 3, np.float32)
    assert run(runner, {"a": one, "b": two}, 1)["y"].tolist() == [[2, 2]]


def test_optional_input_that_is_not_sent_keeps_its_default(tmp_path: Path) -> None:
    forward = "def forward(self, x, scale=None): return x if scale is None else x * scale"
    artifact = write_forward(tmp_path, forward)
    inputs = [
        TensorSpec("x", "FP32", (2,)),
        TensorSpec("scale", "FP32", (2,), is_optional=True),
    ]
    runner = backend("pytorch")(torch_config(artifact, inputs))
    array = np.full((1, 2), 5, np.float32)
    assert run(runner, {"x": array}, 1)["y"].tolist() == [[5, 5]]
    assert run(runner, {"x": array, "scale": array}, 1)["y"].tolist() == [[25, 25]]


@pytest.mark.parametrize("parameters", ["self", "self, x, mask", "self, a, b, c"])
def test_forward_that_does_not_take_the_inputs_is_refused_at_load(
    tmp_path: Path, parameters: str
) -> None:
    artifact = write_forward(tmp_path, f"def forward({parameters}): return x")
    [problem] = problems_of(torch_config(artifact))
    assert problem.startswith("1/module.py: forward(")
    assert "configured are 'x'" in problem


@pytest.mark.parametrize(
    "answer",
    [
        "a, b",
        "[a, b]",
        "a, b, 'more'",
        "{'b': b, 'a': a, 'more': 1}",
        "Named(b, a)",
        "Attributes(a, b)",
        "transformers_output(a, b)",
    ],
)
def test_answer_may_have_many_forms(tmp_path: Path, answer: str) -> None:
    code = f"""
    import torch
    from collections import namedtuple
    from dataclasses import dataclass

    Named = namedtuple("Named", ["b", "a"])

    @dataclass
    class Attributes:
        a: torch.Tensor
        b: torch.Tensor

    def transformers_output(a, b):
        from transformers.utils import ModelOutput

        @dataclass
        class Output(ModelOutput):
            a: torch.Tensor | None = None
            b: torch.Tensor | None = None
            c: torch.Tensor | None = None

        return Output(a=a, b=b)

    class factory(torch.nn.Module):
        def forward(self, x):
            a, b = x + 1, x + 2
            return {answer}
    """
    if "transformers" in answer:
        pytest.importorskip("transformers")
    outputs = [TensorSpec("a", "FP32", (3,)), TensorSpec("b", "FP32", (3,))]
    runner = backend("pytorch")(torch_config(write_module(tmp_path, code), [X], outputs))
    got = run(runner, {"x": np.zeros((1, 3), np.float32)}, 1)
    assert {name: array.tolist() for name, array in got.items()} == {
        "a": [[1, 1, 1]],
        "b": [[2, 2, 2]],
    }


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("(x,)", "the model gave no output 'z'; it gave 1 outputs"),
        ("{'y': x, 'other': x}", "the model gave no output 'z'; it gave ['other', 'y']"),
        ("None", "the model gave no output 'y'; it gave NoneType"),
        ("{'y': x, 'z': 3}", "output 'z': expected a tensor, got int"),
        ("x, x.double()", "output 'z': torch.float64, expected torch.float32 (FP32)"),
        ("x, x.bfloat16()", "output 'z': torch.bfloat16, expected torch.float32 (FP32)"),
        ("x, x.int()", "output 'z': torch.int32, expected torch.float32 (FP32)"),
    ],
)
def test_answer_that_is_not_as_configured_is_an_error(
    tmp_path: Path, answer: str, text: str
) -> None:
    artifact = write_forward(tmp_path, f"def forward(self, x): return {answer}")
    outputs = [TensorSpec("y", "FP32", (3,)), TensorSpec("z", "FP32", (3,))]
    runner = backend("pytorch")(torch_config(artifact, [X], outputs))
    with pytest.raises(BackendFailed) as caught:
        run(runner, {"x": np.zeros((1, 3), np.float32)}, 1)
    assert str(caught.value) == text


@pytest.mark.parametrize("is_writeable", [True, False])
def test_module_that_writes_to_its_input_writes_to_a_copy(
    tmp_path: Path, is_writeable: bool
) -> None:
    artifact = write_forward(tmp_path, "def forward(self, x): return x.add_(1)")
    runner = backend("pytorch")(torch_config(artifact, [X], [TensorSpec("y", "FP32", (3,))]))
    array = np.zeros((2, 3), np.float32)
    array.flags.writeable = is_writeable
    assert run(runner, {"x": array}, 2)["y"].tolist() == [[1, 1, 1]] * 2
    assert not array.any()


def test_module_runs_in_evaluation_mode_and_records_no_gradients(tmp_path: Path) -> None:
    forward = """
    def forward(self, x):
        facts = [self.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
        return torch.tensor([facts])
    """
    outputs = [TensorSpec("y", "BOOL", (3,))]
    runner = backend("pytorch")(torch_config(write_forward(tmp_path, forward), [X], outputs))
    got = run(runner, {"x": np.zeros((1, 3), np.float32)}, 1)
    assert got["y"].tolist() == [[False, False, True]]


def test_weight_given_back_as_output_is_fine(tmp_path: Path) -> None:
    code = """
    import torch

    class factory(torch.nn.Linear):
        def __init__(self):
            super().__init__(3, 2)

        def forward(self, x):
            return self.bias.expand(len(x), 2)
    """
    weights = linear_weights()
    runner = backend("pytorch")(torch_config(write_module(tmp_path, code, weights)))
    got = run(runner, {"x": np.zeros((2, 3), np.float32)}, 2)["y"]
    assert_same(got, np.stack([weights["bias"].numpy()] * 2), "FP32")


def test_bytes_are_refused_with_the_backend_that_has_them(tmp_path: Path) -> None:
    artifact = write_module(tmp_path, LINEAR, linear_weights())
    inputs, outputs = echo_specs("BYTES", (1,))
    assert problems_of(torch_config(artifact, inputs, outputs)) == (
        "input 'x0': torch has no BYTES; use backend 'python'",
        "output 'y0': torch has no BYTES; use backend 'python'",
    )


# Options


def sharing_config(tmp_path: Path, count: int, **options: str) -> ModelConfig:
    tmp_path.mkdir(exist_ok=True)
    artifact = write_module(tmp_path, LINEAR, linear_weights())
    given = {f"penstock.{key}": text for key, text in options.items()}
    return replace(torch_config(artifact, options=given), num_instances=count)


def made_on_gpu(config: ModelConfig, fusion: object = None, **options: object):
    """The runner of a GPU that is none, with the module on the CPU."""
    plain = {"is_channels_last": False, "has_cuda_graphs": False}
    asked = pytorch.Options(1, 1, "", None, "factory", **plain, **options)
    module = torch.nn.Linear(3, 2).eval()
    return TorchRunner(config, asked, pytorch.LoadedModule(module, ("x",), (), fusion=fusion))


@pytest.mark.parametrize(("count", "num_streams"), [(1, 1), (2, 2), (4, 3)])
def test_a_model_has_its_priority_and_at_most_one_stream_per_instance(
    tmp_path, fake_gpu, count, num_streams
):
    config = sharing_config(tmp_path, count)
    runner = made_on_gpu(config, stream_priority="high", num_streams=3)
    assert (fake_gpu.priority, fake_gpu.num_streams) == ("high", num_streams)
    assert runner.built()["stream_priority"] == "high"
    assert runner.pipeline.num_streams == num_streams


@pytest.mark.parametrize(("has_ranges", "label"), [(True, "resnet"), (False, "")])
def test_ranges_have_the_name_of_the_model(tmp_path, fake_gpu, has_ranges, label):
    config = replace(sharing_config(tmp_path, 1), name="resnet")
    assert made_on_gpu(config, has_ranges=has_ranges).pipeline.label == label


@pytest.mark.parametrize(
    ("option", "text"), [("stream_priority", "low"), ("streams", "2"), ("nvtx", "on")]
)
def test_what_is_of_gpus_is_refused_on_a_cpu(tmp_path: Path, option: str, text: str) -> None:
    [problem] = problems_of(sharing_config(tmp_path, 2, **{option: text}))
    assert problem.startswith(f"parameters.penstock.{option}: needs a GPU")


@pytest.mark.parametrize(
    ("option", "text", "expected"),
    [
        ("stream_priority", "urgent", "high, normal, low"),
        ("streams", "9", "1, 2, 3, 4, 5, 6, 7, 8"),
        ("nvtx", "yes", "on, off"),
        ("nvtx", "", "on, off"),
    ],
)
def test_what_is_accepted_is_said(tmp_path: Path, option: str, text: str, expected: str) -> None:
    first, *_ = problems_of(sharing_config(tmp_path, 2, **{option: text}))
    assert first == f"parameters.penstock.{option}: '{text}' is not one of {expected}"


def test_kernels_that_share_memory_have_one_stream(tmp_path, fake_gpu):
    fusion = SimpleNamespace(facts=dict, settle=lambda: None)
    with pytest.raises(ConfigError, match=r"penstock\.streams: the kernels of penstock\.fuse"):
        made_on_gpu(sharing_config(tmp_path, 2), fusion, num_streams=2)
    made_on_gpu(sharing_config(tmp_path / "one", 1), fusion, num_streams=2)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("intra_op_thread_count", "many"),
        ("inter_op_thread_count", "-1"),
        ("penstock.compile", "fast"),
        ("penstock.dtype", "int8"),
    ],
)
def test_option_that_makes_no_sense_is_refused_by_name(
    tmp_path: Path, option: str, text: str
) -> None:
    artifact = write_module(tmp_path, LINEAR, linear_weights())
    [problem] = problems_of(torch_config(artifact, options={option: text}))
    assert problem.startswith(f"parameters.{option}: '{text}' is not ")


def test_every_wrong_option_is_reported_at_once(tmp_path: Path) -> None:
    artifact = write_module(tmp_path, LINEAR, linear_weights())
    options = {
        "intra_op_thread_count": "x",
        "penstock.compile": "x",
        "penstock.dtype": "x",
        "penstock.factory": "x.py:x",
    }
    assert len(problems_of(torch_config(artifact, options=options))) == 4


def test_what_was_built_is_read_back(tmp_path: Path) -> None:
    artifact = write_module(tmp_path, LINEAR, linear_weights())
    built = backend("pytorch")(
        torch_config(artifact, options={"intra_op_thread_count": "1", "penstock.dtype": "bf16"})
    ).built()
    assert built == {
        "torch": str(torch.__version__),
        "form": "module.py",
        "device": "cpu",
        "dtype": "bfloat16",
        "intra_op_thread_count": "1",
        "inter_op_thread_count": str(torch.get_num_interop_threads()),
        "compile": "off",
    }


INTEROP = """
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from suites.backend import model_config
from penstock.backends import backend
from penstock.errors import ConfigError
from penstock.types import TensorSpec

def load(count):
    options = {"inter_op_thread_count": count}
    tensors = [TensorSpec("x", "FP32", (3,))], [TensorSpec("y", "FP32", (2,))]
    config = model_config("pytorch", sys.argv[1], *tensors, 4, options)
    return backend("pytorch")(config).built()["inter_op_thread_count"]

print(load("3"), load("3"))
try:
    load("2")
except ConfigError as error:
    print(error)
"""


def test_inter_op_threads_are_set_once_for_the_process(tmp_path: Path) -> None:
    artifact = write_module(tmp_path, LINEAR, linear_weights())
    tests = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-c", INTEROP, str(artifact), str(tests), str(tests.parent)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == [
        "3 3",
        "parameters.inter_op_thread_count: asked for 2, but this process has 3, "
        "and torch sets it only once",
    ]


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_dtype_casts_weights_and_inputs_and_outputs_back(
    tmp_path: Path, name: str, dtype: "torch.dtype"
) -> None:
    weights = linear_weights()
    artifact = write_module(tmp_path, LINEAR, weights)
    runner = backend("pytorch")(torch_config(artifact, options={"penstock.dtype": name}))
    array = np.random.default_rng(0).random((3, 3), np.float32)
    with torch.inference_mode():
        cast = {key: value.to(dtype) for key, value in weights.items()}
        x = torch.from_numpy(array).to(dtype)
        expected = torch.nn.functional.linear(x, cast["weight"], cast["bias"]).float().numpy()
    assert_same(run(runner, {"x": array}, 3)["y"], expected, "FP32")
    assert not np.array_equal(expected, linear(array, weights))


def test_dtype_leaves_integers_alone(tmp_path: Path) -> None:
    artifact = write_forward(tmp_path, "def forward(self, x): return x + 1")
    specs = [TensorSpec("x", "INT64", (1,))], [TensorSpec("y", "INT64", (1,))]
    runner = backend("pytorch")(torch_config(artifact, *specs, options={"penstock.dtype": "fp16"}))
    array = np.array([[2**40 + 1]], np.int64)
    assert run(runner, {"x": array}, 1)["y"].tolist() == [[2**40 + 2]]


def test_module_that_refuses_the_dtype_is_not_served_in_another(tmp_path: Path) -> None:
    code = """
    import torch

    class factory(torch.nn.Linear):
        def __init__(self):
            super().__init__(3, 2)

        def to(self, *args, **kwargs):
            return self
    """
    artifact = write_module(tmp_path, code, linear_weights())
    [problem] = problems_of(torch_config(artifact, options={"penstock.dtype": "bf16"}))
    assert problem == (
        "parameters.penstock.dtype: asked for torch.bfloat16, the module has float32"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_device_that_is_not_there_is_refused_with_what_torch_says(tmp_path: Path) -> None:
    config = torch_config(write_module(tmp_path, LINEAR, linear_weights()))
    [problem] = problems_of(replace(config, device="cuda:0"))
    assert problem.startswith("device: 'cuda:0' cannot be used: ")
    assert "CUDA" in problem


# torch's compiler imports a module of its own that uses what torch has deprecated.
compiles = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))),
    reason="torch.compile needs a C++ compiler on CPUs",
)


@pytest.mark.slow
@compiles
@needs_compiler
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", ["module.py", "model.pt2"])
def test_compiled_model_answers_like_the_plain_one(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    weights = linear_weights()
    if form == "module.py":
        artifact = write_module(tmp_path, LINEAR, weights)
        inputs = [TensorSpec("input", "FP32", (3,))]
    else:
        module = torch.nn.Linear(3, 2)
        module.load_state_dict(weights)
        dims = ({0: torch.export.Dim("b", min=1, max=64)},)
        artifact = export(tmp_path / "model.pt2", module, (torch.zeros(2, 3),), dims)
        inputs = [TensorSpec("input", "FP32", (3,))]
    config = torch_config(artifact, inputs, options={"penstock.compile": "default"})
    runner = backend("pytorch")(config)
    for num_rows in (1, 2, MAX_BATCH):
        array = np.random.default_rng(num_rows).random((num_rows, 3), np.float32)
        got = run(runner, {"input": array}, num_rows)["y"]
        np.testing.assert_allclose(got, linear(array, weights), rtol=1e-5)
    built = runner.built()
    assert built["compile"] == "default"
    assert int(built["compiled_graphs"]) >= 1


@compiles
def test_model_that_cannot_be_compiled_is_refused_at_load(tmp_path: Path) -> None:
    """The trial is a real call, so whatever goes wrong in it is told."""
    forward = """
    def forward(self, x):
        raise ValueError("not today")
    """
    artifact = write_forward(tmp_path, forward)
    [problem] = problems_of(torch_config(artifact, options={"penstock.compile": "default"}))
    assert problem.startswith("parameters.penstock.compile: fails on a batch of zeros: ")
    assert "not today" in problem


@compiles
def test_model_of_which_nothing_is_compiled_is_refused(tmp_path: Path) -> None:
    forward = """
    @torch.compiler.disable
    def forward(self, x):
        return x[:, :2]
    """
    artifact = write_forward(tmp_path, forward)
    [problem] = problems_of(torch_config(artifact, options={"penstock.compile": "default"}))
    assert problem == "parameters.penstock.compile: torch compiled nothing of the model"


def test_compiling_needs_fixed_shapes(tmp_path: Path) -> None:
    artifact = write_forward(tmp_path, "def forward(self, x): return x")
    inputs = [TensorSpec("x", "FP32", (-1,))]
    [problem] = problems_of(torch_config(artifact, inputs, options={"penstock.compile": "default"}))
    assert problem.startswith("parameters.penstock.compile: needs inputs of fixed shapes")


@pytest.mark.slow
@compiles
@needs_compiler
@pytest.mark.timeout(600)
def test_buckets_are_compiled_once_for_all_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    forward = """
    def forward(self, x):
        return x.sum(1, keepdim=True) * 2
    """
    inputs, outputs = [TensorSpec("x", "FP32", (-1,))], [TensorSpec("y", "FP32", (1,))]
    options = {"penstock.compile": "default"}
    config = torch_config(write_forward(tmp_path, forward), inputs, outputs, options=options)
    config = replace(config, padding=Padding((PadAxis("x", 0),), (4, 8)))
    runner = backend("pytorch")(config)
    num_graphs = runner.built()["compiled_graphs"]
    for length in (4, 8, 6):
        array = np.random.default_rng(length).random((3, length), np.float32)
        got = run(runner, {"x": array}, 3)["y"]
        np.testing.assert_allclose(got, array.sum(1, keepdims=True) * 2, rtol=1e-5)
    assert runner.built()["compiled_graphs"] == num_graphs


def test_tf32_is_of_gpus(tmp_path: Path) -> None:
    artifact = write_forward(tmp_path, "def forward(self, x): return x")
    [problem] = problems_of(torch_config(artifact, options={"penstock.dtype": "tf32"}))
    assert problem == "parameters.penstock.dtype: tf32 is of GPUs; the model runs on the CPU"


# .pt2


class TwoInputs(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, image, *, mask):
        return {"logits": self.linear(image), "kept": mask}


def export_two_inputs(path: Path, max_rows: int = 64) -> Path:
    batch = torch.export.Dim("batch", min=1, max=max_rows)
    return export(
        path,
        TwoInputs(),
        (torch.zeros(2, 3),),
        {"image": {0: batch}, "mask": {0: batch}},
        {"mask": torch.zeros(2, 1, dtype=torch.bool)},
    )


IMAGE, MASK = TensorSpec("image", "FP32", (3,)), TensorSpec("mask", "BOOL", (1,))
LOGITS, KEPT = TensorSpec("logits", "FP32", (2,)), TensorSpec("kept", "BOOL", (1,))


def test_exported_program_knows_its_tensors(tmp_path: Path) -> None:
    artifact = export_two_inputs(tmp_path / "model.pt2")
    runner = backend("pytorch")(torch_config(artifact, [MASK, IMAGE], [KEPT]))
    assert [(s.name, s.datatype, s.shape) for s in runner.inputs] == [
        ("image", "FP32", (-1, 3)),
        ("mask", "BOOL", (-1, 1)),
    ]
    assert [s.name for s in runner.outputs] == ["logits", "kept"]
    mask = np.array([[True], [False]])
    outputs = run(runner, {"mask": mask, "image": np.zeros((2, 3), np.float32)}, 2)
    assert set(outputs) == {"kept"}
    assert_same(outputs["kept"], mask, "BOOL")
    assert runner.built()["form"] == "pt2"


def test_every_mismatch_with_the_program_is_reported_at_once(tmp_path: Path) -> None:
    artifact = export_two_inputs(tmp_path / "model.pt2")
    inputs = [TensorSpec("image", "FP16", (4,))]
    outputs = [TensorSpec("scores", "FP32", (2,))]
    text = "\n".join(problems_of(torch_config(artifact, inputs, outputs)))
    for part in (
        "input 'image': configured as FP16, the model has FP32",
        "input 'image': configured as [-1, 4], the model has [-1, 3]",
        "input: the model needs 'mask', which is not configured",
        "output 'scores': the model has only kept, logits",
    ):
        assert part in text


def test_more_outputs_than_the_program_has_are_refused(tmp_path: Path) -> None:
    artifact = export_echo(tmp_path / "model.pt2", "FP32", (3,), has_batch=True)
    inputs, outputs = echo_specs("FP32", (3,))
    [problem] = problems_of(
        torch_config(artifact, inputs, [*outputs, TensorSpec("z", "FP32", (3,))])
    )
    assert problem == "output 'z': the model has only y0"


def test_fixed_batch_dimension_is_refused_when_batches_are_wanted(tmp_path: Path) -> None:
    artifact = export(tmp_path / "model.pt2", echo_module(1), (torch.zeros(2, 3),))
    problems = problems_of(torch_config(artifact, *echo_specs("FP32", (3,))))
    assert [problem.split(":")[0] for problem in problems] == ["input 'x0'", "output 'y0'"]
    assert all("max_batch_size must be 0" in problem for problem in problems)


def test_limits_of_the_program_are_told_at_load(tmp_path: Path) -> None:
    artifact = export_two_inputs(tmp_path / "model.pt2", max_rows=4)
    inputs = [IMAGE, replace(MASK, is_optional=True)]
    assert problems_of(torch_config(artifact, inputs, [LOGITS], max_batch_size=5)) == (
        "input 'mask': a .pt2 needs all its inputs; it cannot be optional",
        "max_batch_size: 5, but the model was exported for at most 4 rows",
    )
    backend("pytorch")(torch_config(artifact, [IMAGE, MASK], [LOGITS], max_batch_size=4)).close()


def test_options_that_change_the_program_are_refused(tmp_path: Path) -> None:
    artifact = export_echo(tmp_path / "model.pt2", "FP32", (3,), has_batch=True)
    options = {"penstock.dtype": "bf16", "penstock.factory": "build"}
    problems = problems_of(torch_config(artifact, *echo_specs("FP32", (3,)), options=options))
    assert [problem.split(":")[0] for problem in problems] == [
        "parameters.penstock.factory",
        "parameters.penstock.dtype",
    ]


def test_torchscript_under_the_name_of_a_program_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt2", "w") as archive:  # as torch.jit.save lays it out
        for name in ("data.pkl", "constants.pkl", "code/__torch__.py", "version"):
            archive.writestr(f"model/{name}", b"")
    [problem] = problems_of(torch_config(tmp_path / "model.pt2"))
    assert problem.startswith("1/model.pt2: is TorchScript; rename it to model.pt, or export")


def test_saved_module_or_state_is_refused_and_not_unpickled(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    torch.save({"weight": MakeFileWhenUnpickled(canary)}, tmp_path / "model.pt2")
    [problem] = problems_of(torch_config(tmp_path / "model.pt2"))
    assert problem.startswith("1/model.pt2: is a file of torch.save: a pickle")
    assert not canary.exists()


def rewrite(source: Path, target: Path, change: Callable[[str, bytes], bytes]) -> Path:
    """The same archive with members changed, by their names without the first folder."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name.partition("/")[2], old.read(name)))
    return target


def test_sample_inputs_are_not_unpickled(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    good = export_echo(tmp_path / "good.pt2", "FP32", (3,), has_batch=True)
    torch.save(MakeFileWhenUnpickled(canary), tmp_path / "evil.pt")
    evil = (tmp_path / "evil.pt").read_bytes()

    def change(name: str, data: bytes) -> bytes:
        return evil if name == "data/sample_inputs/model.pt" else data

    artifact = rewrite(good, tmp_path / "model.pt2", change)
    [problem] = problems_of(torch_config(artifact, *echo_specs("FP32", (3,))))
    assert problem.startswith("1/model.pt2: its sample inputs are not plain tensors")
    assert not canary.exists()


def copy_with_samples(source: Path, target: Path, samples: bytes, name: str, twin: str) -> Path:
    """The same archive with other sample inputs, under a name of their own, before the good ones;
    `twin` has what it needs to be a model of its own."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for member in old.namelist():
            if member.endswith("sample_inputs/model.pt"):
                new.writestr(member.replace("model.pt", name), samples)
            new.writestr(member, old.read(member))
            if twin and member.endswith(".json"):
                new.writestr(twin.join(member.rsplit("model", 1)), old.read(member))
    return target


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("name", "twin"), [("model.pt", ""), ("MODEL.pt", ""), ("evil.pt", "evil")]
)
def test_other_sample_inputs_beside_the_good_ones_are_not_unpickled(
    tmp_path: Path, name: str, twin: str
) -> None:
    canary = tmp_path / "canary"
    good = export_echo(tmp_path / "good.pt2", "FP32", (3,), has_batch=True)
    torch.save(MakeFileWhenUnpickled(canary), tmp_path / "evil.pt")
    evil = (tmp_path / "evil.pt").read_bytes()
    artifact = copy_with_samples(good, tmp_path / "model.pt2", evil, name, twin)
    [problem] = problems_of(torch_config(artifact, *echo_specs("FP32", (3,))))
    assert problem.startswith("1/model.pt2: 'data/")
    assert not canary.exists()


def directory_offset(archive: bytes) -> int:
    """Where a zip without a comment says that its directory is."""
    return int(struct.unpack("<I", archive[-6:-2])[0])


def test_file_that_two_readers_read_differently_is_not_unpickled(tmp_path: Path) -> None:
    """Python finds the directory before the end of the file, torch where the file says it is."""
    canary = tmp_path / "canary"
    source = export_echo(tmp_path / "model.pt2", "FP32", (3,), has_batch=True)
    torch.save(MakeFileWhenUnpickled(canary), tmp_path / "evil.pt")
    pickled = (tmp_path / "evil.pt").read_bytes()

    def change(name: str, data: bytes) -> bytes:
        if name == "byteorder":
            return data.ljust(1000)
        return pickled if name == "data/sample_inputs/model.pt" else data

    evil = rewrite(source, tmp_path / "evil.pt2", change).read_bytes()
    good = rewrite(source, tmp_path / "good.pt2", lambda name, data: data).read_bytes()
    start, end = directory_offset(good), directory_offset(evil)
    assert start <= end
    moved = good[:start] + bytes(end - start) + good[start:-6] + struct.pack("<I", end) + bytes(2)
    (tmp_path / "model.pt2").write_bytes(evil + moved)
    artifact = tmp_path / "model.pt2"
    [problem] = problems_of(torch_config(artifact, *echo_specs("FP32", (3,))))
    assert problem.startswith("1/model.pt2: its sample inputs are not plain tensors")
    assert not canary.exists()


def test_pickled_weights_in_a_program_are_refused(tmp_path: Path) -> None:
    good = export_two_inputs(tmp_path / "good.pt2")

    def change(name: str, data: bytes) -> bytes:
        return data.replace(b'"use_pickle": false', b'"use_pickle": true', 1)

    artifact = rewrite(good, tmp_path / "model.pt2", change)
    [problem] = problems_of(torch_config(artifact, [IMAGE, MASK], [LOGITS, KEPT]))
    assert problem.startswith("1/model.pt2: weights linear.")
    assert "stored as pickles" in problem


def test_program_that_torch_cannot_load_is_refused_in_one_line(tmp_path: Path) -> None:
    good = export_two_inputs(tmp_path / "good.pt2")

    def change(name: str, data: bytes) -> bytes:
        return data.replace(b"torch.ops.aten.linear.default", b"torch.ops.aten.no_such.default")

    artifact = rewrite(good, tmp_path / "model.pt2", change)
    with pytest.raises(PenstockError) as caught:
        backend("pytorch")(torch_config(artifact, [IMAGE, MASK], [LOGITS, KEPT]))
    assert str(caught.value).startswith("1/model.pt2: torch cannot load it: ")
    assert len(str(caught.value).splitlines()) == 1


BERT = """
from transformers import BertConfig, BertForMaskedLM

def factory():
    return BertForMaskedLM(BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32,
    ))
"""


def test_hugging_face_model_with_the_weights_that_it_saves_itself(tmp_path: Path) -> None:
    """Its output layer is tied to its embedding, so the file has that weight once."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    artifact = write_module(tmp_path, BERT)
    scope: dict[str, Callable[[], torch.nn.Module]] = {}
    exec(BERT, scope)
    model = scope["factory"]().eval()
    assert isinstance(model, transformers.PreTrainedModel)
    model.save_pretrained(tmp_path)
    inputs = [TensorSpec(name, "INT64", (-1,)) for name in ("input_ids", "attention_mask")]
    outputs = [TensorSpec("logits", "FP32", (-1, 50))]
    runner = backend("pytorch")(torch_config(artifact, inputs, outputs))
    ids = np.random.default_rng(0).integers(0, 50, (2, 7))
    arrays = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    got = run(runner, arrays, 2)["logits"]
    with torch.inference_mode():
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        assert_same(got, model(**tensors).logits.numpy(), "FP32")
