"""The models that an ensemble's steps run, as the table of models has them now.

A member is looked up each time a step starts, so a reload takes effect with the next step. When a
member has changed, the ensemble is checked again. Used by the core and by shards alike.
"""

from __future__ import annotations

from penstock.config import EnsembleStep, ModelConfig
from penstock.errors import ConfigError, NotFound, NotReady
from penstock.repository.ensemble_cases import STEP
from penstock.repository.ensemble_rules import find_cycle, member_problems
from penstock.serving.model_table import ModelTable
from penstock.serving.served import Served
from penstock.serving.traffic_split import TrafficSplit


class EnsembleMembers:
    """Holds configurations of members, never members: those that are unloaded can be freed."""

    def __init__(self, config: ModelConfig, table: ModelTable) -> None:
        self._config = config
        self._table = table
        self._known: list[ModelConfig | None] = [None for _ in config.steps]
        self._problems: list[str] = []

    def find(self, index: int) -> Served:
        """Return the model of a step. NotReady, with the reason, if it is not loaded or does not
        fit the ensemble any more."""
        model = self._look_up(self._config.steps[index])
        if model.config is not self._known[index] or self._problems:
            self._known = [self._find_config(step) for step in self._config.steps]
            self._problems = member_problems(self._config, self._known)
        if self._problems:
            raise NotReady("; ".join(self._problems))
        return model

    def choose(self, index: int) -> tuple[Served, TrafficSplit | None]:
        """Return the version that runs a step, and the split that counts it, if its model has a
        rollout: steps that name a version are not split."""
        model, step = self.find(index), self._config.steps[index]
        if not self._table.splits:
            return model, None
        return self._table.choose(step.model, step.version, {})

    def check(self) -> None:
        """Raise ConfigError, with all problems, unless every member is loaded and fits."""
        problems: list[str] = []
        known: list[ModelConfig | None] = []
        for index, step in enumerate(self._config.steps):
            try:
                known.append(self._look_up(step).config)
            except NotReady as error:
                known.append(None)
                problems.append(f"{STEP}[{index}]: {error}")
        problems += member_problems(self._config, known)
        if cycle := find_cycle(self._needed()):
            problems.append(f"{STEP}: a cycle of ensembles: {' -> '.join(reversed(cycle))}")
        if problems:
            raise ConfigError(problems)

    @property
    def reason(self) -> str:
        """Why the ensemble cannot answer now; empty if it can."""
        for index in range(len(self._config.steps)):
            try:
                model = self.find(index)
            except NotReady as error:
                return str(error)
            if not model.is_ready:
                why = f": {model.reason}" if model.reason else ""
                return f"model '{model.config.name}' is not ready{why}"
        return ""

    def _find_config(self, step: EnsembleStep) -> ModelConfig | None:
        try:
            return self._look_up(step).config
        except NotReady:
            return None

    def _look_up(self, step: EnsembleStep) -> Served:
        try:
            return self._table.find(step.model, step.version)
        except NotFound:
            version = f" version {step.version}" if step.version else ""
            raise NotReady(f"model '{step.model}'{version} is not loaded") from None

    def _needed(self) -> dict[str, list[str]]:
        """Return the members of this ensemble and of those in it, by name."""
        needed: dict[str, list[str]] = {}
        waiting = [self._config]
        while waiting:
            config = waiting.pop()
            if config.name in needed:
                continue
            needed[config.name] = [step.model for step in config.steps]
            # Those that are missing are reported by the caller.
            found = map(self._find_config, config.steps)
            waiting += [member for member in found if member is not None]
        return needed
