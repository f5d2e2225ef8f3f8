"""Builds for tests of trials, serving and the passes that write only config.pbtxt."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from onnx import helper, numpy_helper

from penstock.config import BatchPolicy, ModelConfig, PadAxis, Padding
from penstock.optimizer.candidates import Build, Candidate
from penstock.optimizer.examples import Examples, Split
from penstock.optimizer.facts import Facts
from penstock.optimizer.machine import Machine
from penstock.optimizer.passes import PassContext
from penstock.optimizer.plan import Plan
from penstock.optimizer.simulate import TimeTable
from penstock.repository import layout
from penstock.slo import parse
from penstock.types import TensorSpec

TEXT = TensorSpec("tokens", "INT64", (-1,))
IMAGE = TensorSpec("image", "FP32", (4,))
SCORES = TensorSpec("scores", "FP32", (2,))


def read(folder: Path) -> Build:
    found = layout.read(folder)
    assert found.problems == {}
    return Build(Candidate(), folder, found.configs[0])


def null_build(root: Path, *, max_batch: int = 8, **options: object) -> Build:
    """INT32 [1] to [1]; a batch of b rows takes a_ms + b x c_ms."""
    folder = root / "model"
    (folder / "1").mkdir(parents=True)
    lines = [
        f'backend: "null" max_batch_size: {max_batch} dynamic_batching {{ }}',
        'input { name: "x" data_type: TYPE_INT32 dims: 1 }',
        'output { name: "y" data_type: TYPE_INT32 dims: 1 }',
    ]
    for key, value in options.items():
        lines.append(f'parameters {{ key: "null.{key}" value {{ string_value: "{value}" }} }}')
    (folder / "config.pbtxt").write_text("\n".join(lines))
    return read(folder)


def mean_build(root: Path, write_onnx, *, masked: bool = True, config: str = "") -> Build:
    """Sequences [n, 2] to [2]: their sum, which zeros behind them do not change, or their mean,
    which they do."""
    operator = "ReduceSum" if masked else "ReduceMean"
    if masked:
        nodes = [helper.make_node(operator, ["x", "axes"], ["y"], keepdims=0)]
        constants = [numpy_helper.from_array(np.array([1], np.int64), "axes")]
    else:
        nodes = [helper.make_node(operator, ["x"], ["y"], keepdims=0, axes=[1])]
        constants = []
    folder = root / "model"
    inputs, outputs = {"x": ("FP32", ["batch", "n", 2])}, {"y": ("FP32", ["batch", 2])}
    write_onnx(folder / "1" / "model.onnx", nodes, inputs, outputs, constants)
    (folder / "config.pbtxt").write_text(config)
    return read(folder)


def company_build(root: Path, write_onnx) -> Build:
    """A model whose rows influence each other: each minus the mean of the batch."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], keepdims=1, axes=[0]),
        helper.make_node("Sub", ["x", "mean"], ["y"]),
    ]
    folder = root / "model"
    shape = ["batch", 3]
    write_onnx(folder / "1" / "model.onnx", nodes, {"x": ("FP32", shape)}, {"y": ("FP32", shape)})
    return read(folder)


def outlier_nodes() -> list:
    """Each row scaled by the largest value of the whole batch, but only where that is beyond 10:
    no random row is, so the check at load passes."""
    return [
        helper.make_node("Abs", ["x"], ["magnitude"]),
        helper.make_node("ReduceMax", ["magnitude"], ["largest"], keepdims=0),
        helper.make_node("Max", ["largest", "ten"], ["limit"]),
        helper.make_node("Div", ["limit", "ten"], ["scale"]),
        helper.make_node("Div", ["x", "scale"], ["y"]),
    ]


def write_outlier_model(path: Path, write_onnx, num_features: int = 3) -> Path:
    """A model whose rows influence each other next to an outlier only."""
    kind = ("FP32", ["batch", num_features])
    ten = [numpy_helper.from_array(np.float32([10.0]), "ten")]
    return write_onnx(path, outlier_nodes(), {"x": kind}, {"y": kind}, ten)


def a_config(
    spec: TensorSpec = IMAGE, *, max_batch: int = 32, is_dynamic: bool = True, **others: object
) -> ModelConfig:
    policy = BatchPolicy(max(1, max_batch), is_dynamic)
    return ModelConfig(
        "model", "1", "onnxruntime", "model.onnx", (spec,), (SCORES,), max_batch, policy, **others
    )


def a_table(a_s: float = 0.004, c_s: float = 0.001, *, lengths=(0,), instances=1, threads=2):
    """T(b) = (a + c b) x length / 32; without lengths as it is."""
    seconds = {
        length: {b: (a_s + c_s * b) * (length / 32 if length else 1) for b in (1, 8, 32)}
        for length in lengths
    }
    return TimeTable(instances, threads, seconds)


def a_packed_config(max_batch: int = 256, max_tokens: int | None = None, **others: object):
    """Texts of up to 384 tokens, whose padding is not computed, on a GPU."""
    config = a_config(
        TEXT,
        max_batch=max_batch,
        padding=Padding((PadAxis("tokens", 0),), (384,)),
        options={"penstock.pack": "tokens"},
        device="cuda",
        **others,
    )
    return replace(config, batching=replace(config.batching, max_tokens=max_tokens))


def a_packed_table(a_s: float = 0.002, c_s: float = 1e-6, *, mean: int = 100, instances=1):
    """T = a + c x tokens, measured with rows of this many tokens."""
    rows = (1, 8, 32, 128, 256)
    return TimeTable(
        instances,
        2,
        {384: {b: a_s + c_s * mean * b for b in rows}},
        tokens={384: {b: float(mean * b) for b in rows}},
    )


def a_situation(
    config: ModelConfig,
    *tables: TimeTable,
    slo: str = "p99 < 100ms",
    rows=(),
    facts: Facts | None = None,
    num_cores: int = 2,
    is_exhaustive: bool = False,
) -> PassContext:
    plan = Plan(
        "m.onnx", "model", "out", slo=parse(slo) if slo else None, is_exhaustive=is_exhaustive
    )
    examples = Examples(rows, None, Split((), (), ()), "", "") if rows else None
    return PassContext(
        plan,
        Machine("a processor", num_cores, 1 << 33, ()),
        Build(Candidate(), Path("nowhere/model"), config),
        facts or Facts("onnxruntime"),
        examples,
        {(table.num_instances, table.num_threads): table for table in tables},
        rows,
    )


def texts(lengths) -> list[dict[str, np.ndarray]]:
    return [{"tokens": np.arange(length)} for length in lengths]
