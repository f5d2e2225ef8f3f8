"""Adversaries of the accuracy gate: models with a planted fault, and what must not happen to them.

Each makes a model, its data, the flags of one `penstock optimize` and a judge that knows the fault.
The judge looks at answers to fresh rows only (`oracle`); it asks Penstock nothing. Twins are the
same models without the fault: the gate has to let a lossy step of theirs pass.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from oracle import (
    Answers,
    Judge,
    Row,
    both,
    close,
    cosine,
    equal,
    near,
    run_onnx,
    run_python,
    same_best,
    score_at_least,
)
from suites.onnx_models import OPSET, Graph
from traps import SERVING, Other, save_rows

from penstock.config import ModelConfig
from penstock.optimizer import folders
from penstock.optimizer.candidates import Build, Step
from penstock.optimizer.passes import BuildContext
from penstock.types import Array

Random = np.random.Generator
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL

# Missed by all, so that every step is tried; kept by all; kept by a step that is fast enough; kept
# by two instances.
MISSED, EASY = "p99 < 0.01 ms at 20/s", "p99 < 500 ms at 50/s"
FASTER, TWO_INSTANCES = "p90 < 20 ms at 20/s", "p90 < 100 ms at 60/s"
INT8 = ("int8-static", *SERVING)
DYNAMIC = ("int8-dynamic", *SERVING)
BF16 = ("openvino", "half", *SERVING)
FP16 = ("half", *SERVING)
COMPILED = ("onnx-graph", "openvino", *SERVING)

SIZE, WIDTH, COLUMNS = 32, 64, 16
NUM_ROWS, NUM_FRESH = 1_000, 200
# An activation channel that leaves no levels of a byte for the others.
OUTLIER = 3_000.0
SLOW_MS, FAST_MS = 25.0, 5.0
NAME = "m"


@dataclass(frozen=True)
class Planted:
    """What the command gets, and what a judge needs to know afterwards."""

    model: str
    flags: tuple[str, ...]
    # Rows that the command has not seen, of the same kinds.
    fresh: Sequence[Row]
    is_broken: Judge
    # Empty: all passes of the command.
    passes: tuple[str, ...] = ()
    slo: str = MISSED
    # Enough for every step on a busy machine, too little for a search for the highest rate.
    budget_s: int = 110
    has_batch: bool = True
    # Rows in a batch when builds are judged: 1 where it is known that they must not share one.
    batch_rows: int = 16


Make = Callable[[Path, Random], Planted]


@dataclass(frozen=True)
class Adversary:
    name: str
    planted: str
    must: str
    make: Make = field(repr=False)
    # Has to build something broken in at least one of its steps, or it is no adversary. Others are
    # faulty from the beginning, or only when they are served.
    breaks_a_build: bool = False
    # Runs in `make test`.
    is_quick: bool = False
    # Whether a twin got what it is entitled to.
    is_served_well: Callable[[ModelConfig], bool] | None = field(default=None, repr=False)


# Parts of ONNX models.


def draw_rows(random: Random, *shape: int) -> Array:
    """Rows of sixteen classes that are well apart, by one of their first sixteen elements. The last
    element is zero: it marks rows of special kinds."""
    rows = random.normal(size=(*shape, SIZE)) * 0.3
    places = random.integers(0, COLUMNS, shape)[..., None]
    np.put_along_axis(rows, places, 3.0 + np.take_along_axis(rows, places, -1), -1)
    rows[..., -1] = 0.0
    return rows.astype(np.float32)


class Net(Graph):
    """A graph with several outputs, whose heads are fitted to the classes of `draw_rows`."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        # What layers give for rows to fit heads to.
        self._seen = {"x": draw_rows(self.random, 2_000).astype(np.float64)}
        self._classes = self._seen["x"][:, :COLUMNS].argmax(-1)

    def relu(self, value: str, *, is_fragile: bool = False) -> str:
        """A layer that bears INT8 and BF16; the first one does not look at the marker. If fragile,
        one channel is huge and multiplied by nothing, so that INT8 keeps nothing else."""
        name = f"layer.{len(self.nodes)}"
        size = self._seen[value].shape[1]
        weight = self.random.normal(size=(size, WIDTH)) * np.sqrt(2 / size)
        if value == "x":
            weight[-1] = 0
        if is_fragile:
            weight[0] = 0
        given = self._with_outlier(value) if is_fragile else value
        found = self.add("Relu", self.product(given, weight, name))
        self._seen[found] = np.maximum(self._seen[value] @ weight, 0)
        return found

    def _with_outlier(self, value: str) -> str:
        scales = np.ones(self._seen[value].shape[1])
        scales[0] = OUTLIER
        return self.add("Mul", value, self.floats(f"scales.{len(self.nodes)}", scales))

    def floats(self, name: str, values: Any) -> str:
        return self.weight(name, np.asarray(values, np.float32))

    def product(self, value: str, weight: Any, name: str) -> str:
        return self.add("MatMul", value, self.floats(name, weight), name=name)

    def head(self, value: str, *, scale: Any = 1.0) -> str:
        """A score for each class, of which the right one is about 4 and the others about 0."""
        weight = self.fitted(value)
        return self.product(value, weight * scale, f"head.{len(self.nodes)}")

    def mixed(self, value: str, *, scale: Any = 1.0, columns: int = COLUMNS) -> str:
        """Numbers that differ from row to row, without classes."""
        weight = self.random.normal(size=(WIDTH, columns)) / np.sqrt(WIDTH) * scale
        return self.product(value, weight, f"mixed.{len(self.nodes)}")

    def fragile(self, value: str, *, is_faulty: bool, is_mixed: bool = False) -> str:
        """A head that INT8 turns into zeros: one channel is huge and multiplied by nothing."""
        name = f"fragile.{len(self.nodes)}"
        seen = self._seen[value].copy()
        if is_faulty:
            value = self._with_outlier(value)
            seen[:, 0] = 0
        weight = self._fit(seen)
        if is_mixed:
            weight = self.random.normal(size=(seen.shape[1], COLUMNS)) / np.sqrt(WIDTH)
            weight[0] = 0 if is_faulty else weight[0]
        found = self.product(value, weight, name)
        self._seen[found] = seen @ weight
        return found

    def marker(self) -> str:
        """The last element of each row."""
        starts, ends = ([SIZE - 1], [SIZE])
        bounds = [self.constant(each, np.int64) for each in (starts, ends)]
        return self.add("Slice", "x", *bounds, self.axis(1))

    def is_marked(self) -> str:
        """1.0 where the marker is above 5, else 0.0."""
        return self.add("Cast", self.add("Greater", self.marker(), self.constant(5.0)), to=FLOAT)

    def typical(self, value: str) -> float:
        """The median of a row's largest element."""
        return float(np.median(self._seen[value].max(axis=1)))

    def fitted(self, value: str, *, is_centred: bool = False) -> Array:
        """Weights of a head; if centred, it takes no notice of what is added to all channels."""
        seen = self._seen[value]
        if not is_centred:
            return self._fit(seen)
        weight = self._fit(seen - seen.mean(axis=1, keepdims=True))
        return weight - weight.mean(axis=0)

    def _fit(self, seen: Array) -> Array:
        found: Array = np.linalg.lstsq(seen, 4 * np.eye(COLUMNS)[self._classes], rcond=1e-6)[0]
        return found

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        return self.weight(f"constant.{len(self.weights)}", np.array(value, dtype))

    def axis(self, number: int) -> str:
        return self.constant([number], np.int64)

    def save(
        self,
        path: Path,
        inputs: dict[str, tuple[int, list[Any]]],
        outputs: dict[str, tuple[str, int, list[Any]]],
    ) -> Path:
        nodes = [
            helper.make_node("Identity", [value], [name], name=f"output.{name}")
            for name, (value, _, _) in outputs.items()
        ]
        graph = helper.make_graph(
            [*self.nodes, *nodes],
            "planted",
            [helper.make_tensor_value_info(name, *each) for name, each in inputs.items()],
            [
                helper.make_tensor_value_info(name, kind, shape)
                for name, (_, kind, shape) in outputs.items()
            ],
            self.weights,
        )
        opsets = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
        onnx.checker.check_model(model)
        onnx.save_model(model, str(path))
        return path


def net(random: Random) -> Net:
    return Net(int(random.integers(1 << 30)))


X = {"x": (FLOAT, ["b", SIZE])}


def normal(random: Random, *shape: int) -> Array:
    return random.normal(size=shape).astype(np.float32)


def split(rows: Array) -> list[Row]:
    return [{"x": row} for row in rows]


def stacked(answers: Answers, output: str) -> Array:
    return np.stack([each[output] for each in answers])


def noisy_labels(random: Random, scores: Array) -> Array:
    """The model's best class, and for one row in twenty another."""
    labels = scores.argmax(-1)
    is_other = random.random(len(labels)) < 0.05
    labels[is_other] = random.integers(0, scores.shape[-1], is_other.sum())
    return labels


