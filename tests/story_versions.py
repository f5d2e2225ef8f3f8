"""The versions of the story of `make verify-operate`: a classifier of handwritten digits, which
`penstock optimize` commits twice, and two versions that do not keep the promise of the second."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from sklearn.datasets import load_digits
from suites.onnx_models import Graph

from penstock.repository import layout, versions
from penstock.repository import manifest as manifests
from penstock.types import Array

NAME, NUM_INPUTS, NUM_CLASSES = "classifier", 64, 10
RATE, TERM = 200.0, "p99 < 250ms"
# Two layers of random features; the last one is fitted.
WIDTHS = (4096, 8192)
NUM_FITTED = 797
RIDGE = 0.1
TIMEOUT_S = 300


@dataclass(frozen=True)
class Digits:
    """The original model, and labelled images that it was not fitted to."""

    model: Path
    data: Path
    rows: Array


@dataclass(frozen=True)
class Optimized:
    version: str
    outcome: str
    headline: str
    # Requests per second, as predicted from batch times.
    highest_rate: float
    # The steps of the optimisation that were kept.
    steps: Sequence[object]


def make_digits(folder: Path) -> Digits:
    """Fit the classifier to a part of scikit-learn's digits; write it and the other images."""
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target
    order = np.random.default_rng(0).permutation(len(images))
    fitted, others = order[:NUM_FITTED], order[NUM_FITTED:]
    weights = random_layers()
    features = images[fitted]
    for weight in weights:
        features = np.maximum(features @ weight, 0)
    kernel = features @ features.T + RIDGE * np.eye(NUM_FITTED)
    last = features.T @ np.linalg.solve(kernel, np.eye(NUM_CLASSES)[labels[fitted]])
    model, data = folder / "original.onnx", folder / "digits.npz"
    onnx.save(make_model("original", [*weights, last.astype(np.float32)]), model)
    np.savez(data, x=images[others], label=labels[others])
    return Digits(model, data, images[others])


def random_layers() -> list[Array]:
    chance, sizes = np.random.default_rng(1), (NUM_INPUTS, *WIDTHS)
    return [
        (chance.normal(size=shape) * shape[0] ** -0.5).astype(np.float32)
        for shape in zip(sizes, sizes[1:], strict=False)
    ]


def make_model(kind: str, weights: list[Array]) -> onnx.ModelProto:
    """The original; or `slow`, which multiplies large matrices besides; or `wrong`, which gives
    each class the score of the next one."""
    graph, value = Graph(seed=1), "x"
    for index, weight in enumerate(weights):
        value = graph.add("MatMul", value, graph.weight(f"w{index}", weight))
        if index < len(weights) - 1:
            value = graph.add("Relu", value)
    if kind == "slow":
        mean = graph.add("ReduceMean", "x", keepdims=0)
        square = graph.add("Add", graph.drawn("a", 768, 768), mean)
        for _ in range(96):
            square = graph.add("MatMul", square, "a")
        small = graph.weight("small", np.array(1e-9, np.float32))
        value = graph.add("Add", value, graph.add("Mul", graph.add("ReduceMean", square), small))
    if kind == "wrong":
        order = graph.weight("order", np.roll(np.arange(NUM_CLASSES), 1))
        value = graph.add("Gather", value, order, axis=1)
    return graph.model({"x": (1, ["rows", NUM_INPUTS])}, value, ["rows", NUM_CLASSES])


def right_classes(digits: Digits) -> list[int]:
    """The class that the original gives to each image."""
    session = ort.InferenceSession(digits.model)
    return session.run(None, {"x": digits.rows})[0].argmax(axis=1).tolist()


def optimize(root: Path, digits: Digits, slo: str) -> Optimized:
    """Commit a version by `penstock optimize`, made from the served one; serve the first."""
    told = root.parent / "optimization.json"
    model = root / NAME / "1" if root.exists() else digits.model
    command = [sys.executable, "-m", "penstock", "optimize", str(model), "--data", str(digits.data)]
    command += ["--slo", slo, "--accuracy", "top1 drop <= 2 %", "--duration", "3s"]
    command += ["--budget", "120s", "--out", str(root), "--name", NAME]
    command += ["--quiet", "--json", str(told)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert told.exists(), done.stderr
    found = json.loads(told.read_text())
    told.unlink()
    version = layout.version_folders(root / NAME)[-1]
    if version == "1":
        versions.promote(root, NAME, version)
    highest = max(each["predicted_rate"] or 0.0 for each in found["tries"])
    steps = read_evidence(root, version)["lineage"]["steps"]
    return Optimized(version, found["outcome"], found["headline"], highest, steps)


def read_evidence(root: Path, version: str) -> dict[str, Any]:
    manifest = manifests.read(root / NAME / version)
    assert manifest is not None
    return dict(manifest.evidence)


def plant(root: Path, digits: Digits, kind: str) -> str:
    """Commit a bad version with the evidence of the latest good one; return its number."""
    graph = onnx.load(digits.model).graph
    weights = [onnx.numpy_helper.to_array(each) for each in graph.initializer]
    [config] = layout.read_one(root, NAME).configs
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(make_model(kind, weights), Path(folder) / "model.onnx")
        return versions.commit(root, NAME, folder, config, read_evidence(root, "2"))
