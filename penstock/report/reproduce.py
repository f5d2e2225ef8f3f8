"""How to reproduce a candidate: its steps, code that builds it, commands that measure it. Pure."""

from __future__ import annotations

import shlex

from penstock.optimizer.candidates import Candidate
from penstock.optimizer.results import Optimization

# Flags that `penstock bench` has too, with the same meaning.
DATA_FLAGS = ("--data", "--data-name")
REBUILT = "rebuilt"
# All answers have the requested length.
TEXT_ADDRESS = "openai+http://127.0.0.1:8000/v1"
LENGTHS = ("--extra", '{"ignore_eos": true}')
ADDRESS = "http://127.0.0.1:8000/v2/models"
BUILD = """\
from pathlib import Path

from penstock.repository import layout
from penstock.optimizer import examples
from penstock.optimizer.candidates import Build, Step
from penstock.optimizer.this_machine import read_machine
from penstock.optimizer.passes import BuildContext, find
from penstock.optimizer.plan import Plan
from penstock.optimizer.subject import open_subject

{steps}

plan = Plan({plan})
home = Path(plan.out)
(home / "0").mkdir(parents=True)
(home / "cache").mkdir()
build = open_subject(plan, home / "0" / plan.name).build
config = build.config
has_batch = config.max_batch_size > 0
data = None
if plan.data:
    data = examples.open_examples(plan, config.inputs, has_batch, config.classes)
workshop = BuildContext(plan, read_machine(), data, home / "cache")
for number, step in enumerate(steps, 1):
    folder = home / str(number) / plan.name
    folder.parent.mkdir()
    find(step.pass_name).build(build, step, folder, workshop)
    build = Build(build.candidate.then(step), folder, layout.read(folder).configs[-1])
print(build.folder)
"""
# Fields of the plan that a build depends on; they are named as their flags.
PLAN_FIELDS = ["data", "data_name", "labels", "calibration", "preprocess", "postprocess", "device"]


def steps_code(candidate: Candidate) -> str:
    if not candidate.steps:
        return "steps = []"
    lines = [f"    Step({step.pass_name!r}, {step.settings!r})," for step in candidate.steps]
    return "\n".join(["steps = [", *lines, "]"])


def build_code(optimization: Optimization, candidate: Candidate) -> str:
    """Return a script that builds the candidate from the original."""
    if optimization.form == "text":
        return parameters(candidate)
    flags = _flags(optimization.command)
    known = {"model": optimization.source, "name": optimization.name, "out": REBUILT}
    given = {field: flags.get(f"--{field.replace('_', '-')}") for field in PLAN_FIELDS}
    known |= {field: value for field, value in given.items() if value is not None}
    if live := optimization.live_data:
        known |= {"data": live, "from_live": live}
    words = [f"{field}={value!r}" for field, value in known.items()]
    words += [f"seed={flags['--seed']}"] if flags.get("--seed", "").isdecimal() else []
    return BUILD.format(steps=steps_code(candidate), plan=", ".join(words))


def parameters(candidate: Candidate) -> str:
    """Return the parameters of a language model's config.pbtxt; later steps win."""
    settings = {name: value for step in candidate.steps for name, value in step.settings.items()}
    lines = [
        f'parameters {{ key: "penstock.{name}" value {{ string_value: "{value}" }} }}'
        for name, value in settings.items()
    ]
    return "\n".join(['backend: "llm"', *lines])


def files(optimization: Optimization, candidate: Candidate) -> str:
    """Return the path of its build; empty if it was not kept."""
    if not optimization.work:
        return ""
    name = ("builds", candidate.key) if candidate.steps else ("original",)
    return shlex.quote("/".join((optimization.work, *name)))


def bench_commands(optimization: Optimization) -> str:
    """Return commands that serve the chosen candidate and measure it as this run did."""
    flags = _flags(optimization.command)
    data = [word for name in DATA_FLAGS if name in flags for word in (name, flags[name])]
    data += ["--data", optimization.live_data] if optimization.live_data else []
    bench = ["penstock", "bench", f"{ADDRESS}/{optimization.name}", *data]
    if optimization.form == "text":
        bench = ["penstock", "bench", TEXT_ADDRESS, "--model", optimization.name, *data, *LENGTHS]
    if optimization.slo:
        bench += ["--slo", optimization.slo]
    lines = [shlex.join(["penstock", "serve", _folder(optimization)]), shlex.join(bench)]
    if optimization.slo:
        lines.append(shlex.join([*bench, "--max-rate"]))
    return "\n".join(lines)


def _folder(optimization: Optimization) -> str:
    """Return the repository with the version; without one, the folder that the script makes."""
    if optimization.version and optimization.out:
        return optimization.out
    steps = () if optimization.chosen is None else optimization.chosen.steps
    if optimization.member:
        # The ensemble around the build.
        return f"{optimization.work}/ensembles/{Candidate(steps).key}"
    return f"{REBUILT}/{len(steps)}"


def _flags(command: str) -> dict[str, str]:
    """Return the value of each flag of a command, separated by a space or an equals sign."""
    words = shlex.split(command)
    found = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, is_joined, text = word.partition("=")
        if name.startswith("--"):
            found[name] = text if is_joined else following
    return found
