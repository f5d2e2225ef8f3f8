"""Evaluators of candidates, with all the time there is unless a budget says otherwise."""

import time
from dataclasses import replace
from typing import Any

from penstock.optimizer.evaluator import Evaluator
from penstock.optimizer.examples import Examples
from penstock.optimizer.findings import Findings
from penstock.optimizer.journal import Journal
from penstock.optimizer.machine import Machine
from penstock.optimizer.measured_ensemble import MeasuredEnsemble
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import Optimization
from penstock.optimizer.run_context import RunContext
from penstock.optimizer.subject import Subject
from penstock.optimizer.tensor_run import TensorRun
from penstock.optimizer.time_plan import TimeBudget


def made_record(evaluator: Any, findings: Findings) -> Optimization:
    """Return the record of a run whose search is over."""
    run = evaluator.run
    made = TensorRun(run.plan, lambda progress: None, "command", 0.0, "today", run.machine)
    return made.record(run.subject, run.samples, findings)


def made_evaluator(
    plan: Plan,
    machine: Machine,
    subject: Subject,
    examples: Examples,
    journal: Journal,
    budget: TimeBudget | None = None,
    ensemble: MeasuredEnsemble | None = None,
) -> Evaluator:
    is_on_gpu = subject.build.config.uses_gpu
    budget = budget or TimeBudget(
        plan, Findings(), time.monotonic, time.monotonic(), is_on_gpu=is_on_gpu
    )
    run = RunContext(plan, machine, subject, examples, journal, budget, lambda doing: None)
    return Evaluator(replace(run, ensemble=ensemble))
