"""Start a run: choose its kind by the model, tensors or text."""

from __future__ import annotations

import datetime
import time

from penstock.errors import ConfigError
from penstock.optimizer.model_run import Watch
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import Optimization
from penstock.optimizer.this_machine import read_machine
from penstock.repository.model_source import is_ensemble, is_language_model


def optimize(plan: Plan, watch: Watch, command: str) -> Optimization:
    """Run the optimisation. ConfigError at once if the plan or its files are wrong."""
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    call = plan, watch, command, time.monotonic(), created, read_machine()
    if is_language_model(plan.model):
        from penstock.optimizer.llm.text_run import TextRun

        return TextRun(*call).optimize()
    if is_ensemble(plan.model):
        from penstock.optimizer.member_run import MemberRun

        return MemberRun(*call).optimize()
    if plan.member:
        raise ConfigError([f"member: {plan.model} is not an ensemble; leave it out"])
    from penstock.optimizer.tensor_run import TensorRun

    return TensorRun(*call).optimize()
