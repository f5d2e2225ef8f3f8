"""PyTorch to ONNX: the same answers, the same names, free axes stay free."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from served_builds import a_config, a_situation

from penstock.backends import Batch, backend
from penstock.config import PadAxis, Padding
from penstock.errors import BackendFailed
from penstock.optimizer import folders
from penstock.optimizer.candidates import Build, Candidate, Skip, Step
from penstock.optimizer.facts import Facts
from penstock.optimizer.machine import Machine
from penstock.optimizer.passes import BuildContext, PassContext, find
from penstock.optimizer.plan import Plan
from penstock.optimizer.this_machine import read_machine
from penstock.optimizer.torch_source import take_factory
from penstock.types import TensorSpec

torch = pytest.importorskip("torch")
PLAN = Plan("model", "model", "out")
EXPORT = find("onnx-export")
MODULE = '''
import torch


class Attention(torch.nn.Module):
    """One layer over embedded tokens; a mask that leaves tokens out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(30, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.query, self.key = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, input_ids, attention_mask):
        x = self.norm(self.table(input_ids))
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        scores = scores.masked_fill(attention_mask[:, None, :] == 0, -1e9)
        return {"tokens": scores.softmax(-1) @ x, "first": (scores.softmax(-1) @ x)[:, 0]}


class Forgetful(torch.nn.Module):
    """Its second input is of no use, so it is in no graph."""

    def forward(self, input_ids, attention_mask):
        return input_ids * 2


