"""Needs against what GPUs have: what fits, what does not, and what that says."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.serving.placement import Need, Share, describe_share, gib, make_plan, shortages
from penstock.system.devices import Gpu

GIB = 1 << 30
GPUS = [Gpu(0, "GPU-0", "Made Up", 100 * GIB, 90 * GIB), Gpu(1, "GPU-1", "Made Up", 100 * GIB, 0)]


def share(model: str, num_gib: float, device: str = "cuda:0", num_instances: int = 1) -> Share:
    return Share(model, "1", device, num_instances, Need(int(num_gib * GIB), "estimated"))


def test_each_gpu_has_its_shares_the_largest_first():
    shares = [share("a", 5), share("b", 2, num_instances=4), share("c", 1, "cuda:1")]
    first, second = make_plan(shares, GPUS, 0.05)
    assert [each.model for each in first.shares] == ["b", "a"]
    assert first.needed_bytes == 13 * GIB
    assert first.room_bytes == 85 * GIB
    assert [each.model for each in second.shares] == ["c"]
    assert second.room_bytes == 0


def test_exactly_full_fits_and_a_byte_more_does_not():
    assert shortages(make_plan([share("a", 85)], GPUS, 0.05)) == []
    more = Share("b", "1", "cuda:0", 1, Need(1, "configured"))
    assert len(shortages(make_plan([share("a", 85), more], GPUS, 0.05))) == 1


def test_a_full_gpu_that_nobody_wants_is_no_shortage():
    assert shortages(make_plan([share("a", 1)], GPUS, 0.05)) == []


def test_a_gpu_that_does_not_tell_its_size_refuses_nothing():
    assert shortages(make_plan([share("a", 1000)], [Gpu(0, "", "Shared", 0, 0)], 0.05)) == []


def test_a_shortage_names_sizes_and_the_largest_models():
    shares = [share(f"m{i}", i, num_instances=2) for i in range(1, 12)]
    [text] = shortages(make_plan(shares, GPUS, 0.05))
    assert text.startswith(
        "GPU 0 (Made Up): 132.0 GiB of memory would be needed and 85.0 GiB can be had "
        "(100.0 GiB, of which 10.0 GiB in use and 5.0 GiB kept back). "
        "Largest: m11/1 2 x 11.0 GiB (estimated); m10/1"
    )
    assert "; and 6 smaller ones." in text
    assert "m6/1" not in text
    for remedy in ("instance_group", "penstock.gpu_memory_bytes", "--gpu-memory-reserve"):
        assert remedy in text


def test_sizes_are_told_in_the_unit_that_fits():
    assert gib(3 * GIB // 2) == "1.5 GiB"
    assert gib(300 << 20) == "300 MiB"
    assert describe_share(share("a", 2)) == "a/1 2.0 GiB (estimated)"
    slots = Share("a", "1", "cuda:0", 1, Need(2 * GIB, "evidence"), num_instances=3)
    assert describe_share(slots) == "a/1 2.0 GiB for 3 instances (evidence)"


@given(st.lists(st.floats(0.1, 60), max_size=6), st.floats(0, 0.5))
def test_whatever_fits_still_fits_without_one_of_them(sizes: list[float], reserve: float):
    shares = [share(f"m{i}", size) for i, size in enumerate(sizes)]
    if not shortages(make_plan(shares, GPUS, reserve)):
        assert not shortages(make_plan(shares[1:], GPUS, reserve))