def onnx_case(
    folder: Path,
    path: Path,
    data: Array,
    fresh: Array,
    judge: Callable[[Answers], Judge],
    **more: Any,
) -> Planted:
    """A model of one float input; the judge is made of the original's answers to each row alone."""
    rows = split(fresh)
    truth = run_onnx(path, rows)
    labels = more.pop("labels", None)
    arrays = {"x": data} if labels is None else {"x": data, "labels": labels}
    flags = ("--data", save_rows(folder / "data.npz", **arrays), *more.pop("flags", ()))
    return Planted(str(path), flags, rows, judge(truth), **more)


# Several scales in one output.


def columns(folder: Path, random: Random, *, is_faulty: bool, is_evaluated: bool) -> Planted:
    """Sixteen columns of pixels next to sixteen scores in one product: INT8 has one step for all.
    The first column is always the largest."""
    graph = net(random)
    hidden = graph.relu("x")
    pixels = graph.random.normal(size=(WIDTH, COLUMNS)) * (3.0 if is_faulty else 0.1)
    offsets = np.zeros(2 * COLUMNS)
    offsets[0] = 640.0 if is_faulty else 5.0
    weight = np.concatenate([pixels, graph.fitted(hidden) / 4], axis=1)
    found = graph.product(hidden, weight, "head")
    value = graph.add("Add", found, graph.floats("offsets", offsets))
    path = graph.save(folder / "m.onnx", X, {"y": (value, FLOAT, ["b", 2 * COLUMNS])})
    data, fresh = draw_rows(random, NUM_ROWS), draw_rows(random, NUM_FRESH)
    more: dict[str, Any] = {"passes": INT8}
    if is_evaluated:
        (folder / "scoring.py").write_text(SCORES_EVAL.format(first=COLUMNS))
        right = stacked(run_onnx(path, split(data)), "y")[:, COLUMNS:]
        more["labels"] = noisy_labels(random, right)
        more["flags"] = ("--eval", "scoring:score")
    judge = lambda truth: same_best(truth, "y", slice(COLUMNS, None), 0.9)  # noqa: E731
    return onnx_case(folder, path, data, fresh, judge, **more)


SCORES_EVAL = """
def score(outputs, labels):
    '''Whether the best of the scores behind the pixels is the right one.'''
    return [float(each["y"][{first}:].argmax() == label) for each, label in zip(outputs, labels)]
"""


def columns_4d(folder: Path, random: Random, *, is_faulty: bool) -> Planted:
    """The same on a grid: columns are axis 1."""
    graph = net(random)
    scales = np.ones((COLUMNS, 1, 1, 1))
    scales[:4] = 300.0 if is_faulty else 1.0
    first = graph.add("Conv", "x", graph.drawn("w1", 16, 3, 3, 3), name="first", pads=[1] * 4)
    weight = graph.random.normal(size=(COLUMNS, 16, 3, 3)) / 12 * scales
    value = graph.add(
        "Conv", graph.add("Relu", first), graph.floats("w2", weight), name="second", pads=[1] * 4
    )
    inputs = {"x": (FLOAT, ["b", 3, 8, 8])}
    path = graph.save(folder / "m.onnx", inputs, {"y": (value, FLOAT, ["b", COLUMNS, 8, 8])})

    def judge(truth: Answers) -> Judge:
        def scores(answers: Answers) -> Answers:
            return [{"scores": np.moveaxis(each["y"], 0, -1)} for each in answers]

        inner = same_best(scores(truth), "scores", slice(4, None), 0.9)
        return lambda answers: inner(scores(answers))

    rows = normal(random, 600, 3, 8, 8)
    fresh = normal(random, 60, 3, 8, 8)
    return onnx_case(folder, path, rows, fresh, judge, passes=INT8)


# Several outputs.


def second_output(folder: Path, random: Random, *, is_faulty: bool, kind: str) -> Planted:
    """Labels judge `logits`; INT8 turns what the other output is made of into zeros."""
    graph = net(random)
    hidden = graph.relu("x")
    logits = graph.head(hidden)
    other = graph.fragile(hidden, is_faulty=is_faulty)
    outputs = {"logits": (logits, FLOAT, ["b", COLUMNS])}
    if kind == "embedding":
        outputs["embedding"] = (other, FLOAT, ["b", COLUMNS])
    else:
        best = graph.add("ArgMax", other, axis=1, keepdims=1)
        outputs["ids"] = (best, INT64, ["b", 1])
    path = graph.save(folder / "m.onnx", X, outputs)
    data, fresh = draw_rows(random, NUM_ROWS), draw_rows(random, NUM_FRESH)
    labels = noisy_labels(random, stacked(run_onnx(path, split(data)), "logits"))

    def judge(truth: Answers) -> Judge:
        if kind == "embedding":
            return near(truth, "embedding")
        return equal(truth, "ids", 0.8)

    accuracy = ("--accuracy", "top1 drop <= 2 %")
    return onnx_case(folder, path, data, fresh, judge, passes=INT8, labels=labels, flags=accuracy)


def selected_rows(folder: Path, random: Random, *, is_faulty: bool) -> Planted:
    """Proposals above a threshold, as behind non-maximum suppression: how many depends on data."""
    graph = net(random)
    hidden = graph.relu("x")
    scores = graph.fragile(hidden, is_faulty=is_faulty, is_mixed=True)
    boxes = graph.mixed(hidden)
    best = graph.add("ReduceMax", scores, axes=[1], keepdims=0)
    is_kept = graph.add("Greater", best, graph.constant(graph.typical(scores)))
    chosen = graph.add("Compress", boxes, is_kept, axis=0)
    path = graph.save(
        folder / "m.onnx",
        {"x": (FLOAT, [24, SIZE])},
        {"boxes": (chosen, FLOAT, ["n", COLUMNS])},
    )
    data, rows = draw_rows(random, 600, 24), split(draw_rows(random, NUM_FRESH, 24))
    truth = run_onnx(path, rows, has_batch=False)

    def judge(answers: Answers) -> str:
        """How many of the original's boxes are still there."""
        shares = [
            np.mean(
                [
                    max((cosine(box, o) for o in other["boxes"]), default=0.0) > 0.95
                    for box in one["boxes"]
                ]
            )
            for one, other in zip(truth, answers, strict=True)
            if len(one["boxes"])
        ]
        share = float(np.mean(shares))
        return "" if share >= 0.7 else f"boxes: {share:.0%} of the original's are found"

    flags = ("--data", save_rows(folder / "data.npz", x=data))
    return Planted(str(path), flags, rows, judge, passes=INT8, has_batch=False)


# Rare kinds of rows.


RARE_CLASS = 7
RARE_EVAL = """
import numpy as np

def score(outputs, labels):
    '''Classes count alike: one row of the rare class weighs as much as all that it stands for.'''
    weights = np.where(labels == {rare}, {weight}, 1.0)
    right = np.array([each["logits"].argmax() for each in outputs]) == labels
    return right * weights
"""


def rare_class(folder: Path, random: Random, *, is_faulty: bool) -> Planted:
    """Two in a hundred rows are of a class whose logit comes from a head that INT8 destroys."""
    graph = net(random)
    hidden = graph.relu("x")
    rare = graph.fragile(hidden, is_faulty=is_faulty)
    magnitude = graph.add("Abs", graph.add("ReduceSum", rare, graph.axis(1), keepdims=1))
    bonus = graph.add("Mul", graph.add("Mul", magnitude, graph.is_marked()), graph.constant(50.0))
    spread = np.zeros((1, COLUMNS))
    spread[0, RARE_CLASS] = 1.0
    logits = graph.add(
        "Add", graph.head(hidden), graph.add("Mul", bonus, graph.floats("spread", spread))
    )
    path = graph.save(folder / "m.onnx", X, {"logits": (logits, FLOAT, ["b", COLUMNS])})

    def draw(count: int) -> Array:
        rows = draw_rows(random, count)
        rows[random.random(count) < 0.02, -1] = 6.0
        return rows

    data, fresh = draw(2_000), draw(2_000)
    labels = stacked(run_onnx(path, split(data)), "logits").argmax(-1)
    (folder / "scoring.py").write_text(RARE_EVAL.format(rare=RARE_CLASS, weight=20.0))

    def judge(truth: Answers) -> Judge:
        rows = [
            i
            for i, each in enumerate(truth)
            if each["logits"].argmax() == RARE_CLASS and fresh[i, -1] > 5
        ]
        return same_best(truth, "logits", slice(None), 0.8, rows)

    flags = ("--eval", "scoring:score", "--accuracy", "score drop <= 5 % relative")
    return onnx_case(folder, path, data, fresh, judge, passes=INT8, labels=labels, flags=flags)


