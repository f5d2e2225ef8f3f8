"""Simulated serving against laws that are known: M/D/1, saturation, buckets."""

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from served_builds import (
    IMAGE,
    TEXT,
    a_config,
    a_packed_config,
    a_packed_table,
    a_table,
    texts,
)

from penstock.config import PadAxis, Padding
from penstock.optimizer.simulate import (
    BYTE_CPU_S,
    CORE_S,
    DISPATCH_S,
    OVERHEAD_S,
    REQUEST_CPU_S,
    TimeTable,
    as_served,
    capacity,
    fitted,
    length_of,
    max_rate,
    percentile,
    row_lengths,
    run,
    shares_of,
    simulate_rate,
    variable_axes,
)
from penstock.slo import parse
from penstock.types import TensorSpec


def lengths_of(rows, config):
    return shares_of(row_lengths(rows, config), config)


ALIKE = {0: 1.0}
BUCKETS = Padding((PadAxis("tokens", 0),), (16, 64))


def test_rows_are_the_same_unless_they_have_a_one_too_many() -> None:
    rows = [{"image": np.ones(4), "label": np.array(1)}]
    assert fitted(rows, a_config(IMAGE)) is rows
    (row,) = fitted([{"image": np.ones((1, 4)), "label": np.array(1)}], a_config(IMAGE))
    assert (row["image"].shape, row["label"].shape) == ((4,), ())
    without = [{"image": np.ones((1, 4))}]
    assert fitted(without, a_config(TensorSpec("image", "FP32", (1, 4)), max_batch=0)) is without
    assert fitted([], a_config(IMAGE)) == []


def unbatched(seconds: float, **others):
    return TimeTable(1, 1, {0: {1: seconds}}), a_config(max_batch=1, is_dynamic=False, **others)


def batch_s(table: TimeTable, config, rate: float) -> float:
    return as_served(table, config, rate).batch_s(0, 1)


def waiting_beyond(rate: float, service_s: float, limit_s: float) -> float:
    """M/D/1 (Erlang): the share of requests that wait longer."""
    within = 0.0
    for k in range(int(limit_s / service_s) + 1):
        reach = rate * (k * service_s - limit_s)
        within += reach**k / math.factorial(k) * math.exp(-reach)
    return 1 - (1 - rate * service_s) * within


class TestFreeCores:
    """Cores that no instance uses do the server's work first."""

    def test_the_model_loses_nothing_as_long_as_they_hold_it(self):
        table, config = unbatched(0.010)
        free = replace_free(table, 1)
        rate = 0.9 / cpu_s(config)
        assert batch_s(free, config, rate) == pytest.approx(0.010 + DISPATCH_S)
        assert batch_s(table, config, rate) == pytest.approx((0.010 + DISPATCH_S) / 0.1)

    def test_and_only_the_rest_beyond(self):
        table, config = unbatched(0.010)
        rate = 1.5 / cpu_s(config)
        found = batch_s(replace_free(table, 1), config, rate)
        assert found == pytest.approx((0.010 + DISPATCH_S) / 0.5)

    @pytest.mark.parametrize("num_free", [0, 1, 3])
    @pytest.mark.parametrize("service_s", [0.00005, 0.0002, 0.005])
    def test_capacity_is_where_batches_as_served_take_all_time(self, num_free, service_s):
        table, config = unbatched(service_s)
        table = replace_free(table, num_free)
        rate = capacity(table, config, ALIKE)
        assert rate * batch_s(table, config, rate) == pytest.approx(1.0)

    def test_one_thread_beats_two_where_the_server_needs_the_other_core(self):
        """0.24 ms with one thread, 0.22 with two, and a server that takes 0.3 of a request."""
        image = TensorSpec("image", "FP32", (3, 64, 64))
        config = a_config(image, max_batch=1, is_dynamic=False)
        slo = parse("p99 < 20 ms")
        one = replace_free(TimeTable(1, 1, {0: {1: 0.00024}}), 1)
        two = TimeTable(1, 2, {0: {1: 0.00022}})
        assert max_rate(one, config, slo, ALIKE) > 1.3 * max_rate(two, config, slo, ALIKE)


