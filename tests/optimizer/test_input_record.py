"""Statistics of the data in the evidence: of what clients send, and of what the network gets."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from penstock.config import BatchPolicy, ModelConfig
from penstock.optimizer.input_record import statistics_of
from penstock.repository import layout
from penstock.serving.input_statistics import references
from penstock.serving.pipeline import stages_of
from penstock.types import TensorSpec

tiny = pytest.importorskip("tiny_pretrained")


def test_rows_of_tensors() -> None:
    spec = TensorSpec("x", "FP32", (2,))
    config = ModelConfig("m", "1", "null", "", (spec,), (), 8, BatchPolicy(8))
    found = statistics_of(config, [{"x": np.array([n, n + 1], np.float32)} for n in range(50)])
    assert found["x"]["value"].num_rows == 50 and found["x"]["value"].max == 50


def test_images_and_what_the_network_gets(tmp_path: Path) -> None:
    folder = tmp_path / "photo"
    (folder / "1").mkdir(parents=True)
    lines = [
        'backend: "null" max_batch_size: 4 instance_group { kind: KIND_CPU }',
        'input { name: "PHOTO" data_type: TYPE_STRING dims: 1 }',
        'output { name: "y" data_type: TYPE_FP32 dims: 5 }',
        'parameters { key: "penstock.model_inputs" value { string_value: "x:FP32[3,24,24]" } }',
        'parameters { key: "penstock.image" value { string_value: "resize=shortest 28" } }',
    ]
    (folder / "config.pbtxt").write_text("\n".join(lines))
    config = layout.read(folder).configs[-1]
    assert config.is_staged
    photos = [tiny.draw_image(50 + n, 40, seed=n, form="JPEG") for n in range(12)]
    found = statistics_of(config, [{"PHOTO": np.array([photo], object)} for photo in photos])
    sizes = [len(photo) for photo in photos]
    assert found["PHOTO"]["value"].max == max(sizes) and found["PHOTO"]["value"].num_rows == 12
    network = found["x"]["value"]
    assert network.count == 12 * 3 * 24 * 24 and 0 <= network.min < network.max <= 1
    # Each stage is compared with its own inputs.
    evidence = {"input_statistics": msgspec.to_builtins(found)}
    names = [
        [each.input.spec.name for each in references(stage.config, evidence)]
        for stage in stages_of(config)
    ]
    assert names == [["PHOTO"], ["x"]]
