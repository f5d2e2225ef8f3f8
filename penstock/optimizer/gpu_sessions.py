"""GPU sessions: builds on a GPU, each loaded once for all requests of the evaluator.

On a GPU a process takes longer to start than most requests take. A server's process has run other
batches too, so times measured here are those of a server. On CPUs every request has a process of
its own (`trials`). The evaluator uses one session at a time.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.config import ModelConfig
from penstock.errors import BackendFailed, ConfigError
from penstock.optimizer import influence, trials
from penstock.optimizer.candidates import Build
from penstock.optimizer.endpoints import Servers
from penstock.optimizer.facts import Facts
from penstock.optimizer.influence import RowCheck
from penstock.optimizer.machine import Machine
from penstock.optimizer.shapes import arrangements, with_instances
from penstock.optimizer.simulate import Row, TimeTable
from penstock.optimizer.time_plan import TookTooLong
from penstock.optimizer.trial_child import PrepareTrial, TrialDone
from penstock.optimizer.trials import Told, TrialCrew, TrialLimits, TrialProcess
from penstock.profiling.results import StepTime
from penstock.system import devices
from penstock.types import Array

T = TypeVar("T")
# Entry of the facts that is left out: the slots of this session, not of the build.
SLOTS = "slots"
# Share of each GPU's memory that must be free for trials while servers are kept running.
MIN_FREE = 0.75


class WarmSpare:
    """The next child process, which imports its backend ahead. `settle` before measuring."""

    def __init__(self) -> None:
        self._child: TrialProcess | None = None
        self._is_ready = False

    def take(self, config: ModelConfig) -> TrialProcess:
        """Return a child with nothing loaded, and start the next one."""
        self.settle()
        child, self._child = self._child, None
        if child is None or child.config.backend != config.backend:
            if child is not None:
                child.close()
            child = TrialProcess(config)
            child.start()
        child.config = config
        self._child, self._is_ready = TrialProcess(config), False
        self._child.start()
        with contextlib.suppress(BackendFailed):
            self._child.send(PrepareTrial(config.backend))
        return child

    def settle(self) -> None:
        """Wait until the next child is idle; drop it if it failed."""
        if self._child is None or self._is_ready:
            return
        try:
            self._child.expect(TrialDone)
            self._is_ready = True
        except (BackendFailed, ConfigError):
            self.close()

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()


class GpuSession:
    """The session of one build. A failed request is repeated once in a new process, unless that was
    new: an earlier request may be the cause. A timeout is not repeated."""

    def __init__(self, build: Build, most: tuple[int, int], spare: WarmSpare) -> None:
        """`most`: instances and threads; fewer instances are timed as fewer batches in flight."""
        self.build = build
        self._config = with_instances(build.config, *most)
        self._spare = spare
        self._child: TrialProcess | None = None
        # Deadline of all requests, by the monotonic clock.
        self.ends_at = math.inf

    def inspect(self) -> Facts:
        facts = self._ask(lambda child: trials.inspected(child, self.build))
        facts.built.pop(SLOTS, None)
        return facts

    def check_rows(self, rows: Sequence[Row], *, is_rounded: bool) -> RowCheck:
        """Check whether these rows influence each other."""
        return self._ask(
            lambda child: influence.check_rows(child, self.build, rows, is_rounded=is_rounded)
        )

    def answers(
        self, rows: Sequence[Row], told: Told | None = None, rules: TrialLimits = trials.NO_LIMITS
    ) -> list[dict[str, Array]]:
        return self._ask(lambda child: trials.answered(child, self.build, rows, told), rules)

    def times(
        self,
        rows: Sequence[Row],
        pair: tuple[int, int],
        longest_s: float = trials.MAX_BATCH_S,
        rules: TrialLimits = trials.NO_LIMITS,
    ) -> TimeTable:
        """Measure T(b) with this many instances; memory is that of all this process has run."""

        def measured(child: TrialProcess) -> TimeTable:
            self._spare.settle()
            crew = TrialCrew(self._config, [child], longest_s, num_slots=pair[0])
            table = crew.table(rows, pair)
            if crew.is_hurt or crew.ran_out_at:
                self.close()
            return table

        return self._ask(measured, rules)

    def step_time(self, rows: Sequence[Row], num_rows: int) -> StepTime | None:
        """Return where a batch of so many rows spends the GPU's time. A profiler has been in the
        process then, so the session ends."""

        def watched(child: TrialProcess) -> StepTime | None:
            return TrialCrew(self._config, [child], math.inf).step_time(rows, num_rows)

        try:
            return self._ask(watched)
        finally:
            self.close()

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def _ask(self, ask: Callable[[TrialProcess], T], rules: TrialLimits = trials.NO_LIMITS) -> T:
        is_new = self._child is None
        try:
            if self._child is None:
                self._child = self._spare.take(self._config)
                self._child.ends_at = self.ends_at
                self._child.load()
            self._child.ends_at, self._child.rules = self.ends_at, rules
            return ask(self._child)
        except BaseException as error:
            # The next request must not receive this answer.
            self.close()
            if is_new or not isinstance(error, BackendFailed) or isinstance(error, TookTooLong):
                raise
        return self._ask(ask, rules)


class GpuProcesses:
    """All processes that a run keeps on GPUs: the session of one build, a spare child, servers.
    `deadline` says until when a child of a build that starts now may run."""

    def __init__(self, machine: Machine, deadline: Callable[[Build], float]) -> None:
        self._machine = machine
        self._deadline = deadline
        self.spare = WarmSpare()
        self._session: GpuSession | None = None
        self._servers = Servers()

    def close(self) -> None:
        self.release()
        self.spare.close()
        self._servers.close()

    def session(self, build: Build) -> GpuSession | None:
        """Return the session that has the build loaded, started if needed; None on CPUs."""
        config = build.config
        if not config.uses_gpu:
            return None
        if self._session is None or self._session.build.config != config:
            self.release()
            self.make_room(config)
            pairs = arrangements(config, self._machine.num_cores)
            alone = [pair for pair in pairs if num_workers(config, pair) == 1]
            self._session = GpuSession(build, max(alone, default=pairs[0]), self.spare)
        self._session.ends_at = self._deadline(build)
        return self._session

    def release(self) -> None:
        """Close the session, which frees the GPU."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def settle(self) -> None:
        """Make sure that nothing else of this run is active during the next measurement."""
        self.release()
        self.spare.settle()

    def make_room(self, config: ModelConfig) -> None:
        """Stop the kept servers if the GPUs do not have enough free memory for a trial."""
        if not config.uses_gpu:
            return
        gpus = [gpu for gpu in devices.read_gpus() if gpu.total_bytes]
        if not gpus or any(gpu.free_bytes < MIN_FREE * gpu.total_bytes for gpu in gpus):
            self._servers.close()

    def kept_servers(self, builds: Sequence[Build]) -> Servers | None:
        """Return the servers to keep running. On GPUs starting one takes as long as a measurement;
        on CPUs each measurement gets the whole machine and its memory, so None."""
        is_on_gpu = all(build.config.uses_gpu for build in builds)
        return self._servers if is_on_gpu else None


def num_workers(config: ModelConfig, pair: tuple[int, int]) -> int:
    return len(with_instances(config, *pair).workers)