def replace_free(table: TimeTable, num_free: int) -> TimeTable:
    return msgspec.structs.replace(table, num_free_cores=num_free)


def cpu_s(config) -> float:
    specs = (*config.inputs, *config.outputs)
    return REQUEST_CPU_S + BYTE_CPU_S * sum(spec.row_bytes(spec.shape) for spec in specs)


class TestTimeTable:
    TABLE = TimeTable(1, 1, {16: {1: 2.0, 8: 9.0}, 64: {1: 4.0, 8: 30.0}})

    def test_says_what_was_measured(self):
        assert self.TABLE.batch_s(16, 8) == 9.0

    def test_between_rungs_is_a_straight_line(self):
        assert self.TABLE.batch_s(16, 4) == pytest.approx(5.0)

    def test_between_lengths_too(self):
        assert self.TABLE.batch_s(40, 1) == pytest.approx(3.0)
        assert self.TABLE.batch_s(40, 8) == pytest.approx(19.5)

    def test_beyond_the_ends_goes_on(self):
        assert self.TABLE.batch_s(16, 15) == pytest.approx(16.0)
        assert self.TABLE.batch_s(112, 1) == pytest.approx(6.0)
        assert self.TABLE.batch_s(8, 1) == pytest.approx(2.0 - 8 / 24)

    def test_noise_never_makes_larger_batches_cheaper_than_measured(self):
        noisy = TimeTable(1, 1, {0: {1: 2.0, 8: 1.9}})
        assert noisy.batch_s(0, 64) == pytest.approx(2.0)

    def test_one_point_holds_for_all(self):
        assert TimeTable(1, 1, {0: {1: 2.0}}).batch_s(7, 9) == 2.0

    def test_knows_the_largest_batch(self):
        assert self.TABLE.max_rows == 8


class TestLengths:
    def test_rows_that_are_alike_have_none(self):
        rows = [{"image": np.zeros(4)}]
        assert lengths_of(rows, a_config()) == ALIKE

    def test_without_padding_each_length_is_its_own(self):
        found = lengths_of(texts([3, 3, 5, 100]), a_config(TEXT))
        assert found == {3: 0.5, 5: 0.25, 100: 0.25}

    def test_with_padding_they_are_buckets_and_what_is_longer(self):
        config = a_config(TEXT, padding=BUCKETS)
        assert lengths_of(texts([3, 16, 17, 100]), config) == {16: 0.5, 64: 0.25, 100: 0.25}

    def test_without_rows_nothing_is_known(self):
        assert lengths_of([], a_config(TEXT)) == ALIKE

    def test_an_input_with_two_free_axes_has_no_length(self):
        assert variable_axes(a_config(TensorSpec("x", "FP32", (-1, -1)))) == ()

    def test_strings_have_no_length(self):
        assert variable_axes(a_config(TensorSpec("x", "BYTES", (-1,)))) == ()

    def test_fixed_inputs_beside_it_do_not_matter(self):
        config = replace(a_config(TEXT), inputs=(TEXT, IMAGE))
        assert variable_axes(config) == (PadAxis("tokens", 0),)

    def test_axes_of_different_lengths_are_no_length(self):
        axes = (PadAxis("a", 0), PadAxis("b", 0))
        assert length_of({"a": np.zeros(3), "b": np.zeros(4)}, axes) is None