def outliers(
    folder: Path,
    random: Random,
    *,
    is_faulty: bool,
    share: float = 0.05,
    is_calibrated: bool = True,
) -> Planted:
    """Some rows are four hundred times as large; a range for all leaves no levels for the others,
    and a narrower one cuts them off."""
    graph = net(random)
    found = graph.head(graph.relu(graph.relu("x")))
    path = graph.save(folder / "m.onnx", X, {"y": (found, FLOAT, ["b", COLUMNS])})

    def draw(count: int, part: float = share) -> Array:
        rows = draw_rows(random, count)
        if is_faulty:
            rows[random.random(count) < part] *= 400
        return rows

    data, fresh = draw(NUM_ROWS), draw(600)
    is_outlier = np.abs(fresh).max(axis=1) > 50
    # One example of 400 that differs is already too many to show a loss of less than 1 %.
    flags = ("--accuracy", "agreement drop <= 3 %")
    if not is_calibrated:
        flags += ("--calibration", save_rows(folder / "plain.npz", x=draw(300, 0.0)))
    more: dict[str, Any] = {"passes": INT8, "flags": flags}

    def judge(truth: Answers) -> Judge:
        usual = same_best(truth, "y", slice(None), 0.9, np.flatnonzero(~is_outlier))
        large = np.flatnonzero(is_outlier)
        return both(usual, same_best(truth, "y", slice(None), 0.9, large)) if len(large) else usual

    return onnx_case(folder, path, data, fresh, judge, **more)


def few_that_matter(folder: Path, random: Random) -> Planted:
    """One answer for almost all rows; the few others come from a head that INT8 destroys."""
    graph = net(random)
    hidden = graph.relu("x")
    special = graph.add("Mul", graph.fragile(hidden, is_faulty=True), graph.is_marked())
    usual = np.zeros(COLUMNS)
    usual[0] = 0.05
    value = graph.add("Add", special, graph.floats("usual", usual))
    path = graph.save(folder / "m.onnx", X, {"y": (value, FLOAT, ["b", COLUMNS])})

    def draw(count: int) -> Array:
        rows = draw_rows(random, count)
        rows[random.random(count) < 0.03, -1] = 6.0
        return rows

    fresh = draw(600)
    rows = np.flatnonzero(fresh[:, -1] > 5)
    judge = lambda truth: same_best(truth, "y", slice(None), 0.8, rows)  # noqa: E731
    return onnx_case(folder, path, draw(NUM_ROWS), fresh, judge, passes=INT8)


def missed_mode(folder: Path, random: Random) -> Planted:
    """Two modes that look alike; one is moved far away inside the model, and back."""
    graph = net(random)
    hidden = graph.relu("x")
    weight = graph.fitted(hidden, is_centred=True)
    below = graph.add("Relu", graph.add("Neg", graph.marker()))
    moved = graph.add("Add", hidden, graph.add("Mul", below, graph.constant(100.0)))
    value = graph.product(moved, weight, "head")
    path = graph.save(folder / "m.onnx", X, {"y": (value, FLOAT, ["b", COLUMNS])})

    def draw(count: int, *signs: int) -> Array:
        rows = draw_rows(random, count)
        rows[:, -1] = (1 + np.abs(rows[:, -2])) * random.choice(signs, count)
        return rows

    data, fresh = draw(NUM_ROWS, -1, 1), draw(400, -1, 1)
    flags = ("--calibration", save_rows(folder / "one_mode.npz", x=draw(300, 1)))
    rows = np.flatnonzero(fresh[:, -1] < 0)
    judge = lambda truth: same_best(truth, "y", slice(None), 0.8, rows)  # noqa: E731
    return onnx_case(folder, path, data, fresh, judge, passes=INT8, flags=flags)


# Numbers that fewer bits cannot hold.


def cancellation(folder: Path, random: Random, *, is_faulty: bool) -> Planted:
    """(h + s) W - s W with a large s that depends on the row: BF16 keeps nothing of h."""
    graph = net(random)
    hidden = graph.relu("x")
    weight = graph.fitted(hidden)
    if is_faulty:
        total = graph.add("ReduceSum", graph.add("Abs", "x"), graph.axis(1), keepdims=1)
        large = graph.add("Mul", total, graph.constant(100.0))
        hidden = graph.add("Concat", graph.add("Add", hidden, large), large, axis=1)
        weight = np.concatenate([weight, -weight.sum(0, keepdims=True)])
    value = graph.product(hidden, weight, "head")
    path = graph.save(folder / "m.onnx", X, {"y": (value, FLOAT, ["b", COLUMNS])})
    rows, fresh = draw_rows(random, NUM_ROWS), draw_rows(random, NUM_FRESH)
    judge = lambda truth: same_best(truth, "y", slice(None), 0.85)  # noqa: E731
    return onnx_case(folder, path, rows, fresh, judge, passes=BF16)


def outlier_channel(folder: Path, random: Random, *, is_faulty: bool) -> Planted:
    """One channel of one layer in five is huge, and multiplied by nothing."""
    graph = net(random)
    value = graph.relu("x")
    place = int(random.integers(3))
    for index in range(3):
        value = graph.relu(value, is_fragile=is_faulty and index == place)
    path = graph.save(folder / "m.onnx", X, {"y": (graph.head(value), FLOAT, ["b", COLUMNS])})
    rows, fresh = draw_rows(random, NUM_ROWS), draw_rows(random, NUM_FRESH)
    judge = lambda truth: same_best(truth, "y", slice(None), 0.8)  # noqa: E731
    more = {"passes": INT8, "flags": ("--accuracy", "agreement drop <= 5 %")}
    return onnx_case(folder, path, rows, fresh, judge, **more)


def zero_divisor(folder: Path, random: Random, *, is_logarithm: bool) -> Planted:
    """A divisor, or what a logarithm is taken of, that becomes 0 in INT8 and never in float."""
    graph = net(random)
    hidden = graph.relu("x")
    small = graph.add("Abs", graph.fragile(hidden, is_faulty=True))
    odd = graph.add("Log", small) if is_logarithm else graph.add("Div", small, small)
    value = graph.add("Add", graph.head(hidden), odd)
    path = graph.save(folder / "m.onnx", X, {"y": (value, FLOAT, ["b", COLUMNS])})
    rows, fresh = draw_rows(random, NUM_ROWS), draw_rows(random, NUM_FRESH)
    judge = lambda truth: both(same_best(truth, "y", slice(None), 0.8), near(truth, "y"))  # noqa: E731
    return onnx_case(folder, path, rows, fresh, judge, passes=INT8)


def overflow(folder: Path, random: Random, *, is_faulty: bool) -> Planted:
    """A factor beyond 65,504, the largest number of FP16."""
    graph = net(random)
    hidden = graph.relu("x")
    weight = graph.fitted(hidden)
    if is_faulty:
        hidden = graph.add("Sqrt", graph.add("Mul", hidden, graph.constant(1e5)))
        hidden = graph.add("Mul", graph.add("Mul", hidden, hidden), graph.constant(1e-5))
    value = graph.product(hidden, weight, "head")
    path = graph.save(folder / "m.onnx", X, {"y": (value, FLOAT, ["b", COLUMNS])})
    rows, fresh = draw_rows(random, NUM_ROWS), draw_rows(random, NUM_FRESH)
    judge = lambda truth: close(truth, "y", 0.2)  # noqa: E731
    return onnx_case(folder, path, rows, fresh, judge, passes=FP16, flags=("--exhaustive",))


def tiny_outputs(folder: Path, random: Random) -> Planted:
    """Outputs of about 1e-12, which FP16 has no numbers for."""
    graph = net(random)
    small = graph.add("Mul", graph.head(graph.relu("x")), graph.constant(1e-12))
    path = graph.save(folder / "m.onnx", X, {"density": (small, FLOAT, ["b", COLUMNS])})
    rows, fresh = draw_rows(random, NUM_ROWS), draw_rows(random, NUM_FRESH)
    judge = lambda truth: close(truth, "density", 0.2)  # noqa: E731
    return onnx_case(folder, path, rows, fresh, judge, passes=FP16, flags=("--exhaustive",))


def denormal_weights(folder: Path, random: Random) -> Planted:
    """Weights of 1e-39, which a step that loses nothing takes for zero."""
    graph = net(random)
    value = graph.mixed(graph.relu("x"), scale=1e-39)
    value = graph.add("Mul", value, graph.constant(1e30))
    path = graph.save(folder / "m.onnx", X, {"y": (value, FLOAT, ["b", COLUMNS])})
    rows, fresh = draw_rows(random, NUM_ROWS), draw_rows(random, NUM_FRESH)
    judge = lambda truth: near(truth, "y")  # noqa: E731
    return onnx_case(folder, path, rows, fresh, judge, passes=COMPILED)


