"""Images decoded, resized and normalised on a GPU, beside Pillow on the CPU; `make test-gpu`, with
`-s` for the table of differences."""

import importlib.resources
import io
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.errors import InvalidRequest

torch = pytest.importorskip("torch")
Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

if torch.cuda.is_available():
    from penstock.backends import backend
    from penstock.backends.torch_cuda import Arena
    from penstock.backends.torch_images import open_nvjpeg
    from penstock.config import BatchPolicy, ModelConfig, Preprocess
    from penstock.kernels import pixels
    from penstock.types import TensorSpec

    HAS_NVJPEG = open_nvjpeg(torch.device("cuda:0"))[0] is not None
else:
    HAS_NVJPEG = False
needs_nvjpeg = pytest.mark.skipif(not HAS_NVJPEG, reason="torchvision has no nvJPEG here")

SIZE, CLASSES = 224, 7
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SETTINGS = "resize=shortest 256; mean=0.485,0.456,0.406; std=0.229,0.224,0.225"
MODULE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 7, 4, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(4),
            torch.nn.Flatten(), torch.nn.Linear(256, 7))

    def forward(self, x):
        return {"y": self.layers(x)}

def factory():
    torch.manual_seed(0)
    return Net()
"""
ECHO = """
import torch

class Echo(torch.nn.Module):
    def forward(self, x):
        return {"y": x * 1.0}

def factory():
    return Echo()
