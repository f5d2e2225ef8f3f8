"""Plans for replicas, and every figure of docs/capacity.md, computed by the same functions."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

import penstock
from penstock import slo
from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import CommandLineError, ConfigError
from penstock.operate.capacity import (
    CapacityPlan,
    Demand,
    Replica,
    max_demand,
    plan,
    replica_of,
)
from penstock.optimizer import simulate
from penstock.optimizer.simulate import TimeTable
from penstock.repository import layout, versions

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "capacity.md").read_text()
BERT = Replica(4635.0, "given by --replica-rate", "p99 < 130 ms")
NODE = Demand(50_000.0, failure_domain=8, price=2.5)
TABLE = TimeTable(1, 1, {0: {1 << n: 0.0015 + 0.00011 * (1 << n) for n in range(8)}})
GPU = ModelConfig(
    "encoder",
    "1",
    "null",
    "",
    (),
    (),
    128,
    BatchPolicy(128, is_dynamic=True, slo_latency_s=0.02),
    device="cuda:0",
    slo="p99 < 20 ms",
)
NULL = """backend: "null" max_batch_size: 8 dynamic_batching { }
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
"""


def add_model(root: Path, name: str) -> Path:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(NULL)
    return root / name


class TestPlan:
    def test_replicas_for_the_load_keep_the_headroom(self):
        found = plan(Replica(100.0, ""), Demand(900.0, 0.1, 0))
        assert found.needed == found.total == 10
        assert found.utilisation == pytest.approx(0.9)
        assert plan(Replica(100.0, ""), Demand(901.0, 0.1, 0)).needed == 11

    def test_the_others_take_the_load_while_a_domain_is_down(self):
        found = plan(Replica(100.0, ""), Demand(900.0, 0.1, 1))
        assert (found.needed, found.total) == (10, 10), "the headroom covers one of ten"
        few = plan(Replica(100.0, ""), Demand(150.0, 0.1, 1))
        assert (few.needed, few.total) == (2, 3)
        assert few.degraded_utilisation == pytest.approx(0.75)

    @pytest.mark.parametrize("domain", [0, 1, 2, 8])
    @pytest.mark.parametrize("rate", [1.0, 99.0, 100.0, 101.0, 12_345.0])
    def test_every_plan_serves_its_load_also_without_a_domain(self, rate, domain):
        demand = Demand(rate, 0.15, domain)
        found = plan(Replica(100.0, ""), demand)
        assert found.total * 100.0 * 0.85 >= rate * (1 - 1e-9)
        assert (found.total - domain) * 100.0 >= rate * (1 - 1e-9)
        assert found.total % max(1, domain) == 0
        assert max_demand(found.replica, found.total, demand) >= rate * (1 - 1e-9)

    def test_cost_is_that_of_all_replicas(self):
        found = plan(BERT, NODE)
        assert found.cost_per_hour == 2.5 * found.total
        assert found.cost_per_million == pytest.approx(1e6 * 60.0 / (3600 * 50_000))
        free = plan(BERT, replace(NODE, price=None))
        assert free.cost_per_hour is None and free.cost_per_million is None

    def test_the_queues_threshold_follows_littles_law(self):
        found = plan(BERT, NODE)
        assert found.queue_threshold == pytest.approx(0.9 * 4635 * 0.13 / math.log(100))
        simulated = plan(replace(BERT, queue_s=0.004), NODE)
        assert simulated.queue_threshold == pytest.approx(0.9 * 4635 * 0.004)
        assert plan(Replica(5.0, "", "p99 < 10 ms"), Demand(1.0)).queue_threshold == 1.0
        assert plan(Replica(5.0, ""), Demand(1.0)).queue_threshold is None

    @pytest.mark.parametrize(
        ("replica", "demand", "problem"),
        [
            (BERT, Demand(0.0), "rate: 0/s; expected a number above 0"),
            (BERT, Demand(1.0, 1.0), "headroom: 100%; expected from 0 % to below 100 %"),
            (Replica(0.0, ""), Demand(1.0), "rate of a replica: 0/s; expected a number above 0"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, replica, demand, problem):
        with pytest.raises(ConfigError) as caught:
            plan(replica, demand)
        assert caught.value.problems == (problem,)


class TestEvidence:
    SLO = "p99 < 20ms at 1000/s poisson"
    TIMES = {"num_instances": 1, "num_threads": 1, "seconds": {"0": {"1": 0.002, "64": 0.009}}}

    def test_the_lower_end_of_the_measured_rate_comes_first(self):
        measured = {"max_rate": {"value": 2100.0, "low": 2000.0, "high": 2200.0}}
        evidence = {"slo": self.SLO, "measured": measured, "batch_times": self.TIMES}
        found = replica_of(evidence, GPU)
        assert (found.rate, found.slo) == (2000.0, self.SLO)
        assert found.source.startswith("measured") and found.queue_s > 0
        measured["max_rate"]["low"] = None
        assert replica_of(evidence, GPU).rate == 2100.0

    def test_otherwise_batch_times_are_simulated(self):
        found = replica_of({"slo": self.SLO, "batch_times": self.TIMES}, GPU)
        table = TimeTable(1, 1, {0: {1: 0.002, 64: 0.009}})
        assert found.rate == simulate.max_rate(table, GPU, slo.parse(self.SLO), {0: 1.0})
        assert found.source.startswith("simulated")

    def test_otherwise_the_rate_of_a_kept_slo_is_a_lower_bound(self):
        found = replica_of({"slo": self.SLO, "outcome": "kept"}, GPU)
        assert found.rate == 1000.0 and found.queue_s is None
        with pytest.raises(ConfigError, match="its evidence has no rate; measure one with"):
            replica_of({"slo": self.SLO, "outcome": "missed"}, GPU)
        slow = {**self.TIMES, "seconds": {"0": {"1": 0.05, "128": 0.06}}}
        with pytest.raises(ConfigError, match="encoder/1: .* cannot keep p99 < 20 ms at any rate"):
            replica_of({"slo": "p99 < 20 ms", "batch_times": slow}, GPU)
        with pytest.raises(ConfigError, match="evidence.batch_times: "):
            replica_of({"slo": self.SLO, "batch_times": {"seconds": 3}}, GPU)

    def test_the_function_reads_a_committed_version(self, tmp_path: Path):
        folder = add_model(tmp_path / "made", "small")
        [config] = layout.read(tmp_path / "made").configs
        evidence = {"slo": self.SLO, "measured": {"max_rate": {"value": 500.0, "low": 400.0}}}
        (folder / "1" / "weights.bin").write_bytes(b"0")
        (tmp_path / "models").mkdir()
        version = versions.commit(tmp_path / "models", "small", folder / "1", config, evidence)
        found = penstock.capacity(tmp_path / "models" / "small", rate=3000, price=2.0)
        assert found.name == f"small/{version}" and found.plan.replica.rate == 400.0
        assert (found.plan.needed, found.plan.total) == (9, 9)
        assert "<pre" in found._repr_html_() and "9, with 10% headroom" in str(found)
        assert json.loads(json.dumps(found.figures))["replicas"] == 9


class TestModels:
    def test_a_repository_with_several_models_needs_a_name(self, tmp_path: Path):
        for name in ("a", "b"):
            add_model(tmp_path, name)
        with pytest.raises(CommandLineError, match="--model is required: .* has a, b"):
            penstock.capacity(tmp_path, rate=1, replica_rate=1)
        assert penstock.capacity(tmp_path, rate=1, replica_rate=1, model="b").name == "b/1"
        with pytest.raises(ConfigError, match="no such model or version; there are a/1, b/1"):
            penstock.capacity(tmp_path, rate=1, replica_rate=1, model="c")

    def test_a_version_that_is_not_served_is_found_by_its_number(self, tmp_path: Path):
        folder = add_model(tmp_path, "a")
        add_model(tmp_path, "b")
        for version in ("2", "10"):
            (folder / version).mkdir()
        policy = "version_policy { specific { versions: 2 } }"
        (folder / "config.pbtxt").write_text(f"{NULL}{policy}")
        for place in (tmp_path, folder):
            given = {"rate": 1, "replica_rate": 1, "model": "a"}
            assert penstock.capacity(place, **given).name == "a/2"
            for version in ("1", "2", "10"):
                assert penstock.capacity(place, **given, version=version).name == f"a/{version}"
            with pytest.raises(ConfigError, match="there are a/1, a/2, a/10"):
                penstock.capacity(place, **given, version="3")
        assert penstock.capacity(tmp_path, rate=1, replica_rate=1, version="10").name == "a/10"
        one = {"rate": 1, "replica_rate": 1, "version": "1"}
        with pytest.raises(CommandLineError, match="--model is required: .* has a, b"):
            penstock.capacity(tmp_path, **one)
        with pytest.raises(ConfigError, match="there are a/10$"):
            penstock.capacity(folder / "10", **one)

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({}, "--rate is required, e.g. --rate 50000/s"),
            ({"rate": "many"}, "--rate 'many'; expected a rate above 0, like 50000/s"),
            ({"rate": "0"}, "--rate '0'; expected a rate above 0, like 50000/s"),
            ({"rate": "inf/s"}, "--rate 'inf/s'; expected a rate above 0"),
            ({"rate": "5/s", "replica_rate": "x"}, "--replica-rate 'x'; expected a rate above 0"),
            ({"rate": "5/s", "replica_rate": "-1"}, "--replica-rate '-1'; expected a rate above"),
        ],
    )
    def test_rates_are_checked(self, tmp_path: Path, options, problem):
        with pytest.raises(CommandLineError, match=re.escape(problem)):
            penstock.capacity(add_model(tmp_path, "m"), **options)


class TestPage:
    """docs/capacity.md says what the functions say."""

    def test_the_highest_rates_by_arrivals(self):
        capacity = simulate.capacity(TABLE, GPU, {0: 1.0})
        gammas = {f"gamma, CV {cv}": f"gamma {cv}" for cv in (2, 3)}
        for name, arrivals in {"Poisson": "poisson", **gammas}.items():
            goal = slo.parse(f"p99 < 20 ms at 1000/s {arrivals}")
            rate = simulate.max_rate(TABLE, GPU, goal, {0: 1.0})
            assert f"| {name} | {rate:,.0f}/s | {100 * rate / capacity:.0f} % |" in PAGE

    def test_latency_by_share_of_the_highest_rate(self):
        goal = slo.parse("p99 < 20 ms at 1000/s poisson")
        highest = simulate.max_rate(TABLE, GPU, goal, {0: 1.0})
        for percent in (70, 80, 90, 100, 105):
            outcome = simulate.simulate_rate(TABLE, GPU, goal, percent / 100 * highest, {0: 1.0})
            latencies = outcome.counted_s
            p99, mean = simulate.percentile(latencies, 99), latencies[latencies < 1].mean()
            figures = "missed: more than 1 % are refused | |"
            if p99 < math.inf:
                figures = f"{1e3 * p99:.1f} ms | {1e3 * mean:.1f} ms |"
            assert f"| {percent} % | {figures}" in PAGE

    def test_the_worked_example(self, tmp_path: Path):
        add_model(tmp_path, "bert-large")
        options = {"rate": "50000/s", "replica_rate": "4635/s", "slo": "p99 < 130 ms"}
        found = penstock.capacity(tmp_path, **options, failure_domain=8, price=2.5)
        assert f"```text\n{found}\n```" in PAGE

    def test_fleets_up_to_a_thousand_gpus(self):
        whole = max_demand(BERT, 1000, NODE)
        for rate in (10_000.0, 50_000.0, 250_000.0, 1_000_000.0, whole):
            found = plan(BERT, replace(NODE, rate=rate))
            assert self.row(found) in PAGE
        assert f"A thousand GPUs serve {whole:,.0f} requests/s on paper" in PAGE
        assert plan(BERT, replace(NODE, rate=whole)).total == 1000

    def row(self, found: CapacityPlan) -> str:
        cells = [
            f"{found.demand.rate:,.0f}/s",
            f"{found.needed:,}",
            f"{found.total:,}",
            f"{found.num_domains}",
            f"{found.cost_per_hour:,.0f}",
            f"{found.cost_per_million:.3g}",
        ]
        return f"| {' | '.join(cells)} |"

    def test_kedas_thresholds(self):
        found = plan(BERT, NODE)
        assert f'threshold: "{found.rate_threshold:.0f}"' in PAGE
        assert f'threshold: "{found.queue_threshold:.0f}"' in PAGE
        assert f"minReplicaCount: {found.total}" in PAGE