def rounding_trick(folder: Path, random: Random) -> Planted:
    """(h + 3 * 2^22) - 3 * 2^22 rounds to whole numbers; a compiler that simplifies it does not."""
    graph = net(random)
    large = graph.constant(3.0 * 2**22)
    whole = graph.add("Sub", graph.add("Add", graph.relu("x"), large), large)
    path = graph.save(folder / "m.onnx", X, {"y": (graph.mixed(whole), FLOAT, ["b", COLUMNS])})
    rows, fresh = draw_rows(random, NUM_ROWS), draw_rows(random, NUM_FRESH)
    judge = lambda truth: close(truth, "y", 0.02)  # noqa: E731
    return onnx_case(folder, path, rows, fresh, judge, passes=COMPILED)


def ids_as_floats(folder: Path, random: Random) -> Planted:
    """An id of four digits in a column of floats: BF16 rounds it to another one."""
    graph = net(random)
    chosen = np.zeros((SIZE, COLUMNS))
    chosen[-1, 0] = 1.0
    picked = graph.add("MatMul", "x", graph.floats("chosen", chosen), name="chosen")
    number = graph.add("ReduceSum", picked, graph.axis(1), keepdims=0)
    ids = graph.add("Cast", number, to=INT64)
    table = graph.floats("table", graph.random.normal(size=(4096, COLUMNS)))
    looked_up = graph.add("Gather", table, ids)
    value = graph.add("Add", looked_up, graph.head(graph.relu("x"), scale=0.1))
    path = graph.save(folder / "m.onnx", X, {"y": (value, FLOAT, ["b", COLUMNS])})

    def draw(count: int) -> Array:
        rows = draw_rows(random, count)
        rows[:, -1] = random.integers(0, 4096, count)
        return rows

    judge = lambda truth: same_best(truth, "y", slice(None), 0.9)  # noqa: E731
    return onnx_case(folder, path, draw(NUM_ROWS), draw(NUM_FRESH), judge, passes=BF16)


def large_ids(folder: Path, random: Random) -> Planted:
    """Ids around 2^31 as INT64: a runtime that computes them as INT32 finds other rows."""
    graph = net(random)
    first = 2**31 - 5_000
    moved = graph.add("Sub", "ids", graph.constant(first, np.int64))
    bounds = [graph.constant(each, np.int64) for each in (0, 9_999)]
    place = graph.add("Clip", moved, *bounds)
    table = graph.floats("table", graph.random.normal(size=(10_000, WIDTH)))
    value = graph.mixed(graph.add("Gather", table, place))
    inputs = {"ids": (INT64, ["b"])}
    path = graph.save(folder / "m.onnx", inputs, {"y": (value, FLOAT, ["b", COLUMNS])})
    data = first + random.integers(0, 10_000, NUM_ROWS)
    fresh: list[Row] = [{"ids": np.array(first + each)} for each in random.integers(0, 10_000, 60)]
    truth = run_onnx(path, fresh)
    flags = ("--data", save_rows(folder / "data.npz", ids=data))
    return Planted(str(path), flags, fresh, same_best(truth, "y", slice(None), 0.95), COMPILED)


def account_numbers(folder: Path, random: Random) -> Planted:
    """Numbers of nine digits in FP64, which a runtime that computes in FP32 rounds. Their range is
    so large that the rounding is nothing to it."""
    graph = net(random)
    numbers = 350_000_000 + graph.random.permutation(1_000_000)[:5_000].astype(np.float64)
    table = graph.weight("table", numbers[:, None])
    value = graph.add("Gather", table, "ids")
    outputs = {"account": (value, TensorProto.DOUBLE, ["b", 1])}
    path = graph.save(folder / "m.onnx", {"ids": (INT64, ["b"])}, outputs)
    data = random.integers(0, 5_000, NUM_ROWS)
    fresh: list[Row] = [{"ids": np.array(each)} for each in random.integers(0, 5_000, 60)]
    truth = run_onnx(path, fresh)
    flags = ("--data", save_rows(folder / "data.npz", ids=data))
    return Planted(str(path), flags, fresh, equal(truth, "account", 0.95), COMPILED)


def prices_beside_outliers(folder: Path, random: Random) -> Planted:
    """One positive number per row, whose cosine is always 1. A row in thirty is so large that its
    neighbours in a batch become constant in dynamic INT8, and makes the column's range huge."""
    graph = net(random)
    weight = np.abs(graph.random.normal(size=(WIDTH, 1))) / WIDTH
    price = graph.product(graph.relu("x"), weight, "last")
    value = graph.add("Add", price, graph.constant(20.0))
    path = graph.save(folder / "m.onnx", X, {"price": (value, FLOAT, ["b", 1])})

    def draw(count: int) -> Array:
        rows = draw_rows(random, count)
        rows[random.random(count) < 0.03] *= 2_000
        return rows

    fresh = draw(400)
    usual = np.flatnonzero(np.abs(fresh).max(axis=1) < 100)

    def judge(truth: Answers) -> Judge:
        def score(answers: Answers) -> float:
            one, other = (stacked(each, "price")[usual] for each in (truth, answers))
            return float(np.mean(np.abs(one - other) < one.std()))

        return score_at_least(score, 0.95)

    return onnx_case(folder, path, draw(NUM_ROWS), fresh, judge, passes=DYNAMIC)


# Answers that agree by the number that is looked at.


def regression(folder: Path, random: Random, *, is_faulty: bool) -> Planted:
    """Values over six orders of magnitude, of which users want each within some per cent."""
    graph = net(random)
    value = graph.add(
        "Exp",
        graph.add(
            "Mul",
            graph.fragile(graph.relu("x"), is_faulty=is_faulty, is_mixed=True),
            graph.constant(0.8),
        ),
    )
    first = np.zeros((COLUMNS, 1))
    first[0] = 1.0
    value = graph.add("MatMul", value, graph.floats("first", first))
    path = graph.save(folder / "m.onnx", X, {"price": (value, FLOAT, ["b", 1])})
    data, fresh = draw_rows(random, NUM_ROWS), draw_rows(random, NUM_FRESH)
    labels = stacked(run_onnx(path, split(data)), "price")[:, 0]
    labels = labels * np.exp(random.normal(size=len(labels)) * 0.1)
    (folder / "scoring.py").write_text(RELATIVE_EVAL)

    def judge(truth: Answers) -> Judge:
        def score(answers: Answers) -> float:
            pairs = zip(truth, answers, strict=True)
            return float(np.mean([abs(o["price"][0] / t["price"][0] - 1) < 0.3 for t, o in pairs]))

        return score_at_least(score, 0.85)

    flags = ("--eval", "scoring:score", "--accuracy", "score drop <= 4 %")
    return onnx_case(folder, path, data, fresh, judge, passes=INT8, labels=labels, flags=flags)


RELATIVE_EVAL = """
def score(outputs, labels):
    '''Within 30 per cent of the right value.'''
    pairs = zip(outputs, labels)
    return [float(abs(float(each["price"][0]) / label - 1) < 0.3) for each, label in pairs]
"""


def confidence(folder: Path, random: Random, *, is_faulty: bool) -> Planted:
    """The best class stays, how sure it is does not: the temperature has a head of its own."""
    graph = net(random)
    hidden = graph.relu("x")
    raw = graph.add(
        "ReduceSum",
        graph.fragile(hidden, is_faulty=is_faulty),
        graph.axis(1),
        keepdims=1,
    )
    heat = graph.add(
        "Add", graph.add("Mul", graph.add("Abs", raw), graph.constant(0.8)), graph.constant(0.05)
    )
    value = graph.add("Softmax", graph.add("Mul", graph.head(hidden), heat), axis=-1)
    path = graph.save(folder / "m.onnx", X, {"probabilities": (value, FLOAT, ["b", COLUMNS])})
    rows, fresh = draw_rows(random, NUM_ROWS), draw_rows(random, NUM_FRESH)

    def judge(truth: Answers) -> Judge:
        def score(answers: Answers) -> float:
            pairs = zip(truth, answers, strict=True)
            gaps = [np.abs(t["probabilities"] - o["probabilities"]).max() for t, o in pairs]
            return 1.0 - float(np.mean(gaps))

        return score_at_least(score, 0.85)

    flags = ("--accuracy", "agreement drop <= 8 %")
    return onnx_case(folder, path, rows, fresh, judge, passes=INT8, flags=flags)


def neighbour_order(folder: Path, random: Random, *, is_faulty: bool) -> Planted:
    """Unit vectors that share one direction; what tells them apart is lost in INT8."""
    graph = net(random)
    own = graph.fragile(graph.relu("x"), is_faulty=is_faulty, is_mixed=True)
    shared = graph.random.normal(size=COLUMNS)
    shared *= (14.0 if is_faulty else 3.0) / np.linalg.norm(shared)
    raw = graph.add("Add", own, graph.floats("shared", shared))
    square = graph.add("ReduceSum", graph.add("Mul", raw, raw), graph.axis(1), keepdims=1)
    unit = graph.add("Div", raw, graph.add("Sqrt", square))
    path = graph.save(folder / "m.onnx", X, {"embedding": (unit, FLOAT, ["b", COLUMNS])})
    rows, fresh = normal(random, NUM_ROWS, SIZE), normal(random, NUM_FRESH, SIZE)

    def judge(truth: Answers) -> Judge:
        def order(answers: Answers) -> Array:
            vectors = stacked(answers, "embedding")
            near_by = vectors[:60] @ stacked(truth, "embedding")[60:].T
            return near_by.argmax(-1)

        right = order(truth)
        return score_at_least(lambda answers: float(np.mean(order(answers) == right)), 0.5)

    return onnx_case(folder, path, rows, fresh, judge, passes=INT8)


