"""Which ways to serve are worth measuring."""

from dataclasses import replace
from itertools import combinations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served_builds import (
    IMAGE,
    TEXT,
    a_config,
    a_packed_config,
    a_packed_table,
    a_situation,
    a_table,
    texts,
)

from penstock.config import SLO_OFF, PadAxis, Padding
from penstock.optimizer import shapes
from penstock.optimizer.facts import Facts
from penstock.slo import parse

SLO = parse("p99 < 20ms at 100/s")


class TestInstances:
    def test_threads_are_the_option_of_the_backend(self):
        config = shapes.with_instances(a_config(), 2, 1)
        assert config.num_instances == 2
        assert config.options == {"intra_op_thread_count": "1"}

    def test_another_spelling_of_it_is_replaced(self):
        config = replace(
            a_config(), backend="openvino", options={"INFERENCE_NUM_THREADS": "8", "x": "y"}
        )
        found = shapes.with_instances(config, 1, 2)
        assert found.options == {"x": "y", "inference_num_threads": "2"}
        assert shapes.threads_of(found, 16) == 2

    def test_backends_without_it_only_get_instances(self):
        config = shapes.with_instances(replace(a_config(), backend="python"), 4, 1)
        assert (config.num_instances, config.options) == (4, {})

    def test_those_on_several_gpus_stay_there(self):
        config = replace(a_config(), backend="pytorch").on(["cuda:0", "cuda:1"])
        assert shapes.arrangements(config, 8) == [(2, 8), (4, 8)]
        assert shapes.with_instances(config, 2, 8).devices == ("cuda:0", "cuda:1")
        found = shapes.with_instances(config, 4, 8)
        assert found.workers == (("cuda:0", 2), ("cuda:1", 2))
        assert shapes.with_instances(found, 2, 8).devices == config.devices

    def test_those_on_one_device_stay_on_it(self):
        one = replace(a_config(), device="cuda:3")
        assert shapes.arrangements(one, 8) == [(1, 8), (2, 8)]
        assert shapes.with_instances(one, 2, 8).devices == ("cuda:3", "cuda:3")
        assert shapes.with_instances(a_config(), 3, 1).devices == ("cpu", "cpu", "cpu")

    def test_threads_are_the_share_of_the_cores_unless_said(self):
        assert shapes.threads_of(replace(a_config(), num_instances=2), 8) == 4

    @pytest.mark.parametrize(
        ("num_cores", "expected"),
        [
            (1, [(1, 1)]),
            (2, [(1, 2), (1, 1), (2, 1)]),
            (8, [(1, 8), (1, 1), (2, 4), (4, 2), (8, 1)]),
        ],
    )
    def test_pairs_use_all_cores_or_one(self, num_cores, expected):
        assert shapes.pairs(num_cores) == expected

    @given(st.integers(1, 500))
    def test_pairs_never_use_more_than_there_are(self, num_cores):
        assert all(n * t <= num_cores for n, t in shapes.pairs(num_cores))


def on_gpu(**options: str):
    return replace(a_config(), backend="pytorch", device="cuda:0", options=options)


def tables_of(busy: float, idle: float, *counts: int):
    """Batch times of these instances; `idle` is the share that does not grow with rows."""
    made = {}
    for count in counts:
        table = a_table(idle, (1 - idle) / a_table().max_rows, instances=count)
        made[count, 8] = msgspec.structs.replace(table, busy=busy)
    return made


class TestFurther:
    @pytest.mark.parametrize(
        ("busy", "idle", "counts", "expected"),
        [
            (0.99, 0.1, (1, 2), None),
            (0.8, 0.1, (1, 2), 3),
            (0.8, 0.1, (1, 2, 3), None),
            (0.99, 0.6, (1, 2), 4),
            (0.8, 0.6, (1, 2), 3),
            (0.8, 0.6, (1, 2, 3), 4),
            (0.8, 0.6, (1, 2, 4), 8),
            (0.8, 0.6, (1, 2, 4, 8), None),
            # Cut short after one instance.
            (0.5, 0.9, (1,), None),
        ],
    )
    def test_more_instances_are_for_what_leaves_the_gpu_idle(self, busy, idle, counts, expected):
        found = shapes.further(on_gpu(), tables_of(busy, idle, *counts), 8)
        assert found == (None if expected is None else (expected, 8))

    @pytest.mark.parametrize("key", ["penstock.fuse", "penstock.pack"])
    def test_kernels_of_one_stream_get_no_second(self, key):
        assert shapes.further(on_gpu(**{key: "x"}), tables_of(0.99, 0.9, 1, 2), 8) is None

    def test_each_gpu_gets_as_many(self):
        config = on_gpu().on(["cuda:0", "cuda:1"])
        assert shapes.further(config, tables_of(0.99, 0.9, 2, 4), 8) == (8, 8)
        assert shapes.with_instances(config, 8, 8).options[shapes.STREAMS] == "2"

    def test_a_cpu_has_none(self):
        assert shapes.further(a_config(), tables_of(0.1, 0.9, 1, 2), 8) is None

    @pytest.mark.parametrize(("count", "streams"), [(2, None), (3, None), (4, "2"), (8, "4")])
    def test_streams_have_two_instances_each(self, count, streams):
        assert shapes.with_instances(on_gpu(), count, 8).options.get(shapes.STREAMS) == streams


