"""Builds candidates, each once, into the folder of a run."""

from __future__ import annotations

import functools
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import BackendFailed, ConfigError, PenstockError, first_line
from penstock.kernels import CHOICES
from penstock.optimizer import passes, trials
from penstock.optimizer.candidates import Build, Candidate
from penstock.optimizer.gpu_sessions import GpuProcesses
from penstock.optimizer.passes import BuildContext
from penstock.optimizer.run_context import RunContext
from penstock.optimizer.time_plan import CutOff, OutOfTime, TookTooLong
from penstock.repository import layout
from penstock.repository.accelerators import TENSORRT_PROVIDER

# Share of the remaining search time that one compilation may take; it gets at least MIN_COMPILE_S.
COMPILE_SHARE = 0.5
# The same for tuning convolutions: its time is known, and it gains far more than other steps.
TUNING_SHARE = 0.8
MIN_COMPILE_S = 20.0
# What torch.compile normally takes on a GPU: it may have this much of the time that is left.
NORMAL_COMPILE_S = 90.0
# A build that was started this often and never finished crashes the run.
MAX_BEGUN = 3


@dataclass
class Builder:
    run: RunContext
    gpu: GpuProcesses
    _builds: dict[str, Build] = field(default_factory=dict)

    @functools.cached_property
    def context(self) -> BuildContext:
        run = self.run
        cache = run.folder / "cache"
        cache.mkdir(exist_ok=True)
        timeout_s, check_time = self._compile_timeout_s, run.budget.check_part
        return BuildContext(run.plan, run.machine, run.examples, cache, timeout_s, check_time)

    def _compile_timeout_s(self, share: float = COMPILE_SHARE) -> float | None:
        left_s = self.run.budget.stage_left_s
        if left_s is None:
            return None
        return max(MIN_COMPILE_S, min(NORMAL_COMPILE_S, left_s), share * left_s)

    def build(self, candidate: Candidate) -> Build:
        """Return the candidate's files, built after its parents'. BackendFailed if that fails."""
        run = self.run
        if not candidate.steps:
            return run.original
        if (known := self._builds.get(candidate.key)) is not None:
            return known
        parent = self.build(candidate.parent)
        home = run.folder / "builds" / candidate.key
        make = functools.partial(self._make, candidate, parent)
        run.journal.remember("build", candidate.key, bool, make, passing=run.passing)
        if not home.is_dir():
            # The journal knows the build, but its files are gone.
            make()
        build = self._builds[candidate.key] = _open(candidate, home / run.plan.name)
        return build

    def _make(self, candidate: Candidate, parent: Build) -> bool:
        """Build in a hidden folder, then rename: readers never see a partial build."""
        run = self.run
        run.tell("build")
        self.gpu.release()
        if run.journal.count("build begun", candidate.key) > MAX_BEGUN:
            raise BackendFailed(f"its build was started {MAX_BEGUN} times and never finished")
        home = run.folder / "builds" / candidate.key
        draft = home.with_name(f".{home.name}")
        for old in (draft, home):
            shutil.rmtree(old, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            self._write(candidate, parent, draft / run.plan.name)
            os.rename(draft, home)
        except (TookTooLong, OutOfTime) as error:
            # The build ended, so a run with more time must not count this start.
            run.journal.count("build begun", candidate.key, -1)
            if isinstance(error, OutOfTime):
                raise
            # With a budget, the compiler had only a share of the remaining time.
            kind = TookTooLong if run.budget.stage_left_s is None else CutOff
            raise kind(f"compiling it takes too long: {error}") from error
        except PenstockError as error:
            raise BackendFailed(str(error)) from error
        except (OSError, MemoryError) as error:
            # The machine's fault, not the candidate's.
            raise ConfigError([f"{home.name}: cannot be built: {error}"]) from error
        except Exception as error:  # A build may fail in any way its libraries do.
            raise BackendFailed(f"{type(error).__name__}: {first_line(error)}") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return True

    def _write(self, candidate: Candidate, parent: Build, target: Path) -> None:
        """Run the pass, and compile models that are compiled at load."""
        step = candidate.steps[-1]
        made_by = passes.find(step.pass_name)
        if not made_by.is_config_only:
            self.gpu.make_room(parent.config)
        made_by.build(parent, step, target, self.context)
        made = _open(candidate, target)
        options = made.config.options
        # TensorRT builds engines at load.
        is_compiled = TENSORRT_PROVIDER in options.get("providers", "")
        if not is_compiled and not {"penstock.compile", "penstock.fuse"} & options.keys():
            return
        self.run.tell("compile")
        self.gpu.make_room(made.config)
        share = TUNING_SHARE if "penstock.fuse" in made.config.options else COMPILE_SHARE
        timeout_s = self._compile_timeout_s(share) or trials.LOAD_TIMEOUT_S
        take = self.gpu.spare.take if made.config.uses_gpu else None
        trials.keep_compiled(made, timeout_s, take)

    def keep_chosen(self, build: Build, left_s: float | None = None) -> None:
        """Save the fastest GEMM kernels of a packed model with the version. They are timed at load,
        which later starts then skip. Done only for the version that is kept: a load that covers all
        token counts takes as long as a measurement."""
        is_packed = build.config.uses_gpu and "penstock.pack" in build.config.options
        if not is_packed or (build.version_folder / CHOICES).exists():
            return
        self.run.tell("keep which products are the fastest")
        self.gpu.release()
        left_s = None if left_s is None else max(MIN_COMPILE_S, left_s)
        trials.keep_compiled(build, left_s or trials.LOAD_TIMEOUT_S)


def _open(candidate: Candidate, folder: Path) -> Build:
    found = layout.read(folder)
    if found.problems:
        raise BackendFailed("; ".join(text for each in found.problems.values() for text in each))
    return Build(candidate, folder, found.configs[-1])
