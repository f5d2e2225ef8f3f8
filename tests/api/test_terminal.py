"""What people see: nothing is lost, broken or obeyed as markup."""

import io
import logging
from dataclasses import replace

import pytest
from rich.console import Console

from penstock.api import terminal
from penstock.server import LoadProgress
from penstock.serving.explain import (
    Explanation,
    InstanceState,
    LaneState,
    PaceState,
    PastBatch,
    ProcessState,
    SeenShape,
)
from penstock.serving.placement import GpuPlan, Need, Share, make_plan
from penstock.system.devices import Gpu

ANSWER = Explanation(
    model="[bold]digits",
    version="3",
    state="READY",
    mode="slo",
    mode_reason="penstock.slo promises an answer within 50 ms",
    policy={"max_batch_size": "16", "SLO": "50 ms"},
    instances=[InstanceState(0, "busy", 10), InstanceState(1, "busy", 11)],
    waiting=[LaneState("[1,8,8]", 5, 7, 0.0123, "an idle instance (2 busy)")],
    recent=[
        PastBatch(
            0.5, 4, 3, "[1,8,8]", 0.0001, 0.0042, 0.01, 0.011, 1, "SLO target", "the worker died"
        )
    ],
    num_shapes=2,
    shapes=[SeenShape("[1,8,8]", 100, 120, 30), SeenShape("[1,4,4]", 2, 2, 2)],
    batch_sizes={1: 30, 3: 1, 4: 1, 16: 10},
    verdicts=["Batches hold 3.9 rows on average; at most 16 are allowed."],
    paces=[PaceState("[1,8,8]", 6, {1: 0.001, 2: 0.002}, 812.4)],
    refused={"predicted_late": 17},
    notes=["12 % of the rows are padding"],
    processes=[ProcessState("core", 9, 0.31), ProcessState("shard 1", 12, 0.97, 64)],
)


