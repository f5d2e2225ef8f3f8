"""A model behind `penstock.image`, from config.pbtxt to the answer, on the CPU: an ONNX file and a
PyTorch module, served, inspected, measured and profiled with a folder of photos."""

import io
import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
import tiny_pretrained as tiny
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

import penstock
from penstock.backends.preprocess import open_step
from penstock.data.images import read_images
from penstock.errors import ConfigError, InvalidRequest
from penstock.repository import layout, pbtxt

SIZE, CLASSES = 24, 5
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SETTINGS = "resize=shortest 28; mean=0.485,0.456,0.406; std=0.229,0.224,0.225"
PHOTOS = [tiny.draw_image(50 + n, 40, seed=n, form="JPEG") for n in range(12)]
PARAMETER = 'parameters { key: "%s" value { string_value: "%s" } }\n'
INPUT = 'input { name: "PHOTO" data_type: TYPE_STRING dims: 1 }\n'
OUTPUT = f'output {{ name: "y" data_type: TYPE_FP32 dims: {CLASSES} }}\n'
TAKEN = PARAMETER % ("penstock.model_inputs", f"x:FP32[3,{SIZE},{SIZE}]")
IMAGE = PARAMETER % ("penstock.image", SETTINGS)
WEIGHT = np.random.default_rng(3).standard_normal((3 * SIZE * SIZE, CLASSES)).astype(np.float32)
MODULE = """
import numpy as np
import torch

class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        weight = np.random.default_rng(3).standard_normal((3 * 24 * 24, 5)).astype(np.float32)
        self.register_buffer("weight", torch.from_numpy(weight), persistent=False)

    def forward(self, x):
        return x.flatten(1) @ self.weight

def factory():
    return Linear()
"""


