"""Encoded images in front of a model on a GPU that is none: what its decoder gets and what the
threads get, and that both end as the CPU's own path does. On a real GPU: tests/gpu."""

import io
from dataclasses import replace

import numpy as np
import pytest
import tiny_pretrained as tiny
from fake_gpu import FakeGpu
from PIL import Image
from suites.backend import model_config

from penstock.backends import Batch, backend, processing
from penstock.backends.image import MAX_PIXELS, draw_sample
from penstock.backends.processing import Functions
from penstock.config import BatchPolicy, Postprocess, Preprocess
from penstock.errors import InvalidRequest
from penstock.serving.worker_load import load_runner
from penstock.types import TensorSpec
from penstock.wire.frames import RequestPart

torch = pytest.importorskip("torch")
torch_images = pytest.importorskip("penstock.backends.torch_images")

FILE, MAX_BATCH, SIZE = TensorSpec("IMAGE", "BYTES", (1,)), 8, 24
X, Y = TensorSpec("x", "FP32", (3, SIZE, SIZE)), TensorSpec("y", "FP32", (3, SIZE, SIZE))
SETTINGS = "resize=shortest 28; mean=0.485,0.456,0.406; std=0.229,0.224,0.225"
# Gives back what it got.
MODULE = """
import torch

class Echo(torch.nn.Module):
    def forward(self, x):
        return {"y": x.float() if x.dtype == torch.uint8 else x * 1}

def factory():
    return Echo()
"""
# One step of 8 bits, normalised.
STEP = 1.01 / 255 / 0.224
JPEGS = [
    tiny.draw_image(61, 47, seed=1, form="JPEG"),
    tiny.draw_image(40, 90, seed=2, form="JPEG"),
    tiny.draw_image(33, 28, seed=3, form="JPEG", mode="L"),
]


