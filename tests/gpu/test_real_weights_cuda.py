"""What precisions and fusions do to answers of trained models on real data, and to planted
outliers: random weights have none. `make test-gpu`; without a GPU the same on the CPU with a few
examples.

The trained ones need `.bench/gpu/real.tar.xz`, which `benchmarks/gpu/pack_real.py` makes where
there is a network.
"""

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from penstock.backends import Batch, backend
from penstock.config import BatchPolicy, ModelConfig, PadAxis, Padding
from penstock.optimizer import accuracy, budget, numerics
from penstock.types import TensorSpec

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from packable import texts, write  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from penstock.backends import torch_packing  # noqa: E402
from penstock.backends.pytorch import load_module  # noqa: E402

pytestmark = pytest.mark.timeout(300)
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda:0" if HAS_GPU else "cpu"
ROOT = Path(__file__).resolve().parents[2]
SIDE = 224
NUM_PHOTOGRAPHS, NUM_REVIEWS = (20, 400) if HAS_GPU else (3, 16)
LENGTH = 128 if HAS_GPU else 48
GRAPHS = {"penstock.cuda_graphs": "on"} if HAS_GPU else {}
only_gpu = pytest.mark.skipif(not HAS_GPU, reason="there is no GPU")
has_fp8 = pytest.mark.skipif(
    not HAS_GPU or torch.cuda.get_device_capability() < (8, 9), reason="no GPU with FP8"
)


# Without ranges: each token by its own.
BY_ROW = getattr(torch_packing, "ROWWISE", "")
has_rows = pytest.mark.skipif(not BY_ROW, reason="FP8 by row is not there")


def loaded_script(name: str) -> ModuleType:
    path = ROOT / "benchmarks" / "gpu" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What was packed, with the folder it lies in now."""
    script = loaded_script("pack_real")
    if not script.ARCHIVE.is_file():
        pytest.skip(f"{script.ARCHIVE} is not there: {script.HOW}")
    folder = tmp_path_factory.mktemp("real")
    return script.unpack(folder) | {"folder": folder}


def relative(found, wanted) -> float:
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def answers(config: ModelConfig, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Twice: the second of a captured shape is the graph's."""
    runner = backend("pytorch")(config)
    num_rows = len(next(iter(inputs.values())))
    name = config.outputs[0].name
    for _ in range(2):
        (outputs,) = runner.start(Batch(inputs, num_rows)).wait()
        found = np.array(outputs[name], np.float32)
    built = runner.built()
    assert "without_cuda_graph" not in built, built
    runner.close()
    return found


# MobileNetV2 on photographs.


@pytest.fixture(scope="module")
def images(real) -> np.ndarray:
    """Whole photographs, and on a GPU mirrored ones and parts of them too."""
    photos = torch.from_numpy(real["photographs"][:NUM_PHOTOGRAPHS]).permute(0, 3, 1, 2).float()
    views = [photos]
    if HAS_GPU:
        views += [photos.flip(3), photos[:, :, 16:144, :128], photos[:, :, :120, 40:160]]
    large = [
        torch.nn.functional.interpolate(each, (SIDE, SIDE), mode="bilinear", align_corners=False)
        for each in views
    ]
    mean, deviation = (torch.tensor(real[key])[:, None, None] for key in ("mean", "deviation"))
    return ((torch.cat(large) / 255 - mean) / deviation).float().contiguous().numpy()


def mobilenet(real, options: Mapping[str, str], device: str = DEVICE) -> ModelConfig:
    return ModelConfig(
        name="mobilenet",
        version="1",
        backend="pytorch",
        artifact=str(real["folder"] / "mobilenet" / "1" / "module.py"),
        inputs=(TensorSpec("image", "FP32", (3, SIDE, SIDE)),),
        outputs=(TensorSpec("logits", "FP32", (1000,)),),
        max_batch_size=80,
        batching=BatchPolicy(80, is_dynamic=True),
        device=device,
        options={"penstock.factory": "MobileNetV2", **options},
    )