class TestRun:
    def test_one_request_takes_its_time_and_the_overhead(self):
        table, config = unbatched(0.010)
        outcome = run(table, config, [1.0], [0])
        assert outcome.latencies_s.tolist() == pytest.approx([0.010 + OVERHEAD_S])
        assert outcome.busy_s == pytest.approx(0.010)

    def test_without_batching_they_queue(self):
        table, config = unbatched(0.010)
        outcome = run(table, config, [0.0, 0.0, 0.001], [0, 0, 0])
        expected = np.array([0.010, 0.020, 0.029]) + OVERHEAD_S
        assert outcome.latencies_s == pytest.approx(expected)

    def test_with_batching_those_who_wait_run_together(self):
        table = a_table(0.004, 0.001)
        outcome = run(table, a_config(), [0.0, 0.001, 0.002], [0, 0, 0])
        # Alone 5 ms; the other two then 6 ms together.
        assert outcome.latencies_s == pytest.approx(np.array([5, 10, 9]) / 1e3 + OVERHEAD_S)
        assert (outcome.num_batches, outcome.num_rows) == (2, 3)

    def test_lengths_do_not_mix(self):
        table = a_table(lengths=(32, 64))
        outcome = run(table, a_config(TEXT), [0.0, 0.001, 0.002], [32, 64, 32])
        assert outcome.num_batches == 3

    def test_two_instances_run_at_once(self):
        table = a_table(instances=2, threads=1)
        outcome = run(table, a_config(num_instances=2), [0.0, 0.001], [0, 0])
        assert outcome.latencies_s == pytest.approx(np.array([5, 5]) / 1e3 + OVERHEAD_S)

    def test_a_queue_delay_is_waited(self):
        config = a_config()
        config = replace(config, batching=replace(config.batching, max_queue_delay_s=0.002))
        outcome = run(a_table(), config, [0.0], [0])
        assert outcome.latencies_s == pytest.approx([0.002 + 0.005 + OVERHEAD_S])

    def test_slo_mode_refuses_what_would_be_late_and_keeps_the_rest(self):
        config = a_config(max_batch=8)
        config = replace(config, batching=replace(config.batching, slo_latency_s=0.030))
        due = np.arange(0, 1, 0.0005).tolist()  # 2,000/s on what does 667/s.
        outcome = run(a_table(), config, due, [0] * len(due))
        answered = outcome.latencies_s[np.isfinite(outcome.latencies_s)]
        assert 0.2 < len(answered) / len(due) < 0.36
        assert percentile(answered, 99) < 0.030 + OVERHEAD_S


