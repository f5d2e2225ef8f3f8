"""Whatever form a model comes in, it becomes a folder that can be served as it is."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from doubles import FakeGpus
from onnx import TensorProto, helper, numpy_helper
from suites.classifiers import write_classifier

import penstock
from penstock.errors import ConfigError
from penstock.optimizer.plan import Plan
from penstock.optimizer.subject import MAX_BATCH, MAX_BATCH_ON_GPU, Subject, open_subject
from penstock.repository import versions
from penstock.system import devices
from penstock.types import TensorSpec

MODULE = """
import numpy as np
import torch


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x):
        return {"y": x * self.weight, "total": x.sum(-1)}


def make():
    return Scale()


def not_a_module():
    return 3


def example_inputs():
    return {"x": np.zeros((2, 3), np.float32)}


def halve(inputs):
    return {"x": inputs["raw"].astype(np.float32) / 2}


def wrong(inputs):
    return {"z": inputs["raw"]}


# Behind y = x W: which is larger, and those that are not zero.
def name(outputs):
    y = outputs["y"]
    return {"name": ["first", "second"][int(y.argmax())], "kept": y[y != 0], "y": y / y.sum()}


def broken(outputs):
    return {"one": outputs["y"][2]}


def unsteady(outputs):
    return {"y": outputs["y"]} if outputs["y"][0] > 4 else {"y": outputs["y"].astype(int)}


def none(outputs):
    return {"boxes": outputs["y"][:0]}


def place(outputs):
    return {"y": outputs["y"] + len(__file__)}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with users' code in it."""
    (tmp_path / "subject_code.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("subject_code", None)


def write_linear(path: Path, rows: object = "n") -> np.ndarray:
    """y = x W, of three numbers two."""
    weight = np.arange(6, dtype=np.float32).reshape(3, 2)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [rows, 2])],
        [numpy_helper.from_array(weight, "w")],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return weight


def plan(model: object, **wishes: str) -> Plan:
    return Plan(str(model), "model", "out", **wishes)