@pytest.fixture(scope="module")
def logits(real, images) -> np.ndarray:
    return answers(mobilenet(real, {}, "cpu"), {"image": images})


def test_photographs_are_recognised(real, logits) -> None:
    """Else what is compared below says nothing."""
    whole = logits[:NUM_PHOTOGRAPHS].argmax(1)
    assert (whole == np.array(real["classes"][:NUM_PHOTOGRAPHS])).mean() >= 0.6


FUSED = {"penstock.fuse": "convolutions"}
LAST = {"penstock.memory_format": "channels_last"}


@pytest.mark.parametrize(
    ("options", "most", "agreement"),
    [
        pytest.param({"penstock.dtype": "fp32"}, 1e-3, 1.0, id="fp32"),
        pytest.param({"penstock.dtype": "tf32"}, 1e-2, 0.96, id="tf32", marks=only_gpu),
        # Convolutions in FP16 take a CPU many seconds.
        pytest.param({"penstock.dtype": "fp16"}, 1e-2, 0.96, id="fp16", marks=only_gpu),
        pytest.param({"penstock.dtype": "bf16"}, 8e-2, 0.85, id="bf16"),
        pytest.param(
            {"penstock.dtype": "fp16", **LAST, **GRAPHS},
            1e-2,
            0.96,
            id="fp16, channels-last, graphs",
            marks=only_gpu,
        ),
        pytest.param({"penstock.dtype": "fp32", **FUSED}, 5e-3, 0.97, id="fp32, fused"),
        pytest.param(
            {"penstock.dtype": "fp16", **FUSED, **GRAPHS},
            1e-2,
            0.96,
            id="fp16, fused, graphs",
            marks=only_gpu,
        ),
        pytest.param({"penstock.dtype": "bf16", **FUSED, **GRAPHS}, 8e-2, 0.85, id="bf16, fused"),
    ],
)
def test_mobilenet_agrees_with_fp32(real, images, logits, options, most, agreement) -> None:
    found = answers(mobilenet(real, options), {"image": images})
    assert np.isfinite(found).all()
    assert relative(found, logits) < most
    assert (found.argmax(1) == logits.argmax(1)).mean() >= agreement


# MiniLM on reviews.


@pytest.fixture(scope="module")
def kept(real) -> list[int]:
    """Which reviews are compared."""
    short = [number for number, row in enumerate(real["ids"]) if len(row) <= LENGTH]
    return short[:NUM_REVIEWS]


@pytest.fixture(scope="module")
def reviews(real, kept) -> dict[str, np.ndarray]:
    return padded([real["ids"][number] for number in kept])


