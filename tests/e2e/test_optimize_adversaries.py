"""Adversaries of the accuracy gate, each through the whole command.

The law: whatever `penstock optimize` commits answers fresh rows as the original does, judged
without Penstock; and no step that breaks the model passes the gate. TRAP_SEED repeats a run.
"""

import multiprocessing
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from adversaries import ADVERSARIES, NAME, TWINS, Adversary, Planted
from oracle import ask, run_build, serving
from traps import SERVING, UNPROFILED, Ran, committed, num_versions, optimized

from penstock.optimizer.results import Try
from penstock.optimizer.this_machine import read_machine
from penstock.repository import layout

pytestmark = pytest.mark.slow

DURATION = ("--duration", "1s")
# A gate has said no, or it could not even be built.
REFUSED = ("rejected", "failed")
ADVERSARIES_MD = Path(__file__).parents[2] / "docs" / "adversaries.md"
BY_NAME = {each.name: each for each in [*ADVERSARIES, *TWINS]}
OUTCOMES = {0: "kept", 1: "error", 2: "missed", 3: "refused", 4: "disturbed"}


# Most of a run is waiting for servers that are asked twenty times a second.
NUM_AT_ONCE = max(4, (os.cpu_count() or 1) // 2)


@dataclass(frozen=True)
class Outcome:
    """What became of one adversary."""

    name: str
    folder: Path
    seed: int
    ran: Ran
    # Tries whose builds give broken answers.
    broken: list[Try]
    # What is wrong with the answers of the committed version.
    wrong: str
    seconds: float

    @property
    def problems(self) -> list[str]:
        passed = [str(each.candidate) for each in self.broken if each.outcome not in REFUSED]
        problems = [f"the gate let {each} pass" for each in passed]
        return problems + ([f"committed, {self.wrong}"] if self.wrong else [])

    @property
    def line(self) -> str:
        found = self.ran.found
        tries = [] if found is None else found.tries
        refused = {each.candidate.steps[-1].pass_name for each in tries if each.outcome in REFUSED}
        fields = [
            self.name,
            BY_NAME[self.name].planted,
            f"{OUTCOMES.get(self.ran.code, '?')} ({self.ran.code})",
            "nothing" if found is None else str(found.chosen),
            ", ".join(sorted(refused)) or "nothing",
            f"{self.seconds:.0f}",
            "; ".join(self.problems) or "nothing",
        ]
        return " | ".join(fields)

    @property
    def text(self) -> str:
        return "\n".join([f"TRAP_SEED={self.seed}", *self.problems, self.ran.text])


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory) -> Iterator[dict[str, Future[Outcome]]]:
    """All adversaries that were asked for, some at once; at the end, the table of all of them.
    They run in other processes than pytest: a fault in a runtime ends no test run, and threads
    that earlier tests left behind are not there."""
    items = [item for item in request.session.items if item.path == request.node.path]
    chosen = [item.callspec.params["adversary"] for item in items if hasattr(item, "callspec")]
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(NUM_AT_ONCE, spawned) as pool:
        futures = {
            each.name: pool.submit(run, each.name, tmp_path_factory.mktemp("adversary"))
            for each in chosen
        }
        yield futures
        pool.shutdown(cancel_futures=True)
    ended = [each for each in futures.values() if not each.cancelled() and not each.exception()]
    print(
        "\n\nadversary | planted | outcome | committed | refused | seconds | broken and let through"
    )
    print("\n".join(each.result().line for each in ended))


def run(name: str, folder: Path) -> Outcome:
    seed = int(os.environ.get("TRAP_SEED") or time.time_ns() % 2**31)
    began = time.monotonic()
    planted = BY_NAME[name].make(folder, np.random.default_rng(seed))
    ran = optimize(folder, planted)
    broken = broken_tries(ran, planted)
    wrong = judge_committed(folder, planted)
    return Outcome(name, folder, seed, ran, broken, wrong, time.monotonic() - began)