class TestWaiting:
    def test_sizes_that_are_run_as_they_are_may_be_worth_waiting_for(self):
        situation = a_situation(
            replace(a_config(), backend="pytorch", device="cuda:0"),
            a_table(0.004, 0.001),
            slo="p99 < 100ms at 500/s",
        )
        plain = [rate for steps, rate in shapes.shapes(situation) if "fixed" in str(steps[0])]
        found = shapes.shapes(situation, is_thorough=True)
        waits = [(steps[0].settings, rate) for steps, rate in found if "preferred" in str(steps[0])]
        assert waits
        settings, rate = waits[0]
        assert settings["mode"] == "fixed"
        assert rate >= (1 + shapes.MIN_GAIN) * max(plain)

    def test_what_gains_nothing_is_left_out(self):
        situation = a_situation(a_config(), a_table(0.0001, 0.01), slo="p99 < 100ms at 500/s")
        found = shapes.shapes(situation, is_thorough=True)
        assert not any("delay_us" in str(steps[0]) for steps, _ in found)

    def test_settings_become_the_configuration(self):
        settings = {"mode": "fixed", "max_batch": "32", "delay_us": "1500", "preferred": "8,16"}
        found = shapes.with_batching(a_config(), settings, None).batching
        assert found.max_queue_delay_s == pytest.approx(0.0015)
        assert found.preferred_batch_sizes == (8, 16)


class TestDerived:
    """From what was measured to arrangements that leave cores free."""

    def tables(self, num_cores: int, alone_s: float, wide_s: float, many_s: float):
        return {
            (1, 1): a_table(alone_s, 0.0, instances=1, threads=1),
            (1, num_cores): a_table(wide_s, 0.0, instances=1, threads=num_cores),
            (num_cores, 1): a_table(many_s, 0.0, instances=num_cores, threads=1),
        }

    def test_threads_follow_amdahls_law_and_instances_a_line(self):
        # One part in ten is serial: 10 ms with one thread, 1 + 9 / 8 with eight.
        found = shapes.derived(self.tables(8, 0.010, 0.001 + 0.009 / 8, 0.017), 8)
        by_pair = {(each.num_instances, each.num_threads): each for each in found}
        assert by_pair.keys() == {(1, 4), (1, 7), (7, 1)}
        assert by_pair[1, 4].batch_s(0, 1) == pytest.approx(0.001 + 0.009 / 4)
        assert by_pair[1, 7].batch_s(0, 1) == pytest.approx(0.001 + 0.009 / 7)
        assert by_pair[7, 1].batch_s(0, 1) == pytest.approx(0.010 + 0.007 * 6 / 7)
        assert {pair: each.num_free_cores for pair, each in by_pair.items()} == {
            (1, 4): 4,
            (1, 7): 1,
            (7, 1): 1,
        }

    @pytest.mark.parametrize("num_cores", [1, 2])
    def test_small_machines_have_no_more_than_is_measured(self, num_cores):
        assert shapes.derived(self.tables(num_cores, 0.01, 0.006, 0.012), num_cores) == []

    def test_nothing_follows_from_half_of_the_measurements(self):
        tables = self.tables(8, 0.01, 0.006, 0.012)
        del tables[8, 1]
        assert shapes.derived(tables, 8) == []

    @pytest.mark.slow
    def test_the_server_gets_a_core_where_it_needs_one(self):
        """Two requests a millisecond take most of a core beside the model, which gains little by
        the last of its threads."""
        slo = parse("p99 < 20ms at 2000/s")
        times = self.tables(4, 0.0004, 0.0002, 0.0006)
        situation = a_situation(a_config(max_batch=1, is_dynamic=False), *times.values())
        situation = replace(
            situation,
            plan=replace(situation.plan, slo=slo),
            machine=msgspec.structs.replace(situation.machine, num_cores=4),
        )
        found = shapes.shapes(situation)
        pairs = [
            (step.settings["instances"], step.settings["threads"])
            for steps, _ in found
            for step in steps
            if step.pass_name == "instances"
        ]
        assert pairs.index(("1", "3")) < pairs.index(("1", "4"))