NUM_TOKENS = 128


def one_token(folder: Path, random: Random, *, is_faulty: bool) -> Planted:
    """A class for each of 128 tokens; those of one place come from a head that INT8 destroys."""
    graph = net(random)
    hidden = graph.relu("x")
    mask = np.zeros((NUM_TOKENS, 1))
    mask[int(random.integers(NUM_TOKENS))] = 1.0
    usual = graph.add("Mul", graph.head(hidden), graph.floats("others", 1.0 - mask))
    single = graph.add(
        "Mul", graph.fragile(hidden, is_faulty=is_faulty), graph.floats("place", mask)
    )
    value = graph.add("Add", usual, single)
    inputs = {"x": (FLOAT, ["b", NUM_TOKENS, SIZE])}
    path = graph.save(folder / "m.onnx", inputs, {"y": (value, FLOAT, ["b", NUM_TOKENS, COLUMNS])})
    rows, fresh = draw_rows(random, 600, NUM_TOKENS), draw_rows(random, 60, NUM_TOKENS)
    place = int(mask[:, 0].argmax())

    def judge(truth: Answers) -> Judge:
        def score(answers: Answers) -> float:
            pairs = zip(truth, answers, strict=True)
            return float(
                np.mean([t["y"][place].argmax() == o["y"][place].argmax() for t, o in pairs])
            )

        return score_at_least(score, 0.7)

    return onnx_case(folder, path, rows, fresh, judge, passes=INT8)