def shown(answer: Explanation, width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(terminal.explained(answer))
    return out.getvalue()


def test_tokens_are_shown_where_there_is_a_budget_of_them() -> None:
    text = shown(ANSWER, width=140)
    assert "tokens" not in text and "b in rows" in text
    batch = replace(ANSWER.recent[0], num_tokens=1234)
    policy = {**ANSWER.policy, "max_tokens": "4096"}
    text = shown(replace(ANSWER, recent=[batch], policy=policy), width=140)
    assert "1234" in text and "b in tokens" in text


@pytest.mark.parametrize(
    "words",
    [
        "[bold]digits/3 READY  2 busy",
        "mode slo: penstock.slo promises an answer within 50 ms",
        "policy max_batch_size 16, SLO 50 ms",
        "Note: 12 % of the rows are padding",
        "- Batches hold 3.9 rows on average",
        "an idle instance (2 busy)         5     7      12.30",
        "SLO target (the worker died)",
        "shard 1   12        97%           64",
        "Shapes of a row (2 seen)",
        "[1,4,4]         2     2        2",
        "predicted_late        17",
    ],
)
def test_every_part_of_the_answer_is_shown(words):
    assert words in shown(ANSWER)


def test_the_table_of_times_shows_the_batch_aimed_at():
    assert "shape    b*  arrivals/s  T(1)  T(2)" in shown(ANSWER)
    assert "[1,8,8]   6         812  1.00  2.00" in shown(ANSWER)


def test_sizes_are_bars_in_steps_of_two():
    lines = [line.split() for line in shown(ANSWER).splitlines() if "█" in line]
    assert [(line[0], line[2], line[3]) for line in lines] == [
        ("1", "30", "71%"),
        ("3-4", "2", "5%"),
        ("9-16", "10", "24%"),
    ]
    assert [len(line[1]) for line in lines] == [40, 3, 13]


def test_a_model_that_has_done_nothing():
    empty = replace(
        ANSWER, waiting=[], recent=[], shapes=[], batch_sizes={}, paces=[], refused={}, notes=[]
    )
    text = shown(empty)
    for words in ("nothing", "none", "nobody"):
        assert words in text
    assert "T(b)" not in text and "Note" not in text


def test_what_says_most_comes_first():
    text = shown(ANSWER)
    titles = ("Note:", "Why batches", "Waiting now", "Refused", "T(b)", "Rows per batch", "Last")
    places = [text.index(title) for title in titles]
    assert places == sorted(places)


def test_a_watch_that_is_no_terminals_prints_one_answer_after_the_other(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "WATCH_S", 0.0)
    answers = iter([ANSWER, replace(ANSWER, version="4")])

    def ask() -> Explanation:
        try:
            return next(answers)
        except StopIteration:
            raise KeyboardInterrupt from None

    with pytest.raises(KeyboardInterrupt):
        terminal.watch(ask)
    text = capsys.readouterr().out
    assert text.index("[bold]digits/3 READY") < text.index("[bold]digits/4 READY")
    assert "\x1b" not in text


def test_loading_is_told_in_a_log_that_nobody_watches_and_not_every_second(caplog):
    caplog.set_level(logging.INFO)
    status = terminal.LoadingStatus()
    for second in range(1, 13):
        status(LoadProgress(1, 8, list("abcdefg"), float(second)))
    status.end()
    texts = [record.getMessage() for record in caplog.records]
    assert texts == ["1 of 8 models loaded; loading a, b, c, d, e and 2 more"] * 2


GIB = 1 << 30
PLAN = make_plan(
    [
        Share("bert[large]", "3", "cuda:0", 2, Need(40 * GIB, "estimated")),
        Share("resnet", "1", "cuda:0", 1, Need(2 * GIB, "evidence")),
        Share("resnet", "1", "cuda:1", 1, Need(2 * GIB, "evidence"), num_instances=3),
    ],
    [Gpu(i, f"GPU-{i}", "Made Up", 80 * GIB, 78 * GIB) for i in range(2)],
    reserve=0.05,
)


def table_of(plan: tuple[GpuPlan, ...], width: int = 80) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(terminal.memory_table(plan))
    return [line.rstrip() for line in out.getvalue().splitlines() if line.strip(" ─")]


def test_the_memory_plan_shows_every_gpu_with_its_models_and_what_there_is():
    title, _, *rows = table_of(PLAN)
    assert title == "GPU memory"
    assert [row.split() for row in rows] == [
        ["0", "Made", "Up", "bert[large]/3", "2", "40.0", "GiB", "80.0", "GiB", "estimated"],
        ["resnet/1", "1", "2.0", "GiB", "2.0", "GiB", "evidence"],
        ["in", "all", "82.0", "GiB", "of", "74.0", "GiB"],
        ["1", "Made", "Up", "resnet/1", "1", "of", "3", "2.0", "GiB", "2.0", "GiB", "evidence"],
        ["in", "all", "2.0", "GiB", "of", "74.0", "GiB"],
    ]


def test_the_memory_plan_is_lines_of_the_log_where_nobody_looks(caplog):
    caplog.set_level(logging.INFO)
    terminal.tell_memory_plan(PLAN)
    assert [record.getMessage() for record in caplog.records] == [
        "GPU 0 (Made Up): models need 82.0 GiB of the 74.0 GiB that can be had: "
        "bert[large]/3 2 x 40.0 GiB (estimated); resnet/1 2.0 GiB (evidence)",
        "GPU 1 (Made Up): models need 2.0 GiB of the 74.0 GiB that can be had: "
        "resnet/1 2.0 GiB for 3 instances (evidence)",
    ]
    assert caplog.records[0].gpu_uuid == "GPU-0"
    assert caplog.records[0].needed_bytes == 82 * GIB


def test_instances_on_gpus_are_shown_with_their_devices():
    assert "Instances" not in shown(ANSWER)
    instances = [
        InstanceState(0, "idle", 10, "cuda:0", 3 * GIB, num_slots=2),
        InstanceState(1, "not ready", 0, "cuda:1"),
    ]
    text = shown(replace(ANSWER, instances=instances))
    assert "0         cuda:0  idle           2   10     3.0 GiB" in text
    assert "1         cuda:1  not ready      1    0" in text


@pytest.mark.parametrize(
    ("host", "address"),
    [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("localhost", "localhost"), ("10.0.0.7", "10.0.0.7")],
)
def test_a_server_on_all_addresses_is_called_by_the_loopback_one(host: str, address: str) -> None:
    assert terminal.reachable(host) == address