class TestBatching:
    def test_fixed_mode_stays_fixed_beside_evidence(self):
        config = shapes.with_batching(a_config(), {"mode": "fixed", "max_batch": "8"}, SLO)
        assert config.max_batch_size == config.batching.max_batch_size == 8
        assert (config.slo, config.batching.slo_latency_s) == (SLO_OFF, None)

    def test_slo_mode_is_the_plans(self):
        config = shapes.with_batching(a_config(), {"mode": "slo", "max_batch": "8"}, SLO)
        assert parse(config.slo) == SLO
        assert config.batching.slo_latency_s == 0.020

    def test_off_keeps_the_batch_dimension(self):
        padded = a_config(TEXT, padding=Padding((PadAxis("tokens", 0),), (8,)))
        config = shapes.with_batching(padded, {"mode": "off"}, None)
        assert (config.max_batch_size, config.batching.is_dynamic) == (32, False)
        assert config.padding is None

    def test_buckets_are_for_the_variable_axes(self):
        wanted = {"mode": "fixed", "max_batch": "8", "buckets": "16,64"}
        config = shapes.with_batching(a_config(TEXT), wanted, None)
        assert config.padding == Padding((PadAxis("tokens", 0),), (16, 64))
        assert shapes.settings_of(config) == wanted

    def test_preferred_sizes_that_are_too_large_go(self):
        config = a_config()
        config = replace(config, batching=replace(config.batching, preferred_batch_sizes=(4, 32)))
        found = shapes.with_batching(config, {"mode": "fixed", "max_batch": "8"}, None)
        assert found.batching.preferred_batch_sizes == (4,)


