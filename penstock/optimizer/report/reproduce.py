"""How to get a candidate again: its steps, the code that takes them, the commands that measure. Pure
text."""

from __future__ import annotations

import shlex

from penstock.optimizer.candidates import Candidate
from penstock.optimizer.results import Optimization

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


def bench_commands(optimization: Optimization, folder: str) -> str:
    """What serves a folder and measures it as this run did."""
    address = f"{ADDRESS}/{optimization.name}"
    bench = ["penstock", "bench", address, *_data_flags(optimization.command)]
    if optimization.slo:
        bench += ["--slo", optimization.slo]
    lines = [shlex.join(["penstock", "serve", folder]), shlex.join(bench)]
    if optimization.slo:
        lines.append(shlex.join([*bench, "--max-rate"]))
    return "\n".join(lines)


def _data_flags(command: str) -> list[str]:
    """What the run was given to send, in the words of bench, which are the same."""
    words = shlex.split(command)
    found = []
    for word, value in zip(words, [*words[1:], ""], strict=True):
        name, is_joined, text = word.partition("=")
        if name in DATA_FLAGS:
            found += [name, text if is_joined else value]
    return found