def problems_of(model: object, target: Path, **wishes: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        open_subject(plan(model, **wishes), target)
    return error.value.problems


def answer(subject: Subject, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    with penstock.load(str(subject.build.folder)) as model:
        return dict(model.infer(inputs))


def test_onnx_file_is_batched_as_it_is(tmp_path: Path) -> None:
    weight = write_linear(tmp_path / "linear.onnx")
    subject = open_subject(plan(tmp_path / "linear.onnx"), tmp_path / "work" / "original")
    config = subject.build.config
    assert (subject.kind, subject.text) == ("ONNX", "ONNX, 6 parameters, FP32")
    assert (config.max_batch_size, config.batching.is_dynamic) == (MAX_BATCH, True)
    assert (config.num_instances, config.slo, config.padding) == (1, "", None)
    x = np.ones((2, 3), np.float32)
    assert np.array_equal(answer(subject, x=x)["y"], x @ weight)


def test_onnx_model_without_batch_is_not_batched(tmp_path: Path) -> None:
    write_linear(tmp_path / "linear.onnx", rows=1)
    config = open_subject(plan(tmp_path / "linear.onnx"), tmp_path / "original").build.config
    assert (config.max_batch_size, config.batching.is_dynamic) == (0, False)


def test_weights_beside_an_onnx_file_come_along(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    weight = write_linear(source / "plain.onnx")
    onnx.save(
        onnx.load(source / "plain.onnx"),
        source / "linear.onnx",
        save_as_external_data=True,
        location="linear.weights",
        size_threshold=0,
    )
    subject = open_subject(plan(source / "linear.onnx"), tmp_path / "original")
    x = np.ones((1, 3), np.float32)
    assert np.array_equal(answer(subject, x=x)["y"], x @ weight)
    (source / "linear.weights").unlink()
    assert problems_of(source / "linear.onnx", tmp_path / "other") == (
        f"{source}/linear.onnx: its weights 'linear.weights' are not beside it",
    )


def test_weights_may_not_lie_elsewhere(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_linear(source / "linear.onnx")
    model = onnx.load(source / "linear.onnx")
    (tensor,) = model.graph.initializer
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret")
    (tmp_path / "secret").write_bytes(b"0" * 24)
    onnx.save(model, source / "linear.onnx")
    (problem,) = problems_of(source / "linear.onnx", tmp_path / "original")
    assert problem.endswith("its weights '../secret' lie outside the model's folder")


def test_tokens_with_a_mask_are_padded_up_to_the_longest_of_the_data(tmp_path: Path) -> None:
    names = ("input_ids", "attention_mask")
    values = [helper.make_tensor_value_info(n, TensorProto.INT64, ["n", "s"]) for n in names]
    output = helper.make_tensor_value_info("y", TensorProto.INT64, ["n", "s"])
    graph = helper.make_graph([helper.make_node("Mul", names, ["y"])], "mul", values, [output])
    opsets = [helper.make_opsetid("", 17)]
    path = tmp_path / "tokens.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    rows = [{name: [1] * length for name in names} for length in (3, 17)]
    (tmp_path / "data.json").write_text(json.dumps(rows))
    subject = open_subject(plan(path, data=str(tmp_path / "data.json")), tmp_path / "original")
    padding = subject.build.config.padding
    assert padding is not None
    assert [(each.input, each.axis, each.value) for each in padding.axes] == [
        ("input_ids", 0, 0.0),
        ("attention_mask", 0, 0.0),
    ]
    assert padding.buckets == (8, 16, 32)


def test_digest_changes_with_every_byte(tmp_path: Path) -> None:
    write_linear(tmp_path / "linear.onnx")
    digests = [
        open_subject(plan(tmp_path / "linear.onnx"), tmp_path / name / "original").digest
        for name in ("a", "b")
    ]
    assert digests[0] == digests[1]
    write_linear(tmp_path / "linear.onnx", rows="m")
    other = open_subject(plan(tmp_path / "linear.onnx"), tmp_path / "c" / "original").digest
    assert other != digests[0]


def test_served_version_keeps_its_configuration_and_loses_its_promise(tmp_path: Path) -> None:
    write_linear(tmp_path / "linear.onnx")
    first = open_subject(plan(tmp_path / "linear.onnx"), tmp_path / "linear")
    evidence = {"slo": "p99 < 20ms"}
    (tmp_path / "models").mkdir()
    for _ in range(2):
        source = first.build.version_folder
        versions.commit(tmp_path / "models", "linear", source, first.build.config, evidence)
    folder = tmp_path / "models" / "linear"
    latest = open_subject(plan(folder), tmp_path / "latest")
    named = open_subject(plan(folder / "1"), tmp_path / "named")
    assert (latest.kind, named.kind) == ("served version 2", "served version 1")
    assert latest.build.config.max_batch_size == MAX_BATCH
    assert (latest.build.config.slo, latest.build.config.batching.slo_latency_s) == ("", None)
    assert sorted(path.name for path in latest.build.version_folder.iterdir()) == ["model.onnx"]


def limit_of(folder: Path, target: Path) -> int | None:
    return open_subject(plan(folder), target).max_rows


def test_a_limit_that_the_author_wrote_is_known(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "model"
    (folder / "1").mkdir(parents=True)
    write_linear(folder / "1" / "model.onnx")
    assert limit_of(folder, tmp_path / "worked out" / "model") is None
    (folder / "config.pbtxt").write_text("max_batch_size: 12")
    assert limit_of(folder, tmp_path / "written" / "model") == 12
    (folder / "1" / "config.pbtxt").write_text("max_batch_size: 5")
    assert limit_of(folder, tmp_path / "own" / "model") == 5


def test_a_limit_of_python_code_is_known(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text("def infer(inputs): return {'y': inputs['x']}")
    text = 'backend: "python" max_batch_size: 4\n'
    text += 'input { name: "x" data_type: TYPE_FP32 dims: 3 }\n'
    text += 'output { name: "y" data_type: TYPE_FP32 dims: 3 }\n'
    (folder / "config.pbtxt").write_text(text)
    assert limit_of(folder, tmp_path / "work" / "model") == 4


@pytest.mark.parametrize(
    ("source", "limit"), [("ONNX, 6 parameters", None), ("served version 1", 4)]
)
def test_a_limit_that_an_optimisation_of_a_file_chose_is_nobodys(
    tmp_path: Path, source: str, limit: int | None
) -> None:
    write_linear(tmp_path / "model.onnx")
    subject = open_subject(plan(tmp_path / "model.onnx"), tmp_path / "work" / "model")
    assert subject.max_rows is None
    batching = replace(subject.build.config.batching, max_batch_size=4)
    config = replace(subject.build.config, max_batch_size=4, batching=batching)
    (tmp_path / "out").mkdir()
    evidence = {"lineage": {"source": source}}
    versions.commit(tmp_path / "out", "model", subject.build.version_folder, config, evidence)
    assert limit_of(tmp_path / "out" / "model", tmp_path / "again" / "model") == limit


def test_repository_of_several_models_is_not_one_model(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        write_linear(tmp_path / "models" / name / "1" / "model.onnx")
    (problem,) = problems_of(tmp_path / "models", tmp_path / "original")
    assert "holds a, b; name the folder of one" in problem


def test_factory_is_taken_along_with_its_weights(here: Path) -> None:
    pytest.importorskip("torch")
    subject = open_subject(plan("subject_code:make"), here / "original")
    config = subject.build.config
    assert subject.kind == "PyTorch module"
    assert subject.text == "PyTorch module, 3 parameters, FP32, subject_code.py is taken along"
    assert [(s.name, s.datatype, s.shape) for s in (*config.inputs, *config.outputs)] == [
        ("x", "FP32", (3,)),
        ("y", "FP32", (3,)),
        ("total", "FP32", ()),
    ]
    assert config.max_batch_size == MAX_BATCH
    found = answer(subject, x=np.ones((2, 3), np.float32))
    assert found["y"].tolist() == [[2.0] * 3] * 2


def test_exported_program_is_served_as_it_is(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    shapes = ({0: torch.export.Dim("batch", max=16)},)
    program = torch.export.export(
        torch.nn.Linear(3, 2).eval(), (torch.ones(2, 3),), dynamic_shapes=shapes
    )
    torch.export.save(program, tmp_path / "linear.pt2")
    subject = open_subject(plan(tmp_path / "linear.pt2"), tmp_path / "original")
    config = subject.build.config
    assert subject.kind == "exported program"
    # It was exported for fewer rows than we would take.
    assert (config.backend, config.max_batch_size) == ("pytorch", 16)
    assert answer(subject, input=np.ones((3, 3), np.float32))["OUTPUT__0"].shape == (3, 2)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "read_gpus", FakeGpus(1 << 34, 1 << 34))


@pytest.mark.parametrize(
    ("device", "expected", "max_batch"),
    [
        ("auto", "cuda", MAX_BATCH_ON_GPU),
        ("cuda", "cuda", MAX_BATCH_ON_GPU),
        ("cuda:1", "cuda:1", MAX_BATCH_ON_GPU),
        ("cpu", "cpu", MAX_BATCH),
    ],
)
def test_a_module_is_where_the_plan_says(
    here: Path, two_gpus: None, device: str, expected: str, max_batch: int
) -> None:
    pytest.importorskip("torch")
    subject = open_subject(plan("subject_code:make", device=device), here / "original")
    config = subject.build.config
    assert (config.devices, config.max_batch_size) == ((expected,), max_batch)


def test_without_a_gpu_a_module_is_on_the_cpu(here: Path) -> None:
    pytest.importorskip("torch")
    config = open_subject(plan("subject_code:make"), here / "original").build.config
    assert (config.devices, config.max_batch_size) == (("cpu",), MAX_BATCH)


def test_a_program_has_as_many_rows_as_it_was_exported_for(tmp_path: Path, two_gpus: None) -> None:
    torch = pytest.importorskip("torch")
    for most in (100, 1000):
        shapes = ({0: torch.export.Dim("batch", max=most)},)
        program = torch.export.export(
            torch.nn.Linear(3, 2).eval(), (torch.ones(2, 3),), dynamic_shapes=shapes
        )
        torch.export.save(program, tmp_path / f"{most}.pt2")
        subject = open_subject(plan(tmp_path / f"{most}.pt2"), tmp_path / f"original{most}")
        assert subject.build.config.max_batch_size == min(most, MAX_BATCH_ON_GPU)
        assert subject.build.config.batching.max_batch_size == min(most, MAX_BATCH_ON_GPU)


def test_onnx_is_on_the_gpus_unless_the_plan_says(tmp_path: Path, two_gpus: None) -> None:
    pytest.importorskip("torch")
    write_linear(tmp_path / "linear.onnx")
    asked = plan(tmp_path / "linear.onnx")
    config = open_subject(asked, tmp_path / "original").build.config
    assert (config.uses_gpu, config.engine) == (True, "pytorch")
    on_cpu = open_subject(replace(asked, device="cpu"), tmp_path / "other").build.config
    assert (on_cpu.devices, on_cpu.max_batch_size) == (("cpu",), MAX_BATCH)
    assert on_cpu.engine == "onnxruntime"


def test_a_gpu_that_is_not_there_is_told(here: Path, two_gpus: None) -> None:
    pytest.importorskip("torch")
    (problem,) = problems_of("subject_code:make", here / "original", device="cuda:7")
    assert problem.startswith("device: cuda:7: ") and "only GPUs 0, 1" in problem


def test_a_served_version_stays_where_it_is_unless_the_plan_says(
    here: Path, two_gpus: None
) -> None:
    pytest.importorskip("torch")
    first = open_subject(plan("subject_code:make", device="cuda:1"), here / "original").build
    again = open_subject(plan(first.folder), here / "again").build.config
    assert again.devices == ("cuda:1",)
    moved = open_subject(plan(first.folder, device="cpu"), here / "moved").build.config
    assert moved.devices == ("cpu",)


def test_preprocessing_becomes_part_of_what_is_served(here: Path) -> None:
    pytest.importorskip("torch")
    np.savez(here / "data.npz", raw=np.full((5, 3), 4, np.uint8), y=np.zeros(5))
    wishes = {"data": "data.npz", "labels": "y"}
    subject = open_subject(
        plan("subject_code:make", preprocess="subject_code:halve", **wishes), here / "original"
    )
    config = subject.build.config
    assert [(spec.name, spec.datatype) for spec in config.inputs] == [("raw", "UINT8")]
    assert [(spec.name, spec.datatype) for spec in config.model.inputs] == [("x", "FP32")]
    found = answer(subject, raw=np.full((1, 3), 6, np.uint8))
    assert found["y"].tolist() == [[6.0] * 3]
    (problem,) = problems_of(
        "subject_code:make", here / "other", preprocess="subject_code:wrong", **wishes
    )
    assert "forward(x)" in problem
    write_linear(here / "linear.onnx")
    (problem,) = problems_of(
        "linear.onnx", here / "third", preprocess="subject_code:wrong", **wishes
    )
    assert problem == "preprocess: preprocess.py:wrong: gave no 'x'; it gave ['z']"


def test_labels_that_nobody_named_are_no_input(here: Path) -> None:
    np.savez(here / "data.npz", raw=np.full((5, 3), 4, np.uint8), y=np.zeros(5))
    write_linear(here / "linear.onnx")
    wishes = plan("linear.onnx", preprocess="subject_code:halve", data="data.npz")
    config = open_subject(wishes, here / "original").build.config
    assert [spec.name for spec in config.inputs] == ["raw"]


def test_nor_are_they_of_a_module(here: Path) -> None:
    pytest.importorskip("torch")
    np.savez(here / "data.npz", x=np.ones((5, 3), np.float32), label=np.zeros(5))
    config = open_subject(plan("subject_code:make", data="data.npz"), here / "one").build.config
    assert [spec.name for spec in config.inputs] == ["x"]


def test_a_classifier_is_taken_with_its_probabilities_as_a_tensor(here: Path) -> None:
    path = write_classifier(here / "spam.onnx", classlabels_strings=["no", "yes"])
    before = path.read_bytes()
    subject = open_subject(plan("spam.onnx"), here / "original")
    taken = onnx.load(here / "original" / "1" / "model.onnx")
    assert "ZipMap" not in {node.op_type for node in taken.graph.node}
    found = answer(subject, x=np.zeros((1, 2), np.float32))
    assert found["probability"].tolist() == [[0.5, 0.5]]
    assert path.read_bytes() == before


def test_a_python_file_is_taken_with_the_modules_beside_it(here: Path) -> None:
    (here / "factors.py").write_text("FACTOR = 3")
    (here / "scale.py").write_text(
        "from factors import FACTOR\ndef scale(x: float) -> float:\n    return x * FACTOR\n"
    )
    subject = open_subject(plan("scale.py"), here / "original")
    assert (subject.kind, subject.build.config.backend) == ("Python", "python")
    assert subject.build.config.max_batch_size > 1
    assert (here / "original" / "1" / "factors.py").read_text() == "FACTOR = 3"
    assert answer(subject, x=np.array([1.0, 2.0]))["output"].tolist() == [3, 6]


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("none.onnx", "none.onnx: no such file"),
        ("text.onnx", "text.onnx: cannot be read as ONNX"),
        ("none", "none: no such file or folder; expected model.onnx, model.pt2"),
        ("model.bin", "model.bin: weights have no code; give the folder"),
        ("subject_code:not_a_module", "gave a int, expected a torch.nn.Module"),
        ("subject_code:absent", "'subject_code' has no function 'absent'"),
    ],
)
def test_what_is_no_model_is_told(here: Path, model: str, problem: str) -> None:
    pytest.importorskip("torch")
    (here / "text.onnx").write_text("hello")
    (here / "model.bin").write_text("hello")
    (found,) = problems_of(model, here / "original")
    assert problem in found


NEEDS_A_FILE = """
from pathlib import Path

import numpy as np


def halve(inputs):
    scale = float((Path(__file__).parent / "scale.txt").read_text())
    return {"x": inputs["raw"].astype(np.float32) / scale}


def place(inputs):
    return {"x": inputs["raw"].astype(np.float32) + len(__file__)}
"""


def test_copy_that_does_not_do_what_the_original_did_is_refused(here: Path) -> None:
    (here / "subject_code.py").write_text(NEEDS_A_FILE)
    (here / "scale.txt").write_text("2")
    write_linear(here / "linear.onnx")
    np.savez(here / "data.npz", raw=np.ones((2, 3), np.uint8))
    problems = [
        problems_of("linear.onnx", here / name, preprocess=f"subject_code:{name}", data="data.npz")
        for name in ("halve", "place")
    ]
    assert "the copy that is served, fails: FileNotFoundError" in problems[0][0]
    assert problems[0][0].endswith("name files beside it that it reads in FILES")
    assert problems[1][0].endswith("gives something else than the original")
    sys.modules.pop("subject_code")
    (here / "subject_code.py").write_text('FILES = ("scale.txt",)\n' + NEEDS_A_FILE)
    wishes = {"preprocess": "subject_code:halve", "data": "data.npz"}
    subject = open_subject(plan("linear.onnx", **wishes), here / "good")
    assert (subject.build.version_folder / "scale.txt").read_text() == "2"


def test_preprocessing_needs_data(here: Path) -> None:
    write_linear(here / "linear.onnx")
    (problem,) = problems_of("linear.onnx", here / "original", preprocess="subject_code:halve")
    assert problem.startswith("preprocess: needs data")


def test_postprocessing_becomes_part_of_what_is_served(here: Path) -> None:
    write_linear(here / "linear.onnx")
    # W is 0 to 5, so y is [2 b + 4 c, a + 3 b + 5 c].
    np.savez(here / "data.npz", x=np.float32([[1, 1, 1], [1, 0, 0], [2, 2, 2]]), label=[0, 1, 0])
    wishes = {"postprocess": "subject_code:name", "data": "data.npz"}
    subject = open_subject(plan("linear.onnx", **wishes), here / "original")
    config = subject.build.config
    assert (subject.build.version_folder / "postprocess.py").is_file()
    assert "subject_code.py is taken along" in subject.text
    # What is of another size in another example is free; names may be of any length.
    assert config.outputs == (
        TensorSpec("name", "BYTES", ()),
        TensorSpec("kept", "FP32", (-1,)),
        TensorSpec("y", "FP32", (2,)),
    )
    assert config.model.outputs == (TensorSpec("y", "FP32", (2,)),)
    found = answer(subject, x=np.float32([[1, 1, 1]]))
    assert found["name"].tolist() == [b"second"]
    assert found["kept"].tolist() == [[6.0, 9.0]]


def test_between_both_functions_the_model_is_what_it_was(here: Path) -> None:
    write_linear(here / "linear.onnx")
    np.savez(here / "data.npz", raw=np.full((5, 3), 4, np.uint8), label=np.zeros(5))
    functions = {"preprocess": "subject_code:halve", "postprocess": "subject_code:name"}
    subject = open_subject(plan("linear.onnx", data="data.npz", **functions), here / "m")
    config = subject.build.config
    assert [spec.name for spec in config.inputs] == ["raw"]
    assert [spec.name for spec in config.outputs] == ["name", "kept", "y"]
    assert [spec.name for spec in (*config.model.inputs, *config.model.outputs)] == ["x", "y"]
    assert answer(subject, raw=np.full((1, 3), 2, np.uint8))["kept"].tolist() == [[6.0, 9.0]]

    # A version that is served is optimised again with what it has, and can have no second one.
    (here / "models").mkdir()
    versions.commit(here / "models", "m", subject.build.version_folder, config)
    again = open_subject(plan(here / "models" / "m", data="data.npz"), here / "again" / "m")
    assert again.build.config.postprocess == config.postprocess
    assert again.build.config.preprocess == config.preprocess
    wishes = {"data": "data.npz", "postprocess": "subject_code:name"}
    (problem,) = problems_of(here / "models" / "m", here / "third", **wishes)
    assert problem == "postprocess: the model has one already, postprocess.py:name"


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("broken", "postprocess: broken fails on the data: IndexError: index 2 is out of bounds"),
        ("unsteady", "postprocess: output 'y': examples differ in datatype or number of axes"),
        ("place", "postprocess: 1/postprocess.py, the copy that is served, gives something else"),
        ("absent", "postprocess: 'subject_code' has no function 'absent'"),
    ],
)
def test_postprocessing_that_does_not_do_is_told(here: Path, function: str, problem: str) -> None:
    write_linear(here / "linear.onnx")
    np.savez(here / "data.npz", x=np.float32([[1, 1, 1], [1, 0, 0]]))
    wishes = {"postprocess": f"subject_code:{function}", "data": "data.npz"}
    (found,) = problems_of("linear.onnx", here / "original", **wishes)
    assert problem in found


def test_nothing_found_in_any_example_is_of_any_size(here: Path) -> None:
    write_linear(here / "linear.onnx")
    np.savez(here / "data.npz", x=np.float32([[1, 1, 1], [1, 0, 0]]))
    wishes = {"postprocess": "subject_code:none", "data": "data.npz"}
    config = open_subject(plan("linear.onnx", **wishes), here / "original").build.config
    assert config.outputs == (TensorSpec("boxes", "FP32", (-1,)),)


def test_postprocessing_needs_data(here: Path) -> None:
    write_linear(here / "linear.onnx")
    functions = {"preprocess": "subject_code:halve", "postprocess": "subject_code:name"}
    problems = problems_of("linear.onnx", here / "original", **functions)
    assert [each.partition(": needs data")[0] for each in problems] == list(functions)
