"""The members of ensembles in a repository: which models are loaded with an ensemble, and in what
order. `ensemble_rules` says whether they fit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from penstock.config import ModelConfig
from penstock.errors import NotFound
from penstock.repository.ensemble_cases import STEP
from penstock.repository.ensemble_rules import find_cycle
from penstock.repository.layout import RepositoryScan


def add_members(
    found: RepositoryScan,
    read: Callable[[str], RepositoryScan],
    is_loaded: Callable[[str, str], bool] = lambda name, version: False,
) -> None:
    """Add the models that the ensembles of a scan run, and those of ensembles among them, unless
    they `is_loaded` by name and version. An ensemble whose member does not exist has a problem."""
    waiting = list(found.configs)
    while waiting:
        config = waiting.pop()
        for index, step in enumerate(config.steps):
            if step.model in found.folders or is_loaded(step.model, step.version):
                continue
            try:
                more = read(step.model)
            except NotFound as error:
                problems = found.problems.setdefault(config.name, [])
                problems.append(f"{STEP}[{index}].model_name: {error}")
                continue
            found.add(more)
            found.members.add(step.model)
            waiting += more.configs
    found.configs = [config for config in found.configs if config.name not in found.problems]


def needed_models(configs: Iterable[ModelConfig]) -> dict[str, set[str]]:
    """Return, by model, which of the others must be loaded before it."""
    configs = list(configs)
    names = {config.name for config in configs}
    needed: dict[str, set[str]] = {name: set() for name in names}
    for config in configs:
        needed[config.name] |= {step.model for step in config.steps} & names
    return needed


def unneeded_members(
    name: str, loaded: Iterable[ModelConfig], removable: Collection[str]
) -> list[str]:
    """Return the `removable` models that only this ensemble runs, directly or through others of
    them. `loaded` are all models, this one included."""
    needed = needed_models(loaded)
    gone = [name]
    for each in gone:
        for member in sorted(needed.get(each, ())):
            users = {user for user, members in needed.items() if member in members}
            if member in removable and member not in gone and users <= set(gone):
                gone.append(member)
    return gone[1:]


def take_out_cycles(needed: dict[str, set[str]]) -> dict[str, list[str]]:
    """Take the models of each cycle out of the order; return their problems."""
    problems: dict[str, list[str]] = {}
    while cycle := find_cycle(needed):
        # In a cycle, the needed comes first.
        order = " -> ".join(reversed(cycle))
        for name in cycle[1:]:
            problems[name] = [f"{STEP}: a cycle of ensembles: {order}"]
            needed.pop(name, None)
        for others in needed.values():
            others.difference_update(cycle)
    return problems
