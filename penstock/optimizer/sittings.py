"""GPU sessions: builds on a GPU, each loaded once for all requests of the lab.

On a GPU a process takes longer to start than most requests take: the import of torch, the device
context, the weights. A server's process has run other batches too, so times measured here are those
of a server. On CPUs every request has a process of its own (`trials`). The lab uses one session at
a time.
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
from penstock.optimizer.facts import Facts
from penstock.optimizer.influence import RowCheck
from penstock.optimizer.shapes import with_instances
from penstock.optimizer.simulate import TimeTable
from penstock.optimizer.time_plan import TookTooLong
from penstock.optimizer.trials import Child, Crew, Row, TrialLimits
from penstock.types import Array

T = TypeVar("T")
# Entry of the facts that is left out: the slots of this session, not of the build.
SLOTS = "slots"


class Spare:
    """The next child process, which imports its backend while the previous one is in use. `settle`
    before measuring."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._is_ready = False

    def take(self, config: ModelConfig) -> Child:
        """Return a child with nothing loaded, and start the next one."""
        self.settle()
        child, self._child = self._child, None
        if child is None or child.config.backend != config.backend:
            self._drop(child)
            child = Child(config)
            child.start()
        child.config = config
        self._begin(config)
        return child

    def settle(self) -> None:
        """Wait until the next child is idle; drop it if it failed."""
        if self._child is None or self._is_ready:
            return
        try:
            self._child.expect_prepared()
            self._is_ready = True
        except (BackendFailed, ConfigError):
            self.close()

    def close(self) -> None:
        child, self._child = self._child, None
        self._drop(child)

    def _begin(self, config: ModelConfig) -> None:
        self._child, self._is_ready = Child(config), False
        self._child.start()
        with contextlib.suppress(BackendFailed):
            self._child.prepare()

    def _drop(self, child: Child | None) -> None:
        if child is not None:
            child.close()


class Sitting:
    """The session of one build. A failed request is repeated once in a new process, unless that was
    new: an earlier request may be the cause. A timeout is not repeated."""

    def __init__(self, build: Build, most: tuple[int, int], spare: Spare) -> None:
        """`most`: instances and threads; fewer instances are timed in the same process, as fewer
        batches in flight."""
        self.build = build
        self._config = with_instances(build.config, *most)
        self._spare = spare
        self._child: Child | None = None
        # Deadline of all requests, by the monotonic clock.
        self.ends_at = math.inf

    def inspect(self) -> Facts:
        facts = self._asked(lambda child: trials.inspected(child, self.build))
        facts.built.pop(SLOTS, None)
        return facts

    def check_rows(self, rows: Sequence[Row], *, is_rounded: bool) -> RowCheck:
        """Check whether these rows influence each other."""

        def check(child: Child) -> RowCheck:
            child.rules = trials.NO_LIMITS
            return influence.check_rows(child, self.build, rows, is_rounded=is_rounded)

        return self._asked(check)

    def answers(
        self,
        rows: Sequence[Row],
        told: Callable[[int], None] | None = None,
        rules: TrialLimits = trials.NO_LIMITS,
    ) -> list[dict[str, Array]]:
        def answer(child: Child) -> list[dict[str, Array]]:
            child.rules = rules
            return trials.answered(child, self.build, rows, told)

        return self._asked(answer)

    def times(
        self,
        rows: Sequence[Row],
        pair: tuple[int, int],
        longest_s: float = trials.MAX_BATCH_S,
        rules: TrialLimits = trials.NO_LIMITS,
    ) -> TimeTable:
        """Measure T(b) with this many instances; the memory is that of everything this process has
        run."""

        def measured(child: Child) -> TimeTable:
            self._spare.settle()
            child.rules = rules
            crew = Crew(self._config, [child], longest_s, num_slots=pair[0])
            table = crew.table(rows, pair)
            if crew.is_hurt:
                self.close()
            return table

        return self._asked(measured)

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def _asked(self, question: Callable[[Child], T]) -> T:
        is_new = self._child is None
        try:
            return question(self._loaded())
        except (TookTooLong, ConfigError):
            self.close()
            raise
        except BackendFailed:
            self.close()
            if is_new:
                raise
        except BaseException:
            # The next request must not receive this answer.
            self.close()
            raise
        return self._asked(question)

    def _loaded(self) -> Child:
        if self._child is None:
            child = self._child = self._spare.take(self._config)
            child.ends_at = self.ends_at
            child.load()
        self._child.ends_at = self.ends_at
        return self._child
