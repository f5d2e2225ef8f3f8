"""Options to a plan, a plan to a version in a repository: `optimize` in Python and as a command."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.api import shown
from penstock.api.optimize_options import OptimizeOptions
from penstock.benchmark import run_files
from penstock.optimizer import optimization_files, plan_file
from penstock.optimizer.first_line import exit_code
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import Optimization

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class OptimizeResult:
    """Result of an optimisation. `optimization` has every candidate with its figures."""

    optimization: Optimization

    @property
    def headline(self) -> str:
        return self.optimization.headline

    @property
    def outcome(self) -> str:
        """kept, missed, refused, disturbed, interrupted or failed."""
        return self.optimization.outcome

    @property
    def version(self) -> str:
        """The new version in the repository; empty if none was committed."""
        return self.optimization.version

    @property
    def folder(self) -> Path:
        """The model's folder in the repository, as `penstock.serve` takes it."""
        return Path(self.optimization.out) / self.optimization.name

    @property
    def exit_code(self) -> int:
        """The exit code of `penstock optimize`."""
        return int(exit_code(self.optimization))

    def save(self, path: str | Path) -> None:
        """Write a .json or .html file, by the name's ending."""
        writers = {".html": write_html, ".json": optimization_files.write_optimization}
        shown.writer_for(Path(path), writers)(self.optimization, Path(path))

    def __rich__(self) -> RenderableType:
        from penstock.report import optimize_table

        return optimize_table.shown(self.optimization)

    def __str__(self) -> str:
        return shown.to_text(self.__rich__())

    def _repr_html_(self) -> str:
        from penstock.report import optimize

        return optimize.fragment(self.optimization)


def optimize(model: str, options: OptimizeOptions, *, progress: bool = False) -> OptimizeResult:
    """Optimise a model and commit the best version."""
    from penstock.optimizer.run import optimize as run
    from penstock.report.optimize_live import OptimizeDisplay

    plan = make_plan(model, options)
    command = f"penstock.optimize({model!r}, ...)"
    with OptimizeDisplay() if progress else contextlib.nullcontext() as live:
        watch = (lambda progress: None) if live is None else live.update
        return OptimizeResult(run(plan, watch, command))


def make_plan(model: str, options: OptimizeOptions) -> Plan:
    """Combine options and plan file; the problems of both are reported together."""
    file = plan_file.read(Path(options.plan)) if options.plan else None
    flags = {"model": model, **asdict(options)}
    del flags["plan"]
    given = {key: value for key, value in flags.items() if value not in (None, "")}
    return plan_file.make_plan(given, file)


def write_html(optimization: Optimization, path: Path) -> None:
    from penstock.report import optimize as report

    run_files.write_text(report.page(optimization), path)
