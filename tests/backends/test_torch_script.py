"""TorchScript models: made here by torch.jit, called by Triton's names, and never unpickled."""

import pickle
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from suites.backend import (
    MAX_BATCH,
    ArtifactContract,
    BackendContract,
    MakeFileWhenUnpickled,
    echo_specs,
    model_config,
    run,
)

from penstock.backends import Batch, backend
from penstock.config import ModelConfig
from penstock.errors import BackendFailed, ConfigError
from penstock.types import TensorSpec

torch = pytest.importorskip("torch")
pytest.importorskip("penstock.backends.pytorch")
# Here models are made; loading them warns of nothing.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.(script|save)")

X = np.arange(6, dtype=np.float32).reshape(2, 3)
SCALE = np.array([[2], [3]], np.float32)


class Scaled(torch.nn.Module):
    """Two different outputs of two different inputs, so that no mix-up goes unseen."""

    def forward(self, x, scale):
        return x * scale, x.sum(dim=1, keepdim=True)


class Named(torch.nn.Module):
    def forward(self, x) -> dict[str, torch.Tensor]:
        return {"double": x * 2, "sum": x.sum(dim=1, keepdim=True)}


class Listed(torch.nn.Module):
    def forward(self, x):
        return [x, x + 1]


class Shifted(torch.nn.Module):
    def forward(self, x, by: torch.Tensor | None = None):
        return x if by is None else x + by


class Picked(torch.nn.Module):
    def forward(self, x, row: int):
        return x[row]


def saved(folder: Path, module: "torch.nn.Module") -> Path:
    torch.jit.script(module.eval()).save(str(folder / "model.pt"))
    return folder / "model.pt"


def specs(shapes: Mapping[str, Sequence[int]]) -> list[TensorSpec]:
    return [TensorSpec(name, "FP32", tuple(shape)) for name, shape in shapes.items()]


def config_of(
    artifact: Path, inputs: Mapping[str, Sequence[int]], outputs: Mapping[str, Sequence[int]]
) -> ModelConfig:
    return model_config("pytorch", artifact, specs(inputs), specs(outputs), MAX_BATCH)


def problems_of(config: ModelConfig) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        backend("pytorch")(config)
    return caught.value.problems


class TestScript(BackendContract, ArtifactContract):
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
        names = [f"x{number}" for number in range(num_tensors)]
        code = f"def forward(self, {', '.join(names)}):\n  return ({', '.join(names)},)\n"

        class Echo(torch.jit.ScriptModule):
            def __init__(self) -> None:
                super().__init__()
                self.define(code)

        Echo().save(str(folder / "model.pt"))
        both = echo_specs(datatype, row_shape, num_tensors)
        return model_config("pytorch", folder / "model.pt", *both, max_batch_size)

    def failing_model(self, folder: Path) -> tuple[ModelConfig, Batch, Batch]:
        class Gather(torch.nn.Module):
            def forward(self, index):
                return torch.arange(4.0)[index]

        index, value = TensorSpec("index", "INT64", (1,)), TensorSpec("value", "FP32", (1,))
        bad, good = (
            Batch({"index": np.array([[0], [last]], np.int64)}, 2) for last in (4_000_000, 3)
        )
        config = model_config("pytorch", saved(folder, Gather()), [index], [value])
        return config, bad, good

    def good_artifact(self, folder: Path) -> Path:
        return Path(self.echo_config(folder).artifact)

    def artifact_config(self, artifact: Path) -> ModelConfig:
        return model_config("pytorch", artifact, *echo_specs("FP32", (3,)))


@pytest.mark.parametrize(
    ("x", "scale"),
    [
        ("INPUT__0", "INPUT__1"),
        ("input__0", "other__1"),
        ("x", "scale"),
        ("first", "second"),
    ],
)
@pytest.mark.parametrize("is_swapped", [False, True])
def test_inputs_are_called_as_in_triton(
    tmp_path: Path, x: str, scale: str, is_swapped: bool
) -> None:
    inputs = {x: [3], scale: [1]}
    if is_swapped and x != "first":
        inputs = dict(reversed(inputs.items()))
    config = config_of(saved(tmp_path, Scaled()), inputs, {"OUTPUT__0": [3]})
    answers = run(backend("pytorch")(config), {x: X, scale: SCALE}, 2)
    assert answers["OUTPUT__0"].tolist() == (X * SCALE).tolist()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["OUTPUT__0", "OUTPUT__1"], [[0, 2, 4], [3]]),
        (["OUTPUT__1", "OUTPUT__0"], [[3], [0, 2, 4]]),
        (["OUTPUT__1"], [[3]]),
        (["any", "other"], [[0, 2, 4], [3]]),
    ],
)
def test_outputs_are_called_as_in_triton(
    tmp_path: Path, names: list[str], expected: list[list[float]]
) -> None:
    shapes = {name: [len(values)] for name, values in zip(names, expected, strict=True)}
    config = config_of(saved(tmp_path, Scaled()), {"INPUT__0": [3], "INPUT__1": [1]}, shapes)
    answers = run(backend("pytorch")(config), {"INPUT__0": X[:1], "INPUT__1": SCALE[:1]}, 1)
    assert [answers[name][0].tolist() for name in names] == expected


