"""What binds operators and models, on a device of round numbers."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_operators import product, sum_of_two
from served_builds import a_config

from penstock.profiling import roofline
from penstock.profiling.results import Peaks, RequestPhase
from penstock.profiling.roofline import RooflineInput
from penstock.profiling.work import OperatorTime, Shaped


def measured(peaks, times, total_s=None, buckets=(), **more) -> RooflineInput:
    operators = roofline.judged(times, peaks)
    total_s = sum(each.seconds for each in times) if total_s is None else total_s
    return RooflineInput(
        operators, peaks, total_s, buckets, **{"num_rows": 1, "max_batch_size": 0} | more
    )


def bound_of(peaks, each: OperatorTime) -> str:
    return roofline.judged([each], peaks)[0].bound


def test_a_large_product_computes(peaks) -> None:
    """512 x 1024 x 1024: 1.07 GFLOP in 10.7 ms at the peak; 8.4 MB in 0.84 ms."""
    (found,) = roofline.judged([product("p", 16e-3)], peaks)
    assert found.bound == "compute"
    assert found.needed_s == pytest.approx(10.74e-3, rel=1e-3)
    assert found.efficiency == pytest.approx(0.671, rel=1e-3)


def test_the_same_product_of_one_row_waits_for_its_weights(peaks) -> None:
    """2 MFLOP in 21 us; 4.2 MB in 420 us."""
    assert bound_of(peaks, product("p", 500e-6, rows=1)) == "memory"


def test_a_sum_waits_for_memory(peaks) -> None:
    (found,) = roofline.judged([sum_of_two("s", 2e-3)], peaks)
    assert (found.bound, found.efficiency) == ("memory", pytest.approx(0.6))


def test_what_the_caches_hold_moves_faster(peaks) -> None:
    with_caches = msgspec.structs.replace(peaks, cache_bytes=50_000_000, cache_bytes_per_s=100e9)
    (found,) = roofline.judged([sum_of_two("s", 2e-3)], with_caches)
    assert found.efficiency == pytest.approx(0.06)


def test_weights_are_in_the_caches_only_when_all_of_them_fit(peaks) -> None:
    caches = msgspec.structs.replace(peaks, cache_bytes=6_000_000, cache_bytes_per_s=100e9)
    alone = roofline.judged([product("p", 1e-3, rows=1)], caches)
    two = roofline.judged([product("p", 1e-3, rows=1), product("q", 1e-3, rows=1)], caches)
    assert alone[0].needed_s == pytest.approx(4.2e-5, rel=0.01)
    assert two[0].needed_s == pytest.approx(4.2e-4, rel=0.01)


def test_a_tiny_operator_is_a_launch(peaks) -> None:
    assert bound_of(peaks, sum_of_two("s", 3e-6, num_elements=10)) == "launch"


def test_far_from_every_roof_is_overhead(peaks) -> None:
    assert bound_of(peaks, sum_of_two("s", 100e-3)) == "overhead"


def test_without_shapes_nothing_is_said(peaks) -> None:
    (found,) = roofline.judged([OperatorTime("s", "Add", 1e-3)], peaks)
    assert (found.bound, found.efficiency, found.needed_s) == ("unknown", None, None)


def test_calls_are_work_done_several_times(peaks) -> None:
    once = roofline.judged([product("p", 16e-3)], peaks)[0]
    twice = roofline.judged([replace(product("p", 32e-3), num_calls=2)], peaks)[0]
    assert twice.flops == 2 * once.flops
    assert twice.efficiency == pytest.approx(once.efficiency)


def test_the_longest_comes_first(peaks) -> None:
    found = roofline.judged([sum_of_two("a", 1e-3), sum_of_two("b", 3e-3)], peaks)
    assert [each.name for each in found] == ["b", "a"]


def test_a_peak_is_no_lower_than_what_was_seen(peaks) -> None:
    """10 ms for what the peak says takes 10.74."""
    raised = roofline.raised(peaks, [product("p", 5.37e-3)])
    assert raised.flops["fp32"] == pytest.approx(200e9, rel=1e-3)
    assert raised.flops["int8"] == 400e9
    assert roofline.raised(peaks, [product("p", 16e-3)]) == peaks


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("/encoder/layer.3/attention/MatMul", "encoder/layer.3"),
        ("/m/features.12/conv/Conv", "m/features.12"),
        ("model.layers.7.mlp", "model.layers.7"),
        ("MatMul_42", ""),
    ],
)
def test_names_tell_blocks(name, block) -> None:
    assert roofline.block_of(name) == block


def test_time_between_operators_is_overhead(peaks) -> None:
    found = measured(peaks, [product("p", 16e-3)], total_s=50e-3)
    assert roofline.bound_of(found) == "overhead"
    assert roofline.shares(found)["overhead"] == pytest.approx(34e-3)


def test_headroom_is_what_the_peaks_leave(peaks) -> None:
    found = measured(peaks, [product("p", 16e-3)], total_s=16e-3)
    assert roofline.headroom(found) == pytest.approx(16 / 10.74, rel=1e-3)


def step(found: RooflineInput, name: str):
    return next((each for each in roofline.next_steps(found) if each.name == name), None)


def test_int8_is_bounded_by_amdahl(peaks) -> None:
    """16 of 20 ms become a quarter: 20 / (4 + 4)."""
    found = measured(peaks, [product("p", 16e-3), sum_of_two("s", 4e-3)])
    int8 = step(found, "int8")
    assert int8.ceiling == pytest.approx(2.5, rel=0.01)
    assert int8.text == "INT8 for MatMul (80 % of the time): at most 2.5x"


def test_int8_of_weights_from_memory_is_bounded_by_their_bytes(peaks) -> None:
    slow = msgspec.structs.replace(peaks, flops={"fp32": 100e9, "int8": 100e9})
    found = measured(slow, [product("p", 500e-6, rows=1)])
    assert step(found, "int8").ceiling == pytest.approx(4, rel=0.05)


def test_int8_without_instructions_for_it_promises_nothing_to_what_computes(peaks) -> None:
    slow = msgspec.structs.replace(peaks, flops={"fp32": 100e9, "int8": 90e9})
    assert step(measured(slow, [product("p", 16e-3)]), "int8") is None


def test_what_is_int8_already_is_not_promised_again(peaks) -> None:
    narrow = replace(product("p", 16e-3), datatype="int8")
    assert step(measured(peaks, [narrow]), "int8") is None


def test_fusion_takes_away_small_operators_at_best(peaks) -> None:
    found = measured(peaks, [product("p", 15e-3), sum_of_two("s", 5e-3)])
    assert step(found, "fusion").ceiling == pytest.approx(20 / 15)


def test_batching_shares_what_is_paid_once(peaks) -> None:
    """All of it are weights, nearly: 8 rows cost what 1 does."""
    found = measured(peaks, [product("p", 500e-6, rows=1)], num_rows=1, max_batch_size=8)
    batching = step(found, "batching")
    assert batching.ceiling == pytest.approx(8, rel=0.02)
    assert not batching.is_latency


@pytest.mark.parametrize("max_batch_size", [0, 4])
def test_what_cannot_be_larger_is_not_proposed(peaks, max_batch_size) -> None:
    times = [product("p", 500e-6, rows=1)]
    assert (
        step(measured(peaks, times, num_rows=4, max_batch_size=max_batch_size), "batching") is None
    )


def test_threads_that_help_little_are_better_apart(peaks) -> None:
    found = measured(peaks, [product("p", 16e-3)], single_thread_s=20e-3)
    instances = step(found, "instances")
    assert instances.ceiling == pytest.approx(2 * 16 / 20)
    assert not instances.is_latency


def test_threads_that_scale_stay_together(peaks) -> None:
    assert step(measured(peaks, [product("p", 16e-3)], single_thread_s=32e-3), "instances") is None


def test_a_long_queue_is_told_before_the_model(peaks) -> None:
    buckets = [RequestPhase("queue", 60e-3), RequestPhase("compute", 11e-3)]
    found = measured(peaks, [product("p", 11e-3)], buckets=buckets, queue_delay_s=60e-3)
    steps = roofline.next_steps(found)
    assert steps[0].name == "path"
    assert "queue is 85 %" in roofline.verdict(found, steps)
    assert "lower max_queue_delay_microseconds (now 60.0 ms)" in steps[0].text
    assert any("batcher holds it back" in line for line in roofline.findings(found))


# Milliseconds of a request by part, the part that is named, and what is left without it.
PATHS = [
    ({"queue": 25, "decode": 20, "compute": 30, "encode": 25}, "queue", 100 / 75),
    ({"queue": 10, "decode": 50, "compute": 40}, "decode", 2.0),
    ({"copy in": 30, "compute": 60, "copy out": 10}, "copy in", 100 / 70),
    ({"copy in": 10, "compute": 60, "copy out": 30}, "copy out", 100 / 70),
    ({"preprocess": 80, "compute": 20}, "preprocess", 5.0),
    ({"compute": 60, "postprocess": 40}, "postprocess", 100 / 60),
    ({"decode": 5, "compute": 75, "encode": 20}, "encode", 1.25),
]


@pytest.mark.parametrize(("parts", "named", "ceiling"), PATHS)
def test_a_part_around_the_model_promises_what_is_left_without_it(
    peaks, parts, named, ceiling
) -> None:
    """1 / (1 - p) of exactly the part that is named, not of all parts around the model."""
    buckets = [RequestPhase(name, each * 1e-3) for name, each in parts.items()]
    path = step(
        measured(peaks, [], 1.0, buckets, max_batch_size=8, queue_delay_s=0.1),
        "path",
    )
    assert path.text.startswith(f"{named} is {parts[named]} % of a request: ")
    assert path.ceiling == pytest.approx(ceiling)
    assert path.text.endswith(f": at most {ceiling:.2g}x")


@given(st.dictionaries(st.sampled_from(["queue", "decode", "compute", "encode"]), st.floats(0, 1)))
def test_no_part_promises_more_than_its_share(parts) -> None:
    device = Peaks("a test", 2, {"fp32": 1e9}, 1e9, 1e-6)
    buckets = [RequestPhase(name, seconds) for name, seconds in parts.items()]
    found = measured(device, [], 1.0, buckets, max_batch_size=8, queue_delay_s=0.1)
    path = step(found, "path")
    if path is not None:
        name = path.text.partition(" is ")[0]
        left_s = sum(parts.values()) - parts[name]
        assert name != "compute"
        assert path.ceiling == pytest.approx(sum(parts.values()) / max(left_s, 1e-12))


@pytest.mark.parametrize(
    ("part", "more"),
    [
        # No delay is configured: what is left is the hand-over to the worker.
        ("queue", {"max_batch_size": 8}),
        # Rows cannot share a request, or all of them do.
        ("decode", {"max_batch_size": 0}),
        ("copy in", {"num_rows": 8, "max_batch_size": 8}),
    ],
)
def test_nothing_is_advised_that_cannot_be_done(peaks, part, more) -> None:
    buckets = [RequestPhase(part, 60e-3), RequestPhase("compute", 40e-3)]
    assert step(measured(peaks, [], 40e-3, buckets, **more), "path") is None


def test_no_advice_names_what_penstock_does_not_have(peaks) -> None:
    for parts, _, _ in PATHS:
        buckets = [RequestPhase(name, each * 1e-3) for name, each in parts.items()]
        more = {"max_batch_size": 8, "queue_delay_s": 0.1}
        path = step(measured(peaks, [], 1.0, buckets, **more), "path")
        for word in ("shared memory", "instances of its own", "binary"):
            assert word not in path.text


class TestCeilings:
    """1 / ((1 - p) + p / s) for the named share p of 20 ms that becomes s times as fast."""

    def text(self, found: RooflineInput, name: str) -> str:
        return step(found, name).text

    def test_of_fusion(self, peaks) -> None:
        found = measured(peaks, [product("p", 15e-3), sum_of_two("s", 5e-3)])
        assert step(found, "fusion").ceiling == pytest.approx(1 / (1 - 0.25))
        expected = "fuse Add into adjacent operators (25 % of the time): at most 1.3x"
        assert self.text(found, "fusion") == expected

    def test_of_another_compiler(self, peaks) -> None:
        """10 ms for 1.2 ms of memory."""
        found = measured(peaks, [product("p", 10e-3), sum_of_two("s", 10e-3)])
        assert step(found, "compile").ceiling == pytest.approx(20 / (20 - 8.8))
        assert "for Add (44 % of the time is overhead)" in self.text(found, "compile")

    def test_of_batches(self, peaks) -> None:
        """Half of the time is between operators, and paid once for four times the rows."""
        found = measured(peaks, [product("p", 10e-3)], total_s=20e-3, num_rows=2, max_batch_size=8)
        assert step(found, "batching").ceiling == pytest.approx(1 / (0.5 + 0.5 / 4))
        assert "batches of 8 rows: 50 % of the time" in self.text(found, "batching")

    def test_of_instances(self, peaks) -> None:
        """Two threads are 1.25x as fast as one: two instances answer 2 / 1.25 as many."""
        found = measured(peaks, [product("p", 20e-3)], single_thread_s=25e-3)
        assert step(found, "instances").ceiling == pytest.approx(2 / 1.25)

    @pytest.mark.parametrize(("datatype", "faster"), [("bf16", 2), ("int8", 4)])
    def test_of_narrower_products(self, peaks, datatype, faster) -> None:
        flops = {"fp32": 100e9, "bf16": 200e9, "int8": 400e9}
        wide = msgspec.structs.replace(peaks, flops=flops, bytes_per_s=1e12)
        found = measured(wide, [product("p", 16e-3)], total_s=20e-3)
        assert step(found, datatype).ceiling == pytest.approx(1 / (0.2 + 0.8 / faster), rel=1e-3)
        assert "for MatMul (80 % of the time)" in self.text(found, datatype)

    def test_of_what_a_gpu_waits_for(self, peaks, gpu) -> None:
        """2 ms without a kernel, 1.5 ms of copies."""
        found = measured(peaks, [product("p", 16e-3)], total_s=20e-3, gpu=gpu)
        assert step(found, "cuda-graphs").ceiling == pytest.approx(1 / 0.9)
        assert step(found, "instances").ceiling == pytest.approx(1 / (1 - 0.075))


class TestDisturbed:
    def found(self, peaks) -> RooflineInput:
        told = roofline.disturbance([10e-3, 11e-3, 30e-3])
        buckets = [RequestPhase("queue", 60e-3), RequestPhase("compute", 1e-3)]
        times = [product("p", 11e-3), sum_of_two("s", 100e-3)]
        return measured(peaks, times, None, buckets, disturbance=told, queue_delay_s=0.1)

    def test_nothing_is_promised(self, peaks) -> None:
        found = self.found(peaks)
        assert roofline.next_steps(found) == []
        assert roofline.next_steps(replace(found, disturbance=""))
        lines = roofline.findings(found)
        assert not any("as fast" in line or "limit" in line for line in lines)

    def test_the_verdict_says_to_measure_again(self, peaks) -> None:
        found = self.found(peaks)
        text = roofline.verdict(found, roofline.next_steps(found))
        assert text == (
            "Disturbed: the same run took from 10.0 ms to 30.0 ms: other processes used this"
            " machine. Measure again on a quiet machine before you act on this profile"
        )
        assert roofline.findings(found)[0] == found.disturbance


def test_the_verdict_says_what_binds_and_what_is_next(peaks) -> None:
    found = measured(peaks, [product("p", 16e-3), sum_of_two("s", 4e-3)])
    text = roofline.verdict(found, roofline.next_steps(found))
    assert text.startswith("Compute-bound: 80 % of the time, most of it MatMul. Next: INT8")


def test_the_verdict_does_not_blame_an_operator_for_the_time_between_them(peaks) -> None:
    found = measured(peaks, [product("p", 2e-3)], total_s=50e-3)
    text = roofline.verdict(found, roofline.next_steps(found))
    assert text.startswith("Overhead-bound: 96 % of the time, most of it between operators. ")


def test_at_the_roof_nothing_is_recommended(peaks) -> None:
    narrow = replace(product("p", 2.7e-3), datatype="int8")
    found = measured(peaks, [narrow])
    assert roofline.next_steps(found) == []
    assert "No step promises more than 1.05x" in roofline.verdict(found, [])
    assert any("run at this device's peaks" in line for line in roofline.findings(found))


def test_without_operators_there_is_still_a_verdict(peaks) -> None:
    found = measured(peaks, [], total_s=5e-3)
    assert roofline.bound_of(found) == "unknown"
    assert "cannot be seen" in roofline.verdict(found, roofline.next_steps(found))


def test_runs_that_differ_much_are_warned_of() -> None:
    assert roofline.disturbance([1.0, 1.1, 1.2, 1.05]) == ""
    warning = roofline.disturbance([10e-3, 11e-3, 30e-3])
    assert warning.startswith("the same run took from 10.0 ms to 30.0 ms")


def test_the_same_run_later_must_take_as_long() -> None:
    assert roofline.disturbance([1.0] * 5, 1.2) == ""
    assert roofline.disturbance([1.0] * 5, 2.0)


def test_one_slow_run_of_twenty_is_no_noise() -> None:
    assert roofline.disturbance([1.0] * 19 + [9.0]) == ""


times = st.builds(
    OperatorTime,
    name=st.just("o"),
    kind=st.sampled_from(["MatMul", "Add", "Conv", "Reshape", "?"]),
    seconds=st.floats(0, 1),
    inputs=st.lists(st.builds(Shaped, st.just("fp32"), st.just((4, 4))), max_size=3).map(tuple),
    outputs=st.lists(st.builds(Shaped, st.just("fp32"), st.just((4, 4))), max_size=1).map(tuple),
    weight_bytes=st.sampled_from([0.0, 64.0]),
)


@given(st.lists(times, max_size=6), st.floats(1e-6, 2), st.integers(0, 16))
def test_no_ceiling_is_below_one_and_shares_are_the_whole(listed, total_s, max_batch_size) -> None:
    device = Peaks("a test", 2, {"fp32": 1e9, "int8": 4e9}, 1e9, 1e-6)
    found = measured(device, listed, total_s=total_s, max_batch_size=max_batch_size)
    assert all(each.ceiling >= 1 for each in roofline.next_steps(found))
    assert roofline.headroom(found) >= 1 - 1e-9
    if listed:
        whole = max(total_s, sum(each.seconds for each in listed))
        assert sum(roofline.shares(found).values()) == pytest.approx(whole)
    assert roofline.verdict(found, roofline.next_steps(found))


class TestGpu:
    """6 ms of kernels in a run of 10, of which 2 were spent waiting for the next kernel."""

    def found(self, peaks, gpu, **more) -> RooflineInput:
        times = [product("p", 5e-3), sum_of_two("s", 1e-3)]
        return measured(peaks, times, total_s=10e-3, gpu=gpu, **more)

    def test_waiting_for_kernels_is_launching(self, peaks, gpu) -> None:
        shares = roofline.shares(self.found(peaks, gpu))
        assert shares["launch"] == pytest.approx(2e-3)
        assert shares["overhead"] == pytest.approx(2e-3)
        assert "launch" not in roofline.shares(self.found(peaks, None))

    def test_no_more_of_it_than_there_is_between_operators(self, peaks, gpu) -> None:
        """A profiler makes gaps longer."""
        gpu.gap_s = 1.0
        assert roofline.shares(self.found(peaks, gpu))["launch"] == pytest.approx(4e-3)

    def test_graphs_would_end_it_and_a_second_instance_hide_the_copies(self, peaks, gpu) -> None:
        steps = {step.name: step for step in roofline.next_steps(self.found(peaks, gpu))}
        assert steps["cuda-graphs"].ceiling == pytest.approx(10 / 8)
        assert steps["instances"].ceiling == pytest.approx(10 / 8.5)
        assert not steps["instances"].is_latency
        gpu.num_slots = 2
        names = [step.name for step in roofline.next_steps(self.found(peaks, gpu))]
        assert "instances" not in names

    def test_it_is_told(self, peaks, gpu) -> None:
        lines = roofline.findings(self.found(peaks, gpu))
        (launches,) = [line for line in lines if line.startswith("launch-bound")]
        assert "25 %" in launches and "the next of 2" in launches
        (copies,) = [line for line in lines if line.startswith("copies take")]
        assert "with 1 instance on the GPU 0% of that is hidden" in copies

    def names(self, peaks, time, datatypes) -> set[str]:
        flops = {"fp32": 50e9, "tf32": 400e9, "fp16": 800e9, "fp8": 1600e9, "int8": 1600e9}
        fast = msgspec.structs.replace(peaks, flops=flops, bytes_per_s=1e12)
        return {
            each.name for each in roofline.next_steps(measured(fast, [time], datatypes=datatypes))
        }

    def test_narrower_types_are_offered_that_can_be_built(self, peaks) -> None:
        """INT8 is built for CPUs only, FP8 for packed encoders only."""
        packed = (*roofline.ON_GPUS, "fp8")
        half = replace(product("p", 1), datatype="fp16")
        assert self.names(peaks, product("p", 1), roofline.ON_GPUS) >= {"tf32", "fp16"}
        assert not self.names(peaks, product("p", 1), roofline.ON_GPUS) & {"fp8", "int8"}
        assert "fp8" in self.names(peaks, product("p", 1), packed)
        assert self.names(peaks, half, packed) & {"tf32", "fp8", "int8"} == {"fp8"}
        assert not self.names(peaks, product("p", 1), ()) & set(roofline.NARROWER["fp32"])


@pytest.mark.parametrize(
    ("more", "datatypes"),
    [
        ({"backend": "onnxruntime", "artifact": "m/model.onnx"}, {"bf16", "int8"}),
        ({"backend": "openvino", "artifact": "m/model.xml"}, {"bf16"}),
        ({"backend": "pytorch", "device": "cuda:0"}, {"tf32", "fp16", "bf16"}),
        (
            {"backend": "pytorch", "device": "cuda:0", "options": {"penstock.pack": "1"}},
            {"tf32", "fp16", "bf16", "fp8"},
        ),
        ({"backend": "pytorch", "device": "cuda:0", "artifact": "m/model.pt2"}, set()),
    ],
)
def test_datatypes_that_can_be_built_of_a_model(more, datatypes) -> None:
    assert set(roofline.buildable(replace(a_config(), **more))) == datatypes


class TestLimitShare:
    def test_is_what_the_work_takes_at_the_peaks(self, peaks) -> None:
        """10.74 ms of products and 1.2 ms of memory, in a run of 20."""
        found = measured(peaks, [product("p", 16e-3), sum_of_two("s", 3e-3)], total_s=20e-3)
        assert roofline.limit_share(found) == pytest.approx(11.94 / 20, rel=1e-3)
        assert any("runs at 60% of its limit" in line for line in roofline.findings(found))

    def test_launches_are_no_work(self, peaks) -> None:
        found = measured(peaks, [sum_of_two("s", 2e-6, num_elements=10)] * 10)
        share = roofline.limit_share(found)
        assert share is not None and share < 0.01

    def test_where_most_is_unknown_nothing_is_said(self, peaks) -> None:
        found = measured(peaks, [product("p", 1e-3), OperatorTime("k", "other kernel", 9e-3)])
        assert roofline.limit_share(found) is None