class TestTokens:
    """A packed model: 2 ms and 1 ms for a thousand tokens."""

    TABLE = a_packed_table()
    # Texts of 20 and of 180 tokens, as many of each.
    LENGTHS = {20: 0.5, 180: 0.5}

    def test_times_go_by_tokens(self):
        assert self.TABLE.tokens_s(800) == pytest.approx(0.0028)
        assert self.TABLE.tokens_s(5000) == pytest.approx(0.007)
        assert self.TABLE.tokens_s(50_000) == pytest.approx(0.052)
        assert a_table().by_tokens == {}

    def test_rows_keep_their_own_length_where_padding_is_not_computed(self):
        rows = texts([3, 3, 50, 400])
        assert lengths_of(rows, a_packed_config()) == {3: 0.5, 50: 0.25, 400: 0.25}
        padded = replace(a_packed_config(), options={})
        assert lengths_of(rows, padded) == {384: 0.75, 400: 0.25}

    def test_all_lengths_share_batches_that_take_as_long_as_their_tokens(self):
        outcome = run(self.TABLE, a_packed_config(), [0.0, 0.001, 0.002], [100, 20, 180])
        expected = np.array([2.1, 3.3, 2.3]) / 1e3 + OVERHEAD_S
        assert outcome.latencies_s == pytest.approx(expected)

    def test_a_budget_closes_batches(self):
        config = a_packed_config(max_tokens=400)
        due, lengths = [0.0, 0.001, 0.001, 0.001, 0.001], [100, 180, 180, 180, 20]
        outcome = run(self.TABLE, config, due, lengths)
        assert outcome.num_batches == 3
        expected = np.array([2.1, 3.46, 3.46, 5.66, 5.66]) / 1e3 + OVERHEAD_S
        assert outcome.latencies_s == pytest.approx(expected)

    def test_padding_that_is_computed_counts(self):
        padding = Padding((PadAxis("tokens", 0),), (32, 64))
        config = a_config(TEXT, padding=padding)
        config = replace(config, batching=replace(config.batching, max_tokens=128))
        table = a_table(lengths=(32, 64))
        outcome = run(table, config, [0.0, 0.001, 0.001, 0.001, 0.001, 0.001], [32] * 6)
        assert outcome.num_batches == 3, "one, four, one"
        outcome = run(table, config, [0.0, 0.001, 0.001, 0.001], [32, 64, 64, 64])
        assert outcome.num_batches == 3, "one, two, one"
        per_row_s = (0.004 + 2 * 0.001) * 2 / 2
        idle = 1 / (per_row_s + DISPATCH_S / 2 + REQUEST_CPU_S)
        assert capacity(table, config, {64: 1.0}) == pytest.approx(idle, rel=0.01)

    def test_slo_mode_goes_by_tokens_too(self):
        config = a_packed_config(max_tokens=16384)
        config = replace(config, batching=replace(config.batching, slo_latency_s=0.030))
        chance = np.random.default_rng(5)
        due = np.cumsum(chance.exponential(1 / 15_000, 6000)).tolist()
        lengths = chance.choice([20, 180], len(due)).tolist()
        outcome = run(self.TABLE, config, due, lengths)
        answered = outcome.latencies_s[np.isfinite(outcome.latencies_s)]
        # 1.5 times what can be done.
        assert 0.5 < len(answered) / len(due) < 0.75
        assert percentile(answered, 99) < 0.030 + OVERHEAD_S

    def test_a_rate_is_never_beyond_saturation(self):
        config = a_packed_config()
        saturated = 1 / ((0.002 + 0.0256 + DISPATCH_S) / 256)
        assert capacity(self.TABLE, config, self.LENGTHS) == pytest.approx(saturated, rel=0.01)
        slo = parse("p99 < 200ms")
        assert 0.8 * saturated < max_rate(self.TABLE, config, slo, self.LENGTHS) <= saturated
        small = a_packed_config(max_tokens=1000)
        limited = 1 / ((0.002 + 0.001 + DISPATCH_S) / 10)
        assert capacity(self.TABLE, small, self.LENGTHS) == pytest.approx(limited, rel=0.01)
        assert max_rate(self.TABLE, small, slo, self.LENGTHS) <= limited

    def test_without_limits_too(self):
        rate = max_rate(self.TABLE, a_packed_config(), parse("throughput >= 1/s"), self.LENGTHS)
        assert rate > 7000


def p99_s(found):
    return percentile(found.counted_s, 99)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_unbatched_poisson_is_m_d_1(load):
    table, config = unbatched(0.010)
    rate = load / 0.010
    found = simulate_rate(table, config, parse("p99 < 1s"), rate, ALIKE)
    service_s = batch_s(table, config, rate)
    beyond = waiting_beyond(rate, service_s, p99_s(found) - OVERHEAD_S - service_s)
    # What is beyond the p99 that was found is near 1 %.
    assert 0.003 < beyond < 0.03
    assert found.busy_s * rate / len(found.latencies_s) == pytest.approx(load, rel=0.1)
    assert found.num_rows == found.num_batches
    assert (found.counted_s < 1.0).all()


def test_constant_arrivals_do_not_wait():
    table, config = unbatched(0.010)
    due = [index / 90 for index in range(100)]
    latencies = run(table, config, due, [0] * 100).latencies_s
    assert latencies == pytest.approx(0.010 + OVERHEAD_S)


def test_batches_that_differ_are_as_long_on_average():
    table, config = unbatched(0.010)
    due = np.arange(0, 40, 0.1).tolist()
    latencies = run(table, config, due, [0] * len(due), jitter=0.2).latencies_s - OVERHEAD_S
    assert latencies.mean() == pytest.approx(0.010, rel=0.03)
    assert np.log(latencies).std() == pytest.approx(0.2, rel=0.15)


def test_bursts_wait_longer_than_poisson():
    table, config = unbatched(0.010)
    smooth = simulate_rate(table, config, parse("p99 < 1s at 60/s"), 60, ALIKE)
    bursts = simulate_rate(table, config, parse("p99 < 1s at 60/s gamma 3"), 60, ALIKE)
    assert p99_s(bursts) > 2 * p99_s(smooth)


