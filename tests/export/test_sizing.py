"""Figures of a pod: from the evidence where there is some, with the reason of each figure."""

from dataclasses import replace

import pytest
from made_settings import NEEDS

from penstock.errors import ConfigError
from penstock.export.sizing import SizeOverrides, size

MIB = 1 << 20
MEASURED = replace(NEEDS, memory_bytes=400 * MIB, slo_latency_s=0.02, rate_per_s=800.0)
NOTHING = SizeOverrides()


def test_figures_of_the_evidence() -> None:
    found = size([MEASURED], NOTHING)
    assert found.cpu == 2 + 1
    # 256 MiB, and 400 MiB with a quarter more, in steps of 64 MiB.
    assert found.memory_bytes == 768 * MIB
    # 800 requests/s for half of 20 ms.
    assert found.queue_depth == 8
    assert found.startup_s == 630
    assert "measured 400 MiB and a quarter" in "\n".join(found.notes)
    assert found.resources == {
        "requests": {"cpu": "3", "memory": "768Mi"},
        "limits": {"cpu": "3", "memory": "768Mi"},
    }


def test_without_evidence_figures_are_estimates_and_say_so() -> None:
    found = size([replace(NEEDS, num_cores=None)], NOTHING)
    notes = "\n".join(found.notes)
    assert found.cpu == 2 + 1 and "not measured: digits/1" in notes
    assert found.memory_bytes >= (256 + 2 * 200) * MIB and "estimated from its files" in notes
    assert found.queue_depth == 128 and "no SLO was measured" in notes


def test_the_limit_of_workers_counts_before_what_was_measured() -> None:
    limited = replace(MEASURED, memory_limit_bytes=1024 * MIB)
    assert size([limited], NOTHING).memory_bytes == (256 + 2 * 1024) * MIB


def test_models_add_up_and_versions_of_one_share_cores() -> None:
    other = replace(MEASURED, name="text", num_cores=3, rate_per_s=200.0)
    found = size([MEASURED, replace(MEASURED, version="2", num_cores=4), other], NOTHING)
    assert found.cpu == 4 + 3 + 1
    assert found.memory_bytes == (256 + 3 * 500 + 36) * MIB
    # The model with the shortest tolerable queue decides.
    assert found.queue_depth == 2


def test_the_longest_load_decides_about_the_start() -> None:
    slow = replace(NEEDS, name="slow", load_timeout_s=1800.0)
    assert size([NEEDS, slow], NOTHING).startup_s == 1830


def test_a_queue_of_less_than_one_request_is_one() -> None:
    assert size([replace(MEASURED, rate_per_s=1.0)], NOTHING).queue_depth == 1


def test_what_is_given_counts() -> None:
    given = SizeOverrides(16, 3 << 30, 2, "nvidia.com/gpu", 5)
    found = size([MEASURED], given)
    assert (found.cpu, found.queue_depth) == (16, 5)
    assert found.resources["limits"] == {"cpu": "16", "memory": "3Gi", "nvidia.com/gpu": "2"}
    assert found.notes == (
        "GPUs: 2 of nvidia.com/gpu, as given",
        "cpu: 16, as given",
        "memory: 3.00 GiB, as given",
        "queue depth per replica: 5, as given",
        "start-up: at most 630 s, from the models' load time-out",
    )


def test_gpus_of_the_models() -> None:
    on_gpu = replace(MEASURED, num_gpus=2, gpu_memory_bytes=6 << 30)
    assert size([NEEDS, on_gpu], NOTHING).gpus == 2
    with pytest.raises(ConfigError, match="--gpus 1: digits/1 needs 2, by its instance_group"):
        size([on_gpu], SizeOverrides(gpus=1))


def test_a_slice_that_is_too_small_is_refused() -> None:
    on_gpu = replace(MEASURED, num_gpus=1, gpu_memory_bytes=12 * 10**9)
    slices = SizeOverrides(gpu_resource="nvidia.com/mig-1g.10gb")
    with pytest.raises(ConfigError, match="the models need 11.2 GiB of GPU memory, more than 1 of"):
        size([on_gpu], slices)
    larger = size([on_gpu], SizeOverrides(gpu_resource="nvidia.com/mig-2g.20gb"))
    assert larger.resources["requests"]["nvidia.com/mig-2g.20gb"] == "1"


def test_an_instance_that_needs_two_slices_is_refused() -> None:
    """It runs on one device, however many the pod has."""
    on_gpu = replace(
        MEASURED, num_gpus=1, gpu_memory_bytes=12 * 10**9, instance_gpu_bytes=12 * 10**9
    )
    slices = SizeOverrides(gpus=2, gpu_resource="nvidia.com/mig-1g.10gb")
    with pytest.raises(ConfigError, match="an instance needs 11.2 GiB of GPU memory, more than a"):
        size([on_gpu], slices)
    two = replace(on_gpu, gpu_memory_bytes=12 * 10**9, instance_gpu_bytes=6 * 10**9)
    assert size([two], slices).gpus == 2


def test_a_language_model_without_an_slo() -> None:
    assert size([replace(NEEDS, num_rows=0)], NOTHING).queue_depth == 8
