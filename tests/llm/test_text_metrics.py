"""What a language model has done, as numbers and as a scrape reads it."""

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.errors import BackendFailed, Cancelled, InvalidRequest, NotReady, Overloaded
from penstock.llm.generation import Generation, SequenceOutput
from penstock.llm.messages import GenerateRequest, StepReport, pack_tokens
from penstock.llm.text_metrics import REASONS, TextMetrics, decode_record
from penstock.llm.text_scrape import token_bounds
from penstock.sampling_params import SamplingParams
from penstock.serving.histogram import Histogram
from penstock.serving.metrics import ModelMetrics
from penstock.serving.metrics_record import record
from penstock.serving.scrape import Pending, expose
from penstock.slo import parse
from penstock.wire.frames import EngineReady

HISTOGRAMS = {
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
}
# As the parser has them: without the end that counters have.
COUNTERS = {
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "request_success",
}
GAUGES = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"}


def a_ready(num_blocks=10, max_length=120) -> EngineReady:
    return EngineReady(1, 0.5, num_blocks, max_length, 50, {})


def a_step(num_running=0, num_waiting=0, num_free=10, **more) -> StepReport:
    return StepReport([], num_running, num_waiting, num_free, 0.1, **more)


def a_generation(num_prompt=5, num=1, arrived=100.0) -> Generation:
    params = SamplingParams(max_tokens=9, n=num)
    request = GenerateRequest(0, pack_tokens([1] * num_prompt), params)
    found = Generation(request, sink=None, arrived=arrived)
    found.admitted = arrived + 0.5
    found.outputs = [SequenceOutput(None, None) for _ in range(num)]
    return found


def give(metrics, generation, index, now, reason=""):
    """As the model does."""
    output = generation.outputs[index]
    metrics.token(generation, output, now)
    output.num_tokens += 1
    output.reason = reason
    generation.first_at = generation.first_at or now
    generation.last_at = output.last_at = now


@pytest.fixture
def model():
    return ModelMetrics("smol", "1")


@pytest.fixture
def metrics(model):
    found = TextMetrics(model)
    found.loaded(a_ready())
    return found


def scraped(*models):
    text = expose([Pending(each, 0, 1) for each in models]).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(family, **labels):
    return {
        each.name.rpartition(":")[2]: each.value
        for each in family.samples
        if "le" not in each.labels and labels.items() <= each.labels.items()
    }