def oriented(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.open(io.BytesIO(JPEGS[0])).save(file, "JPEG", exif=exif, quality=95)
    return file.getvalue()


class PillowDecoder:
    """In the place of nvJPEG: it decodes the same files to the same form, and refuses batches with
    a file that it cannot read."""

    def __init__(self, refused=()):
        self.refused = set(refused)
        self.sizes = []

    def __call__(self, files):
        self.sizes.append(len(files))
        data = [bytes(each.numpy()) for each in files]
        if self.refused & set(data):
            raise RuntimeError("Error while decoding JPEG images: nvjpegDecode failed: 2")
        try:
            shown = [np.array(Image.open(io.BytesIO(each)).convert("RGB")) for each in data]
        except OSError as error:
            raise RuntimeError(f"Error while decoding JPEG images: {error}") from None
        return [torch.from_numpy(each).permute(2, 0, 1).contiguous() for each in shown]


@pytest.fixture
def gpu(monkeypatch):
    gpu = FakeGpu()
    monkeypatch.setattr("penstock.backends.pytorch.open_device", lambda name: gpu)
    return gpu


def a_config(folder, text=SETTINGS, x=X, y=Y, **options):
    (folder / "module.py").write_text(MODULE)
    config = model_config("pytorch", folder / "module.py", [FILE], [y], MAX_BATCH)
    batching = BatchPolicy(MAX_BATCH, is_dynamic=True)
    named = {f"penstock.{name}": value for name, value in options.items()}
    step = Preprocess("image", (x,), image=text)
    return replace(config, preprocess=step, options=named, batching=batching)


def opened(config, decode):
    inner = backend("pytorch")(config.model)
    runner = torch_images.ImageRunner(config, inner, Functions(config))
    runner.decoder.decode_jpegs = decode
    return runner


def watched(runner):
    """Return a list to which each batch is added that the model gets."""
    kept = []
    run = runner.inner.pipeline.compute
    runner.inner.pipeline.compute = lambda inputs: kept.append(inputs["x"].clone()) or run(inputs)
    return kept


def a_batch(files, counts=()):
    rows = np.empty((len(files), 1), np.object_)
    rows[:, 0] = files
    parts = [RequestPart(str(n), count) for n, count in enumerate(counts or [1] * len(files))]
    return Batch({"IMAGE": rows}, len(files), parts)


def answers(runner, files, counts=()):
    execution = runner.start(a_batch(files, counts))
    (answer,) = execution.wait()
    return answer.answers


def by_cpu(config, files):
    """What the step on the CPU makes of files."""
    step = Functions(config).before
    rows = step.tried_all([{"IMAGE": np.array([file], object)} for file in files])
    step.close()
    return [row["x"] for row in rows]


@pytest.mark.parametrize("text", [SETTINGS, "interpolation=bicubic; channels=bgr; resize=30x26"])
def test_pixels_are_those_of_the_cpu(tmp_path, gpu, text):
    config = a_config(tmp_path, text)
    decode = PillowDecoder()
    runner = opened(config, decode)
    files = [*JPEGS, *map(oriented, range(1, 9))][:MAX_BATCH]
    for answer, expected in zip(answers(runner, files), by_cpu(config, files), strict=True):
        np.testing.assert_allclose(answer["y"][0], expected, atol=STEP)
        # A ratio such as 10 : 7 gives many values that are half of one.
        assert (np.abs(answer["y"][0] - expected) > 1e-4).mean() < 0.2
    assert decode.sizes == [MAX_BATCH] and runner.decoder.num_on_cpu == 0
    runner.close()


def test_other_files_go_to_the_threads_and_are_exact(tmp_path, gpu):
    config = a_config(tmp_path)
    decode = PillowDecoder()
    runner = opened(config, decode)
    files = [
        tiny.draw_image(50, 40, form="PNG"),
        JPEGS[0],
        tiny.draw_image(50, 40, form="WEBP"),
        tiny.draw_image(50, 40, form="JPEG", mode="CMYK"),
    ]
    for row, (answer, expected) in enumerate(
        zip(answers(runner, files), by_cpu(config, files), strict=True)
    ):
        np.testing.assert_allclose(answer["y"][0], expected, atol=STEP if row == 1 else 1e-5)
    assert decode.sizes == [1]
    assert (runner.decoder.num_on_gpu, runner.decoder.num_on_cpu) == (1, 3)
    runner.close()


def test_without_nvjpeg_the_threads_decode_everything(tmp_path, gpu):
    config = a_config(tmp_path)
    runner = opened(config, None)
    for answer, expected in zip(answers(runner, JPEGS), by_cpu(config, JPEGS), strict=True):
        np.testing.assert_allclose(answer["y"][0], expected, atol=1e-5)
    runner.close()


def test_why_the_threads_decode_is_said(tmp_path, gpu, caplog):
    runner = opened(a_config(tmp_path, "interpolation=lanczos"), None)
    told = runner.built()
    assert told["image_decoder"].startswith("CPU threads: only bilinear and bicubic")
    assert (told["image"], told["image_kernel"]) == (f"{SIZE} x {SIZE}", "torch")
    assert "images are decoded by CPU threads: only bilinear" in caplog.text
    runner.close()
    caplog.clear()
    runner = opened(a_config(tmp_path, "decoder=cpu"), None)
    assert runner.built()["image_decoder"] == "CPU threads: decoder=cpu" and not caplog.text
    runner.close()
    if not torch.cuda.is_available():
        decode, problem = torch_images.open_nvjpeg(torch.device("cuda:0"))
        assert decode is None and problem.startswith(("torchvision cannot be", "nvJPEG: "))


def test_what_nvjpeg_refuses_costs_few_calls_and_no_other_file(tmp_path, gpu):
    files = [tiny.draw_image(40 + n, 40, seed=n, form="JPEG") for n in range(8)]
    config = a_config(tmp_path)
    decode = PillowDecoder(refused=[files[5]])
    runner = opened(config, decode)
    for answer, expected in zip(answers(runner, files), by_cpu(config, files), strict=True):
        np.testing.assert_allclose(answer["y"][0], expected, atol=STEP)
    assert decode.sizes == [8, 4, 4, 2, 1, 1, 2]
    assert (runner.decoder.num_on_gpu, runner.decoder.num_on_cpu) == (7, 1)
    runner.close()


def test_out_of_memory_is_no_bad_file(tmp_path, gpu):
    config = a_config(tmp_path)
    tried = []

    def decode(files):
        tried.append(len(files))
        if len(tried) == 1:
            raise RuntimeError("Error while decoding JPEG images: CUDA out of memory.")
        return PillowDecoder()(files)

    runner = opened(config, decode)
    assert len(answers(runner, JPEGS)) == 3
    # Memory is given back, and the batch is decoded once more.
    assert tried == [3, 3] and gpu.num_shrinks == 1
    runner.close()


def huge(width, height):
    """A JPEG whose header says that it is this large."""
    data = bytearray(JPEGS[0])
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return bytes(data)


BAD = {
    b"no image": "8 bytes that are no image; expected a JPEG, PNG or WebP file",
    JPEGS[0][:-300]: "cannot be decoded: image file is truncated",
    huge(7000, 7000): f"7000 x 7000 pixels; at most {MAX_PIXELS} in all",
    tiny.draw_image(1, 65000, form="JPEG"): "resized to 28 x 1820000 pixels; at most 36000000",
}


@pytest.mark.parametrize("has_decoder", [False, True])
@pytest.mark.parametrize(("data", "problem"), BAD.items(), ids=BAD.values())
def test_what_is_no_image_fails_alone(tmp_path, gpu, data, problem, has_decoder):
    decode = PillowDecoder()
    runner = opened(a_config(tmp_path), decode if has_decoder else None)
    first, bad, last = answers(runner, [JPEGS[0], data, JPEGS[1]])
    assert first["y"].shape == last["y"].shape == (1, 3, SIZE, SIZE)
    assert isinstance(bad, InvalidRequest) and str(bad).startswith(f"input 'IMAGE': {problem}")
    assert decode.sizes == ([2] if has_decoder else [])
    # The rows of one request share its fate.
    whole, broken = answers(runner, [JPEGS[0], JPEGS[1], data], [1, 2])
    assert whole["y"].shape == (1, 3, SIZE, SIZE) and isinstance(broken, InvalidRequest)
    runner.close()


def test_rows_that_nobody_sent_are_black(tmp_path, gpu):
    runner = opened(a_config(tmp_path), PillowDecoder())
    kept = watched(runner)
    assert len(answers(runner, [*JPEGS[:2], b"bad"])) == 3
    black = -torch.tensor([0.485, 0.456, 0.406]) / torch.tensor([0.229, 0.224, 0.225])
    # Three rows run as four.
    (batch,) = kept
    for row in (2, 3):
        torch.testing.assert_close(batch[row], black[:, None, None].expand(3, SIZE, SIZE))
    runner.close()


@pytest.mark.parametrize("is_last", [False, True])
def test_pixels_have_the_type_and_layout_that_the_module_takes(tmp_path, gpu, is_last):
    options = {"memory_format": "channels_last"} if is_last else {}
    config = a_config(tmp_path, dtype="bf16", **options)
    runner = opened(config, PillowDecoder())
    kept = watched(runner)
    assert len(answers(runner, JPEGS)) == 3
    (batch,) = kept
    assert (batch.dtype, batch.shape) == (torch.bfloat16, (4, 3, SIZE, SIZE))
    assert batch.is_contiguous(memory_format=torch.channels_last) == is_last
    runner.close()


@pytest.mark.parametrize("datatype", ["UINT8", "FP16"])
def test_channels_behind_and_raw_values(tmp_path, gpu, datatype):
    shape = SIZE, SIZE + 2, 3
    x, y = (TensorSpec(name, datatype, shape) for name in "xy")
    if datatype == "UINT8":
        y = replace(y, datatype="FP32")
    config = a_config(tmp_path, "resize=shortest 28", x, y)
    runner = opened(config, PillowDecoder())
    for answer, expected in zip(answers(runner, JPEGS), by_cpu(config, JPEGS), strict=True):
        gap = np.abs(answer["y"][0].astype(np.float32) - expected.astype(np.float32))
        assert gap.max() <= (1 if datatype == "UINT8" else 0.0045)
    runner.close()


def test_a_batch_is_decoded_in_parts_that_fit(tmp_path, gpu, monkeypatch):
    monkeypatch.setattr(torch_images, "DECODE_BYTES", 20_000)
    config = a_config(tmp_path)
    decode = PillowDecoder()
    runner = opened(config, decode)
    files = [JPEGS[0], JPEGS[0], JPEGS[1], JPEGS[0], JPEGS[2]]
    for answer, expected in zip(answers(runner, files), by_cpu(config, files), strict=True):
        np.testing.assert_allclose(answer["y"][0], expected, atol=STEP)
    # 8.6 kB and 10.8 kB each, and 2.8 kB.
    assert decode.sizes == [2, 2, 1]
    runner.close()


def test_memory_is_reused_only_when_its_readers_are_done(tmp_path, gpu):
    runner = opened(a_config(tmp_path), PillowDecoder())
    runner.start(a_batch(JPEGS))
    assert not gpu.waited
    runner.start(a_batch(JPEGS))
    assert len(gpu.waited) == 1
    runner.close()


def test_a_function_behind_the_model_sees_good_rows_only(tmp_path, gpu):
    (tmp_path / "post.py").write_text(
        "import numpy as np\n\ndef mean(outputs):\n"
        "    return {'m': outputs['y'].mean(keepdims=True).reshape(1)}\n"
    )
    after = Postprocess("post.py:mean", (Y,))
    config = a_config(tmp_path)
    config = replace(config, postprocess=after, outputs=(TensorSpec("m", "FP32", (1,)),))
    runner = opened(config, PillowDecoder())
    first, bad, last = answers(runner, [JPEGS[0], b"bad", JPEGS[1]])
    assert isinstance(bad, InvalidRequest)
    for answer, expected in zip((first, last), by_cpu(config, JPEGS[:2]), strict=True):
        np.testing.assert_allclose(answer["m"][0, 0], expected.mean(), atol=1e-3)
    runner.close()


def test_an_image_classifier_of_hugging_face_gives_labels(tmp_path, gpu):
    folder = tiny.write_image_classifier(tmp_path / "m")
    x, logits = TensorSpec("pixel_values", "FP32", (3, 32, 32)), TensorSpec("logits", "FP32", (3,))
    outputs = [TensorSpec("LABEL", "BYTES", (1,)), TensorSpec("SCORES", "FP32", (3,))]
    config = replace(
        model_config("pytorch", folder / "config.json", [FILE], outputs, MAX_BATCH),
        preprocess=Preprocess("image", (x,)),
        postprocess=Postprocess("classifier", (logits,)),
    )
    runner = opened(config, PillowDecoder())
    (expected,) = backend("pytorch")(config).start(a_batch(JPEGS)).wait()
    for answer, wanted in zip(answers(runner, JPEGS), expected.answers, strict=True):
        assert answer["LABEL"] == wanted["LABEL"]
        np.testing.assert_allclose(answer["SCORES"], wanted["SCORES"], atol=0.02)
    runner.close()


def test_it_is_rehearsed_with_real_images_at_every_size(tmp_path, gpu, monkeypatch):
    config = a_config(tmp_path)
    decode = PillowDecoder()
    runner = opened(config, decode)
    monkeypatch.setattr("penstock.serving.worker_load.backend", lambda name: lambda config: runner)
    _, ready = load_runner(config, None)
    assert sorted(ready.timings) == [1, 2, 4, 8]
    assert decode.sizes == [1, 1, 2, 2, 4, 4, 8, 8]
    assert ready.needs_requests and not ready.proof.unbatched
    runner.close()


def test_a_failing_rehearsal_fails_the_load(tmp_path, gpu, monkeypatch):
    config = a_config(tmp_path)
    runner = opened(config, None)
    monkeypatch.setattr(torch_images, "draw_sample", lambda *size: b"bad")
    monkeypatch.setattr("penstock.serving.worker_load.backend", lambda name: lambda config: runner)
    with pytest.raises(InvalidRequest, match="no image"):
        load_runner(config, None)
    runner.close()


def test_the_sample_is_a_photo_of_the_usual_size():
    data = draw_sample(500, 375)
    assert Image.open(io.BytesIO(data)).size == (500, 375)
    assert 60_000 < len(data) < 140_000


@pytest.mark.parametrize("is_there", [False, True])
def test_a_model_that_the_gpu_cannot_read_gets_pixels_from_threads(tmp_path, monkeypatch, is_there):
    """As an ONNX file without a kind, whose operators its engine does not have."""
    if is_there:
        monkeypatch.setattr("penstock.backends.pytorch.open_device", lambda name: FakeGpu())
    config = a_config(tmp_path)
    inner = backend("pytorch")(config.model)
    runner = processing.load(config.on(["cuda:0"]), lambda model: inner)
    assert isinstance(runner, torch_images.ImageRunner) == runner.runs_ahead == is_there
    found = answers(runner, [*JPEGS[:2], b"bad"])
    for answer, expected in zip(found[:2], by_cpu(config, JPEGS[:2]), strict=True):
        np.testing.assert_allclose(answer["y"][0], expected, atol=1e-5)
    assert isinstance(found[2], InvalidRequest)
    runner.close()


def test_only_a_gpu_of_this_engine_decodes_in_the_models_worker(tmp_path):
    config = a_config(tmp_path)
    assert config.is_staged and not config.decodes_on_gpu
    on_gpu = config.on(["cuda:0", "cuda:0"])
    assert on_gpu.decodes_on_gpu and not on_gpu.is_staged
    # Instances share a worker, as without images.
    assert on_gpu.workers == (("cuda:0", 2),)
    other = replace(on_gpu, backend="null")
    assert other.is_staged and not other.decodes_on_gpu