"""


def scene(width, height, seed):
    """Return a picture with the spectrum of a photo, and edges between strong colours."""
    chance = np.random.default_rng(seed)
    shown = np.zeros((height, width, 3))
    for octave in range(7):
        size = min(width, 3 << octave), min(height, 2 << octave)
        noise = chance.integers(0, 256, (*size[::-1], 3), np.uint8)
        layer = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
        shown += np.asarray(layer) / 2.0**octave
    shown *= 128 / shown.mean()
    for _ in range(6):
        x, y = chance.integers(0, width), chance.integers(0, height)
        shown[y : y + height // 6, x : x + width // 6] = chance.integers(0, 256, 3)
    return shown.clip(0, 255).astype(np.uint8)


def encoded(shown, form="JPEG", **options):
    file = io.BytesIO()
    image = Image.fromarray(shown)
    image.convert(options.pop("mode", "RGB")).save(file, form, **options)
    return file.getvalue()


def photos():
    """Return pictures by name; real ones where scikit-learn brings some."""
    found = {f"scene {n}": scene(500, 375, n) for n in range(3)} | {"large": scene(1600, 1200, 9)}
    try:
        folder = importlib.resources.files("sklearn.datasets.images")
    except ModuleNotFoundError:
        return found
    for name in ("china.jpg", "flower.jpg"):
        found[name] = np.array(Image.open(io.BytesIO((folder / name).read_bytes())))
    return found


def a_config(folder: Path, module=ECHO, text=SETTINGS, max_batch=16, y=None, **options):
    (folder / "module.py").write_text(module)
    x = TensorSpec("x", "FP32", (3, SIZE, SIZE))
    return ModelConfig(
        name="photo",
        version="1",
        backend="pytorch",
        artifact=str(folder / "module.py"),
        inputs=(TensorSpec("IMAGE", "BYTES", (1,)),),
        outputs=(y or TensorSpec("y", "FP32", (3, SIZE, SIZE)),),
        max_batch_size=max_batch,
        batching=BatchPolicy(max_batch, is_dynamic=True),
        preprocess=Preprocess("image", (x,), image=text),
        device="cuda:0",
        num_instances=2,
        options={f"penstock.{name}": value for name, value in options.items()},
    )


def made_of(runner, files):
    """Return what the model gets for files, on the host, and the errors."""
    decoder = runner.decoder
    with torch.inference_mode(), decoder.device.lane("in"):
        made, errors = decoder.write(files, Arena(decoder.device.empty), len(files))
        torch.cuda.synchronize()
        return made["x"].float().cpu().numpy(), errors


def by_cpu(runner, files):
    rows = runner.decoder.step.tried_all([{"IMAGE": np.array([f], object)} for f in files])
    return np.stack([row["x"] for row in rows])


def gaps(found, expected):
    """Return differences in steps of 255."""
    return np.abs(found - expected) * np.array(STD, np.float32)[:, None, None] * 255


@pytest.mark.parametrize("resample", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_the_kernel_resizes_as_pillow_does(resample, dtype):
    assert pixels.has_kernel(torch.device("cuda:0"))
    sizes = [(500, 375), (375, 500), (64, 48), (1600, 900), (224, 224), (3000, 40), (5, 7)]
    shown = [scene(*size, seed) for seed, size in enumerate(sizes)]
    rows = [torch.from_numpy(each).cuda().permute(2, 0, 1) for each in shown]
    batch = torch.empty((len(rows) + 1, SIZE, SIZE, 3), dtype=dtype, device="cuda")
    batch = batch.permute(0, 3, 1, 2)
    form = pixels.PixelForm(resample, 1 / 255, MEAN, STD, is_bgr=False)
    images, expected = [], []
    for row, (each, there) in enumerate(zip(shown, rows, strict=True)):
        height, width = each.shape[:2]
        short = 256 / min(height, width)
        resized = int(height * short), int(width * short)
        corner = (resized[0] - SIZE) // 2, (resized[1] - SIZE) // 2
        images.append(pixels.DecodedImage(there, 1, (*resized, *corner), row))
        image = Image.fromarray(each).resize(resized[::-1], resample)
        top, left = corner
        expected.append(np.asarray(image.crop((left, top, left + SIZE, top + SIZE)), np.float32))
    pixels.place(images, [len(rows)], batch, form, torch.Tensor.cuda)
    found = batch.permute(0, 2, 3, 1).float().cpu().numpy()
    if dtype != torch.uint8:
        found = (found * np.array(STD) + np.array(MEAN)) * 255
    gap = np.abs(found[:-1] - np.stack(expected))
    rounding = {torch.uint8: 0, torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 1.0}
    assert gap.max() <= 1 + rounding[dtype]
    assert (gap > 0.5 + rounding[dtype]).mean() < 0.1
    assert np.abs(found[-1]).max() <= rounding[dtype] + 0.01


@needs_nvjpeg
def test_pixels_beside_pillow(tmp_path):
    """Without subsampled colours, decoders differ in rounding only."""
    runner = backend("pytorch")(a_config(tmp_path))
    print("\npicture, coding, mean / p99 / max difference in steps of 255")
    for name, shown in photos().items():
        for coding, options in {
            "4:4:4": {"subsampling": 0},
            "4:2:2": {"subsampling": 1},
            "4:2:0": {"subsampling": 2},
            "4:2:0 progressive": {"subsampling": 2, "progressive": True},
            "grey": {"mode": "L"},
        }.items():
            data = encoded(shown, quality=92, **options)
            before = runner.decoder.num_on_gpu
            found, errors = made_of(runner, [data])
            assert not errors and runner.decoder.num_on_gpu == before + 1
            gap = gaps(found, by_cpu(runner, [data]))
            far = float(np.quantile(gap, 0.99))
            print(f"{name:10} {coding:18} {gap.mean():.3f} {far:.1f} {gap.max():.1f}")
            if coding in ("4:4:4", "grey"):
                assert gap.mean() < 0.5 and gap.max() < 5
            else:
                # Each decoder enlarges the colours in its own way, which shows at their edges.
                assert gap.mean() < 2.0 and far < 16
    runner.close()


@needs_nvjpeg
def test_orientations_and_files_for_the_threads(tmp_path):
    runner = backend("pytorch")(a_config(tmp_path))
    shown = scene(400, 300, 4)
    files = []
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        files.append(encoded(shown, subsampling=0, quality=95, exif=exif))
    others = [encoded(shown, "PNG"), encoded(shown, "WEBP"), encoded(shown, mode="CMYK")]
    found, errors = made_of(runner, [*files, *others, b"no image", files[0][:2000]])
    assert list(errors) == [11, 12] and all(isinstance(e, InvalidRequest) for e in errors.values())
    assert (runner.decoder.num_on_gpu, runner.decoder.num_on_cpu) == (8, 3)
    expected = by_cpu(runner, [*files, *others])
    gap = gaps(found[:11], expected)
    assert gap[:8].max() < 5
    np.testing.assert_allclose(found[8:11], expected[8:], atol=1e-4)
    runner.close()


@needs_nvjpeg
def test_a_damaged_file_fails_alone_or_is_decoded_by_pillow(tmp_path):
    """Whatever is in a file, others in its batch are as without it."""
    runner = backend("pytorch")(a_config(tmp_path))
    good = [encoded(scene(320, 240, n), subsampling=0) for n in range(3)]
    expected, _ = made_of(runner, good)
    chance = np.random.default_rng(3)
    for _ in range(30):
        bad = bytearray(good[0])
        for at in chance.integers(2, len(bad) - 2, 4):
            bad[at] = chance.integers(0, 256)
        found, errors = made_of(runner, [good[0], good[1], bytes(bad), good[2]])
        assert set(errors) <= {2}
        np.testing.assert_array_equal(found[[0, 1, 3]], expected)
    assert not runner.inner.is_lost()
    runner.close()


FAST = {"dtype": "fp16", "cuda_graphs": "on", "memory_format": "channels_last"}


def test_batches_in_flight_keep_their_images(tmp_path):
    """Memory of decoded images is reused from batch to batch."""
    runner = backend("pytorch")(a_config(tmp_path, dtype="fp16", cuda_graphs="on"))
    files = [encoded(scene(300 + 40 * n, 240, n)) for n in range(12)]
    expected, _ = made_of(runner, files)
    chance = np.random.default_rng(0)
    flying = []
    for _ in range(60):
        rows = chance.integers(0, len(files), chance.integers(1, 17))
        given = np.array([[files[row]] for row in rows], dtype=object)
        flying.append((rows, runner.start(penstock.backends.Batch({"IMAGE": given}, len(rows)))))
        if len(flying) == 2:
            rows, execution = flying.pop(0)
            (answer,) = execution.wait()
            np.testing.assert_array_equal(answer["y"], expected[rows])
    told = runner.built()
    assert told["image_kernel"] == "Triton" and int(told["cuda_graphs"]) > 0
    assert told["image_decoder"].startswith("nvJPEG" if HAS_NVJPEG else "CPU threads: ")
    runner.close()


CONFIG = """
platform: "onnxruntime_onnx"
max_batch_size: 16
dynamic_batching { }
instance_group [{ count: 2, kind: %s }]
parameters { key: "penstock.image" value { string_value: "%s" } }
"""


def test_an_onnx_file_is_served_from_photos(tmp_path):
    folder = tmp_path / "photo"
    (folder / "1").mkdir(parents=True)
    space: dict[str, object] = {}
    exec(MODULE.replace('{"y": self.layers(x)}', "self.layers(x)"), space)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            space["factory"]().eval(),
            (torch.rand(2, 3, SIZE, SIZE),),
            folder / "1" / "model.onnx",
            input_names=["x"],
            output_names=["y"],
            opset_version=13,
            dynamo=False,
            dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
        )
    files = [encoded(scene(400, 300, n), subsampling=0, quality=95) for n in range(24)]
    files += [encoded(scene(300, 200, 50), "PNG")]
    answers = {}
    for kind in ("KIND_CPU", "KIND_GPU"):
        (folder / "config.pbtxt").write_text(CONFIG % (kind, SETTINGS))
        with penstock.load(folder) as model, ThreadPoolExecutor(16) as threads:

            def ask(file, model=model):
                return model.infer({"IMAGE": np.array([[file]], dtype=object)})["y"][0]

            answers[kind] = np.stack(list(threads.map(ask, files * 4)))
            with pytest.raises(InvalidRequest, match="no image; expected a JPEG, PNG or WebP"):
                ask(b"no image")
    scale = np.abs(answers["KIND_CPU"]).max()
    assert np.abs(answers["KIND_CPU"] - answers["KIND_GPU"]).max() < 0.02 * scale


@pytest.mark.parametrize("options", [{}, FAST, {**FAST, "fuse": "convolutions"}], ids=str)
def test_a_module_is_served_in_its_type_and_layout(tmp_path, options):
    options = dict(options)
    if "fuse" in options:
        options.pop("memory_format")
    (tmp_path / "weights").mkdir()
    space: dict[str, object] = {}
    exec(MODULE, space)
    network = space["factory"]().eval()
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file(network.state_dict(), tmp_path / "model.safetensors")
    y = TensorSpec("y", "FP32", (CLASSES,))
    runner = backend("pytorch")(a_config(tmp_path, MODULE, y=y, **options))
    files = [encoded(scene(400, 300, n), subsampling=0, quality=95) for n in range(5)]
    for _ in range(3):
        given = np.array([[file] for file in files], dtype=object)
        (answer,) = runner.start(penstock.backends.Batch({"IMAGE": given}, 5)).wait()
    with torch.inference_mode():
        expected = network(torch.from_numpy(by_cpu(runner, files)))["y"].numpy()
    assert np.abs(answer["y"] - expected).max() < 0.02 * np.abs(expected).max()
    runner.close()
