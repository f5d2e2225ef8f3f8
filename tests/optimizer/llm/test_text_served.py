"""A tiny language model measured through a real server, and how long is waited for answers."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

import text_server
from child_processes import children_running

from penstock.benchmark.pacer import Closed, Flat, Open
from penstock.benchmark.results import GeneratorUse, Level
from penstock.benchmark.stats import DurationHistogram, Interval
from penstock.llm.text_files import of_folder
from penstock.optimizer import served, served_figures
from penstock.optimizer.candidates import Candidate, Step
from penstock.optimizer.endpoints import Servers
from penstock.optimizer.llm import text_evaluator
from penstock.optimizer.llm.text_prompts import read_prompts
from penstock.optimizer.llm.text_subject import build_of, open_text_subject
from penstock.optimizer.plan import Plan
from penstock.optimizer.time_plan import MeasurementLimits
from penstock.slo import parse

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("slo", "expected"),
    [
        ("p99 ttft < 1s, p99 tpot < 100ms", 3 * (1 + 20 * 0.1)),
        ("p99 ttft < 1s, p50 tpot < 50ms, p99 tpot < 100ms", 3 * (1 + 20 * 0.05)),
        ("p99 < 2s", 6.0),
        ("p99 < 100ms", 3.0),
        ("p99 ttft < 1s", 60.0),
        ("throughput >= 3/s", 60.0),
    ],
)
def test_an_answer_is_waited_for_as_long_as_the_slo_makes_sense(slo, expected):
    assert text_evaluator.patience_of(parse(slo), 20) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (Closed(1), 10.0),
        (Open(Flat(5.0)), 10.0),
        (Open(Flat(0.2)), 30.0),
        (Open(Flat(0.001)), 60.0),
    ],
)
def test_few_requests_are_measured_for_longer(build, prompts, load, expected, tmp_path):
    endpoint = text_evaluator.TextEndpoint(build, prompts, tmp_path / "load.jsonl", patience_s=1.0)
    assert endpoint.level_s(Plan("m", "m", "out"), load) == pytest.approx(expected)


def test_no_level_has_prompts_of_another(build, prompts, tmp_path):
    endpoint = text_evaluator.TextEndpoint(build, prompts, tmp_path / "load.jsonl", patience_s=1.0)
    sent = []
    for _ in range(3):
        inputs = endpoint.inputs(Plan("m", "m", "out"))
        sent.append(set(Path(inputs.path).read_text().splitlines()))
    assert len(set.union(*sent)) == sum(map(len, sent)) > 3 * len(prompts.asked)


def test_a_client_alone_begins_with_the_measurement(build, prompts, tmp_path):
    """Else, after a warm-up, none of its requests is due in a level that is shorter than one."""
    endpoint = text_evaluator.TextEndpoint(build, prompts, tmp_path / "load.jsonl", patience_s=1.0)
    plan = Plan("m", "m", "out")
    assert served.bench_plan(endpoint, plan, Closed(1)).max_warm_up_s == 0
    assert served.bench_plan(endpoint, plan, Open(Flat(1.0))).max_warm_up_s > 0


def a_level(rate):
    use = GeneratorUse([0.0], DurationHistogram(), 0.0, 0, 0, 0)
    return Level(Open(Flat(rate)), 1.0, "time", None, [], DurationHistogram(), use)


def test_what_is_shown_is_the_highest_rate_that_was_kept():
    levels = [a_level(rate) for rate in (1.0, 2.0, 4.0, 2.8)]
    assert served_figures.shown_level(levels, Interval(3.0, 2.8, 4.0)) is levels[3]
    none = Interval(float("nan"), float("nan"), 1.0)
    assert served_figures.shown_level(levels, none) is levels[0]


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    root = tmp_path_factory.mktemp("served")
    folder = text_server.write_model(root)
    return open_text_subject(str(folder), "cpu", root / "original" / "smol").build


@pytest.fixture
def prompts(build, tmp_path):
    (tmp_path / "p.txt").write_text("the cat sat\non the mat\n")
    prompts = read_prompts(str(tmp_path / "p.txt"), of_folder(build.version_folder), 200)
    assert prompts.is_chat
    return prompts


def text_servers(prompts, file, *, is_alone):
    return Servers(
        lambda build: text_evaluator.TextEndpoint(build, prompts, file, 20.0), is_alone=is_alone
    )


@pytest.fixture
def servers(prompts, tmp_path):
    found = text_servers(prompts, tmp_path / "load.jsonl", is_alone=False)
    yield found
    found.close()


def a_bench(plan, servers, **limits):
    return served.ServedBench(plan, (), lambda text: None, servers, MeasurementLimits(**limits))


class TestServers:
    def test_one_is_asked_up_to_its_highest_rate(self, build, servers):
        plan = Plan("m", "smol", "out", slo=parse("ttft p99 < 2 s, tpot p99 < 1 s"), duration_s=2.0)
        found, has_ended = a_bench(plan, servers, search_s=0.5).rate_from(build, 2.0)
        # With more time it would have gone on.
        assert not has_ended
        assert servers.open([build], ()) == servers.open([build], ())
        servers.close()
        assert found.max_rate is not None and found.max_rate.value == pytest.approx(2.0)
        assert found.load == "2/s poisson" and found.num_failed == 0 < found.num_requests
        assert found.streams is not None and found.streams.tokens_per_s > 0
        assert 0 < found.streams.tpot.value < 1 and [each.outcome for each in found.verdicts] == [
            "kept",
            "kept",
        ]
        assert (
            found.curve is not None and len(found.curve.ttft_p99_s) == len(found.curve.rates) == 1
        )
        assert found.memory_bytes > 1 << 20
        assert children_running("penstock") == []

    def test_answers_that_take_longer_than_a_level_are_measured(self, build, servers):
        """A level is over long before an answer is there."""
        slo = parse("ttft p99 < 2 s, tpot p99 < 1 s")
        plan = Plan("m", "smol", "out", slo=slo, duration_s=0.05)
        found, _ = a_bench(plan, servers, search_s=0.1).rate_from(build, None)
        assert found.num_requests > 0
        (alone,) = a_bench(plan, servers, left_s=lambda: 0.0).prove([build], [None])
        assert alone.max_rate is None
        assert alone.load == "concurrency 1" and alone.num_requests == 1
        assert 0.05 < alone.p50.value < 20 and alone.num_failed == 0

    def test_a_search_that_ended_by_itself_needs_no_more_time(self, build, servers):
        # Kept at no rate, and none below the one given is asked for.
        slo = parse("ttft p99 < 0.001 ms at 2/s")
        plan = Plan("m", "smol", "out", slo=slo, duration_s=1.0)
        found, has_ended = a_bench(plan, servers, search_s=60.0).rate_from(build, 2.0)
        assert has_ended and found.max_rate is None

    def test_two_that_may_not_run_at_once_take_turns(self, build, prompts, tmp_path):
        servers = text_servers(prompts, tmp_path / "load.jsonl", is_alone=True)
        other = build_of(build, Candidate((Step("x", {"max_num_seqs": "2"}),)), tmp_path / "smol")
        try:
            (first,) = servers.open([build], ())
            assert first.is_streaming and first.num_clients == 16
            (second,) = servers.open([other], ())
            assert second.is_running and not first.is_running and second.num_clients == 2
        finally:
            servers.close()
        assert not second.is_running
