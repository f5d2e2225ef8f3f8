"""`ensemble_scheduling` in config.pbtxt: read and written here, with what an ensemble may not have.

`ensemble_rules` checks how the steps fit together; what they run is not looked at before a load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.config import ENSEMBLE, EnsembleStep, ModelConfig
from penstock.repository.ensemble_parameters import LIMITS, PREFIXES, read_step_parameters
from penstock.repository.pbtxt_fields import Proto

Problem = Callable[[str, str], None]
FIELD = "ensemble_scheduling"
LATEST = -1
# Fields of a model with workers of its own.
REFUSED = {
    "instance_group": "the members have instances",
    "model_warmup": "the members are warmed up",
    "dynamic_batching": "the members batch the requests of all ensembles",
    "sequence_batching": "the members have sequences",
    "batch_input": "the members make them",
    "batch_output": "the members make them",
}
# What has an effect on an ensemble among the parameters.
PARAMETERS = ("penstock.record", "penstock.record_share", "penstock.record_redact")


def is_ensemble(message: Proto) -> bool:
    """Whether the message describes an ensemble; one of another backend or platform does not."""
    if message.platform == ENSEMBLE:
        return True
    return message.HasField(FIELD) and not message.platform and message.backend in ("", ENSEMBLE)


def refuse(message: Proto, problem: Problem) -> None:
    """Report what an ensemble may not have."""
    if message.backend not in ("", ENSEMBLE):
        text = f"'{message.backend}' beside platform '{ENSEMBLE}'; leave it out"
        problem("backend", text)
    if message.platform != ENSEMBLE:
        problem("platform", f"'{message.platform}' beside {FIELD}; expected '{ENSEMBLE}'")
    for descriptor, _ in message.ListFields():
        if descriptor.name in REFUSED:
            problem(descriptor.name, f"not for an ensemble: {REFUSED[descriptor.name]}")


def read_steps(message: Proto, problem: Problem) -> tuple[EnsembleStep, ...]:
    """Return the steps; report what is missing in them."""
    steps = message.ensemble_scheduling.step
    if not steps:
        problem(f"{FIELD}.step", "missing: an ensemble needs at least one step")
    found = [_read_step(step, f"{FIELD}.step[{i}]", problem) for i, step in enumerate(steps)]
    given = {key: value.string_value for key, value in message.parameters.items()}
    return read_step_parameters(given, found, problem)


def _read_step(step: Proto, path: str, problem: Problem) -> EnsembleStep:
    if not step.model_name:
        problem(f"{path}.model_name", "missing")
    version = step.model_version
    if version != LATEST and version < 1:
        expected = f"expected a version, or {LATEST} for the latest"
        problem(f"{path}.model_version", f"{version}: {expected}")
    for field in ("input_map", "output_map"):
        tensors = getattr(step, field)
        if not tensors:
            problem(f"{path}.{field}", "missing: it maps the member's tensors to the ensemble's")
        for name in sorted(tensors):
            if not name or not tensors[name]:
                problem(f"{path}.{field}", f"'{name}': '{tensors[name]}' has an empty name")
    number = "" if version == LATEST else str(version)
    return EnsembleStep(step.model_name, number, dict(step.input_map), dict(step.output_map))


def describe(message: Proto, config: ModelConfig) -> None:
    """Write an ensemble's own fields."""
    message.backend, message.platform = "", ENSEMBLE
    message.ClearField("default_model_filename")
    message.ClearField("instance_group")
    steps = message.ensemble_scheduling.step
    del steps[:]
    for each in config.steps:
        step = steps.add()
        step.model_name = each.model
        step.model_version = int(each.version) if each.version else LATEST
        for field, tensors in (("input_map", each.inputs), ("output_map", each.outputs)):
            for name, tensor in tensors.items():
                getattr(step, field)[name] = tensor


def without_effect(message: Proto) -> Iterator[str]:
    """Yield a warning for each field that has an effect on other models only."""
    if message.default_model_filename:
        yield "default_model_filename: has no effect; an ensemble has no file"
    if message.HasField("optimization"):
        yield "optimization: has no effect; set it for the members"
    for key in sorted(message.parameters):
        if key not in (*PARAMETERS, *LIMITS) and not key.startswith(PREFIXES):
            yield f"parameters.{key}: has no effect; set it for the members"