def padded(rows) -> dict[str, np.ndarray]:
    ids = np.zeros((len(rows), LENGTH), np.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    return {"input_ids": ids, "attention_mask": (ids != 0).astype(np.int64)}


def minilm(real, options: Mapping[str, str], device: str = DEVICE) -> ModelConfig:
    axes = (PadAxis("input_ids", 0), PadAxis("attention_mask", 0))
    return ModelConfig(
        name="minilm",
        version="1",
        backend="pytorch",
        artifact=str(real["folder"] / "minilm" / "1" / "module.py"),
        inputs=tuple(TensorSpec(each.input, "INT64", (-1,)) for each in axes),
        outputs=(TensorSpec("embedding", "FP32", (384,)),),
        max_batch_size=400,
        batching=BatchPolicy(400, is_dynamic=True),
        padding=Padding(axes, (LENGTH,)),
        device=device,
        options={"penstock.factory": "encoder", **options},
    )


@pytest.fixture(scope="module")
def embeddings(real, reviews) -> np.ndarray:
    return answers(minilm(real, {}, "cpu"), reviews)


def classes(real, found: np.ndarray) -> np.ndarray:
    return (found @ real["head"]["weight"].T + real["head"]["bias"]).argmax(1)


def cosines(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
    return (found * wanted).sum(1) / lengths


@pytest.fixture
def check_reviews(real, kept, embeddings) -> Callable[[np.ndarray, float, float], None]:
    labels = np.array(real["labels"])[kept]

    def check(found: np.ndarray, least_cosine: float, agreement: float) -> None:
        assert np.isfinite(found).all()
        assert cosines(found, embeddings).min() >= least_cosine
        before, after = classes(real, embeddings), classes(real, found)
        assert (before == after).mean() >= agreement
        lost = int((before == labels).sum()) - int((after == labels).sum())
        # Of a few, one is chance.
        assert lost <= max(1, 0.02 * len(labels)), f"{lost} of the reviews more are wrong"

    return check


def test_reviews_are_understood(real, kept, embeddings) -> None:
    labels = np.array(real["labels"])[kept]
    assert (classes(real, embeddings) == labels).mean() >= 0.65


PACKED = {"penstock.pack": "tokens"}


@pytest.mark.parametrize(
    ("options", "least_cosine", "agreement"),
    [
        pytest.param({"penstock.dtype": "fp16"}, 0.9999, 0.985, id="fp16", marks=only_gpu),
        pytest.param({"penstock.dtype": "bf16"}, 0.999, 0.97, id="bf16", marks=only_gpu),
        pytest.param({"penstock.dtype": "tf32"}, 0.9999, 0.985, id="tf32", marks=only_gpu),
        pytest.param({"penstock.dtype": "fp32", **PACKED}, 0.99999, 0.995, id="packed fp32"),
        pytest.param(
            {"penstock.dtype": "fp16", **PACKED, **GRAPHS},
            0.9999,
            0.985,
            id="packed fp16",
            marks=only_gpu,
        ),
        pytest.param({"penstock.dtype": "bf16", **PACKED, **GRAPHS}, 0.999, 0.97, id="packed bf16"),
    ],
)
def test_minilm_agrees_with_fp32(
    real, reviews, check_reviews, options, least_cosine, agreement
) -> None:
    check_reviews(answers(minilm(real, options), reviews), least_cosine, agreement)


@pytest.fixture(scope="module")
def ranges(real) -> dict[str, float]:
    """Of other reviews than those that are compared."""
    others = [row for row in real["ids"][-64:] if len(row) <= LENGTH]
    return calibrated(minilm(real, {}), [padded(others)], name="embedding")


def test_minilm_in_fp8_by_static_ranges(real, reviews, check_reviews, ranges) -> None:
    """The products as the GPU computes them; on a CPU with the same roundings."""
    found = packed_answers(minilm(real, {}), reviews, ranges, name="embedding")
    check_reviews(found, 0.97, 0.93)


@has_rows
def test_minilm_in_fp8_by_row(real, reviews, check_reviews) -> None:
    found = packed_answers(minilm(real, {}), reviews, BY_ROW, name="embedding")
    check_reviews(found, 0.97, 0.93)


@has_fp8
@pytest.mark.parametrize("kind", ["fp8.json", pytest.param(BY_ROW, id="by row", marks=has_rows)])
def test_minilm_in_fp8_as_it_is_served(real, reviews, check_reviews, ranges, kind) -> None:
    options = {"penstock.dtype": "bf16", "penstock.fp8": kind, **PACKED, **GRAPHS}
    config = minilm(real, options)
    Path(config.artifact).with_name("fp8.json").write_text(json.dumps(ranges))
    check_reviews(answers(config, reviews), 0.97, 0.93)


# Planted outliers.

Rows = Mapping[str, np.ndarray]


def calibrated(config: ModelConfig, batches: list[Rows], name: str = "y") -> dict[str, float]:
    packing, call, close = packed(config, torch.float32, name)
    found = torch_packing.calibrated(packing, call, [there(each) for each in batches])
    close()
    return found


def packed_answers(
    config: ModelConfig, rows: Rows, ranges: Mapping[str, float] | str | None, name: str = "y"
) -> np.ndarray:
    """In BF16, with products in FP8 where there are ranges, or by row."""
    packing, call, close = packed(config, torch.bfloat16, name)
    if ranges is not None:
        kind = ranges if isinstance(ranges, str) else "fp8.json"
        Path(config.artifact).with_name("fp8.json").write_text(json.dumps(ranges))
        torch_packing.quantise(packing, replace(config, options={"penstock.fp8": kind}))
    given = there(rows)
    with torch.inference_mode():
        packing.lay_out(given, int(rows["attention_mask"].sum()))
        found = call(given)[name].float().cpu().numpy()
    close()
    return found


def plain_answers(
    config: ModelConfig, rows: Rows, change: Callable[[Any], None] = lambda module: None
) -> np.ndarray:
    """Padded, in FP32, on the CPU."""
    loaded = load_module(replace(config, device="cpu"))
    change(loaded.module)
    with torch.inference_mode():
        found = loaded.call({name: torch.from_numpy(each) for name, each in rows.items()})
    loaded.close()
    return found["y"].numpy()


def packed(config: ModelConfig, dtype, name: str) -> tuple[Any, Any, Callable[[], None]]:
    loaded = load_module(replace(config, device="cpu"))

    def call(tensors):
        found = loaded.call(tensors)
        return found if isinstance(found, dict) else {name: found}

    packing = torch_packing.pack(loaded.module, call, config)
    loaded.module.to(DEVICE, dtype)
    return packing, call, loaded.close


def there(rows: Rows) -> dict[str, Any]:
    return {name: torch.from_numpy(each).to(DEVICE) for name, each in rows.items()}


ENCODER = {"width": 128, "inner": 512, "layers": 2, "heads": 2}
LENGTHS = (32, 20, 7, 3, 30, 31, 12, 18)
CHANNELS = (5, 60, 77, 101)
# The last word, which texts for calibration are without.
RARE = 119


def planted(folder: Path, change: Callable[[dict[str, Any]], None]) -> ModelConfig:
    config = write(folder, **ENCODER)
    path = Path(config.artifact).with_name("model.safetensors")
    weights = load_file(path)
    change(weights)
    save_file({name: each.contiguous() for name, each in weights.items()}, path)
    return config


def larger_channels(weights, factor: float) -> None:
    """Some channels of the values that attention mixes are larger, and what reads them weighs them
    less: the answers stay the same, and eight bits have to hold both."""
    channels = torch.tensor(CHANNELS)
    for number in range(ENCODER["layers"]):
        layer = f"encoder.layer.{number}.attention"
        weights[f"{layer}.self.value.weight"][channels] *= factor
        weights[f"{layer}.self.value.bias"][channels] *= factor
        weights[f"{layer}.output.dense.weight"][:, channels] /= factor


def rare_outlier(weights) -> None:
    """One neuron that only the rare word wakes, to a hundred times what others come to, and that
    the answer hangs on."""
    words = weights["embeddings.word.weight"]
    direction = torch.zeros(words.shape[1])
    direction[::2] = 1.0
    direction[1::2] = -1.0
    words[RARE] = 8.0 * direction
    layer = "encoder.layer.0"
    weights[f"{layer}.intermediate.dense.weight"][0] = 1.5 * direction
    weights[f"{layer}.intermediate.dense.bias"][0] = -60.0
    weights[f"{layer}.output.dense.weight"][:, 0] = 0.5 * weights["head.weight"][3]


def without_rare_word(rows: Rows) -> dict[str, np.ndarray]:
    ids = rows["input_ids"]
    return {**rows, "input_ids": np.where(ids == RARE, RARE - 1, ids)}


def with_rare_word(rows: Rows) -> dict[str, np.ndarray]:
    ids = rows["input_ids"].copy()
    ids[:, ::2] = RARE
    return {**rows, "input_ids": ids * rows["attention_mask"]}


@pytest.mark.parametrize("factor", [50.0, pytest.param(100.0, marks=pytest.mark.slow)])
def test_outlier_channels_that_calibration_sees_cost_fp8_nothing_more(tmp_path, factor) -> None:
    """A float of eight bits has as many digits for small values as for large ones. Integers of
    eight bits, by the same ranges, have not: the outliers are there."""
    rows = texts(LENGTHS, seed=77)
    plain = write(tmp_path / "plain", **ENCODER)
    config = planted(tmp_path / "planted", lambda weights: larger_channels(weights, factor))
    batches = [texts(LENGTHS, seed=seed) for seed in range(4)]
    ranges, plain_ranges = calibrated(config, batches), calibrated(plain, batches)
    assert ranges["1.out"] > 0.3 * factor * plain_ranges["1.out"]
    wanted = plain_answers(config, rows)
    assert relative(plain_answers(plain, rows), wanted) < 1e-4
    in_bf16 = relative(packed_answers(config, rows, None), wanted)
    in_fp8 = relative(packed_answers(config, rows, ranges), wanted)
    of_plain = relative(packed_answers(plain, rows, plain_ranges), wanted)
    assert in_bf16 < 0.03
    assert in_fp8 < 2 * of_plain and in_fp8 < 0.1
    assert in_integers(config, rows, ranges, wanted) > 3 * in_fp8


# What the products of a packed layer are in the plain one.
PARTS = {
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "out": ("attention.output.dense",),
    "inner": ("intermediate.dense",),
    "outer": ("output.dense",),
}


def in_integers(config: ModelConfig, rows: Rows, ranges: Mapping[str, float], wanted) -> float:
    """How far answers are when the inputs of the products are rounded to 255 steps instead."""

    def change(module) -> None:
        for name, largest in ranges.items():
            number, _, product = name.partition(".")

            def rounded(_, given, step=largest / 127):
                return ((given[0] / step).round().clamp(-127, 127) * step,)

            for part in PARTS[product]:
                layer = module.get_submodule(f"encoder.layer.{number}.{part}")
                layer.register_forward_pre_hook(rounded)

    return relative(plain_answers(config, rows, change), wanted)


def gates(wanted: np.ndarray, found: np.ndarray):
    """What the optimiser's gates say of them."""
    before, after = ([{"y": row} for row in each] for each in (wanted, found))
    agreed = numerics.agreements(before, after, ["y"])
    allowed = budget.parse("agreement drop <= 3 %")
    judged = accuracy.judge(np.ones(len(agreed)), agreed, allowed)
    return numerics.compare(before, after, tolerance=0.1), judged


def test_outliers_that_calibration_does_not_see_are_cut_off_and_rejected(tmp_path) -> None:
    """By both gates of the optimiser, which say so; BF16 passes them."""
    config = planted(tmp_path / "m", rare_outlier)
    usual = [without_rare_word(texts(LENGTHS, seed=seed)) for seed in range(4)]
    ranges = calibrated(config, usual)
    rows = with_rare_word(texts(LENGTHS * 15, seed=10))
    wanted = plain_answers(config, rows)
    seen = calibrated(config, [rows])
    assert seen["0.outer"] > 20 * ranges["0.outer"]
    numeric, judged = gates(wanted, packed_answers(config, rows, None))
    assert numeric.problems == [] and judged.is_passed, judged.text
    numeric, judged = gates(wanted, packed_answers(config, rows, ranges))
    assert numeric.problems and not judged.is_passed
    assert "agreement" in judged.text and numeric.max_relative > 0.1
    both = {name: max(ranges[name], seen[name]) for name in ranges}
    numeric, judged = gates(wanted, packed_answers(config, rows, both))
    assert numeric.problems == [] and judged.is_passed, judged.text


@has_rows
def test_outliers_of_single_tokens_are_kept_by_row(tmp_path) -> None:
    config = planted(tmp_path / "m", rare_outlier)
    rows = with_rare_word(texts(LENGTHS * 15, seed=10))
    numeric, judged = gates(plain_answers(config, rows), packed_answers(config, rows, BY_ROW))
    assert numeric.problems == [] and judged.is_passed, judged.text
