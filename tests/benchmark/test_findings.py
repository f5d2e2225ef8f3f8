"""What a reader must know: each finding when it is due, and none on a healthy run."""

import msgspec
import pytest
from benchmark import made_runs
from benchmark.made_runs import Server

from penstock.benchmark import findings
from penstock.benchmark.findings import Finding
from penstock.benchmark.pacer import Closed, Flat, Open
from penstock.benchmark.results import BenchRun, WarmUp

HEALTHY = Server(num_instances=4, median_s=0.004)


def healthy() -> BenchRun:
    """Long and even enough for every percentile, at three quarters of what the server can do."""
    run = made_runs.run([made_runs.level(Open(Flat(700.0)), HEALTHY, 20.0)], "p99 < 50ms")
    run.levels[0].ending = "precise"
    return run


def texts(run: BenchRun, severity: str) -> list[str]:
    return [each.text for each in findings.find(run) if each.severity == severity]


def test_a_healthy_run_has_no_findings() -> None:
    assert findings.find(healthy()) == []


@pytest.mark.parametrize("num_late", [0, 30])
def test_a_generator_that_is_late_by_itself_is_loud(num_late: int) -> None:
    run = healthy()
    lateness = [0.0001] * 970 + [0.02] * num_late
    run.levels[0].generator.lateness = made_runs.histogram(lateness)
    expected = ["LIMITED BY THE GENERATOR: 1 % of requests left 20.0 ms late or more."]
    found = [text.partition(" The figures")[0] for text in texts(run, "error")]
    assert found == (expected if num_late else [])


def test_lateness_is_held_against_latency() -> None:
    """2 ms late is much for 4 ms and nothing for 100 ms."""
    for median_s, num_found in ((0.004, 1), (0.1, 0)):
        server = Server(num_instances=100, median_s=median_s)
        run = made_runs.run([made_runs.level(Open(Flat(100.0)), server)])
        run.levels[0].generator.lateness = made_runs.histogram([0.002] * 1000)
        assert len(texts(run, "error")) == num_found


def test_lateness_that_no_percentile_shows_is_no_news() -> None:
    """Of a run whose slowest are slow for another reason."""
    run = made_runs.run([made_runs.level(Open(Flat(200.0)), Server(stall_at_s=4.0, stall_s=1.0))])
    late = [0.0001] * 980 + [0.003] * 20
    run.levels[0].generator.lateness = made_runs.histogram(late)
    assert not any("LIMITED" in text for text in texts(run, "error"))
    run.levels[0].generator.lateness = made_runs.histogram([0.003] * 19)
    assert not any("LIMITED" in text for text in texts(run, "error"))
    run.levels[0].generator.lateness = made_runs.histogram([0.003] * 20)
    assert any("50 % of requests left " in text for text in texts(run, "error"))


def test_a_warm_up_too_short_to_tell() -> None:
    run = healthy()
    run.levels[0].warm_up = WarmUp(3.0, 1000, False, 0.0200, 0.0205)
    (text,) = texts(run, "warning")
    assert text.startswith("The warm-up of 3 s was too short, or the load too uneven, to tell")


@pytest.mark.parametrize(("share", "is_found"), [(0.84, False), (0.85, True)])
def test_a_generator_whose_core_is_full(share: float, is_found: bool) -> None:
    run = healthy()
    run.levels[0].generator.cpu_shares = [0.2, share]
    assert any("used 85 % of its core" in text for text in texts(run, "error")) is is_found


def test_all_connections_busy() -> None:
    run = healthy()
    run.levels[0].generator.num_waited = 1
    (text,) = texts(run, "error")
    assert "1 request waited for a connection (--max-connections)" in text


def silenced(run: BenchRun, *places: int) -> BenchRun:
    for place in places:
        run.levels[0].windows[place].num_arrived = 0
    return run


def test_a_server_that_stood_still_is_told_even_in_a_closed_loop() -> None:
    run = made_runs.run([made_runs.level(Closed(8), HEALTHY, 20.0)])
    assert not any("no answer" in text.lower() for text in texts(run, "warning"))
    length_s = run.levels[0].windows[0].length_s
    num = round(2.0 / length_s)
    (text,) = [t for t in texts(silenced(run, *range(3, 3 + num)), "warning") if "answer" in t]
    assert text == "For 2.00 s of 20.0 s no answer came at all: the server stood still."
    (text,) = texts(silenced(run, *range(-num - 1, 0)), "error")
    assert text.startswith("No answer came in the last 2.") and "stopped answering" in text


