"""Runs of models that map tensors to tensors: ONNX, PyTorch, OpenVINO, Hugging Face encoders."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from penstock.errors import PenstockError
from penstock.optimizer import passes, shapes, time_plan
from penstock.optimizer.candidates import Build, Candidate
from penstock.optimizer.conclusion import TensorConclusion
from penstock.optimizer.evaluator import Evaluator
from penstock.optimizer.examples import Examples, open_examples, signature_examples
from penstock.optimizer.findings import Findings
from penstock.optimizer.input_record import statistics_of
from penstock.optimizer.journal import Journal
from penstock.optimizer.model_run import ModelRun
from penstock.optimizer.progress import ProgressReporter, stages_of
from penstock.optimizer.results import Optimization
from penstock.optimizer.run_context import RunContext
from penstock.optimizer.search import Search
from penstock.optimizer.subject import Subject, open_subject
from penstock.optimizer.time_plan import TimeBudget

# Number of random inputs, enough that consecutive requests differ.
NUM_DRAWN = 256

UNPROMISED = (
    "measured in slo mode, which refuses requests that would be late; the version is without it, "
    "because the SLO was not kept: set penstock.slo in config.pbtxt to enforce it"
)


class TensorRun(ModelRun[Subject, Examples]):
    def open(self, target: Path) -> Subject:
        return open_subject(self.plan, target)

    def read_data(self, subject: Subject) -> Examples:
        plan, config = self.plan, subject.build.config
        has_batch = config.max_batch_size > 0
        if plan.data:
            return open_examples(plan, config.inputs, has_batch, config.classes)
        return signature_examples(config.inputs, has_batch, plan.seed, NUM_DRAWN)

    def key(self, subject: Subject, data: Examples) -> str:
        plan = self.plan
        code = map(_code_digest, (plan.evaluator, plan.preprocess, plan.postprocess))
        return self.digest(plan, subject.digest, data.digest, *code)

    def conclude(
        self, subject: Subject, data: Examples, journal: Journal, findings: Findings
    ) -> tuple[Optimization, Build]:
        is_on_gpu = self.uses_gpu(subject)
        plan = time_plan.limited(self.plan, is_on_gpu=is_on_gpu)
        budget = TimeBudget(plan, findings, time.monotonic, self.began, is_on_gpu=is_on_gpu)
        progress = ProgressReporter(
            self.watch, findings, budget, stages_of(is_on_gpu), judges_lossless=bool(plan.data)
        )
        run = RunContext(plan, self.machine, subject, data, journal, budget, progress.tell)
        run = self.narrowed(run)
        with closing(Evaluator(run)) as evaluator:
            search = Search(evaluator, findings, budget, progress, passes.sequence())
            _search(evaluator, search)
            found = self.record(subject, data, findings)
            TensorConclusion(evaluator, search, found).conclude()
            build = without_promise(_as_committed(evaluator, found), found)
            _describe_inputs(evaluator, build, found)
            _keep_chosen(evaluator, search, build, found)
        found.elapsed_s = budget.elapsed_s
        self.describe(run, found)
        return found, build

    def uses_gpu(self, subject: Subject) -> bool:
        return subject.build.config.uses_gpu

    def narrowed(self, run: RunContext) -> RunContext:
        """Return the run of the model that is optimised: of an ensemble, a member."""
        return run

    def describe(self, run: RunContext, found: Optimization) -> None:
        """Add to the record what is known of this kind of model only."""


def _search(evaluator: Evaluator, search: Search) -> None:
    run, budget = evaluator.run, search.budget
    is_on_gpu = run.original.config.uses_gpu
    planned = time_plan.describe(budget.planned, run.plan, is_on_gpu=is_on_gpu)
    if planned:
        run.notes.append(planned)
        search.progress.tell("start", planned)
    began = time.monotonic()
    evaluator.inspector.check_rows()
    evaluator.data.check()
    budget.learn_judging(time.monotonic() - began)
    if not search.run().finalists:
        # Interrupted before the original was measured: there is nothing to keep.
        raise KeyboardInterrupt


def _describe_inputs(evaluator: Evaluator, build: Build, found: Optimization) -> None:
    """Add the statistics of the data, which the server compares live inputs with."""
    examples = evaluator.run.examples
    if examples is None:
        return
    found.live_span = examples.span if evaluator.run.plan.from_live else ()
    try:
        found.input_statistics = statistics_of(build.config, examples.rows)
    except PenstockError as error:
        found.notes.append(f"live inputs will not be compared with the data: {error}")


def _keep_chosen(evaluator: Evaluator, search: Search, build: Build, found: Optimization) -> None:
    repeated = "each start of the version repeats the timing of its matmuls"
    try:
        evaluator.builder.keep_chosen(build, search.budget.left_s)
    except PenstockError as error:
        found.notes.append(f"{repeated}: {error}")
    except KeyboardInterrupt:
        if search.findings.is_interrupted:
            raise
        search.findings.is_interrupted = True
        found.notes.append(f"{repeated}: interrupted")


def _as_committed(evaluator: Evaluator, found: Optimization) -> Build:
    """Return the build to commit: batching is off in its file if rows must not share a batch. Our
    server detects that itself; others follow the file."""
    build = evaluator.builder.build(found.chosen or Candidate())
    # Trials are not recorded; the version is, if the original was.
    build = replace(build, config=replace(build.config, record=evaluator.run.subject.record))
    config = build.config
    if not config.batching.is_dynamic or not evaluator.inspector.facts(build).batching_problem:
        return build
    return replace(build, config=shapes.with_batching(config, {"mode": "off"}, None))


def without_promise(build: Build, found: Optimization) -> Build:
    """Drop the SLO of a version that misses it: in slo mode it would refuse requests. It is batched
    by Triton's rules instead, unless users set penstock.slo themselves."""
    if found.outcome == "kept" or build.config.batching.slo_latency_s is None:
        return build
    found.notes.append(UNPROMISED)
    batching = replace(build.config.batching, slo_latency_s=None)
    return replace(build, config=replace(build.config, slo="", batching=batching))


def _code_digest(reference: str) -> str:
    """Return the digest of the file that defines a user's function."""
    if not reference:
        return ""
    path = [*sys.path]
    try:
        sys.path.insert(0, os.getcwd())
        spec = importlib.util.find_spec(reference.partition(":")[0])
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path[:] = path
    if spec is None or spec.origin is None or not os.path.isfile(spec.origin):
        return ""
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
