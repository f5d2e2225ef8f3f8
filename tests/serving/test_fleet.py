"""Models are put on the GPUs there are, as long as there is room for them."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from doubles import FakeGpus
from onnx import TensorProto, helper, numpy_helper

from penstock.config import DECODE_BYTES, BatchPolicy, ModelConfig, Preprocess
from penstock.serving.fleet import Arrangement, Fleet, shares_of, weight_bytes
from penstock.system.host_policy import HostPolicy
from penstock.types import TensorSpec

GIB = 1 << 30
CONFIG = ModelConfig(
    name="a",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "FP32", (1,)),),
    outputs=(TensorSpec("y", "FP32", (1,)),),
    max_batch_size=4,
    batching=BatchPolicy(4),
)
GPUS = FakeGpus(16 * GIB, 16 * GIB)
GPUS.used_bytes = [6 * GIB, 6 * GIB]


def model(name: str, num_gib: int, *devices: str, version: str = "1") -> ModelConfig:
    config = replace(CONFIG, name=name, version=version, gpu_memory_bytes=num_gib * GIB)
    return config.on(devices or ["cuda"])


def arrange(*configs: ModelConfig, gpus: FakeGpus = GPUS, **more) -> Arrangement:
    return Fleet(0.0, gpus).arrange(configs, **more)


def test_all_that_fits_is_placed():
    found = arrange(model("a", 4), model("b", 6, "cuda:1"), replace(CONFIG, name="c"))
    assert [config.devices for config in found.configs] == [
        ("cuda:0", "cuda:1"),
        ("cuda:1",),
        ("cpu",),
    ]
    assert found.problems == {}
    assert [plan.needed_bytes for plan in found.plan] == [4 * GIB, 10 * GIB]


def test_the_machine_is_not_asked_for_models_of_the_cpu():
    def fail() -> tuple[()]:
        raise AssertionError("nobody wants a GPU")

    found = Fleet(0.0, fail).arrange([CONFIG])
    assert found.configs == [CONFIG]
    assert found.plan == ()


def test_workers_are_pinned_as_their_group_or_their_device_says():
    cores = HostPolicy((min(os.sched_getaffinity(0)),))
    fleet = Fleet(0.0, GPUS, {"fast": cores, "cpu": cores, "gpu_1": cores})
    named = replace(CONFIG, host_policies={"cuda": "fast"}).on(["cuda:0", "cpu", "cuda:1"])
    found = fleet.pin(named)
    assert found.pinned == dict.fromkeys(("cuda:0", "cpu", "cuda:1"), cores)
    assert fleet.pin(found) == found
    other = fleet.pin(CONFIG.on(["cuda:0", "cuda:1"]))
    assert other.pinned == {"cuda:1": cores}
    worker = other.of_worker("cuda:1", 1)
    assert (worker.host_policy, worker.pinned) == (cores, {})
    assert other.of_worker("cuda:0", 1).host_policy is None


def test_a_policy_that_the_server_does_not_have_is_a_warning():
    config = replace(CONFIG, host_policies={"cpu": "slow"})
    [warning] = Fleet(0.0, GPUS, {}).pin(config).warnings
    assert warning.startswith("instance_group.host_policy: 'slow' has no effect; the server has no")
    text = replace(config, backend="llm")
    fleet = Fleet(0.0, GPUS, {"slow": HostPolicy((0,))})
    [warning] = fleet.pin(text).warnings
    assert warning.endswith("has no effect; an engine uses all cores")
    assert fleet.pin(text).pinned == {}


def test_what_does_not_fit_is_refused_and_the_others_are_not():
    found = arrange(model("a", 8, "cuda:0"), model("b", 3, "cuda:0"), model("c", 2, "cuda:0"))
    assert [config.name for config in found.configs] == ["a", "c"]
    [problem] = found.problems["b"]
    assert "GPU 0 (Made Up): 11.0 GiB of memory would be needed and 10.0 GiB" in problem
    assert "a/1 8.0 GiB (configured); b/1 3.0 GiB (configured)" in problem
    assert [plan.needed_bytes for plan in found.plan] == [13 * GIB], "the plan shows what was asked"
    assert not found.plan[0].fits


def test_each_worker_needs_its_memory():
    three = model("a", 4, "cuda:0", "cuda:0", "cuda:0")
    assert arrange(three).problems == {}, "instances on one GPU share a worker"
    found = arrange(replace(three, backend="python"))
    assert "3 x 4.0 GiB" in found.problems["a"][0]


def test_versions_of_a_model_go_together():
    found = arrange(model("a", 6, "cuda:0"), model("a", 6, "cuda:0", version="2"))
    assert found.configs == []
    assert list(found.problems) == ["a"]


def test_what_is_still_loading_counts():
    loading = shares_of(model("old", 7, "cuda:0"))
    assert arrange(model("a", 3, "cuda:0"), loading=loading).problems == {}
    assert list(arrange(model("a", 4, "cuda:0"), loading=loading).problems) == ["a"]
    assert arrange(model("a", 10, "cuda:1"), loading=loading).problems == {}


def test_instances_that_share_a_worker_count_once_and_are_told():
    config = replace(CONFIG, backend="pytorch", gpu_memory_bytes=GIB).on(["cuda:0"] * 3)
    (share,) = shares_of(config)
    assert (share.num_workers, share.num_instances, share.num_bytes) == (1, 3, GIB)


def test_decoded_images_need_memory():
    step = Preprocess("image", CONFIG.inputs, image="")
    bare = replace(CONFIG, backend="pytorch").on(["cuda:0"])
    (plain,), (decoding,) = shares_of(bare), shares_of(replace(bare, preprocess=step))
    assert decoding.num_bytes == plain.num_bytes + DECODE_BYTES


def test_the_reserve_is_kept_back():
    fleet = Fleet(0.25, GPUS)
    assert fleet.arrange([model("a", 6)]).problems == {}
    assert list(fleet.arrange([model("a", 7)]).problems) == ["a"]


def test_a_model_that_cannot_be_placed_says_so():
    found = arrange(model("a", 1), gpus=FakeGpus())
    assert "no NVIDIA GPU is seen here" in found.problems["a"][0]
    assert found.plan == ()


def test_external_weights_of_an_onnx_file_count(tmp_path: Path) -> None:
    weight = np.zeros((1000, 1000), np.float32)
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1000, 1000])
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1000, 1000])
    node = helper.make_node("Add", ["x", "w"], ["y"])
    graph = helper.make_graph(
        [node], "g", [value], [output], [numpy_helper.from_array(weight, "w")]
    )
    path = tmp_path / "model.onnx"
    onnx.save(
        helper.make_model(graph),
        path,
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    specs = (TensorSpec("x", "FP32", (1000, 1000)),)
    config = ModelConfig("m", "1", "onnxruntime", str(path), specs, specs, 0, BatchPolicy(1))
    assert weight_bytes(config) >= weight.nbytes > path.stat().st_size
