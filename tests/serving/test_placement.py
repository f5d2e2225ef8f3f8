"""Groups and the GPUs there are give one device for each instance, or say why not."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from doubles import FakeGpus
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import ConfigError
from penstock.serving.placement import briefly, describe_placement, instances_by_device, place
from penstock.system.devices import Gpu
from penstock.types import TensorSpec

CONFIG = ModelConfig(
    name="m",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "FP32", (1,)),),
    outputs=(TensorSpec("y", "FP32", (1,)),),
    max_batch_size=4,
    batching=BatchPolicy(4),
)


def gpus(count: int) -> Sequence[Gpu]:
    return FakeGpus(*[16 << 30] * count)()


def placed(*devices: str, num_gpus: int = 2) -> tuple[str, ...]:
    return place(CONFIG.on(devices), gpus(num_gpus)).devices


def problems(*devices: str, num_gpus: int) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        placed(*devices, num_gpus=num_gpus)
    return list(caught.value.problems)


def test_a_model_of_the_cpu_needs_no_gpu():
    config = CONFIG.on(["cpu"] * 3)
    assert place(config, []) is config


def test_each_gpu_gets_as_many_as_are_asked_for():
    assert placed("cuda", "cuda") == ("cuda:0", "cuda:1", "cuda:0", "cuda:1")
    assert placed("cuda", num_gpus=3) == ("cuda:0", "cuda:1", "cuda:2")


def test_named_gpus_get_theirs():
    assert placed("cuda:1", "cuda:1") == ("cuda:1", "cuda:1")


def test_groups_add_up():
    assert placed("cpu", "cuda", "cuda:1") == ("cpu", "cuda:0", "cuda:1", "cuda:1")


def test_the_first_instances_are_on_different_devices():
    assert placed("cuda:0", "cuda:0", "cuda:0", "cuda:1") == ("cuda:0", "cuda:1") + 2 * ("cuda:0",)


def test_what_is_placed_stays_where_it_is():
    config = place(CONFIG.on(["cuda", "cpu"]), gpus(2))
    assert place(config, gpus(2)) == config


def test_a_gpu_that_is_not_there_is_told_with_those_that_are():
    [problem] = problems("cuda:3", "cuda:0", num_gpus=2)
    assert problem == "instance_group: asks for GPU 3, and there are only GPUs 0, 1"
    [problem] = problems("cuda:1", num_gpus=1)
    assert problem == "instance_group: asks for GPU 1, and there is only GPU 0"


def test_all_that_are_not_there_are_told():
    assert len(problems("cuda:3", "cuda:4", "cuda", num_gpus=2)) == 2


def test_without_any_gpu_that_is_said():
    [problem] = problems("cuda", num_gpus=0)
    assert problem.startswith("instance_group: asks for KIND_GPU, and no NVIDIA GPU is seen here")
    [problem] = problems("cuda:0", "cuda:1", num_gpus=0)
    assert problem.startswith("instance_group: asks for GPU 0, 1, and no NVIDIA GPU is seen here")


@pytest.mark.parametrize(
    ("backend", "advice"),
    [("tensorrt", "a TensorRT plan needs one"), ("pytorch", "KIND_CPU runs it on the CPU")],
)
def test_only_what_can_run_on_the_cpu_is_advised_to(backend: str, advice: str):
    with pytest.raises(ConfigError) as caught:
        place(replace(CONFIG, backend=backend).on(["cuda"]), [])
    assert caught.value.problems[0].endswith(f"; {advice}")


def test_there_may_be_too_many_in_the_end():
    [problem] = problems(*["cuda"] * 33, num_gpus=2)
    assert "66 instances on 2 GPUs; at most 64" in problem


def test_instances_are_listed_by_device():
    config = place(CONFIG.on(["cuda", "cuda"]), gpus(2))
    assert instances_by_device(config) == {"cuda:0": [0, 2], "cuda:1": [1, 3]}
    assert (
        describe_placement(config, gpus(2)) == "0, 2 on cuda:0 (Made Up); 1, 3 on cuda:1 (Made Up)"
    )
    assert describe_placement(CONFIG.on(["cuda:5"]), gpus(2)).startswith("cannot be placed here: ")


def test_where_they_are_fits_a_column():
    assert briefly(CONFIG.on(["cuda:1"] * 3)) == "cuda:1"
    assert briefly(CONFIG.on([f"cuda:{i}" for i in range(8)])) == "8 GPUs"
    assert briefly(CONFIG.on(["cuda:0", "cpu", "cuda:1"])) == "2 GPUs, cpu"
    assert briefly(CONFIG) == "cpu"


DEVICES = st.lists(st.sampled_from(["cpu", "cuda", "cuda:0", "cuda:2"]), min_size=1, max_size=10)


@given(DEVICES, st.integers(3, 5))
def test_every_instance_has_a_device_of_this_machine(devices: list[str], num_gpus: int):
    config = place(CONFIG.on(devices), gpus(num_gpus))
    assert config.num_instances == len(config.devices)
    assert config.device == config.devices[0]
    each = devices.count("cuda")
    for gpu in gpus(num_gpus):
        assert config.devices.count(gpu.device) == each + devices.count(gpu.device)
    assert config.devices.count("cpu") == devices.count("cpu")