class TestRequests:
    def test_times_are_to_the_first_token_between_tokens_and_of_the_whole(self, model, metrics):
        generation = a_generation()
        for now in (101.0, 101.02, 101.08):
            give(metrics, generation, 0, now)
        give(metrics, generation, 0, 101.12, "stop")
        metrics.finished(generation, 101.12)
        found = scraped(model)
        assert values(found["penstock:time_to_first_token_seconds"]) == {
            "time_to_first_token_seconds_sum": 1.0,
            "time_to_first_token_seconds_count": 1,
        }
        between = values(found["penstock:inter_token_latency_seconds"])
        assert between["inter_token_latency_seconds_sum"] == pytest.approx(0.12)
        assert between["inter_token_latency_seconds_count"] == 3
        mean = values(found["penstock:request_time_per_output_token_seconds"])
        assert mean["request_time_per_output_token_seconds_sum"] == pytest.approx(0.04)
        whole = values(found["penstock:e2e_request_latency_seconds"])
        assert whole["e2e_request_latency_seconds_sum"] == pytest.approx(1.12)
        assert metrics.num_prompt_tokens == 5 and metrics.num_generated_tokens == 4

    def test_a_mean_needs_two_tokens_and_goes_by_the_longest_text(self, metrics):
        alone = a_generation()
        give(metrics, alone, 0, 101.0, "length")
        metrics.finished(alone, 101.0)
        assert metrics.mean_token_s.count == 0
        several = a_generation(num=2)
        give(metrics, several, 1, 101.0, "stop")
        for now in (101.0, 102.0, 103.0):
            give(metrics, several, 0, now, "length")
        metrics.finished(several, 103.0)
        assert metrics.mean_token_s.count == 1 and metrics.mean_token_s.total == 1.0
        # A prompt is one, however often it is continued; of texts, one that was cut counts.
        assert metrics.num_prompt_tokens == 10 and metrics.generated_tokens.total == 5
        assert metrics.num_ended == {"stop": 0, "length": 2, "abort": 0, "error": 0}

    def test_ends_are_counted_here_and_in_what_v2_shows(self, model, metrics):
        done, left, broken = a_generation(), a_generation(), a_generation()
        give(metrics, done, 0, 101.0, "stop")
        metrics.finished(done, 102.0)
        metrics.failed(left, Cancelled("left"), 101.0)
        metrics.failed(broken, BackendFailed("it died"), 103.0)
        metrics.refused(Overloaded("later", 2.0, "predicted_late"), 0.25)
        metrics.refused(InvalidRequest("no"), 0.0)
        assert metrics.num_ended == {"stop": 1, "length": 0, "abort": 1, "error": 1}
        shown = model.statistics()
        assert shown["inference_count"] == shown["execution_count"] == 1
        assert shown["inference_stats"]["success"] == {"count": 1, "ns": 2_000_000_000}
        assert shown["inference_stats"]["compute_infer"]["ns"] == 1_500_000_000
        assert shown["inference_stats"]["fail"] == {"count": 4, "ns": 4_250_000_000}
        assert shown["batch_stats"][0]["batch_size"] == 1
        assert model.num_failures == {"REJECTED": 1, "CANCELED": 1, "BACKEND": 1, "OTHER": 1}
        assert model.num_refused["predicted_late"] == model.num_refused["invalid"] == 1
        # Who was refused has no time of his own.
        assert metrics.request_s.count == 3


class TestSlo:
    """Arrival is at 100; the first token may take 1 s, each further one 0.1 s."""

    @pytest.fixture
    def model(self):
        return ModelMetrics(
            "smol", "1", objectives=parse("p99 ttft < 1s, p95 tpot < 100ms").objectives
        )

    @staticmethod
    def counts(model):
        return {
            each.objective.metric: (each.num_bad, each.num_requests) for each in model.slo_counts
        }

    @pytest.mark.parametrize(
        ("times", "bad"),
        [
            ((101.0, 101.05), (0, 0)),
            ((101.5, 101.55), (1, 0)),
            ((100.5, 100.75), (0, 1)),
            ((101.5, 101.75), (1, 1)),
            # One token has no time per output token.
            ((101.5,), (1, 0)),
        ],
    )
    def test_finished_texts_are_judged_by_both_limits(self, model, metrics, times, bad):
        generation = a_generation()
        for now in times:
            give(metrics, generation, 0, now, "stop")
        metrics.finished(generation, times[-1])
        assert self.counts(model) == {"ttft": (bad[0], 1), "tpot": (bad[1], 1)}

    def test_a_failure_is_bad_once_even_after_a_late_token(self, model, metrics):
        generation = a_generation()
        give(metrics, generation, 0, 105.0)
        metrics.failed(generation, BackendFailed("it died"), 106.0)
        metrics.failed(a_generation(), NotReady("the engine is gone"), 100.1)
        metrics.refused(Overloaded("full"), 0.0)
        assert self.counts(model) == {"ttft": (3, 3), "tpot": (3, 3)}

    def test_clients_that_leave_count_if_they_waited_too_long(self, model, metrics):
        metrics.failed(a_generation(), Cancelled("left"), 100.9)
        metrics.refused(Cancelled("left"), 0.9)
        metrics.refused(InvalidRequest("no"), 5.0)
        assert self.counts(model) == {"ttft": (0, 0), "tpot": (0, 0)}
        metrics.failed(a_generation(), Cancelled("left"), 101.1)
        metrics.refused(Cancelled("left"), 1.1)
        assert self.counts(model) == {"ttft": (2, 2), "tpot": (2, 2)}

    def test_steps_keep_the_engine_busy(self, model, metrics):
        metrics.step(a_step(busy_s=0.25), 1.0)
        metrics.step(a_step(busy_s=0.5), 2.0)
        assert model.busy_s == 0.75