def test_a_short_silence_is_nothing() -> None:
    run = made_runs.run([made_runs.level(Closed(8), HEALTHY, 20.0)])
    assert not any("answer came" in each.text for each in findings.find(silenced(run, 3)))


def test_littles_law_of_a_closed_loop() -> None:
    run = made_runs.run([made_runs.level(Closed(8), HEALTHY, 20.0)])
    run.levels[0].ending = "precise"
    assert texts(run, "warning") == []
    run.levels[0].load = Closed(9)
    (text,) = texts(run, "warning")
    assert text.startswith("Little's law does not hold: throughput x service time is 8.0")
    assert "concurrency is 9.00" in text


def test_idle_clients_of_a_closed_loop() -> None:
    """One client that is idle an eighth of the time."""
    run = made_runs.run([made_runs.level(Closed(1), HEALTHY, 20.0)])
    run.levels[0].ending = "precise"
    assert not any("Little" in text for text in texts(run, "warning"))
    service = run.levels[0].service
    run.levels[0].service = made_runs.histogram([service.mean() * 7 / 8] * 1000)
    assert any("is 0.87" in text for text in texts(run, "warning"))


def test_littles_law_of_an_open_loop() -> None:
    run = healthy()
    run.levels[0].generator.mean_in_flight *= 1.5
    (text,) = texts(run, "warning")
    assert text.startswith("Little's law does not hold: rate x latency is")


def test_a_warm_up_that_ran_out_of_patience() -> None:
    run = healthy()
    run.levels[0].warm_up = WarmUp(30.0, 1000, False, 0.05, 0.02)
    (text,) = texts(run, "warning")
    assert "warm-up of 30 s was over (median 50.0 ms at first, 20.0 ms at last)" in text
    run.levels[0].ending = "interrupted"
    assert texts(run, "warning") == []


def test_a_queue_that_grows() -> None:
    run = made_runs.open_loop(1100.0)
    (text,) = texts(run, "error")
    assert text.startswith("Latency grew all the time")
    # Its interval is no news then.
    assert not any("known to" in text or "cannot be said" in text for text in texts(run, "warning"))


def test_growth_in_a_closed_loop_is_not_a_queue() -> None:
    run = made_runs.open_loop(1100.0)
    run.levels[0].load = Closed(8)
    assert not any(text.startswith("Latency grew") for text in texts(run, "error"))


def test_time_was_up_before_the_interval_was_tight() -> None:
    run = healthy()
    run.levels[0].ending = "time"
    run.precision_percent = 1.0
    (text,) = texts(run, "warning")
    assert text.startswith("p99 is known to ±")
    assert "20.0 s were not enough; about " in text
    seconds = float(text.split("about ")[1].split()[0])
    error = float(text.split("±")[1].split()[0])
    assert seconds == pytest.approx(20 * error**2, rel=0.1)
    run.precision_percent = 0.0
    assert texts(run, "warning") == []


def test_wide_intervals_of_several_levels_share_a_line() -> None:
    run = made_runs.sweep()
    run.precision_percent = 0.5
    for level in run.levels:
        level.ending = "time"
    wide = [each for each in findings.find(run) if "is known to" in each.text]
    assert len(wide) > 2
    ((first, *_),) = findings.grouped(wide)
    assert " to ±" in first.text and first.text.endswith(" s a level would be.")


def test_nobody_is_told_to_measure_for_days() -> None:
    run = healthy()
    run.levels[0].ending = "time"
    run.precision_percent = 0.01
    (text,) = texts(run, "warning")
    assert text.endswith("not enough, by far; or something disturbs the server, or its machine.")


def test_nothing_can_be_said_of_a_high_end() -> None:
    run = made_runs.open_loop(10.0, "")
    (text, *_) = [text for text in texts(run, "warning") if "How high" in text]
    assert text == "How high p99 may be cannot be said from 10.0 s: measure longer."


def test_too_few_for_a_percentile() -> None:
    run = made_runs.open_loop(50.0)
    num = sum(window.num_good for window in run.levels[0].windows)
    assert f"p99 comes from {num} good answers; below 1000 it is mostly chance." in texts(
        run, "warning"
    )
    assert f"p99.9 comes from {num} good answers: mostly chance." in texts(run, "note")


def test_the_other_percentiles_of_too_few_share_a_line() -> None:
    run = made_runs.open_loop(5.0)
    num = sum(window.num_good for window in run.levels[0].windows)
    assert 20 <= num < 100
    (text,) = [text for text in texts(run, "note") if "chance" in text]
    assert text == f"p90, p95 and p99.9 come from {num} good answers: mostly chance."