def test_predictions_repeat():
    arguments = a_table(), a_config(), parse("p99 < 50ms"), 500, ALIKE
    first, second = simulate_rate(*arguments), simulate_rate(*arguments)
    assert np.array_equal(first.latencies_s, second.latencies_s)
    assert (first.num_batches, first.busy_s) == (second.num_batches, second.busy_s)


class TestMaxRate:
    def test_unbatched_is_where_m_d_1_crosses_the_limit(self):
        table, config = unbatched(0.010)
        rate = max_rate(table, config, parse("p99 < 50ms"), ALIKE)
        service_s = batch_s(table, config, rate)
        assert 0.003 < waiting_beyond(rate, service_s, 0.050 - service_s - OVERHEAD_S) < 0.03

    def test_batched_follows_the_law_of_p99(self):
        """On one executor that nobody shares, about (1 - 2.4 a / S) / c."""
        a_s, c_s, slo_s = 0.004, 0.001, 0.100
        config = replace(a_config(max_batch=64, device="cuda"), backend="null")
        rate = max_rate(a_table(a_s, c_s), config, parse("p99 < 100ms"), ALIKE)
        assert rate == pytest.approx((1 - 2.4 * a_s / slo_s) / c_s, rel=0.08)

    def test_is_never_beyond_saturation(self):
        table, config = a_table(0.004, 0.001), a_config()
        saturated = 1 / ((0.004 + 0.032 + DISPATCH_S) / 32 + REQUEST_CPU_S)
        assert capacity(table, config, ALIKE) == pytest.approx(saturated, rel=0.03)
        assert 0.8 * saturated < max_rate(table, config, parse("p99 < 1s"), ALIKE) <= saturated

    def test_two_instances_do_about_twice_as_much(self):
        slo = parse("p99 < 100ms")
        one = max_rate(a_table(), a_config(), slo, ALIKE)
        two = max_rate(a_table(instances=2), a_config(num_instances=2), slo, ALIKE)
        assert 1.8 < two / one < 2.3

    def test_is_zero_when_one_request_alone_is_late(self):
        table, config = unbatched(0.010)
        assert max_rate(table, config, parse("p99 < 5ms"), ALIKE) == 0

    def test_is_zero_when_it_is_not_above_what_was_asked(self):
        table, config = unbatched(0.010)
        slo = parse("p99 < 50ms")
        rate = max_rate(table, config, slo, ALIKE)
        assert max_rate(table, config, slo, ALIKE, above=1.05 * rate) == 0
        assert max_rate(table, config, slo, ALIKE, above=0.9 * rate) == pytest.approx(
            rate, rel=0.02
        )

    def test_the_tightest_term_decides(self):
        table, config = unbatched(0.010)
        loose = max_rate(table, config, parse("p99 < 100ms"), ALIKE)
        both = max_rate(table, config, parse("p99 < 100ms, p50 < 12ms"), ALIKE)
        mean = max_rate(table, config, parse("mean < 12ms"), ALIKE)
        assert both < 0.8 * loose
        assert mean < 0.8 * loose

    def test_goodput_alone_counts_answers(self):
        table, config = unbatched(0.010)
        assert max_rate(table, config, parse("goodput >= 99 %"), ALIKE) > 95

    def test_without_limits_it_is_what_can_be_sustained(self):
        table, config = unbatched(0.010)
        rate = max_rate(table, config, parse("throughput >= 10/s"), ALIKE)
        assert 70 < rate <= 100

    def test_padding_pays_where_lengths_are_many(self):
        rows = texts(np.random.default_rng(3).integers(1, 64, 200).tolist())
        slo = parse("p99 < 100ms")
        table = a_table(lengths=(1, 16, 64))
        plain, padded = a_config(TEXT), a_config(TEXT, padding=BUCKETS)
        without = max_rate(table, plain, slo, lengths_of(rows, plain))
        assert max_rate(table, padded, slo, lengths_of(rows, padded)) > 1.2 * without

    def test_no_model_is_faster_than_the_server(self):
        table = TimeTable(1, 1, {0: {1: 1e-6}})
        assert max_rate(table, a_config(max_batch=1), parse("p99 < 1s"), ALIKE) <= 1 / CORE_S