class TestEngine:
    def test_gauges_are_what_it_told_last_and_nothing_when_nobody_waits(self, model, metrics):
        metrics.step(a_step(3, 2, num_free=4), 1.0)
        found = scraped(model)
        assert values(found["penstock:num_requests_running"]) == {"num_requests_running": 3}
        assert values(found["penstock:num_requests_waiting"]) == {"num_requests_waiting": 2}
        assert values(found["penstock:kv_cache_usage_perc"]) == {"kv_cache_usage_perc": 0.6}
        metrics.idle()
        found = scraped(model)
        for name in GAUGES:
            assert set(values(found[f"penstock:{name}"]).values()) == {0}

    def test_counts_go_on_with_another_engine(self, metrics):
        metrics.step(a_step(num_preemptions=2, num_computed=30, num_asked=20, num_cached=16), 1.0)
        metrics.step(a_step(num_preemptions=1, num_computed=1), 2.0)
        metrics.loaded(a_ready())
        metrics.step(a_step(num_preemptions=1, num_computed=8, num_asked=8), 3.0)
        metrics.step(a_step(), 4.0)
        assert (metrics.num_preemptions, metrics.num_asked, metrics.num_cached) == (4, 28, 16)
        assert metrics.step_tokens.count == 3 and metrics.step_tokens.total == 39

    def test_another_engine_keeps_the_bounds_and_what_is_in_them(self, metrics):
        metrics.failed(a_generation(), Cancelled("left"), 101.0)
        metrics.loaded(a_ready())
        assert metrics.prompt_tokens.count == 1
        metrics.loaded(a_ready(max_length=1000))
        assert metrics.prompt_tokens.bounds[-1] == 1000.0

    def test_tokens_of_experts_are_added_up(self, model, metrics):
        assert "penstock:expert_tokens" not in scraped(model)
        for tokens in ((3, 0, 1), (), (1, 1, 0)):
            metrics.step(a_step(expert_tokens=tokens), 1.0)
        found = scraped(model)["penstock:expert_tokens"]
        for number, num in enumerate((4, 1, 1)):
            assert values(found, expert=f"{number}") == {"expert_tokens_total": num}
        shard = decode_record(model.record_others())
        metrics.add([shard])
        assert metrics.expert_tokens == [8, 2, 2]

    def test_waits_come_with_steps(self, metrics):
        metrics.step(a_step(waits_s=(0.1, 0.4)), 1.0)
        assert metrics.queue_s.count == 2 and metrics.queue_s.total == pytest.approx(0.5)