def test_no_good_answer_at_all_is_told_by_its_failures_alone() -> None:
    run = made_runs.open_loop(400.0, server=Server(fail_share=1.0))
    assert not any("chance" in finding.text for finding in findings.find(run))


def test_too_few_is_said_once_for_all_levels() -> None:
    found = [text for text in texts(made_runs.sweep(), "note") if text.startswith("p99.9")]
    assert len(found) == 1 and "at 7 of 7 levels" in found[0]


def test_failures_by_cause() -> None:
    run = made_runs.partial()
    (text,) = [text for text in texts(run, "warning") if "requests failed" in text]
    failed = sum(sum(window.failures.values()) for window in run.levels[0].windows)
    assert text.startswith(f"{failed} of ")
    assert " x 503 Overloaded, " in text and " x timed out." in text


def test_more_failures_than_answers_are_an_error() -> None:
    run = made_runs.open_loop(300.0, server=Server(fail_share=0.7))
    assert any("requests failed" in text for text in texts(run, "error"))


@pytest.mark.parametrize(
    ("percent", "severity", "words"),
    [
        (95.0, "warning", "CPU was 95 % busy: one traffic spike from trouble."),
        (40.0, "note", "Headroom: the SLO is kept and CPU was only 40 % busy."),
        (75.0, "", ""),
    ],
)
def test_utilisation_of_a_kept_slo(percent: float, severity: str, words: str) -> None:
    run = healthy()
    level = run.levels[0]
    assert level.server is not None
    level.server = msgspec.structs.replace(level.server, busy_ns=None)
    for sample in level.system:
        sample.cpu_percent = percent
    found = findings.find(run)
    if not severity:
        assert found == []
    else:
        (finding,) = found
        assert finding.severity == severity and finding.text.endswith(words)


def test_utilisation_is_silent_when_the_slo_is_missed() -> None:
    run = healthy()
    run.slo = "p99 < 1ms"
    for sample in run.levels[0].system:
        sample.cpu_percent = 94.0
    assert findings.find(run) == []


def test_utilisation_is_that_of_the_highest_load_that_keeps_the_slo() -> None:
    found = [each for each in findings.find(made_runs.sweep("p99 < 20ms")) if "spike" in each.text]
    assert len(found) == 1
    assert found[0].level in (3, 4)


def test_server_and_generator_take_time_from_each_other() -> None:
    run = healthy()
    run.slo = ""
    for sample in run.levels[0].system:
        sample.cpu_percent = 97.0
    (text,) = texts(run, "warning")
    assert "share a machine whose CPU was 97 % busy" in text
    run.environment.is_server_local = False
    assert texts(run, "warning") == []


def test_random_inputs_partial_runs_and_closed_loops_are_said_once() -> None:
    run = made_runs.sweep()
    run.origin = msgspec.structs.replace(run.origin, is_random=True)
    run.is_partial, run.problem = True, "interrupted"
    found = findings.find(run)
    assert found[0] == Finding("error", "This run is partial: interrupted.")
    assert sum(each.text.startswith("Inputs are random") for each in found) == 1
    assert sum(each.text.startswith("Closed loop") for each in found) == 1


def test_doubts_about_the_data_are_warnings() -> None:
    run = healthy()
    run.origin = msgspec.structs.replace(run.origin, warnings=("d.npz: input 'x' row 7 has NaN.",))
    assert texts(run, "warning") == ["d.npz: input 'x' row 7 has NaN."]


def test_a_level_in_which_nothing_was_due() -> None:
    run = healthy()
    run.levels[0].windows = []
    assert findings.find(run) == [
        Finding("error", "No request was due in the time measured: nothing can be said.", 0)
    ]


def test_the_worst_comes_first() -> None:
    run = made_runs.max_rate()
    run.max_rate = None
    ranks = [findings.ORDER.index(each.severity) for each in findings.find(run)]
    assert ranks == sorted(ranks) and set(ranks) == {0, 1, 2}


def test_only_what_a_search_rests_on_is_told() -> None:
    """It goes above capacity to find it; that queues grow there is no finding."""
    run = made_runs.max_rate()
    rates = [level.load.profile.rate for level in run.levels]
    best = max(rate for rate in rates if rate <= run.max_rate.rate.value)
    assert findings.deciding_levels(run) == {rates.index(best)}
    told = {each.level for each in findings.find(run)}
    assert told <= {None, rates.index(best)}


def test_the_same_words_for_several_levels_are_one_group() -> None:
    found = [Finding("note", "a", 0), Finding("note", "b", 1), Finding("note", "a", 2)]
    assert findings.grouped(found) == [[found[0], found[2]], [found[1]]]
