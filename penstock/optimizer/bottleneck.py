"""Which member of an ensemble is optimised: the one where requests spend most of their time, or the
one that the user names; and why a member cannot be. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from penstock import units
from penstock.config import LLM, ModelConfig
from penstock.errors import ConfigError
from penstock.optimizer.measured_ensemble import EnsembleFiles, steps_of
from penstock.optimizer.results import MemberTime

PYTHON = "python"
PYTHON_WAYS = (
    "give it more instances (instance_group), do less in its code, or move the part that computes "
    "into a model of its own"
)


def slowest(members: Mapping[str, MemberTime]) -> str:
    return max(members, key=lambda name: members[name].total_s)


def share_text(members: Mapping[str, MemberTime], name: str) -> str:
    """Return `71 % of the members' time: 1.2 ms queue, 3.4 ms compute`."""
    total_s, own = sum(each.total_s for each in members.values()), members[name]
    parts = f"{units.duration(own.queue_s)} queue, {units.duration(own.compute_s)} compute"
    return f"{units.share(own.total_s, total_s)} of the members' time: {parts}"


def listing(members: Mapping[str, MemberTime]) -> str:
    """Return all members with their shares, the slowest first."""
    ordered = sorted(members, key=lambda name: -members[name].total_s)
    return "; ".join(f"'{name}' has {share_text(members, name)}" for name in ordered)


def choose(files: EnsembleFiles, members: Mapping[str, MemberTime], asked: str) -> str:
    """Return the member to optimise. ConfigError if that is impossible, with what to do."""
    check_asked(files, asked)
    if not members:
        raise ConfigError([f"{files.config.name}: no member has answered a request"])
    name = asked or slowest(members)
    problem = problem_of(files, name)
    if not problem:
        return name
    role = "member" if asked else "the bottleneck is"
    texts = [f"{role} '{name}', {problem}", f"members: {listing(members)}"]
    others = [each for each in files.members if each != name and not problem_of(files, each)]
    if others:
        texts.append(f"--member {others[0]} optimises that member instead")
    raise ConfigError(texts)


def check_asked(files: EnsembleFiles, asked: str) -> None:
    """Raise ConfigError for the name of a member that does not exist."""
    if asked and asked not in files.members:
        there = ", ".join(f"'{name}'" for name in files.members)
        raise ConfigError([f"member: '{asked}' is not a member of the ensemble; it has {there}"])


def problem_of(files: EnsembleFiles, name: str) -> str:
    """Return why a member cannot be optimised for the ensemble; empty if it can."""
    config, member = files.config, files.members[name]
    steps = steps_of(config, name)
    if not steps:
        inner = next(each.name for each in files.members.values() if steps_of(each, name))
        return f"which is a step of the ensemble '{inner}': optimise that ensemble"
    if problem := _problem_of_model(member):
        return problem
    if len(steps) > 1:
        return f"which {len(steps)} steps run: optimise the model by itself, on inputs of all steps"
    (step,) = steps
    if step.fan_out:
        return "whose step makes a request of each row: optimise the model by itself, on such rows"
    if step.condition:
        return "whose step has a condition: optimise the model by itself, on rows that meet it"
    if step.version:
        return (
            f"of which the step names version {step.version}, so it would not run a new one: set "
            "model_version: -1"
        )
    return ""


def _problem_of_model(config: ModelConfig) -> str:
    if config.backend == PYTHON:
        return f"a Python model, whose code cannot be changed: {PYTHON_WAYS}"
    if config.is_ensemble:
        return "an ensemble itself: optimise that ensemble"
    if config.backend == LLM:
        return "a language model: optimise it by itself"
    if config.is_decoupled or config.sequences is not None:
        kind = "decoupled" if config.is_decoupled else "one of sequences"
        return f"which is {kind}: such models cannot be optimised"
    return ""