def test_dicts_and_lists_of_tensors_are_answers(tmp_path: Path) -> None:
    config = config_of(saved(tmp_path, Named()), {"x": [3]}, {"sum": [1], "double": [3]})
    answers = run(backend("pytorch")(config), {"x": X}, 2)
    assert answers["sum"].tolist() == [[3], [12]]
    assert answers["double"].tolist() == (X * 2).tolist()
    config = config_of(saved(tmp_path, Listed()), {"x": [3]}, {"OUTPUT__0": [3], "OUTPUT__1": [3]})
    assert run(backend("pytorch")(config), {"x": X}, 2)["OUTPUT__1"].tolist() == (X + 1).tolist()


def test_missing_output_is_an_error_that_counts_them(tmp_path: Path) -> None:
    config = config_of(saved(tmp_path, Listed()), {"x": [3]}, {"OUTPUT__5": [3]})
    with pytest.raises(BackendFailed, match="no output 'OUTPUT__5'; it gave 2 outputs"):
        run(backend("pytorch")(config), {"x": X}, 2)


def test_argument_with_a_default_may_be_optional(tmp_path: Path) -> None:
    config = config_of(saved(tmp_path, Shifted()), {"x": [3], "by": [3]}, {"y": [3]})
    x, by = config.inputs
    runner = backend("pytorch")(replace(config, inputs=(x, replace(by, is_optional=True))))
    assert run(runner, {"x": X}, 2)["y"].tolist() == X.tolist()
    assert run(runner, {"x": X, "by": X}, 2)["y"].tolist() == (2 * X).tolist()


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (["x"], "forward takes 'x', 'scale'; configured are 'x'"),
        (["INPUT__0"], "configured are 'INPUT__0'"),
        (["INPUT__0", "INPUT__2"], "configured are 'INPUT__0', 'INPUT__2'"),
        (["INPUT__0", "in__0"], "two names end in the same position"),
        (["a", "b", "c"], "configured are 'a', 'b', 'c'"),
    ],
)
def test_inputs_that_forward_does_not_take_are_refused(
    tmp_path: Path, inputs: list[str], words: str
) -> None:
    config = config_of(saved(tmp_path, Scaled()), dict.fromkeys(inputs, [3]), {"y": [3]})
    [problem] = problems_of(config)
    assert problem.startswith("1/model.pt: ")
    assert words in problem


def test_arguments_that_are_no_tensors_or_needed_are_refused(tmp_path: Path) -> None:
    config = config_of(saved(tmp_path, Picked()), {"x": [3], "row": [1]}, {"y": [3]})
    [problem] = problems_of(config)
    assert "argument 'row' of forward is of type int; expected a tensor" in problem
    config = config_of(saved(tmp_path, Scaled()), {"x": [3], "scale": [1]}, {"OUTPUT__0": [3]})
    x, scale = config.inputs
    [problem] = problems_of(replace(config, inputs=(x, replace(scale, is_optional=True))))
    assert "argument 'scale' of forward has no default value, so it cannot be optional" in problem


def test_form_is_read_back_and_options_that_change_the_program_are_refused(tmp_path: Path) -> None:
    config = config_of(saved(tmp_path, Listed()), {"x": [3]}, {"OUTPUT__0": [3]})
    runner = backend("pytorch")(config)
    assert runner.built()["form"] == "TorchScript"
    options = {"penstock.dtype": "bf16", "penstock.fuse": "on"}
    problems = problems_of(replace(config, options=options))
    assert [problem.split(":")[0] for problem in problems] == [
        "parameters.penstock.dtype",
        "parameters.penstock.fuse",
    ]


def test_pickles_are_refused_and_not_unpickled(tmp_path: Path) -> None:
    canary, path = tmp_path / "canary", tmp_path / "model.pt"
    config = config_of(path, {"x": [3]}, {"y": [3]})
    torch.save({"weight": MakeFileWhenUnpickled(canary)}, path)
    [problem] = problems_of(config)
    assert problem.startswith("1/model.pt: is a file of torch.save, a pickle")
    path.write_bytes(pickle.dumps(MakeFileWhenUnpickled(canary)))
    [problem] = problems_of(config)
    assert problem.startswith("1/model.pt: is no TorchScript archive, but perhaps a pickle")
    assert not canary.exists()


@pytest.mark.parametrize("member", ["data.pkl", "constants.pkl"])
def test_pickle_of_python_objects_in_an_archive_is_not_run(tmp_path: Path, member: str) -> None:
    canary, path = tmp_path / "canary", saved(tmp_path, Listed())
    evil = pickle.dumps(MakeFileWhenUnpickled(canary))
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "new.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, evil if name.endswith(f"/{member}") else old.read(name))
    (tmp_path / "new.pt").replace(path)
    with pytest.raises((BackendFailed, ConfigError), match=r"1/model.pt: "):
        backend("pytorch")(config_of(path, {"x": [3]}, {"y": [3]}))
    assert not canary.exists()
