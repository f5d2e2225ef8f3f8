"""Whether ensembles that are loaded still run when another version of a member is promoted."""

from __future__ import annotations

from penstock.config import EnsembleStep, ModelConfig
from penstock.errors import InvalidRequest, NotFound, NotReady
from penstock.repository.ensemble_cases import STEP
from penstock.repository.ensemble_rules import member_problems
from penstock.serving.model_table import ModelTable


def find_users(table: ModelTable, name: str) -> list[ModelConfig]:
    """Return the loaded ensembles that run this model."""
    configs = (each.config for each in table)
    return [each for each in configs if any(step.model == name for step in each.steps)]


def check_ensembles(table: ModelTable, config: ModelConfig) -> None:
    """Raise InvalidRequest if this version, as the only one of its model, breaks an ensemble that
    runs the model now."""
    problems: list[str] = []
    for user in find_users(table, config.name):
        now = [_find_member(table, step) for step in user.steps]
        later = [
            config if step.model == config.name else member
            for step, member in zip(user.steps, now, strict=True)
        ]
        found = [
            f"{STEP}[{index}] runs version {step.version}, which would not be served any more"
            for index, step in enumerate(user.steps)
            if step.model == config.name and step.version not in ("", config.version)
        ]
        before = member_problems(user, now)
        found += [each for each in member_problems(user, later) if each not in before]
        problems += [f"ensemble '{user.name}': {each}" for each in found]
    if problems:
        raise InvalidRequest(
            f"{config.name}: version {config.version} cannot be promoted: {'; '.join(problems)}; "
            "change the ensemble and load it again, or unload it, first"
        )


def _find_member(table: ModelTable, step: EnsembleStep) -> ModelConfig | None:
    try:
        return table.find(step.model, step.version).config
    except (NotFound, NotReady):
        return None