attention, forgetful = Attention, Forgetful
'''


def build_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factory: str) -> Build:
    (tmp_path / "export_code.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    version = tmp_path / "original" / "1"
    version.mkdir(parents=True)
    names = ("input_ids", "attention_mask")
    rows = [dict.fromkeys(names, np.ones(length, np.int64)) for length in (2, 3)]
    config, _ = take_factory(f"export_code:{factory}", rows, version)
    config = folders.write_config(tmp_path / "original", config)
    return Build(Candidate(), tmp_path / "original", config)


def situation(build: Build, machine: Machine | None = None) -> PassContext:
    facts = Facts(build.config.backend)
    return PassContext(PLAN, machine or read_machine(), build, facts, None, {})


def export(build: Build, target: Path) -> Build:
    (step,) = EXPORT.propose(situation(build))
    assert isinstance(step, Step)
    EXPORT.build(build, step, target, BuildContext(PLAN, read_machine(), None, target.parent))
    return Build(build.candidate.then(step), target, folders.read_config(target))


def run(build: Build, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    runner = backend(build.config.backend)(build.config)
    (answer,) = runner.start(Batch(inputs, len(next(iter(inputs.values()))))).wait()
    runner.close()
    return dict(answer)


def test_exported_model_gives_the_same_answers_at_every_size(tmp_path, monkeypatch) -> None:
    build = build_of(tmp_path, monkeypatch, "attention")
    exported = export(build, tmp_path / "exported")
    assert exported.config.backend == "onnxruntime"
    for num_rows, length in ((1, 1), (3, 7), (5, 19)):
        ids = np.arange(num_rows * length).reshape(num_rows, length) % 30
        mask = np.ones_like(ids)
        mask[:, length // 2 + 1 :] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}
        ours, theirs = run(exported, inputs), run(build, inputs)
        assert ours.keys() == theirs.keys() == {"tokens", "first"}
        for name, values in theirs.items():
            assert np.allclose(ours[name], values, atol=1e-5)


def test_names_opset_and_settings_are_kept(tmp_path, monkeypatch) -> None:
    build = build_of(tmp_path, monkeypatch, "attention")
    axes = (PadAxis("input_ids", 0), PadAxis("attention_mask", 0))
    config = folders.write_config(
        build.folder,
        replace(
            build.config,
            padding=Padding(axes, (4, 8)),
            options={"intra_op_thread_count": "1", "penstock.dtype": "fp32"},
        ),
    )
    exported = export(Build(build.candidate, build.folder, config), tmp_path / "exported")
    assert exported.config.padding == config.padding
    assert exported.config.options == {"intra_op_thread_count": "1"}
    assert (exported.config.inputs, exported.config.outputs) == (config.inputs, config.outputs)
    model = onnx.load(exported.artifact)
    assert model.opset_import[0].version >= 17
    assert "LayerNormalization" in {node.op_type for node in model.graph.node}
    names = {path.name for path in exported.version_folder.iterdir()}
    assert {"model.onnx"} <= names
    assert not names & {"module.py", "model.safetensors"}


def exported_program(tmp_path: Path, module: "torch.nn.Module") -> Build:
    version = tmp_path / "original" / "1"
    version.mkdir(parents=True)
    shapes = {"x": {0: torch.export.Dim("batch", max=64)}}
    program = torch.export.export(module, (torch.ones(2, 3, 2),), dynamic_shapes=shapes)
    torch.export.save(program, version / "model.pt2")
    return Build(Candidate(), tmp_path / "original", folders.read_config(tmp_path / "original"))


def test_exported_program_is_exported_too(tmp_path) -> None:
    class Double(torch.nn.Module):
        def forward(self, x):
            return {"y": x * 2}

    exported = export(exported_program(tmp_path, Double()), tmp_path / "exported")
    x = np.ones((4, 3, 2), np.float32)
    assert np.array_equal(run(exported, {"x": x})["y"], 2 * x)


class Flat(torch.nn.Module):
    """Says how many rows there are, which tracing a program makes a constant."""

    def forward(self, x):
        return {"y": x.reshape(x.shape[0], -1) * 2}


def test_program_with_sizes_inside_needs_the_other_exporter(tmp_path) -> None:
    pytest.importorskip("onnxscript")
    exported = export(exported_program(tmp_path, Flat()), tmp_path / "exported")
    x = np.ones((4, 3, 2), np.float32)
    assert run(exported, {"x": x})["y"].tolist() == [[2.0] * 6] * 4


def without_onnxscript(monkeypatch) -> None:
    """torch keeps what it has imported of it, so hiding the package is not enough."""
    real = torch.onnx.export

    def export_by_tracing(*args, dynamo: bool, **options):
        if dynamo:
            raise ModuleNotFoundError("No module named 'onnxscript'", name="onnxscript")
        return real(*args, dynamo=False, **options)

    monkeypatch.setattr(torch.onnx, "export", export_by_tracing)


def test_size_that_became_a_constant_is_noticed(tmp_path, monkeypatch) -> None:
    without_onnxscript(monkeypatch)
    build = exported_program(tmp_path, Flat())
    with pytest.raises(BackendFailed, match=r"tracing: .*: a size became a constant; torch.export"):
        export(build, tmp_path / "exported")


def test_model_that_loses_an_input_is_not_built(tmp_path, monkeypatch) -> None:
    without_onnxscript(monkeypatch)
    build = build_of(tmp_path, monkeypatch, "forgetful")
    with pytest.raises(BackendFailed, match="'attention_mask' is not in the exported model"):
        export(build, tmp_path / "exported")


def test_others_are_skipped_with_the_reason(tmp_path, monkeypatch) -> None:
    build = build_of(tmp_path, monkeypatch, "attention")
    (skip,) = EXPORT.propose(situation(export(build, tmp_path / "exported")))
    assert skip == Skip("onnx-export", "not a PyTorch model")
    bare = Machine("cpu", 2, 1 << 30, ())
    (skip,) = EXPORT.propose(situation(build, bare))
    assert skip == Skip("onnx-export", "onnxruntime is not installed")


@pytest.mark.parametrize("name", ["onnx-export", "openvino", "int8-dynamic", "int8-static"])
def test_on_a_gpu_a_model_stays_what_it_is(name: str) -> None:
    config = replace(a_config(), backend="pytorch", device="cuda", artifact="module.py")
    (skip,) = find(name).propose(a_situation(config, is_exhaustive=True))
    assert isinstance(skip, Skip)
    assert skip.reason.startswith("for CPUs only; on a GPU the PyTorch engine runs the model")


def test_what_was_built_is_compared_with_what_was_asked() -> None:
    before, step = Facts("pytorch"), Step("onnx-export")
    assert EXPORT.check(step, before, Facts("onnxruntime", operators={"Mul": 1})) == []
    assert EXPORT.check(step, before, Facts("pytorch")) == [
        "runs on 'pytorch', expected onnxruntime"
    ]
    assert EXPORT.check(step, before, Facts("onnxruntime")) == ["the exported graph is empty"]
    mixed = Facts("onnxruntime", operators={"Mul": 1}, batching_problem="rows differ")
    assert EXPORT.check(step, before, mixed) == ["rows may not share a batch any more: rows differ"]


class Halves(torch.nn.Module):
    """As in a repository for Triton: positions for names, and two outputs."""

    def forward(self, x):
        half = torch.relu(x) / 2
        return half, half.sum(dim=1, keepdim=True)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_torchscript_is_exported_by_a_trace_and_not_compiled(tmp_path) -> None:
    version = tmp_path / "original" / "1"
    version.mkdir(parents=True)
    torch.jit.script(Halves()).save(str(version / "model.pt"))
    x, half = TensorSpec("INPUT__0", "FP32", (4,)), TensorSpec("OUTPUT__0", "FP32", (4,))
    outputs = half, TensorSpec("OUTPUT__1", "FP32", (1,))
    config = replace(a_config(x, max_batch=8), backend="pytorch", outputs=outputs)
    config = folders.write_config(tmp_path / "original", config)
    build = Build(Candidate(), tmp_path / "original", config)
    exported = export(build, tmp_path / "exported")
    assert exported.config.backend == "onnxruntime"
    inputs = {"INPUT__0": np.arange(-6, 6, dtype=np.float32).reshape(3, 4)}
    ours, theirs = run(exported, inputs), run(build, inputs)
    assert ours.keys() == theirs.keys() == {"OUTPUT__0", "OUTPUT__1"}
    for name, values in theirs.items():
        assert np.allclose(ours[name], values, atol=1e-5)
    [skip] = find("torch-compile").propose(situation(build))
    assert skip.reason.startswith("torch.compile does not compile TorchScript")
