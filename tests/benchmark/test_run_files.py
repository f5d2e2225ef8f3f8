"""What is written is read again, by us and by others' scripts."""

import csv
import io
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmark import made_runs
from benchmark.made_runs import Server

from penstock.benchmark import summary
from penstock.benchmark.pacer import Closed, Flat, Open, Replay
from penstock.benchmark.results import BenchRun, MaxRate
from penstock.benchmark.run_files import (
    csv_text,
    read_run,
    write_run,
    write_text,
)
from penstock.benchmark.stats import Interval
from penstock.errors import ConfigError

MAKERS = [
    made_runs.sweep,
    made_runs.open_loop,
    made_runs.max_rate,
    made_runs.streams,
    made_runs.partial,
    made_runs.empty,
]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_a_run_is_read_as_it_was_written(make: Callable[[], BenchRun], tmp_path: Path) -> None:
    run = make()
    write_run(run, tmp_path / "run.json")
    assert read_run(tmp_path / "run.json") == run


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = made_runs.open_loop()
    run.levels[0].load = Replay((0.0, 0.25, 1.5), 0.5, '"times": [x')
    write_run(run, tmp_path / "run.json")
    assert read_run(tmp_path / "run.json") == run


def test_what_cannot_be_said_stays_unsaid(tmp_path: Path) -> None:
    run = made_runs.open_loop()
    run.max_rate = MaxRate(Interval(900.0, math.nan, math.inf), "p99 < 20ms")
    write_run(run, tmp_path / "run.json")
    found = read_run(tmp_path / "run.json").max_rate
    assert found is not None
    assert math.isnan(found.rate.low) and math.isinf(found.rate.high)


def test_other_tools_find_the_verdict_and_a_summary(tmp_path: Path) -> None:
    run = made_runs.sweep("p99 < 20ms")
    write_run(run, tmp_path / "run.json")

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    data = json.loads((tmp_path / "run.json").read_text(), parse_constant=refuse)
    assert data["verdict"]["slo"] == "partly kept"
    assert data["verdict"]["text"].startswith("SLO kept up to concurrency 16")
    last = data["levels"][6]["summary"]
    figures = summary.figures_of(run, run.levels[6])
    assert last["load"] == "concurrency 64"
    p99 = last["latency_ms"]["p99"]
    assert p99["value"] == pytest.approx(figures.latency["p99"].value * 1e3, abs=1e-5)
    assert (p99["high"] is None) is math.isinf(figures.latency["p99"].high)
    assert last["throughput_per_s"]["value"] == pytest.approx(figures.throughput.value, abs=1e-5)
    assert {"num_failed", "goodput_percent", "phases_ms"} <= last.keys()


def test_a_summary_that_was_changed_changes_nothing(tmp_path: Path) -> None:
    run = made_runs.open_loop()
    path = tmp_path / "run.json"
    write_run(run, path)
    data = json.loads(path.read_text())
    data["verdict"] = data["levels"][0]["summary"] = "nonsense"
    path.write_text(json.dumps(data))
    assert read_run(path) == run


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not JSON"),
        ("# a,b\n", "not JSON"),
        (
            "[1, 2]",
            "JSON, but not of a run; expected what penstock bench or optimize --json writes",
        ),
        ('{"levels": []}', "JSON, but not of a run"),
        (
            '{"target": {}, "levels": [], "format": 2}',
            "format 2; this version of penstock reads format 1",
        ),
        (
            '{"target": {}, "levels": [], "format": 1}',
            "not the whole of a run: Object missing required field",
        ),
    ],
)
def test_what_is_no_run_is_refused_in_words(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_run(path)
    assert str(caught.value).startswith(f"{path}: {problem}")


def test_no_file_a_folder_and_a_bad_slo(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file; expected what penstock bench or"):
        read_run(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_run(tmp_path)
    path = tmp_path / "run.json"
    write_run(made_runs.empty(), path)
    path.write_text(path.read_text().replace("p99 < 20ms", "p98 < 20ms"))
    with pytest.raises(ConfigError, match=r"run\.json: slo: 'p98 < 20ms'"):
        read_run(path)


def test_a_file_changes_when_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_text("old", path)
    write_text("new", path)
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["run.json"]


def test_where_nothing_can_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/run\.json: there is no folder "):
        write_text("text", tmp_path / "file" / "run.json")
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ConfigError, match="is a folder; expected the name of a file"):
        write_text("text", folder)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder"]


def test_what_is_no_plain_file_keeps_its_place(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/stdout"), Path("/dev/null")):
        with pytest.raises(ConfigError, match="is no plain file; expected the name of a file"):
            write_text("text", path)
    assert pipe.is_fifo() and Path("/dev/null").is_char_device()


def rows_of(run: BenchRun) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(csv_text(run))))


def test_csv_begins_as_perf_analyzers_does() -> None:
    head = csv_text(made_runs.sweep()).splitlines()[0]
    assert head.startswith(
        "Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,"
        "Server Compute Input,Server Compute Infer,Server Compute Output,Client Recv,"
        "p50 latency,p90 latency,p95 latency,p99 latency,"
    )
    assert csv_text(made_runs.open_loop()).startswith("Request Rate,Inferences/Second,")


def test_csv_rows_are_sorted_by_throughput_and_in_microseconds() -> None:
    run = made_runs.sweep("p99 < 20ms")
    rows = rows_of(run)
    speeds = [float(row["Inferences/Second"]) for row in rows]
    assert speeds == sorted(speeds) and len(rows) == 7
    row = next(row for row in rows if row["Concurrency"] == "4")
    figures = summary.figures_of(run, run.levels[2])
    assert int(row["p50 latency"]) == round(figures.latency["p50"].value * 1e6)
    assert int(row["p99 low"]) == round(figures.latency["p99"].low * 1e6)
    parts = (
        "Client Send",
        "Network+Server Send/Recv",
        "Server Queue",
        "Server Compute Input",
        "Server Compute Infer",
        "Server Compute Output",
        "Client Recv",
    )
    assert sum(int(row[part]) for part in parts) == pytest.approx(figures.mean_s * 1e6, abs=5)


def test_inferences_are_rows_not_requests() -> None:
    run = made_runs.open_loop()
    (alone,) = rows_of(run)
    run.batch_size = 8
    (batched,) = rows_of(run)
    ratio = float(batched["Inferences/Second"]) / float(alone["Inferences/Second"])
    assert ratio == pytest.approx(8, rel=1e-4)
    assert batched["Request Rate"] == "400"


def test_csv_leaves_empty_what_is_not_known() -> None:
    run = made_runs.run([made_runs.level(Open(Flat(10.0)))])
    (row,) = rows_of(run)
    assert row["p99 high"] == "" and row["Goodput/Second"] == ""


def test_csv_of_a_server_that_only_fails() -> None:
    slo = "p99 < 20ms"
    run = made_runs.run([made_runs.level(Closed(2), Server(fail_share=1.0), slo=slo)], slo)
    (row,) = rows_of(run)
    assert row["p50 latency"] == "" and row["Goodput/Second"] == "0"
    assert int(row["Failures"]) > 1000
    assert row["Network+Server Send/Recv"] == ""