def add_onnx(repository, text, shape=(3, SIZE, SIZE), batch="n"):
    folder = repository / "photo"
    (folder / "1").mkdir(parents=True)
    nodes = [
        helper.make_node("Flatten", ["x"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weight"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, *shape])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, CLASSES])],
        [numpy_helper.from_array(WEIGHT, "weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, folder / "1" / "model.onnx")
    kind = "instance_group { kind: KIND_CPU }\n"
    (folder / "config.pbtxt").write_text(f'backend: "onnxruntime"\n{kind}{text}')
    return folder


def add_module(repository, text):
    folder = repository / "photo"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "module.py").write_text(MODULE)
    kind = "instance_group { kind: KIND_CPU }\n"
    (folder / "config.pbtxt").write_text(f'backend: "pytorch"\n{kind}{text}')
    return folder


def expected(data):
    """The answer for a photo, by Pillow and numpy."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    image = image.resize((int(28 * image.width / image.height), 28), Image.Resampling.BILINEAR)
    left, top = (image.width - SIZE) // 2, (image.height - SIZE) // 2
    pixels = np.asarray(image.crop((left, top, left + SIZE, top + SIZE)), np.float32) / 255
    pixels = (pixels - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    return pixels.transpose(2, 0, 1).reshape(-1) @ WEIGHT


def rows(files):
    return np.array([[file] for file in files], dtype=object)


@pytest.mark.parametrize("form", ["onnx", "onnx with input", "module", "module with input"])
def test_files_go_in_and_the_models_answers_come_out(tmp_path, form):
    head = "max_batch_size: 4\ndynamic_batching { }\n" + IMAGE
    given = INPUT if "input" in form else ""
    if form.startswith("module"):
        pytest.importorskip("torch")
        folder = add_module(tmp_path, head + given + OUTPUT + TAKEN)
    else:
        folder = add_onnx(tmp_path, head + (given + OUTPUT if given else ""))
    name = "PHOTO" if given else "IMAGE"
    with penstock.load(folder) as model:
        found = model.infer({name: rows(PHOTOS[:3])})["y"]
        np.testing.assert_allclose(found, [expected(each) for each in PHOTOS[:3]], atol=1e-3)
        with pytest.raises(InvalidRequest, match=f"input '{name}': 3 bytes that are no image"):
            model.infer({name: rows([b"abc"])})


def config_of(folder):
    found = layout.read(folder.parent)
    assert not found.problems, found.problems
    (config,) = found.configs
    return config


def test_what_the_file_says_is_filled_in_and_reads_back(tmp_path):
    folder = add_onnx(tmp_path, IMAGE)
    config = config_of(folder)
    assert [(spec.name, spec.datatype, spec.shape) for spec in config.inputs] == [
        ("IMAGE", "BYTES", (1,))
    ]
    step = config.preprocess
    assert (step.function, step.image) == ("image", SETTINGS)
    assert [(spec.name, spec.shape) for spec in step.inputs] == [("x", (3, SIZE, SIZE))]
    assert config.max_batch_size > 1 and config.batching.is_dynamic
    (folder / "config.pbtxt").write_text(pbtxt.write(config))
    assert config_of(folder) == config


@pytest.mark.parametrize(
    ("text", "shape", "problem"),
    [
        (PARAMETER % ("penstock.image", "size=3"), (3, 8, 8), "penstock.image: 'size=3': expected"),
        (IMAGE, (3, "h", "w"), "penstock.image: 'x' has shape [3, -1, -1]; expected one input"),
        (
            PARAMETER % ("penstock.image", "resize=shortest 20"),
            (3, SIZE, SIZE),
            "resize: 'shortest 20': less than the model's 24x24, so every image would get a black",
        ),
        (
            PARAMETER % ("penstock.preprocess", "image"),
            (3, SIZE, SIZE),
            "penstock.preprocess: no preprocessor_config.json; it says how images are resized",
        ),
        (IMAGE, (1, 28, 28), "penstock.image: 'x' has shape [1, 28, 28]; expected one input"),
        (
            IMAGE + PARAMETER % ("penstock.preprocess", "tokenizer"),
            (3, 8, 8),
            "penstock.image: not beside parameters.penstock.preprocess",
        ),
        (
            IMAGE + 'max_batch_size: 2 input { name: "x" data_type: TYPE_FP32 dims: 3 }',
            (3, 8, 8),
            "input: x:FP32[3]; expected what clients send: one of TYPE_STRING, dims 1",
        ),
        (
            INPUT + OUTPUT + IMAGE + TAKEN,
            (3, SIZE, SIZE),
            "max_batch_size: 0; encoded images need a batch of rows",
        ),
        (
            IMAGE + PARAMETER % ("penstock.model_inputs", "x:FP32[3,8,8], z:FP32[1]"),
            (3, 8, 8),
            "penstock.model_inputs: x, z: expected one input [3, height, width]",
        ),
    ],
)
def test_configurations_that_make_no_sense_are_refused(tmp_path, text, shape, problem):
    add_onnx(tmp_path, text, shape)
    (problems,) = layout.read(tmp_path).problems.values()
    assert any(problem in each for each in problems), problems


@pytest.mark.parametrize("max_batch", [0, 8])
def test_a_file_for_one_row_is_refused_whatever_the_batch(tmp_path, max_batch):
    add_onnx(tmp_path, f"max_batch_size: {max_batch}\n" + IMAGE, batch=1)
    (problems,) = layout.read(tmp_path).problems.values()
    shape = f"model.onnx: 'x' has shape [1, 3, {SIZE}, {SIZE}]"
    needs = "encoded images need a variable first dimension, the batch: export the model with one"
    assert problems == [f"{shape}; {needs}"]


def add_json(folder, **settings):
    written = {"image_processor_type": "ViTImageProcessor", "image_mean": MEAN, "image_std": STD}
    written["size"] = {"shortest_edge": 28}
    written |= {"do_center_crop": True, "crop_size": {"height": SIZE, "width": SIZE}, **settings}
    (folder / "1" / "preprocessor_config.json").write_text(json.dumps(written))


def test_a_file_of_settings_is_enough(tmp_path):
    head = "max_batch_size: 4\ndynamic_batching { }\n"
    folder = add_onnx(tmp_path, head + PARAMETER % ("penstock.preprocess", "image"))
    add_json(folder)
    config = config_of(folder)
    assert [spec.name for spec in config.inputs] == ["IMAGE"] and not config.warnings
    with penstock.load(folder) as model:
        found = model.infer({"IMAGE": rows(PHOTOS[:2])})["y"]
    np.testing.assert_allclose(found, [expected(each) for each in PHOTOS[:2]], atol=1e-3)


def test_settings_of_another_size_are_refused(tmp_path):
    add_json(
        add_onnx(tmp_path, "max_batch_size: 4\n" + PARAMETER % ("penstock.preprocess", "image")),
        crop_size={"height": 8, "width": 9},
    )
    (problems,) = layout.read(tmp_path).problems.values()
    problem = f"images of 8x9, but 'x' has shape [3, {SIZE}, {SIZE}]"
    assert problems == [f"parameters.penstock.preprocess: {problem}"]


def test_settings_beside_a_file_of_settings_say_which_one_counts(tmp_path):
    folder = add_onnx(tmp_path, IMAGE + PARAMETER % ("penstock.preprocess", "image"))
    add_json(folder)
    (warning,) = config_of(folder).warnings
    why = "parameters.penstock.image decides, so preprocessor_config.json is not read"
    assert warning == f"parameters.penstock.preprocess: has no effect; {why}"


def test_a_module_has_to_say_what_it_takes(tmp_path):
    add_module(tmp_path, "max_batch_size: 4\n" + OUTPUT + IMAGE)
    (problems,) = layout.read(tmp_path).problems.values()
    wanted = "penstock.model_inputs: '': expected what the model takes, such as x:FP32[3,224,224]"
    assert any(wanted in each for each in problems), problems


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, data in enumerate(PHOTOS):
        (folder / f"{number}.jpg").write_bytes(data)
    return folder


def test_a_folder_of_photos_is_data_for_it(tmp_path, photos):
    config = config_of(add_onnx(tmp_path / "models", IMAGE))
    found = read_images(photos, config.inputs[0], seed=0)
    assert sorted(each.item() for each in found.examples) == sorted(PHOTOS)
    assert found.treatment == ""


def test_bench_and_inspect_with_photos(tmp_path, photos):
    folder = add_onnx(tmp_path / "models", "max_batch_size: 4\ndynamic_batching { }\n" + IMAGE)
    assert "penstock.image" in str(penstock.inspect(folder))
    found = penstock.bench(folder, data=photos, concurrency="2", duration=0.3, warm_up="0s")
    (level,) = found.levels
    assert level.num_good > 0 and level.num_failed == 0


@pytest.mark.slow
def test_profile_with_photos(tmp_path, photos, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = add_onnx(tmp_path / "models", "max_batch_size: 4\ndynamic_batching { }\n" + IMAGE)
    found = penstock.profile(folder, data=photos, batch_size=2, runs=3, threads=1)
    assert "preprocess" in str(found) and found.total_s > 0


def test_settings_are_checked_where_a_step_is_opened(tmp_path):
    """As from a version that was written by hand, behind the checks of config.pbtxt."""
    config = config_of(add_onnx(tmp_path, IMAGE))
    broken = replace(config.preprocess, image="channels=x")
    with pytest.raises(ConfigError, match="channels: 'x' is not rgb or bgr"):
        open_step(replace(config, preprocess=broken), "image", broken.inputs)
