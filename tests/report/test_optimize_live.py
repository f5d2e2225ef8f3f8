"""Progress while an optimisation goes on."""

import io
import threading
from dataclasses import replace

from rich.console import Console

from penstock.optimizer.progress import Progress
from penstock.report.optimize_live import (
    OptimizeDisplay,
    sequence,
    stopping_text,
)

NOW = Progress(
    stage="quantise",
    candidate="int8-static(calibrator=minmax)",
    doing="accuracy",
    num_tried=4,
    best="transformer-fusion",
    best_text="p99 12 ms, about 310/s",
    elapsed_s=80.0,
    left_s=520.0,
    to_save="transformer-fusion",
)


def test_a_file_gets_one_line_for_each_thing_that_begins() -> None:
    out = io.StringIO()
    with OptimizeDisplay(Console(file=out, width=200)) as live:
        for elapsed_s in (80.0, 81.0, 82.0):
            live.update(replace(NOW, elapsed_s=elapsed_s))
        for far in ("", ", 1 s", ", 2 s, p99 3 ms"):
            live.update(replace(NOW, doing=f"batch times{far}", elapsed_s=90.0))
        live.update(replace(NOW, doing="served", elapsed_s=120.0, best="int8-static"))
        live.update(replace(NOW, stage="final", candidate="", doing="curves", best="int8-static"))
    assert out.getvalue().splitlines() == [
        "best so far: transformer-fusion (p99 12 ms, about 310/s)",
        "[1 min 20 s] quantise: int8-static(calibrator=minmax): accuracy",
        "[1 min 30 s] quantise: int8-static(calibrator=minmax): batch times",
        "best so far: int8-static (p99 12 ms, about 310/s)",
        "[2 min 0 s] quantise: int8-static(calibrator=minmax): served",
        "[1 min 20 s] final: curves",
    ]


def in_terminal(progress: Progress, width: int = 100) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    with OptimizeDisplay(console) as live:
        live.update(progress)
        return out.getvalue()


def test_a_terminal_shows_the_sequence_the_candidate_and_the_best() -> None:
    text = in_terminal(NOW)
    stages = "baseline › compile › precision ›  quantise  › batching › instances › memory"
    assert stages in text
    assert "int8-static(calibrator=minmax): accuracy" in text
    assert "4 tried, 1 min 20 s, at most 8 min 40 s left" in text
    assert text.count("best so far") == 2


def test_what_is_not_known_yet_is_not_said() -> None:
    early = replace(NOW, stage="baseline", best="", best_text="", left_s=None, num_tried=0)
    text = in_terminal(early)
    assert "best so far" not in text and "left" not in text
    assert "0 tried, 1 min 20 s" in text
    assert "at most 0 s left" in in_terminal(replace(NOW, left_s=-3.0))


def test_the_present_stage_is_marked_and_earlier_ones_are_done() -> None:
    spans = {
        sequence("compile").plain[span.start : span.end].strip(): str(span.style)
        for span in sequence("compile").spans
    }
    assert spans["baseline"] == "green" and "reverse" in spans["compile"]
    assert spans["memory"] == "dim"
    assert sequence("head to head").plain == "head to head"


def test_names_are_not_obeyed_as_markup() -> None:
    assert "[bold]x" in in_terminal(replace(NOW, candidate="[bold]x"))


def test_an_error_ends_the_view() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system=None)
    try:
        with OptimizeDisplay(console) as live:
            live.update(NOW)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    # The cursor is given back.
    assert out.getvalue().count("\x1b[?25h") == 1


def drawn(live: OptimizeDisplay) -> str:
    out = io.StringIO()
    Console(file=out, width=100).print(live.render())
    return out.getvalue()


def test_the_time_goes_on_inside_a_long_step() -> None:
    now = [1000.0]
    live = OptimizeDisplay(Console(file=io.StringIO()), clock=lambda: now[0])
    assert drawn(live).strip() == ""
    live.update(NOW)
    assert "1 min 20 s, at most 8 min 40 s left" in drawn(live)
    now[0] += 45.0
    assert "2 min 5 s, at most 7 min 55 s left" in drawn(live)


def test_a_terminal_is_drawn_again_without_an_update() -> None:
    out = io.StringIO()
    seen = threading.Event()
    now = [1000.0]

    def clock() -> float:
        if now[0] > 1000.0:
            seen.set()
        return now[0]

    console = Console(file=out, width=100, force_terminal=True, color_system=None)
    with OptimizeDisplay(console, clock) as live:
        live.update(NOW)
        now[0] += 45.0
        assert seen.wait(60), "nobody looked at the clock"
    assert "2 min 5 s" in out.getvalue()


def test_ctrl_c_says_what_is_dropped_what_follows_and_how_to_stop_now() -> None:
    assert stopping_text(replace(NOW, finish_s=25.0, to_measure="openvino")) == (
        "stopping: int8-static(calibrator=minmax): accuracy is dropped; measuring openvino; saving "
        "it if it is better, else transformer-fusion (about 25 s); press Ctrl-C again to stop now "
        "without saving"
    )
    assert "is dropped; saving transformer-fusion; press" in stopping_text(NOW)
    assert "(about" not in stopping_text(NOW)
    early = "stopping: nothing to save yet, the original is not measured; run the same command"
    assert stopping_text(None).startswith(early)
    assert stopping_text(replace(NOW, to_save="")).startswith(early)


def test_ctrl_c_is_a_plain_line_in_a_file_and_stays_in_a_terminal() -> None:
    out = io.StringIO()
    with OptimizeDisplay(Console(file=out, width=80)) as live:
        live.update(NOW)
        live.acknowledge(1)
        live.acknowledge(2)
    *_, first, second = out.getvalue().splitlines()
    assert first == stopping_text(NOW)
    assert second == "stopping now without saving; run the same command again to resume"
    out = io.StringIO()
    with OptimizeDisplay(
        Console(file=out, width=100, force_terminal=True, color_system=None)
    ) as live:
        live.update(NOW)
        live.acknowledge(1)
    assert "press Ctrl-C again" in out.getvalue()


def test_a_note_stays_to_be_read() -> None:
    out = io.StringIO()
    with OptimizeDisplay(Console(file=out, width=200)) as live:
        live.update(replace(NOW, best="", note="budget 1 min: about 14 s for steps, no rates"))
        live.update(replace(NOW, best=""))
    assert out.getvalue().splitlines()[0] == "budget 1 min: about 14 s for steps, no rates"
    assert out.getvalue().count("budget") == 1