def marked(cases: list[Adversary]) -> list:
    """Those that are not quick run in `make verify` only."""
    return [
        pytest.param(each, id=each.name, marks=() if each.is_quick else pytest.mark.verify)
        for each in cases
    ]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("adversary", marked(ADVERSARIES))
def test_no_broken_answer_is_committed(adversary, outcomes):
    outcome = outcomes[adversary.name].result()
    ran = outcome.ran
    assert "Traceback" not in ran.text, outcome.text
    assert ran.code in OUTCOMES, outcome.text
    assert not outcome.problems, outcome.text
    if ran.code == 1:
        assert re.search(r"^error: \S", ran.err, re.MULTILINE), outcome.text
    elif adversary.breaks_a_build:
        assert outcome.broken, f"no step broke it, so nothing was tested\n{outcome.text}"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("adversary", marked(TWINS))
def test_a_healthy_twin_passes(adversary, outcomes):
    machine = read_machine()
    if not (machine.has_int8 and machine.has_bf16):
        pytest.skip("the processor lacks INT8 or BF16, so that lossy steps are not tried")
    outcome = outcomes[adversary.name].result()
    # On a busy machine, or with an SLO that nothing keeps, the choice says nothing; the gate does.
    assert outcome.ran.code in (0, 2, 4), outcome.text
    assert not outcome.problems, outcome.text
    if adversary.is_served_well is not None:
        config, _ = committed(outcome.folder / "models", NAME)
        # A disturbed run saves what it has.
        assert outcome.ran.code != 0 or adversary.is_served_well(config), outcome.text
        return
    judged = [each for each in outcome.ran.optimization.tries if each.accuracy is not None]
    passed = [each for each in judged if each.accuracy.is_passed and each.outcome not in REFUSED]
    assert passed, outcome.text


def test_the_documentation_lists_all_adversaries():
    """The table in docs/adversaries.md, row by row."""
    section = ADVERSARIES_MD.read_text().split("## Adversaries", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)[1:]
    assert rows == [(each.name, each.planted, each.must) for each in [*ADVERSARIES, *TWINS]]


def test_there_are_enough_adversaries():
    assert len(ADVERSARIES) >= 30 and len(TWINS) >= 10
    assert sum(each.is_quick for each in ADVERSARIES) == 5
    names = [each.name for each in [*ADVERSARIES, *TWINS]]
    assert len(set(names)) == len(names)


def optimize(folder: Path, planted: Planted) -> Ran:
    flags = ["--name", NAME, "--slo", planted.slo, "--out", "models", *DURATION]
    flags += ["--budget", f"{planted.budget_s}s", *planted.flags]
    passes = planted.passes and (UNPROFILED, *planted.passes)
    return optimized(folder, planted.model, *flags, with_passes=passes)


def broken_tries(ran: Ran, planted: Planted) -> list[Try]:
    """Tries whose build gives broken answers in a plain runtime. Ways to serve are not judged
    here, nor Python models, whose faults show when they are served."""
    if ran.found is None:
        return []
    broken = []
    for each in ran.found.tries:
        steps = each.candidate.steps
        if not steps or steps[-1].pass_name in SERVING:
            continue
        folder = Path(ran.found.work) / "builds" / each.candidate.key / NAME
        if not folder.is_dir():
            continue
        config = layout.read(folder).configs[-1]
        if config.backend == "python":
            continue
        if planted.is_broken(run_build(config, planted.fresh, planted.batch_rows)):
            broken.append(each)
    return broken


def judge_committed(folder: Path, planted: Planted) -> str:
    """What is wrong with the answers of the committed version; empty: nothing, or no version."""
    root = folder / "models"
    if not num_versions(root, NAME):
        return ""
    with serving(root, NAME, folder / "asked") as served:
        return planted.is_broken(ask(served, NAME, planted.fresh, has_batch=planted.has_batch))