class TestBuckets:
    @given(st.lists(st.integers(1, 120), min_size=1, max_size=30), st.integers(1, 4))
    @settings(max_examples=60)
    def test_no_others_fill_up_less(self, lengths, num_buckets):
        longest = max(lengths)
        ends = sorted({min(longest, -(-n // 8) * 8) for n in lengths})

        def filled(buckets):
            return sum(min(b for b in buckets if b >= n) for n in lengths)

        found = shapes.best_buckets(lengths, num_buckets)
        assert found[-1] == longest and len(found) <= num_buckets
        count = min(num_buckets, len(ends))
        best = min(filled((*rest, longest)) for rest in combinations(ends[:-1], count - 1))
        assert filled(found) == best

    def test_the_longest_is_not_rounded(self):
        """More than it may be more than the model has positions for."""
        assert shapes.best_buckets([5, 77], 2) == (8, 77)


class TestTokenBudgets:
    """2 ms and 1 ms for a thousand tokens, up to 25600 of them."""

    TABLE = a_packed_table()

    def test_the_most_that_fits_the_slo_with_room_half_of_it_and_all(self):
        # A batch waits for the one before: 9 ms of the 20 are for one, 7000 tokens.
        found = shapes.token_budgets(self.TABLE, 384, parse("p99 < 20ms"))
        assert found == [25600, 6912, 3328]
        assert self.TABLE.tokens_s(6912) <= 0.009 < self.TABLE.tokens_s(6912 + 256)

    def test_without_a_latency_all_that_was_measured(self):
        assert shapes.token_budgets(self.TABLE, 384, None) == [25600]
        assert shapes.token_budgets(self.TABLE, 384, parse("throughput >= 1/s")) == [25600]

    def test_never_less_than_the_longest_row(self):
        assert shapes.token_budgets(self.TABLE, 384, parse("p99 < 1ms")) == [25600, 384]
        assert shapes.token_budgets(self.TABLE, 30_000, None) == [30_000]

    def test_none_where_time_goes_by_rows(self):
        assert shapes.token_budgets(a_table(), 384, parse("p99 < 20ms")) == []

    def test_they_are_settings_that_read_back(self):
        wanted = {"mode": "fixed", "max_batch": "256", "buckets": "384", "tokens": "4096"}
        config = shapes.with_batching(a_packed_config(), wanted, None)
        assert config.batching.max_tokens == 4096
        assert shapes.settings_of(config) == wanted
        assert shapes.with_batching(config, {"mode": "off"}, None).batching.max_tokens is None
        without = {key: value for key, value in wanted.items() if key != "tokens"}
        assert shapes.with_batching(config, without, None).batching.max_tokens is None

    def test_a_budget_holds_the_longest_row(self):
        wanted = {"mode": "fixed", "max_batch": "8", "buckets": "512", "tokens": "400"}
        assert shapes.with_batching(a_packed_config(), wanted, None).batching.max_tokens == 512

    def test_a_packed_model_gets_one_where_lengths_differ_by_much(self):
        rows = texts([20] * 30 + [380] * 10)
        situation = a_situation(a_packed_config(), rows=rows, slo="p99 < 20ms")
        best, *others = shapes.Ranking(situation).batching(self.TABLE)
        assert "tokens" in best.settings and best.settings["max_batch"] == "256"
        assert best.settings["buckets"] == "384"
        by_rows = [each.rate for each in others if "tokens" not in each.settings]
        assert best.rate > max(by_rows, default=0.0)

    def test_slo_mode_does_more_by_tokens_than_by_rows(self):
        rows = texts([20] * 30 + [380] * 10)
        ranking = shapes.Ranking(a_situation(a_packed_config(), rows=rows, slo="p99 < 40ms"))
        by_rows = {"mode": "slo", "max_batch": "256", "buckets": "384"}
        by_tokens = by_rows | {"tokens": "25600"}
        assert ranking.rate(self.TABLE, by_tokens) > 1.05 * ranking.rate(self.TABLE, by_rows)
        assert by_tokens in [each.settings for each in ranking.batching(self.TABLE)]

    def test_where_time_goes_by_rows_the_one_that_is_configured_stays(self):
        config = replace(a_packed_config(max_tokens=4096), options={}, device="cpu")
        situation = a_situation(config, rows=texts([20, 380] * 20))
        found = shapes.Ranking(situation).batching(a_table(0.0003, 0.0001, lengths=(384,)))
        batched = [each.settings for each in found if each.settings["mode"] != "off"]
        assert batched and {each.get("tokens") for each in batched} == {"4096"}


class TestRanking:
    def test_a_model_that_gains_from_batches_gets_large_ones(self):
        best, *_ = shapes.Ranking(a_situation(a_config())).batching(a_table(0.010, 0.0005))
        assert int(best.settings["max_batch"]) >= 16

    def test_only_what_is_near_the_best_is_left(self):
        found = shapes.Ranking(a_situation(a_config())).batching(a_table(0.010, 0.0005))
        assert all(shape.rate >= shapes.WORTH * found[0].rate for shape in found)
        assert [shape.rate for shape in found] == sorted((s.rate for s in found), reverse=True)
        assert {"mode": "off"} not in [shape.settings for shape in found]

    def test_a_model_that_must_not_be_batched_is_not(self):
        situation = a_situation(a_config(), facts=Facts("onnxruntime", batching_problem="mixes"))
        found = shapes.Ranking(situation).batching(a_table())
        assert [shape.settings for shape in found] == [{"mode": "off"}]

    def test_without_a_latency_there_is_no_slo_mode(self):
        situation = a_situation(a_config(), slo="throughput >= 10/s")
        found = shapes.Ranking(situation).batching(a_table())
        assert "slo" not in {shape.settings["mode"] for shape in found}

    def test_many_lengths_get_buckets(self):
        rows = texts([*range(1, 65)] * 2)
        situation = a_situation(a_config(TEXT), rows=rows)
        table = a_table(0.004, 0.002, lengths=(1, 16, 32, 64))
        best, *_ = shapes.Ranking(situation).batching(table)
        buckets = list(map(int, best.settings["buckets"].split(",")))
        assert buckets[-1] == 64 and 4 <= len(buckets) <= 6

    def test_where_padding_changes_answers_there_are_none(self):
        facts = Facts("onnxruntime", padding_problem="padding changes answers")
        situation = a_situation(a_config(TEXT), rows=texts(range(1, 65)), facts=facts)
        assert shapes.Ranking(situation).buckets() == [{}]

    def test_and_lengths_are_predicted_to_stay_apart(self):
        """Although the configuration asks for padding: the server does not do it either."""
        config = a_config(TEXT, padding=Padding((PadAxis("tokens", 0),), (64,)))
        table = a_table(lengths=(1, 64))
        rows = texts(range(1, 65))
        good, bad = (
            shapes.Ranking(
                a_situation(config, rows=rows, facts=Facts("onnxruntime", padding_problem=problem))
            ).now(table)
            for problem in ("", "padding changes answers")
        )
        plain = shapes.Ranking(a_situation(a_config(TEXT), rows=rows)).now(table)
        assert bad == plain != good

    def test_images_have_none(self):
        assert shapes.Ranking(a_situation(a_config(IMAGE))).buckets() == [{}]


def test_shapes_are_over_all_tables_best_first():
    one = a_table(0.004, 0.0010, instances=1, threads=2)
    two = a_table(0.006, 0.0014, instances=2, threads=1)
    found = shapes.shapes(a_situation(a_config(), one, two))
    rates = [rate for _, rate in found]
    assert rates == sorted(rates, reverse=True)
    (batching, instances), _ = found[0]
    assert (batching.pass_name, instances.pass_name) == ("batching", "instances")
    # Two with 1.4 times the time do 1.4 times as much.
    assert instances.settings == {"instances": "2", "threads": "1"}
    assert {steps[1].settings["instances"] for steps, _ in found} == {"1", "2"}


def test_without_times_nothing_is_known():
    assert shapes.shapes(a_situation(a_config())) == []
