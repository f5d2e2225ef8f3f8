"""What INT8 costs on a GPU in accuracy, with real weights:

    python benchmarks/gpu/int8_accuracy.py --prepare FOLDER    files and data, where registries are
    python benchmarks/gpu/int8_accuracy.py FOLDER              on a GPU
    python benchmarks/gpu/int8_accuracy.py FOLDER --device cpu the same integers, slowly

MNIST-8 on its 10,000 test images, and MobileNetV2 on crops of photographs, where what counts is
whether the class is that of FP32. Each calibrator of `penstock optimize` writes its file; if the
accuracy gate refuses all of them, its fallback by layer chooses layers that stay in FP16. Ranges,
gate and fallback use other crops than those that are judged. The engine runs the files with FP16
between the layers, FP32 on a CPU.
Goals: MNIST-8 loses at most 0.3 points; MobileNetV2 agrees on at least 97 % of 300 crops.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

if TYPE_CHECKING:
    from optimizing.cases import Case

    from penstock.optimizer.accuracy import Judgement
    from penstock.optimizer.candidates import Step
    from penstock.types import Array

METHODS = ("minmax", "entropy", "percentile")
FALLBACK = "fallback"
NUM_CALIBRATION = 64
# Crops beyond those of the case. With what the case has left, layers are chosen by them.
NUM_FURTHER = 256
BATCH, ROWS = 64, 16
MODELS = {"mnist_8": 10_000, "mobilenet_v2": 320}


def prepare(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        num_judged = MODELS[name]
        case, (images, further), labels = _data(name)
        order = np.random.default_rng(0).permutation(len(images))
        judged = (
            np.sort(order)
            if labels is not None
            else order[NUM_CALIBRATION : NUM_CALIBRATION + num_judged]
        )
        others = [images[each] for each in order[NUM_CALIBRATION + num_judged :]]
        target = folder / name
        shutil.rmtree(target, ignore_errors=True)
        trial = Trial(
            target, case, [images[each] for each in order[:NUM_CALIBRATION]], [*others, *further]
        )
        trial.write()
        shutil.rmtree(trial.work)
        if labels is None:
            labels = np.zeros(len(images), np.int64)
        np.savez_compressed(
            target / "data.npz", images=images[judged].astype(np.float16), labels=labels[judged]
        )
        print(name, len(judged), "images to judge", flush=True)


def _data(name: str) -> tuple[Case, tuple[Array, Array], Array | None]:
    """Return a case, its images, further ones to choose layers by, and labels."""
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
    from optimizing import cases

    case = cases.CASES[name]()
    with np.load(case.data) as data:
        labels = data[case.labels] if case.labels else None
        (key,) = [each for each in data.files if each != case.labels]
        images = data[key]
    if labels is not None:
        return case, (images[:, 0], images[:0, 0]), labels
    photos = [photo for photo, _ in cases.photographs()]
    return case, (images, cases.crops(photos, len(images) + NUM_FURTHER)[len(images) :]), None


class Trial:
    """A model on its way through the pass `int8-static`, as in `penstock optimize --device cuda`:
    calibrated with some images, judged and layers chosen by others. ONNX Runtime computes the
    answers, so this needs no GPU."""

    def __init__(
        self, target: Path, case: Case, calibration: Sequence[Array], choice: Sequence[Array]
    ) -> None:
        from penstock.optimizer import budget, folders, onnx_model, this_machine
        from penstock.optimizer.candidates import Build, Candidate
        from penstock.optimizer.examples import Examples, Split
        from penstock.optimizer.passes import BuildContext
        from penstock.optimizer.plan import Plan

        self.target, self.choice = target, choice
        # Every choice of layers is a build.
        self.work = target / "work"
        self.budget = budget.parse(case.accuracy)
        original = self.work / "original"
        (original / "1").mkdir(parents=True)
        onnx_model.write(freed(onnx_model.read(Path(case.model))), original / "1" / "model.onnx")
        config = folders.read_config(original)
        self.parent = Build(Candidate(), original, config.on(["cuda"]))
        (given,) = config.inputs
        rows = [{given.name: image} for image in (*calibration, *choice)]
        first = len(calibration)
        split = Split(tuple(range(first)), tuple(range(first, len(rows))), ())
        examples = Examples(rows, None, split, "", f"{len(rows)} images")
        plan = Plan(model=case.model, name=case.name, out="")
        self.machine = this_machine.read_machine()
        self.context = BuildContext(plan, self.machine, examples, self.work / "cache")

    def write(self) -> None:
        """Write the model as it is, by each calibrator, and with layers in float where none of them
        passes the gate."""
        import onnx

        from penstock.optimizer.facts import file_facts
        from penstock.optimizer.passes import PassContext, int8_static

        ready = int8_static.prepared(self.parent, self.context.cache)
        onnx.save(ready, self.target / "float.onnx")
        found = self.parent, file_facts(self.parent), self.context.examples
        context = PassContext(self.context.plan, self.machine, *found, {})
        made = int8_static.Int8Static()
        judged = {}
        for step in made.propose(context):
            judged[step.settings["calibrator"]] = self.judge(step), step
        for method, (judgement, _) in judged.items():
            shutil.copy(self._path(judged[method][1]), self.target / f"{method}.onnx")
            print(f"  {method}: {judgement.text}", flush=True)
        if not self.choice or any(judgement.is_passed for judgement, _ in judged.values()):
            return
        _, best = min(judged.values(), key=lambda each: each[0].loss_bound)

        def passes(step: Step) -> bool:
            judgement = self.judge(step)
            print(f"  keeps {step.settings['keep']}: {judgement.text}", flush=True)
            return judgement.is_passed

        step, layers = made.fall_back(self.parent, best, self.context, passes)
        names = ", ".join(f"{each.name} ({each.regained:.1%})" for each in layers)
        if step is None:
            print(f"  refused; layers that cause most of the error: {names}", flush=True)
            return
        print(f"  {best.settings['calibrator']} with layers in FP16: {names}", flush=True)
        shutil.copy(self._path(step), self.target / f"{FALLBACK}.onnx")
        kept = [{"name": each.name, "share of error": each.regained} for each in layers]
        found = {"calibrator": best.settings["calibrator"], "kept": kept}
        (self.target / f"{FALLBACK}.json").write_text(json.dumps(found, indent=1))

    def judge(self, step: Step) -> Judgement:
        """Judge a step by the classes of the images to choose by, as the gate does."""
        from penstock.optimizer import accuracy
        from penstock.optimizer.passes import find

        path = self._path(step)
        if not path.exists():
            find(step.pass_name).build(self.parent, step, path.parents[1], self.context)
        if not hasattr(self, "_classes"):
            self._classes = self._classify(self.parent.artifact)
        same = (self._classify(path) == self._classes).astype(np.float64)
        return accuracy.judge(np.ones_like(same), same, self.budget, is_binary=True)

    def _path(self, step: Step) -> Path:
        from penstock.optimizer.candidates import Candidate

        return self.work / "builds" / Candidate((step,)).key / "m" / "1" / "model.onnx"

    def _classify(self, path: Path) -> Array:
        from penstock.optimizer import onnx_model
        from penstock.optimizer.passes import building

        entries = {building.LEFT_OUT: building.FLOATS_TO_BYTES}
        loaded = onnx_model.session(onnx_model.read(path), entries=entries)
        (given,) = self.parent.config.inputs
        found = []
        for start in range(0, len(self.choice), ROWS):
            batch = {given.name: np.stack(self.choice[start : start + ROWS])}
            (scores,) = onnx_model.run(loaded, batch).values()
            found.append(scores.argmax(1))
        return np.concatenate(found) if found else np.zeros(0)


def freed(model):
    """Let a batch of any size in where the file has one row."""
    from onnx import version_converter

    if model.opset_import[0].version < 13:
        model = version_converter.convert_version(model, 13)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "n"
    del model.graph.value_info[:]
    for node in model.graph.node:
        if node.op_type != "Reshape":
            continue
        for tensor in model.graph.initializer:
            if tensor.name == node.input[1]:
                from onnx import numpy_helper

                shape = numpy_helper.to_array(tensor).copy()
                if len(shape) and shape[0] == 1:
                    shape[0] = -1
                    tensor.CopyFrom(numpy_helper.from_array(shape, tensor.name))
    return model


def answers(path: Path, images: np.ndarray, device: str) -> tuple[np.ndarray, str]:
    from penstock.backends import Batch, backend
    from penstock.config import BatchPolicy, ModelConfig
    from penstock.repository import onnx_file
    from penstock.types import TensorSpec

    signature = onnx_file.read_signature(path)
    (given,), (out,) = signature.inputs, signature.outputs
    options = {"penstock.fuse": "convolutions"}
    if device != "cpu":
        options |= {"penstock.dtype": "fp16"} if path.stem != "float" else {}
    config = ModelConfig(
        name=path.parent.name,
        version="1",
        backend="pytorch",
        artifact=str(path),
        inputs=(TensorSpec(given.name, "FP32", given.shape[1:]),),
        outputs=(TensorSpec(out.name, "FP32", out.shape[1:]),),
        max_batch_size=BATCH,
        batching=BatchPolicy(BATCH, is_dynamic=True),
        options=options,
        device=device,
    )
    runner = backend("pytorch")(config)
    found = []
    for start in range(0, len(images), BATCH):
        rows = np.ascontiguousarray(images[start : start + BATCH], np.float32)
        (outputs,) = runner.start(Batch({given.name: rows}, len(rows))).wait()
        found.append(outputs[out.name].copy())
    return np.concatenate(found), runner.built().get("fusion", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=int, default=10_000, help="images of each model")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--out", type=Path, help="JSON file to write the figures to")
    args = parser.parse_args()
    if args.prepare:
        prepare(args.folder, args.models)
        return
    rows = [row for name in args.models for row in judged(args.folder / name, args)]
    if args.out:
        found = {"device": args.device, "date": time.strftime("%Y-%m-%d"), "rows": rows}
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def judged(folder: Path, args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Compare each file of a model with FP32, on images that nothing was chosen by."""
    with np.load(folder / "data.npz") as data:
        images, labels = data["images"][: args.limit], data["labels"][: args.limit]
    wanted, _ = answers(folder / "float.onnx", images, args.device)
    top = wanted.argmax(1)
    right = 100 * float((top == labels).mean())
    for method in (*METHODS, FALLBACK):
        path = folder / f"{method}.onnx"
        if not path.exists():
            continue
        found, fusion = answers(path, images, args.device)
        alike = 100 * float((found.argmax(1) == top).mean())
        row = {"model": folder.name, "file": method, "images": len(images), "agrees": alike}
        text = f"agrees on {alike:.2f} %"
        if labels.any():
            lost = right - 100 * float((found.argmax(1) == labels).mean())
            row |= {"top1": right, "lost": lost}
            text += f", top-1 {right:.2f} %, loses {lost:.2f} points"
        if method == FALLBACK:
            row |= json.loads((folder / f"{FALLBACK}.json").read_text())
        print(f"{folder.name} {method}, {len(images)} images: {text}; {fusion}", flush=True)
        yield {**row, "fusion": fusion}


if __name__ == "__main__":
    main()
