"""Inputs of requests: examples from files, or random ones from the model's signature.

A source knows tensors and texts, but no protocol. Process i of n takes its own share of a data set.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.data.cycling import shares
from penstock.data.datasets import open_data
from penstock.data.example_sets import TextExamples
from penstock.data.files import digest
from penstock.data.lengths import Lengths, Sizes, drawn, followed
from penstock.data.prompts import RandomPrompts
from penstock.data.random_tensors import RandomTensors, has_variable_dimension
from penstock.data.samples import InputSpec, Origin, RequestForm, Sample, Source
from penstock.data.traces import Trace, read_trace
from penstock.errors import ConfigError

__all__ = ["InputSpec", "Lengths", "Origin", "RequestForm", "Sample", "Source", "open_source"]


def open_source(spec: InputSpec, form: RequestForm, index: int, num_processes: int) -> Source:
    """Open inputs for process `index` of `num_processes`; ConfigError if the data does not fit."""
    problems = _problems(spec, form)
    if problems:
        raise ConfigError(problems)
    trace = read_trace(spec.trace_path) if spec.trace_path else Trace(())
    sizes = _sizes(spec, trace, index, num_processes)
    if not _takes_limit(form):
        sizes.answers = None
    if spec.path:
        return open_data(spec, form, sizes, (index, num_processes))
    trace_digest = digest([Path(spec.trace_path)]) if spec.trace_path else ""
    if form.kind == "tensors":
        return RandomTensors(form, spec.batch_size, (spec.seed, index), sizes, trace_digest)
    if form.kind == "fields":
        # Fields other than a prompt and its limit need data.
        known = {"prompt"} if sizes.answers is None else {"prompt", "max_tokens"}
        missing = ", ".join(f"{{{name}}}" for name in form.fields if name not in known)
        if missing:
            raise ConfigError([f"the body names {missing}: expected a data file with these fields"])
    if form.kind == "fields" and not form.fields:
        origin = Origin("the same body for every request", is_random=False, num_examples=1)
        return TextExamples([Sample()], None, shares(1, spec.seed, index, num_processes), origin)
    return RandomPrompts(form, (index, num_processes), spec.seed, sizes, trace_digest)


def _problems(spec: InputSpec, form: RequestForm) -> list[str]:
    """Return the contradictions that show before any file is opened."""
    assert form.kind in ("tensors", "prompt", "messages", "fields"), form.kind
    problems: list[str] = []
    if spec.seed < 0:
        problems.append(f"seed: expected a whole number from 0, got {spec.seed}")
    if spec.batch_size < 1:
        problems.append(f"batch_size: expected a whole number from 1, got {spec.batch_size}")
    if spec.batch_size > 1 and not (form.kind == "tensors" and form.has_batch):
        problems.append(f"batch_size {spec.batch_size}: the target takes one example a request")
    if spec.lengths is not None:
        problems += _length_problems(spec, form)
    if spec.output_lengths is not None and not _takes_limit(form):
        problems.append("output lengths: the target takes no 'max_tokens'")
    return problems


def _takes_limit(form: RequestForm) -> bool:
    return form.kind in ("prompt", "messages") or "max_tokens" in form.fields


def _length_problems(spec: InputSpec, form: RequestForm) -> list[str]:
    if spec.path:
        return [f"lengths: the examples of {spec.path} have their own"]
    if form.kind == "tensors" and not has_variable_dimension(form):
        listed = ", ".join(f"'{s.name}' {list(s.shape)}" for s in form.inputs)
        return [f"lengths: no input has a variable dimension: {listed}"]
    if form.kind == "fields" and "prompt" not in form.fields:
        return ["lengths: the body names no {prompt}"]
    return []


def _sizes(spec: InputSpec, trace: Trace, index: int, num_processes: int) -> Sizes:
    """Return the lengths of requests and answers; requested lengths override those of a trace."""

    def one(
        asked: Lengths | None, recorded: tuple[int, ...] | None, number: int
    ) -> tuple[Iterator[int] | None, str]:
        if asked is not None:
            return drawn(asked, (spec.seed, index, number)), str(asked)
        if recorded is not None:
            return followed(recorded, index, num_processes), f"as recorded in {trace.name}"
        return None, ""

    requests, requests_text = one(spec.lengths, trace.input_tokens, 1)
    answers, answers_text = one(spec.output_lengths, trace.output_tokens, 2)
    return Sizes(requests, answers, requests_text, answers_text)