class TestAsServed:
    def test_a_batch_has_its_way_to_the_worker(self):
        table, config = unbatched(0.010)
        assert batch_s(table, config, 0.0) == pytest.approx(0.010 + DISPATCH_S)

    @pytest.mark.parametrize("num_elements", [1, 150_000])
    def test_the_server_takes_its_share_of_each_instance(self, num_elements):
        table = TimeTable(2, 2, {0: {1: 0.010}})
        config = a_config(TensorSpec("image", "FP32", (num_elements,)))
        slowed = batch_s(table, config, 400) / batch_s(table, config, 0.0)
        request_s = REQUEST_CPU_S + BYTE_CPU_S * 4 * (num_elements + 2)
        assert slowed == pytest.approx(1 / (1 - 400 * request_s / 2))

    def test_large_requests_are_for_instances_that_do_not_wait_for_each_other(self):
        """Two threads are no slower than two instances until somebody else needs their cores."""
        slo = parse("p99 < 100ms")
        together, apart = TimeTable(1, 2, {0: {1: 0.006}}), TimeTable(2, 1, {0: {1: 0.012}})
        for num_elements, is_apart in ((1, False), (150_000, True)):
            spec = TensorSpec("image", "FP32", (num_elements,))
            one, two = (a_config(spec, max_batch=1, num_instances=n) for n in (1, 2))
            rates = max_rate(together, one, slo, ALIKE), max_rate(apart, two, slo, ALIKE)
            assert (rates[1] > 1.1 * rates[0]) == is_apart

    def test_the_engine_of_gpus_runs_batches_of_its_rungs(self):
        """A batch of 33 rows takes as long as one of 64, so preferred sizes are worth it."""
        config = replace(a_config(max_batch=64, device="cuda"), backend="pytorch")
        table, slo = a_table(0.004, 0.001), parse("p99 < 100ms")
        padded = max_rate(table, config, slo, ALIKE)
        assert padded < 0.8 * max_rate(table, replace(config, backend="null"), slo, ALIKE)
        sizes = replace(config.batching, preferred_batch_sizes=(8, 16, 32, 64))
        assert max_rate(table, replace(config, batching=sizes), slo, ALIKE) > 1.1 * padded

    def test_a_gpu_shares_its_cores_with_nobody(self):
        table, config = unbatched(0.010)
        config = replace(config, device="cuda")
        assert batch_s(table, config, 10_000) == batch_s(table, config, 0.0)

    def test_a_model_always_gets_something(self):
        table, config = unbatched(0.010)
        assert 0 < batch_s(table, config, 1e9) < math.inf

    def test_of_models_that_take_less_than_their_way_the_faster_is_ahead(self):
        """And those that share the way are far ahead of those that go alone."""
        slo = parse("p99 < 10ms")
        slow, fast = (TimeTable(2, 1, {0: {1: s, 32: 20 * s}}) for s in (100e-6, 50e-6))
        assert max_rate(fast, a_config(num_instances=2), slo, ALIKE) > 1.1 * max_rate(
            slow, a_config(num_instances=2), slo, ALIKE
        )
        alone = a_config(max_batch=1, num_instances=2)
        assert max_rate(fast, a_config(num_instances=2), slo, ALIKE) > 1.5 * max_rate(
            fast, alone, slo, ALIKE
        )


class TestIdleShare:
    def test_what_does_not_grow_with_rows_is_idle(self):
        assert a_table(0.001, 0.001).idle_share == pytest.approx(1 / 33)
        assert a_table(0.0, 0.001).idle_share == pytest.approx(0.0)
        assert a_table(0.001, 0.0).idle_share == pytest.approx(1.0)

    def test_a_single_size_says_nothing(self):
        assert TimeTable(1, 1, {0: {1: 0.001}}).idle_share == 1.0
