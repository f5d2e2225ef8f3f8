"""Load tests: a plan to runs. Used by `penstock.bench` and `penstock bench`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.api import shown
from penstock.api.bench_options import BenchOptions
from penstock.api.bench_plan import make_plans
from penstock.benchmark import ci_gate, run_files, summary
from penstock.benchmark.comparison import Named
from penstock.benchmark.headline import headline_of
from penstock.benchmark.plan import BenchPlan, LevelProgress
from penstock.benchmark.results import BenchRun
from penstock.benchmark.run import Conductor
from penstock.benchmark.summary import Figures

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.benchmark.ci_gate import Check

Watch = Callable[[LevelProgress], None]
Keep = Callable[[BenchRun], None]
# Percent, of --tolerance.
TOLERANCE = 5.0


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Result of a load test: one run, or one for each batch size."""

    runs: tuple[BenchRun, ...]
    checks: tuple[Check, ...] = ()

    @property
    def run(self) -> BenchRun:
        """The run; of a sweep, the first."""
        return self.runs[0]

    @property
    def levels(self) -> list[Figures]:
        """The figures of each level: throughput, percentiles of latency, failures."""
        return [summary.figures_of(run, level) for run in self.runs for level in run.levels]

    @property
    def headline(self) -> str:
        from penstock.report import bench_table

        is_one = len(self.runs) == 1
        return headline_of(self.run).text if is_one else bench_table.sweep_headline(self.runs)

    @property
    def is_passed(self) -> bool:
        """Whether the SLO was kept and nothing is slower than the baseline."""
        return all(check.is_passed for check in self.checks)

    def save(self, path: str | Path) -> None:
        """Write a .json, .html or .csv file, by the name's ending. `penstock report` shows .json
        files again; of a sweep, each batch size has its own."""
        writers = {".json": write_json, ".html": write_html, ".csv": write_csv}
        shown.writer_for(Path(path), writers)(self.runs, Path(path))

    def to_json(self) -> str:
        """Return the run as JSON; a list of runs of a sweep."""
        texts = [run_files.to_json(run) for run in self.runs]
        return texts[0] if len(texts) == 1 else "[\n" + ",\n".join(texts) + "]\n"

    def __rich__(self) -> RenderableType:
        from penstock.report import bench_table

        is_one = len(self.runs) == 1
        return bench_table.shown(self.run) if is_one else bench_table.sweep(self.runs)

    def __str__(self) -> str:
        return shown.to_text(self.__rich__())

    def _repr_html_(self) -> str:
        from penstock.report import bench, compare

        named = [Named(f"batch size {run.batch_size}", run) for run in self.runs]
        return bench.fragment(self.runs[0]) if len(named) == 1 else compare.fragment(named)


def bench(model: str, options: BenchOptions, *, progress: bool = False) -> BenchResult:
    """Measure a model or a running server under load."""
    from penstock.report.live import BenchDisplay

    plans = make_plans(model, options, command=_as_typed(model, options))
    with BenchDisplay() if progress else contextlib.nullcontext() as live:
        watch = (lambda progress: None) if live is None else live.update
        return measure(plans, options, watch)


def _as_typed(model: str, options: BenchOptions) -> str:
    """Return the call in Python, for the report."""
    defaults = asdict(BenchOptions())
    changed = [f"{k}={v!r}" for k, v in asdict(options).items() if v != defaults[k]]
    return f"penstock.bench({', '.join([repr(model), *changed])})"


def measure(
    plans: Sequence[BenchPlan], options: BenchOptions, watch: Watch, keep: Keep = lambda run: None
) -> BenchResult:
    """Measure each plan and judge the runs by SLO and baseline. Ctrl-C ends the level and keeps
    what was measured. `keep` receives each run after each of its levels."""
    baseline = run_files.read_run(Path(options.baseline)) if options.baseline else None
    tolerance = (TOLERANCE if options.tolerance is None else options.tolerance) / 100
    runs: list[BenchRun] = []
    for plan in plans:
        conductor = Conductor(plan, watch, keep)
        runs.append(_run(conductor))
        if conductor.is_interrupted:
            break
    checks = [ci_gate.checks(run, plans[0].slo, baseline, tolerance) for run in runs]
    return BenchResult(tuple(runs), tuple(check for each in checks for check in each))


def write_json(runs: Sequence[BenchRun], path: Path) -> None:
    """Write the run; each run of a sweep to its own file, `run-b8.json`."""
    for target, run in _targets(runs, path):
        run_files.write_run(run, target)


def write_csv(runs: Sequence[BenchRun], path: Path) -> None:
    """Write the run; each run of a sweep to its own file, `run-b8.csv`."""
    for target, run in _targets(runs, path):
        run_files.write_text(run_files.csv_text(run), target)


def write_html(runs: Sequence[BenchRun], path: Path) -> None:
    """Write the page of a run, or of a sweep's runs compared with the first."""
    from penstock.report import bench, compare

    named = [Named(f"batch size {run.batch_size}", run) for run in runs]
    page = bench.page(runs[0]) if len(runs) == 1 else compare.page(named)
    run_files.write_text(page, path)


def _targets(runs: Sequence[BenchRun], path: Path) -> Iterator[tuple[Path, BenchRun]]:
    for run in runs:
        yield path if len(runs) == 1 else path.with_stem(f"{path.stem}-b{run.batch_size}"), run


def _run(conductor: Conductor) -> BenchRun:
    """Run on an event loop of its own: in the main thread if that has none, so that signals are
    handled; otherwise, as in a notebook, in another thread."""
    is_main = threading.current_thread() is threading.main_thread()
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        is_main = False
    if is_main:
        return asyncio.run(_interruptible(conductor))
    with ThreadPoolExecutor(1) as threads:
        measured = threads.submit(asyncio.run, conductor.measure())
        try:
            return measured.result()
        except KeyboardInterrupt:
            conductor.interrupt()
            return measured.result()


async def _interruptible(conductor: Conductor) -> BenchRun:
    """Handle Ctrl-C: the first ends the level and keeps its measurements; the second ends the run,
    as does the first if nothing was measured yet."""
    loop = asyncio.get_running_loop()
    measuring = asyncio.ensure_future(conductor.measure())

    def interrupt() -> None:
        if conductor.is_interrupted or not conductor.is_measuring:
            measuring.cancel()
        conductor.interrupt()

    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, interrupt)
    try:
        return await measuring
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)
