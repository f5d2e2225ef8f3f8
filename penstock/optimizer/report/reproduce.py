"""How to get a candidate again: its steps, the code that takes them, commands that measure it. Pure
text."""

from __future__ import annotations

import shlex

from penstock.optimizer.candidates import Candidate
from penstock.optimizer.results import Optimization

# Those that bench has too, with the same meaning.
DATA_FLAGS = ("--data", "--data-name")
ADDRESS = "http://127.0.0.1:8000/v2/models"
BUILD = """\
from pathlib import Path

from penstock import repository
from penstock.optimizer.candidates import Build, Step
from penstock.optimizer.machine import read_machine
from penstock.optimizer.passes import Workshop, find
from penstock.optimizer.plan import Plan
from penstock.optimizer.subject import open_subject

{steps}

plan = Plan(model={source!r}, name={name!r}, out="rebuilt")
# Static INT8 calibrates with examples: give the same data as the run had.
workshop = Workshop(plan, read_machine(), examples=None, cache=Path("rebuilt/cache"))
build = open_subject(plan, Path("rebuilt/0")).build
for number, step in enumerate(steps, 1):
    folder = Path(f"rebuilt/{{number}}")
    find(step.pass_name).build(build, step, folder, workshop)
    build = Build(build.candidate.then(step), folder, repository.read(folder).configs[0])
print(build.folder)
"""


def steps_code(candidate: Candidate) -> str:
    """Its steps as Python."""
    if not candidate.steps:
        return "steps = []"
    lines = [f"    Step({step.pass_name!r}, {step.settings!r})," for step in candidate.steps]
    return "\n".join(["steps = [", *lines, "]"])


def build_code(optimization: Optimization, candidate: Candidate) -> str:
    """A script that builds it from the original."""
    steps = steps_code(candidate)
    return BUILD.format(steps=steps, source=optimization.source, name=optimization.name)


def bench_commands(optimization: Optimization) -> str:
    """What serves the chosen and measures it as this run did."""
    flags = _flags(optimization.command)
    data = [word for name in DATA_FLAGS if name in flags for word in (name, flags[name])]
    bench = ["penstock", "bench", f"{ADDRESS}/{optimization.name}", *data]
    if optimization.slo:
        bench += ["--slo", optimization.slo]
    lines = [shlex.join(["penstock", "serve", _folder(optimization)]), shlex.join(bench)]
    if optimization.slo:
        lines.append(shlex.join([*bench, "--max-rate"]))
    return "\n".join(lines)


def _folder(optimization: Optimization) -> str:
    """The repository that got the version; without one, what the script makes."""
    repository = _flags(optimization.command).get("--out", "")
    if optimization.version and repository:
        return repository
    steps = () if optimization.chosen is None else optimization.chosen.steps
    return f"rebuilt/{len(steps)}"


def _flags(command: str) -> dict[str, str]:
    """What stands after each flag of a command, or after its equals sign."""
    words = shlex.split(command)
    found = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, is_joined, text = word.partition("=")
        if name.startswith("--"):
            found[name] = text if is_joined else following
    return found
