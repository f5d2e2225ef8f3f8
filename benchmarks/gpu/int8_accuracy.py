"""What INT8 costs on a GPU in accuracy, with real weights:

    python benchmarks/gpu/int8_accuracy.py --prepare FOLDER    files and data, where registries are
    python benchmarks/gpu/int8_accuracy.py FOLDER              on a GPU
    python benchmarks/gpu/int8_accuracy.py FOLDER --device cpu the same integers, slowly

MNIST-8 on its 10,000 test images, and MobileNetV2 on crops of photographs, where what counts is
whether the class is that of FP32. Ranges come from other images than those that are judged. Each
calibrator of `penstock optimize` writes its file; the engine runs it with FP16 between the layers.
Goals: MNIST-8 loses at most 0.3 points; MobileNetV2 agrees on at least 97 % of 300 crops.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

METHODS = ("minmax", "entropy", "percentile")
NUM_CALIBRATION = 64
BATCH = 64
MODELS = {"mnist_8": 10_000, "mobilenet_v2": 320}


def prepare(folder: Path) -> None:
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
    import onnx
    from optimizing import cases

    from penstock.optimizer import calibration, onnx_folding, onnx_model
    from penstock.optimizer.passes import int8_static

    for name in MODELS:
        case = cases.CASES[name]()
        with np.load(case.data) as data:
            labels = data[case.labels] if case.labels else None
            (key,) = [each for each in data.files if each != case.labels]
            images = data[key]
        if name == "mnist_8":
            images = images[:, 0]
        order = np.random.default_rng(0).permutation(len(images))
        chosen, judged = order[:NUM_CALIBRATION], order[NUM_CALIBRATION:]
        judged = np.sort(order) if name == "mnist_8" else judged[: MODELS[name]]
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        model = freed(onnx_model.read(Path(case.model)))
        model = onnx_folding.fold(model, {key: (-1, *images.shape[1:])})
        ready = onnx_model.prepared(model)
        onnx.save(ready, target / "float.onnx")
        for method in METHODS:
            scheme = int8_static.Scheme(method, True, False, False, is_gpu=True)
            names = onnx_model.float_tensors(ready.graph, scheme.operators)
            tensors = {each: calibration.ValueHistogram() for each in names}
            loaded = onnx_model.session(onnx_model.with_outputs(ready, names))
            for start in range(0, NUM_CALIBRATION, 16):
                batch = {key: images[chosen[start : start + 16]]}
                found = onnx_model.run(loaded, batch)
                calibration._observe(tensors, {**found, **batch})
            known = calibration.Calibration(tensors, {}, NUM_CALIBRATION, "")
            made = int8_static.quantised(ready, known.ranges(method), scheme)
            onnx.save(made, target / f"{method}.onnx")
        if labels is None:
            labels = np.zeros(len(images), np.int64)
        np.savez_compressed(
            target / "data.npz", images=images[judged].astype(np.float16), labels=labels[judged]
        )
        print(name, len(judged), "images", flush=True)


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
    args = parser.parse_args()
    if args.prepare:
        prepare(args.folder)
        return
    for name in MODELS:
        with np.load(args.folder / name / "data.npz") as data:
            images, labels = data["images"][: args.limit], data["labels"][: args.limit]
        wanted, _ = answers(args.folder / name / "float.onnx", images, args.device)
        top = wanted.argmax(1)
        right = 100 * float((top == labels).mean())
        for method in METHODS:
            found, fusion = answers(args.folder / name / f"{method}.onnx", images, args.device)
            alike = 100 * float((found.argmax(1) == top).mean())
            lost = right - 100 * float((found.argmax(1) == labels).mean())
            text = f"agrees on {alike:.2f} %"
            if labels.any():
                text += f", top-1 {right:.2f} %, loses {lost:.2f} points"
            print(f"{name} {method}, {len(images)} images: {text}; {fusion}", flush=True)


if __name__ == "__main__":
    main()