class TestShards:
    def shard(self, report=None, now=1.0):
        """What a shard with one answered request sends, and then a report."""
        model = ModelMetrics("smol", "1")
        metrics = TextMetrics(model)
        metrics.loaded(a_ready())
        generation = a_generation()
        give(metrics, generation, 0, 101.0, "stop")
        metrics.finished(generation, 101.5)
        if report is not None:
            metrics.step(report, now)
        return decode_record(record(model).others)

    def test_counts_and_histograms_are_sums(self, metrics):
        step = a_step(num_preemptions=1, num_computed=8, num_asked=5, num_cached=4, waits_s=(0.5,))
        step.num_drafted, step.num_accepted = 7, 3
        metrics.add([self.shard(step), self.shard(step), self.shard()])
        assert metrics.num_prompt_tokens == 15 and metrics.num_generated_tokens == 3
        assert (metrics.num_preemptions, metrics.num_asked, metrics.num_cached) == (2, 10, 8)
        assert (metrics.num_drafted, metrics.num_accepted) == (14, 6)
        assert metrics.num_ended == {"stop": 3, "length": 0, "abort": 0, "error": 0}
        assert metrics.first_token_s.count == metrics.request_s.count == 3
        assert metrics.queue_s.total == 1.0 and metrics.step_tokens.total == 16
        assert metrics.prompt_tokens.count == 3 and metrics.prompt_tokens.total == 15

    def test_gauges_are_the_newest_that_a_busy_shard_heard(self, metrics):
        old, new = self.shard(a_step(9, 9, num_free=0), 5.0), self.shard(a_step(3, 2, 4), 6.0)
        metrics.add([new, old, self.shard()])
        assert (metrics.num_running, metrics.num_waiting, metrics.cache_use) == (3, 2, 0.6)

    def test_nothing_runs_when_all_are_idle(self, metrics):
        metrics.add([self.shard(), self.shard()])
        assert (metrics.num_running, metrics.num_waiting, metrics.cache_use) == (0, 0, 0.0)

    def test_a_shard_without_an_engine_yet_adds_nothing(self, metrics):
        model = ModelMetrics("smol", "1")
        TextMetrics(model)
        metrics.add([decode_record(record(model).others), self.shard()])
        assert metrics.prompt_tokens.count == 1


class TestScrape:
    def test_names_and_kinds_are_vllms(self, model, metrics):
        found = {
            name.removeprefix("penstock:"): family.type
            for name, family in scraped(model).items()
            if name.startswith("penstock:")
        }
        expected = dict.fromkeys(HISTOGRAMS, "histogram")
        expected |= dict.fromkeys(COUNTERS, "counter") | dict.fromkeys(GAUGES, "gauge")
        assert found == expected

    def test_every_name_is_documented(self, model, metrics):
        text = (Path(__file__).parents[2] / "docs" / "observability.md").read_text()
        assert all(f"`{family.name}`" in text for family in model.others())

    def test_every_line_names_its_model_and_version(self, model, metrics):
        for name, family in scraped(model).items():
            if name.startswith("penstock:"):
                assert family.samples
                for each in family.samples:
                    assert each.labels["model_name"] == "smol" and each.labels["version"] == "1"
        ended = scraped(model)["penstock:request_success"].samples
        assert [each.labels["finished_reason"] for each in ended] == list(REASONS)

    def test_several_models_share_a_family(self, model, metrics):
        other = ModelMetrics("qwen", "2")
        TextMetrics(other).step(a_step(7), 1.0)
        plain = ModelMetrics("digits", "1")
        text = expose([Pending(each, 0, 1) for each in (model, plain, other)]).decode()
        assert text.count("# TYPE penstock:num_requests_running gauge") == 1
        found = scraped(model, plain, other)["penstock:num_requests_running"].samples
        assert {each.labels["model_name"]: each.value for each in found} == {"smol": 0, "qwen": 7}

    def test_models_of_other_kinds_have_none(self):
        assert not any(
            name.startswith("penstock:") for name in scraped(ModelMetrics("digits", "1"))
        )

    def test_buckets_add_up(self, model, metrics):
        for wait_s in (0.2, 0.3, 0.6, 1e6):
            metrics.queue_s.add(wait_s)
        samples = scraped(model)["penstock:request_queue_time_seconds"].samples
        counts = {each.labels["le"]: each.value for each in samples if "le" in each.labels}
        assert counts["0.3"] == 2 and counts["0.5"] == 2 and counts["0.8"] == 3
        assert counts["7680.0"] == 3 and counts["+Inf"] == 4


def test_bounds_of_tokens_end_where_texts_do():
    assert token_bounds(0) == ()
    assert token_bounds(1) == (1,)
    assert token_bounds(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_bounds(4096)[-3:] == (500, 1000, 2000)


def test_a_value_on_a_bound_is_below_it():
    found = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 3.0):
        found.add(value)
    assert found.counts == [1, 2, 1] and found.count == 4 and found.total == 7.5