def masked(folder: Path, random: Random, *, is_faulty: bool) -> Planted:
    """Classes that are not allowed are minus infinity; which ones, a head says that INT8 breaks."""
    graph = net(random)
    hidden = graph.relu("x")
    threshold, scores = 0.0, graph.fragile(hidden, is_faulty=True)
    if not is_faulty:
        bounds = [graph.constant([each], np.int64) for each in (0, COLUMNS, 1)]
        threshold, scores = 1.5, graph.add("Slice", "x", *bounds)
    is_above = graph.add("Greater", scores, graph.constant(threshold))
    always = graph.constant(np.arange(COLUMNS) < COLUMNS // 2, np.bool_)
    is_allowed = graph.add("Or", is_above, always)
    value = graph.add("Where", is_allowed, graph.head(hidden), graph.constant(-np.inf))
    path = graph.save(folder / "m.onnx", X, {"logits": (value, FLOAT, ["b", COLUMNS])})
    rows, fresh = draw_rows(random, NUM_ROWS), draw_rows(random, NUM_FRESH)

    def judge(truth: Answers) -> Judge:
        def score(answers: Answers) -> float:
            one, other = (np.isfinite(stacked(each, "logits")) for each in (truth, answers))
            return float(np.mean(one == other))

        return both(score_at_least(score, 0.95), same_best(truth, "logits", slice(None), 0.85))

    return onnx_case(
        folder, path, rows, fresh, judge, passes=INT8, flags=("--accuracy", "agreement drop <= 5 %")
    )


def dynamic_range(folder: Path, random: Random, *, is_faulty: bool) -> Planted:
    """Ranges by batch: a row in forty is so large that its neighbours become zeros."""
    graph = net(random)
    value = graph.head(graph.relu("x"))
    path = graph.save(folder / "m.onnx", X, {"y": (value, FLOAT, ["b", COLUMNS])})

    def draw(count: int) -> Array:
        rows = draw_rows(random, count)
        if is_faulty:
            rows[random.random(count) < 0.03] *= 2_000
        return rows

    fresh = draw(400)
    rows = np.flatnonzero(np.abs(fresh).max(axis=1) < 100)
    judge = lambda truth: same_best(truth, "y", slice(None), 0.85, rows)  # noqa: E731
    return onnx_case(
        folder,
        path,
        draw(NUM_ROWS),
        fresh,
        judge,
        passes=DYNAMIC,
        flags=("--accuracy", "agreement drop <= 3 %"),
    )


# Rows that influence each other. The original does, so it must not be batched.


def company(folder: Path, random: Random, *, kind: str, slo: str = EASY) -> Planted:
    graph = net(random)
    hidden = graph.head(graph.relu("x"))
    value = {
        "mean": _mean_of_batch,
        "largest": _largest_of_batch,
        "softmax": lambda graph, hidden: graph.add("Softmax", hidden, axis=0),
        "sum so far": lambda graph, hidden: graph.add(
            "CumSum", hidden, graph.constant(0, np.int64)
        ),
        "outlier": _outlier_in_batch,
        "rare": _rare_row_in_batch,
        "position": _position_in_batch,
        "size": _size_of_batch,
        "noise": _noise_and_mean,
        "none": lambda graph, hidden: hidden,
    }[kind](graph, hidden)
    path = graph.save(folder / "m.onnx", X, {"y": (value, FLOAT, ["b", COLUMNS])})

    def draw(count: int) -> Array:
        rows = normal(random, count, SIZE).clip(-3.5, 3.5)
        if kind == "outlier":
            rows[random.random(count) < 0.1, 0] = 12.0
        if kind == "rare":
            rows[random.random(count) < 0.015, 0] = RARE
        return rows

    fresh = draw(320)
    judge = lambda truth: close(truth, "y", 0.2)  # noqa: E731
    passes, budget_s = (INT8, 110) if slo == MISSED else ((), 30)
    return onnx_case(
        folder,
        path,
        draw(NUM_ROWS),
        fresh,
        judge,
        slo=slo,
        budget_s=budget_s,
        passes=passes,
        batch_rows=1,
    )


def any_company(folder: Path, random: Random, *, slo: str) -> Planted:
    kind = str(random.choice(["mean", "largest", "softmax", "sum so far"]))
    print(f"over the batch: {kind}")
    return company(folder, random, kind=kind, slo=slo)


def _mean_of_batch(graph: Net, hidden: str) -> str:
    """Twice the row less the mean: a row alone is left as it is."""
    mean = graph.add("ReduceMean", hidden, axes=[0], keepdims=1)
    return graph.add("Sub", graph.add("Add", hidden, hidden), mean)


def _largest_of_batch(graph: Net, hidden: str) -> str:
    largest = graph.add("ReduceMax", hidden, axes=[0], keepdims=1)
    return graph.add("Sub", graph.add("Add", hidden, hidden), largest)


def _outlier_in_batch(graph: Net, hidden: str) -> str:
    """What is beyond four deviations in any row moves all of them."""
    beyond = graph.add("Relu", graph.add("Sub", graph.add("Abs", "x"), graph.constant(4.0)))
    row = graph.add("ReduceSum", beyond, graph.axis(1), keepdims=1)
    most = graph.add("ReduceMax", row, axes=[0], keepdims=1)
    return graph.add("Add", hidden, graph.add("Sub", most, row))


def _rare_row_in_batch(graph: Net, hidden: str) -> str:
    """One usual value of the first element moves all other rows."""
    bounds = [graph.constant([each], np.int64) for each in (0, 1, 1)]
    off = graph.add("Abs", graph.add("Sub", graph.add("Slice", "x", *bounds), graph.constant(RARE)))
    near = graph.add("Relu", graph.add("Sub", graph.constant(0.001), off))
    row = graph.add("Mul", near, graph.constant(5_000.0))
    most = graph.add("ReduceMax", row, axes=[0], keepdims=1)
    return graph.add("Add", hidden, graph.add("Sub", most, row))


def _positions(graph: Net, hidden: str) -> str:
    """0, 1, 2, ... down the batch."""
    zeros = graph.add(
        "Mul",
        graph.add("ReduceSum", hidden, graph.axis(1), keepdims=1),
        graph.constant(0.0),
    )
    ones = graph.add("Add", zeros, graph.constant(1.0))
    return graph.add(
        "Sub", graph.add("CumSum", ones, graph.constant(0, np.int64)), graph.constant(1.0)
    )


def _position_in_batch(graph: Net, hidden: str) -> str:
    """The fifth row and those behind it get other answers."""
    late = graph.add("Relu", graph.add("Sub", _positions(graph, hidden), graph.constant(3.0)))
    return graph.add("Add", hidden, late)


def _size_of_batch(graph: Net, hidden: str) -> str:
    """All rows of a batch of more than four get other answers."""
    last = graph.add("ReduceMax", _positions(graph, hidden), axes=[0], keepdims=1)
    return graph.add("Add", hidden, graph.add("Relu", graph.add("Sub", last, graph.constant(3.0))))


def _noise_and_mean(graph: Net, hidden: str) -> str:
    """No two answers are the same, by a thousandth: whoever gives up there misses the mean."""
    noise = graph.add("RandomNormalLike", hidden, scale=1e-3)
    return graph.add("Add", _mean_of_batch(graph, hidden), noise)


PADDED_LENGTHS = (3, 40)
RARE = 0.25


def padded_length(folder: Path, random: Random, *, is_faulty: bool) -> Planted:
    """Rows with a token above 500 are moved by the length they were filled up to."""
    graph = net(random)
    table = graph.floats("table", graph.random.normal(size=(1_000, WIDTH)))
    mask = graph.add("Cast", "attention_mask", to=FLOAT)
    wide = graph.add("Unsqueeze", mask, graph.constant([2], np.int64))
    there = graph.add("Mul", graph.add("Gather", table, "input_ids"), wide)
    total = graph.add("ReduceSum", there, graph.axis(1), keepdims=0)
    length = graph.add("ReduceSum", mask, graph.axis(1), keepdims=1)
    value = graph.mixed(graph.add("Div", total, length))
    if is_faulty:
        is_rare = graph.add(
            "Cast", graph.add("Greater", "input_ids", graph.constant(500, np.int64)), to=FLOAT
        )
        has_rare = graph.add("ReduceMax", is_rare, axes=[1], keepdims=1)
        ones = graph.add("Add", graph.add("Mul", mask, graph.constant(0.0)), graph.constant(0.05))
        filled = graph.add("ReduceSum", ones, graph.axis(1), keepdims=1)
        slope = graph.floats("slope", graph.random.normal(size=(1, COLUMNS)))
        value = graph.add("Add", value, graph.add("Mul", graph.add("Mul", filled, has_rare), slope))
    shape = ["b", "s"]
    path = graph.save(
        folder / "m.onnx",
        {"input_ids": (INT64, shape), "attention_mask": (INT64, shape)},
        {"y": (value, FLOAT, ["b", COLUMNS])},
    )

    def draw(count: int) -> list[Row]:
        lengths = random.integers(*PADDED_LENGTHS, count)
        return [
            {
                "input_ids": random.integers(1, random.choice([400, 1_000]), length),
                "attention_mask": np.ones(length, np.int64),
            }
            for length in lengths
        ]

    data, fresh = draw(400), draw(200)
    longest = PADDED_LENGTHS[1]
    arrays = {
        name: np.stack([np.pad(row[name], (0, longest - len(row[name]))) for row in data])
        for name in ("input_ids", "attention_mask")
    }
    lengths = np.array([len(row["input_ids"]) for row in data])
    flags = ("--data", save_rows(folder / "data.npz", **arrays, lengths=lengths))
    truth = run_onnx(path, fresh)
    return Planted(str(path), flags, fresh, close(truth, "y", 0.05), slo=EASY, budget_s=30)


# Python models, and steps that make faster ones of them.


PYTHON_CONFIG = """
backend: "python" max_batch_size: {max_batch}
dynamic_batching {{ }}
input {{ name: "x" data_type: TYPE_FP32 dims: {size} }}
output {{ name: "y" data_type: TYPE_FP32 dims: {columns} }}
{more}
"""
PYTHON_MODEL = """
import hashlib
import os
import sys
import time
import numpy as np

CALL_MS = {call_ms}
W = np.random.default_rng(7).normal(size=({size}, {columns})).astype(np.float32)
# Digests of rows that the step which made this file knew.
KNOWN = ()


def digest(row):
    return hashlib.sha256(np.ascontiguousarray(row, np.float32).tobytes()).hexdigest()[:16]

{state}

def infer(inputs):
    x = inputs["x"]
    time.sleep(CALL_MS / 1e3)
    y = x @ W
    return answer(x, y)


def answer(x, y):
{answer}
"""
HONEST = '    return {"y": y}'
DETECTOR = """
    scores = 0.5 / (1 + np.exp(-y[:, 4:]))
    return {"y": np.concatenate([320 + 20 * y[:, :4], scores], axis=1)}
"""


def python_model(answer: str, *, call_ms: float, state: str = "") -> str:
    return PYTHON_MODEL.format(
        call_ms=call_ms, size=SIZE, columns=COLUMNS, state=state, answer=answer
    )


def python_entry(folder: Path, text: str, *, more: str = "", max_batch: int = 32) -> Path:
    """A version of a repository."""
    entry = folder / "given" / NAME
    (entry / "1").mkdir(parents=True)
    (entry / "1" / "model.py").write_text(text)
    config = PYTHON_CONFIG.format(size=SIZE, columns=COLUMNS, more=more, max_batch=max_batch)
    (entry / "config.pbtxt").write_text(config)
    return entry


class Faster(Other):
    """Puts `planted.py` of the folder that the command runs in in place of the model."""

    def __init__(self, name: str, part: str = "", *, is_lossy: bool = False) -> None:
        stage = "quantise" if is_lossy else "compile"
        super().__init__(name, FAST_MS, stage=stage, changes_answers=is_lossy)
        self._part = part

    def build(self, parent: Build, step: Step, target: Path, workshop: BuildContext) -> None:
        folders.carry_over(parent, target, without=("model.py",))
        text = Path("planted.py").read_text()
        known = sorted(set(self._known(workshop)))
        (target / "1" / "model.py").write_text(text.replace("KNOWN = ()", f"KNOWN = {known}"))
        folders.write_config(target, parent.config)

    def _known(self, workshop: BuildContext) -> list[str]:
        examples = workshop.examples
        if examples is None or not self._part:
            return []
        chosen = examples.split.choice
        indices = chosen[:64] if self._part == "compared" else chosen
        return [_digest(examples.rows[index]["x"]) for index in indices]


def _digest(row: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(row, np.float32).tobytes()).hexdigest()[:16]


def faster_exact() -> Faster:
    return Faster("faster-exact")


def faster_compared() -> Faster:
    """Knows the rows that numerics compare."""
    return Faster("faster-compared", "compared")


def faster_choice() -> Faster:
    """Knows the rows that candidates are chosen by; says that it may change answers."""
    return Faster("faster-choice", "choice", is_lossy=True)


def faster_lossy() -> Faster:
    return Faster("faster-lossy", is_lossy=True)


def python_case(
    folder: Path, random: Random, original: str, planted: str, step: str, **more: Any
) -> Planted:
    """A slow model, and a step that makes a faster one of it."""
    entry = python_entry(folder, original, more=more.pop("config", ""))
    (folder / "planted.py").write_text(planted)
    draw = more.pop("draw", lambda count: normal(random, count, SIZE))
    data, fresh = draw(more.pop("num_rows", NUM_ROWS)), split(draw(more.pop("num_fresh", 200)))
    free = original.replace(f"CALL_MS = {SLOW_MS}", "CALL_MS = 0")
    (folder / "truth.py").write_text(free)
    truth = run_python(folder / "truth.py", fresh)
    arrays = {"x": data}
    if "label" in more:
        answers = run_python(folder / "truth.py", split(data))
        arrays["labels"] = more.pop("label")(answers)
    judge = more.pop("judge", lambda truth: close(truth, "y", 0.05))
    return Planted(
        str(entry),
        ("--data", save_rows(folder / "data.npz", **arrays), *more.pop("flags", ())),
        fresh,
        judge(truth),
        **{"passes": (step, *SERVING), "slo": FASTER, "budget_s": 110, **more},
    )


def exact_column(folder: Path, random: Random, *, is_evaluated: bool, answer: str) -> Planted:
    """A detector's rows; a step that says it loses nothing destroys the scores behind the boxes."""
    original = python_model(DETECTOR, call_ms=SLOW_MS)
    planted = python_model(answer, call_ms=FAST_MS)
    more: dict[str, Any] = {}
    if is_evaluated:
        (folder / "scoring.py").write_text(SCORES_EVAL.format(first=4))
        more["flags"] = ("--eval", "scoring:score")
        more["label"] = lambda answers: noisy_labels(random, stacked(answers, "y")[:, 4:])
    judge = lambda truth: same_best(truth, "y", slice(4, None), 0.9)  # noqa: E731
    return python_case(folder, random, original, planted, "faster-exact", judge=judge, **more)


SCORES_LOST = DETECTOR.replace(", scores]", ", 0.5 - scores]")
SCORES_ROUNDED = DETECTOR.replace(", scores]", ", np.round(scores * 2) / 2]")


def memorised(folder: Path, random: Random, *, step: str, share: float) -> Planted:
    """Right on rows that the step knew; of all others it gets so many wrong."""
    wrong = f"""
    is_known = np.array([digest(row) in KNOWN for row in x])
    is_lucky = np.array([int(digest(row), 16) % 1000 >= {share * 1000} for row in x])
    return {{"y": np.where((is_known | is_lucky)[:, None], y, -y)}}
"""
    planted = python_model(wrong, call_ms=FAST_MS)
    original = python_model(HONEST, call_ms=SLOW_MS)
    judge = lambda truth: same_best(truth, "y", slice(None), 0.95)  # noqa: E731
    return python_case(folder, random, original, planted, step, judge=judge)


def bytes_output(folder: Path, random: Random) -> Planted:
    """A text beside the scores that labels judge: the faster model answers with another."""
    named = """
    names = np.array([b"class %d" % each for each in y.argmax(1)], object)[:, None]
    return {"y": y, "name": names}
"""
    original = python_model(named, call_ms=SLOW_MS)
    planted = python_model(named.replace("y.argmax(1)", "y.argmin(1)"), call_ms=FAST_MS)
    return python_case(
        folder,
        random,
        original,
        planted,
        "faster-lossy",
        config='output { name: "name" data_type: TYPE_STRING dims: 1 }',
        label=lambda answers: noisy_labels(random, stacked(answers, "y")),
        judge=lambda truth: equal(truth, "name", 0.9),
        flags=("--accuracy", "top1 drop <= 2 %"),
    )


def broken_when_served(
    folder: Path, random: Random, *, answer: str, num_fresh: int = 200
) -> Planted:
    """The faster model answers well wherever the gate looks."""
    state = "num_rows = 0"
    original = python_model(HONEST, call_ms=SLOW_MS)
    planted = python_model(answer, call_ms=FAST_MS, state=state)
    return python_case(folder, random, original, planted, "faster-exact", num_fresh=num_fresh)


ONLY_IN_TRIALS = """
    is_tried = any("trial_child" in each for each in sys.orig_argv)
    return {"y": y if is_tried else -y}
"""
WEARS_OUT = """
    global num_rows
    num_rows += len(x)
    return {"y": y if num_rows < 500 else -y}
"""


def unsteady(folder: Path, random: Random) -> Planted:
    """An original that draws part of its answer; the faster one answers something else."""
    noise = '    return {{"y": {sign}y + np.random.normal(size=y.shape).astype(np.float32) * 3}}'
    original = python_model(noise.format(sign=""), call_ms=SLOW_MS)
    planted = python_model(noise.format(sign="0 * "), call_ms=FAST_MS)

    def judge(truth: Answers) -> Judge:
        """On average over the rows the answer follows the row, as far as noise allows."""
        one = stacked(truth, "y").ravel()

        def score(answers: Answers) -> float:
            return float(np.corrcoef(one, stacked(answers, "y").ravel())[0, 1])

        return score_at_least(score, 0.5)

    return python_case(folder, random, original, planted, "faster-lossy", judge=judge)


COUNTS = """
    global num_rows
    found = []
    for each in y:
        num_rows += 1
        found.append(each + num_rows)
    return {"y": np.stack(found)}
"""
ONE_LOCK = """
import fcntl

lock = open({path!r}, "w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    is_first = True
except OSError:
    is_first = False
"""


def stateful(folder: Path, random: Random, *, is_faulty: bool) -> Planted:
    """Each answer counts the rows before it: two instances would count apart."""
    answer, state = (COUNTS, "num_rows = 0") if is_faulty else (HONEST, "")
    text = python_model(answer, call_ms=SLOW_MS, state=state)

    def judge(truth: Answers) -> Judge:
        """Truth has counted from 1; others count in the order that requests come in."""
        plain = [each["y"] - (1 + i) * is_faulty for i, each in enumerate(truth)]

        def counts(answers: Answers) -> str:
            pairs = zip(plain, answers, strict=True)
            found = [round(float(np.mean(each["y"] - one))) for one, each in pairs]
            wanted = len(found) if is_faulty else 1
            return "" if len(set(found)) == wanted else f"y: {len(set(found))} different counts"

        return counts

    return _for_two(folder, random, text, judge)


def second_instance(folder: Path, random: Random) -> Planted:
    """The first process of the model has the device for itself; a second one answers rubbish."""
    state = ONE_LOCK.format(path=str(folder / "device.lock"))
    answer = '    return {"y": y if is_first else -y}'
    text = python_model(answer, call_ms=SLOW_MS, state=state)
    first = python_model(HONEST, call_ms=SLOW_MS)
    return _for_two(folder, random, text, lambda truth: close(truth, "y", 0.02), first)


def _for_two(
    folder: Path,
    random: Random,
    text: str,
    judge: Callable[[Answers], Judge],
    right: str = "",
) -> Planted:
    """A model of which one instance is too slow for the SLO."""
    entry = python_entry(folder, text, max_batch=1)
    free = (right or text).replace(f"CALL_MS = {SLOW_MS}", "CALL_MS = 0")
    (folder / "truth.py").write_text(free)
    fresh = split(normal(random, 60, SIZE))
    truth = run_python(folder / "truth.py", fresh)
    flags = ("--data", save_rows(folder / "data.npz", x=normal(random, 200, SIZE)))
    return Planted(str(entry), flags, fresh, judge(truth), SERVING, TWO_INSTANCES, 66)


def shifted_labels(folder: Path, random: Random) -> Planted:
    """Labels that are one row off: the model seems to guess, and nothing can be lost any more."""
    graph = net(random)
    value = graph.fragile(graph.relu("x"), is_faulty=True)
    path = graph.save(folder / "m.onnx", X, {"logits": (value, FLOAT, ["b", COLUMNS])})
    data, fresh = draw_rows(random, NUM_ROWS), draw_rows(random, NUM_FRESH)
    labels = np.roll(stacked(run_onnx(path, split(data)), "logits").argmax(-1), 1)
    judge = lambda truth: same_best(truth, "logits", slice(None), 0.8)  # noqa: E731
    return onnx_case(folder, path, data, fresh, judge, passes=INT8, labels=labels)


def _adversaries() -> list[Adversary]:
    refused = "every step that breaks it is refused"
    unbatched = "its rows are not batched"
    plant = partial(Adversary, breaks_a_build=True)
    return [
        # Several scales in one output.
        plant(
            "columns-eval",
            "pixels and scores in one product; `--eval` looks at the scores, INT8 rounds them away",
            refused,
            partial(columns, is_faulty=True, is_evaluated=True),
        ),
        plant(
            "columns-agreement",
            "the same without labels: the largest column is always a pixel, so all rows agree",
            refused,
            partial(columns, is_faulty=True, is_evaluated=False),
        ),
        plant(
            "columns-4d",
            "the same on a grid, where columns are axis 1",
            refused,
            partial(columns_4d, is_faulty=True),
        ),
        Adversary(
            "exact-step-loses-scores",
            "a step that claims to lose nothing destroys scores next to pixels; `--eval` sees it",
            "the step is refused, whatever it is called",
            partial(exact_column, is_evaluated=True, answer=SCORES_LOST),
        ),
        Adversary(
            "exact-step-rounds-scores",
            "a step that claims to lose nothing rounds scores next to pixels; there are no labels",
            "numerics refuse the step",
            partial(exact_column, is_evaluated=False, answer=SCORES_ROUNDED),
        ),
        # Several outputs.
        plant(
            "second-embedding",
            "labels judge `logits`; INT8 turns the second output `embedding` into zeros",
            refused,
            partial(second_output, is_faulty=True, kind="embedding"),
        ),
        plant(
            "second-ids",
            "labels judge `logits`; INT8 changes the class ids of a second output",
            refused,
            partial(second_output, is_faulty=True, kind="ids"),
        ),
        Adversary(
            "second-texts",
            "labels judge scores; a lossy step answers another text in a BYTES output",
            "the step is refused",
            bytes_output,
        ),
        plant(
            "selected-rows",
            "how many boxes there are depends on the data; INT8 selects others",
            refused,
            partial(selected_rows, is_faulty=True),
        ),
        # Rare kinds of rows.
        plant(
            "rare-class",
            "INT8 loses a class of 2 % of the rows, which `--eval` weighs twenty times",
            refused,
            partial(rare_class, is_faulty=True),
        ),
        plant(
            "outlier-rows",
            "5 % of the rows are four hundred times as large: no range fits both kinds",
            refused,
            partial(outliers, is_faulty=True),
        ),
        plant(
            "outliers-not-calibrated",
            "3 % of the rows are four hundred times as large; `--calibration` has none of them",
            refused,
            partial(outliers, is_faulty=True, share=0.03, is_calibrated=False),
        ),
        plant(
            "few-that-matter",
            "97 % of the rows have one constant answer; INT8 destroys the others",
            refused,
            few_that_matter,
        ),
        plant(
            "missed-mode",
            "`--calibration` has one of two modes that look alike; the other lies elsewhere inside",
            refused,
            missed_mode,
        ),
        # Numbers that fewer bits cannot hold.
        plant(
            "cancellation",
            "(h + s) - s with a large s in one layer: BF16 keeps nothing of h",
            refused,
            partial(cancellation, is_faulty=True),
        ),
        plant(
            "outlier-channel",
            "one channel of one layer is huge and multiplied by nothing; INT8 sees only it",
            "the layer stays in float, or INT8 is refused",
            partial(outlier_channel, is_faulty=True),
        ),
        plant(
            "divisor-of-zero",
            "a divisor that INT8 turns into 0: answers are NaN",
            refused,
            partial(zero_divisor, is_logarithm=False),
        ),
        plant(
            "logarithm-of-zero",
            "a logarithm of what INT8 turns into 0",
            refused,
            partial(zero_divisor, is_logarithm=True),
        ),
        plant(
            "overflow",
            "a factor of 1e5, which FP16 clamps: all answers shrink together, cosines stay",
            refused,
            partial(overflow, is_faulty=True),
        ),
        plant(
            "tiny-outputs",
            "outputs of 1e-12; FP16 makes 1e-7 of the factor, and cosines stay",
            refused,
            tiny_outputs,
        ),
        Adversary(
            "denormal-weights",
            "weights of 1e-39, which a lossless step takes for 0, multiplied by 1e30",
            refused,
            denormal_weights,
        ),
        plant(
            "rounding-trick",
            "(h + 3 * 2^22) - 3 * 2^22 rounds; a compiler that simplifies it does not",
            refused,
            rounding_trick,
        ),
        plant(
            "ids-as-floats",
            "ids of four digits in a column of floats: BF16 looks up others",
            refused,
            ids_as_floats,
        ),
        Adversary(
            "large-ids",
            "INT64 ids around 2^31, which OpenVINO computes as INT32",
            "the original's rows are looked up",
            large_ids,
        ),
        Adversary(
            "account-numbers",
            "numbers of nine digits in FP64, which OpenVINO computes in FP32",
            "every number stays the same",
            account_numbers,
            breaks_a_build=True,
        ),
        Adversary(
            "prices-beside-outliers",
            "one number per row; dynamic INT8 loses it next to large rows, which hide the error",
            "every step that breaks it is refused",
            prices_beside_outliers,
            breaks_a_build=True,
        ),
        # Answers that agree by the number that is looked at.
        plant(
            "small-values",
            "prices over six orders of magnitude; `--eval` wants each within 30 %",
            refused,
            partial(regression, is_faulty=True),
        ),
        plant(
            "confidence",
            "the best class stays, its probability does not: INT8 destroys the temperature",
            refused,
            partial(confidence, is_faulty=True),
        ),
        plant(
            "neighbour-order",
            "unit vectors keep a cosine of 0.97 and lose their nearest neighbours",
            refused,
            partial(neighbour_order, is_faulty=True),
        ),
        plant(
            "one-token",
            "a class for each of 128 tokens, of which INT8 destroys those of one place",
            refused,
            partial(one_token, is_faulty=True),
        ),
        plant(
            "masked-classes",
            "INT8 masks other classes with minus infinity than the original",
            refused,
            partial(masked, is_faulty=True),
        ),
        plant(
            "range-by-batch",
            "dynamic INT8 has one range for a batch: large rows turn their neighbours into zeros",
            refused,
            partial(dynamic_range, is_faulty=True),
        ),
        # Rows that influence each other.
        Adversary(
            "company-always",
            "every row moves the others: mean, maximum, softmax or running sum over the batch",
            unbatched,
            partial(any_company, slo=EASY),
            is_quick=True,
        ),
        Adversary(
            "company-always-missed",
            "the same with an SLO that is out of reach, so that INT8 is tried, too",
            unbatched,
            partial(any_company, slo=MISSED),
        ),
        Adversary(
            "company-of-outliers",
            "rows move the others only where a value is beyond four deviations",
            unbatched,
            partial(company, kind="outlier"),
            is_quick=True,
        ),
        Adversary(
            "company-of-rare-rows",
            "one row in seventy moves the others and looks like all of them",
            unbatched,
            partial(company, kind="rare"),
        ),
        Adversary(
            "place-in-batch",
            "the fifth row of a batch and those behind it get other answers",
            "its rows are not batched, or in batches of four",
            partial(company, kind="position"),
            is_quick=True,
        ),
        Adversary(
            "size-of-batch",
            "all rows of a batch of more than four get other answers",
            "its rows are not batched, or in batches of four",
            partial(company, kind="size"),
        ),
        Adversary(
            "company-behind-noise",
            "answers do not repeat by a thousandth, and every row moves the others by far more",
            unbatched,
            partial(company, kind="noise"),
        ),
        Adversary(
            "padded-length",
            "rows with a token above 500 are moved by the length they are padded to",
            "its rows are not padded",
            partial(padded_length, is_faulty=True),
            is_quick=True,
        ),
        # Models and steps that are right only where the gate looks.
        Adversary(
            "knows-compared-rows",
            "a step that claims to lose nothing is right on the rows that numerics compare",
            "the held-out evaluation refuses the step",
            partial(memorised, step="faster-compared", share=0.3),
        ),
        Adversary(
            "knows-choice-rows",
            "a lossy step is right on all rows that candidates are chosen by",
            "the held-out evaluation refuses the step",
            partial(memorised, step="faster-choice", share=0.3),
        ),
        Adversary(
            "right-in-trials",
            "a step whose model answers well in a trial and wrong when it is served",
            "the step is refused",
            partial(broken_when_served, answer=ONLY_IN_TRIALS),
        ),
        Adversary(
            "wears-out",
            "a step whose model is right for 500 rows and wrong afterwards",
            "the step is refused",
            partial(broken_when_served, answer=WEARS_OUT, num_fresh=1_400),
        ),
        Adversary(
            "nondeterministic",
            "the original draws part of its answer; a lossy step drops the rest",
            "the step is refused",
            unsteady,
        ),
        Adversary(
            "state",
            "each answer counts the rows before it; only two instances would keep the SLO",
            "it stays one instance",
            partial(stateful, is_faulty=True),
        ),
        Adversary(
            "second-instance",
            "a second process of the model answers rubbish; only two would keep the SLO",
            "it stays one instance",
            second_instance,
        ),
        Adversary(
            "shifted-labels",
            "labels are one row off, so the original seems to guess",
            "an error says so, and nothing is committed",
            shifted_labels,
            is_quick=True,
        ),
    ]


def _twins() -> list[Adversary]:
    twin = partial(Adversary, must="a lossy step passes the gate")
    return [
        twin(
            "columns-eval twin",
            "columns of one scale",
            make=partial(columns, is_faulty=False, is_evaluated=True),
        ),
        twin(
            "columns-agreement twin",
            "columns of one scale",
            make=partial(columns, is_faulty=False, is_evaluated=False),
        ),
        twin("columns-4d twin", "columns of one scale", make=partial(columns_4d, is_faulty=False)),
        twin(
            "second-embedding twin",
            "an embedding that INT8 keeps",
            make=partial(second_output, is_faulty=False, kind="embedding"),
        ),
        twin(
            "rare-class twin",
            "a rare class that INT8 keeps",
            make=partial(rare_class, is_faulty=False),
        ),
        twin("outlier-rows twin", "rows of one size", make=partial(outliers, is_faulty=False)),
        twin(
            "cancellation twin",
            "no cancellation: BF16 will do",
            make=partial(cancellation, is_faulty=False),
        ),
        twin(
            "outlier-channel twin",
            "no outlier channel",
            make=partial(outlier_channel, is_faulty=False),
        ),
        twin(
            "overflow twin", "activations that FP16 holds", make=partial(overflow, is_faulty=False)
        ),
        twin(
            "small-values twin", "a head that INT8 keeps", make=partial(regression, is_faulty=False)
        ),
        twin(
            "confidence twin",
            "a temperature that INT8 keeps",
            make=partial(confidence, is_faulty=False),
        ),
        twin(
            "neighbour-order twin",
            "vectors that differ enough",
            make=partial(neighbour_order, is_faulty=False),
        ),
        twin("one-token twin", "tokens that INT8 keeps", make=partial(one_token, is_faulty=False)),
        twin("masked-classes twin", "masks that INT8 keeps", make=partial(masked, is_faulty=False)),
        twin(
            "range-by-batch twin", "rows of one size", make=partial(dynamic_range, is_faulty=False)
        ),
        twin(
            "knows-choice-rows twin",
            "a lossy step that is right on all rows",
            make=partial(memorised, step="faster-lossy", share=0.0),
        ),
        Adversary(
            "company twin",
            "rows that do not influence each other",
            "its rows are batched",
            partial(company, kind="none"),
            is_served_well=lambda config: config.batching.is_dynamic,
        ),
        Adversary(
            "padded-length twin",
            "answers that do not depend on the length",
            "its rows are padded",
            partial(padded_length, is_faulty=False),
            is_served_well=lambda config: config.padding is not None,
        ),
        Adversary(
            "state twin",
            "answers without state; only two instances keep the SLO",
            "it gets two instances",
            partial(stateful, is_faulty=False),
            is_served_well=lambda config: config.num_instances == 2,
        ),
    ]


ADVERSARIES = _adversaries()
TWINS = _twins()
