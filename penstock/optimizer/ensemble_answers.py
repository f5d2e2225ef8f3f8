"""Answers of an ensemble with a build as its member, through its server; and the tensors that its
steps hand to a member, which are that member's data."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from penstock.config import EnsembleStep, ModelConfig
from penstock.errors import BackendFailed, ConfigError
from penstock.optimizer import folders
from penstock.optimizer.answer_source import AnswerSource
from penstock.optimizer.candidates import Build
from penstock.optimizer.endpoints import ServedEndpoint
from penstock.optimizer.measured_ensemble import EnsembleFiles, steps_of
from penstock.optimizer.numerics import Answers
from penstock.optimizer.run_context import Row
from penstock.repository import layout, pbtxt
from penstock.repository import manifest as manifests
from penstock.types import Array, TensorSpec

# Builds whose answers are kept, besides those of the original.
NUM_KEPT = 2


@dataclass
class EnsembleAnswers(AnswerSource):
    """Answers to the user's examples, each asked for once."""

    # By candidate, then by index.
    _known: dict[str, dict[int, Row]] = field(default_factory=dict)

    def answers(
        self, build: Build, indices: tuple[int, ...], stop_after_s: float = math.inf
    ) -> Answers:
        run = self.run
        known = self._known.setdefault(build.candidate.key, {})
        if left := [index for index in indices if index not in known]:
            self.gpu.settle()
            rows = [run.asked.rows[index] for index in left]

            def ask() -> Answers:
                with ServedEndpoint(run.served(build), "") as endpoint:
                    return endpoint.answers_once(rows, time.monotonic() + stop_after_s)

            found = run.required(build, ask)()
            known |= {index: row for index, row in zip(left, found, strict=True) if row}
            self._forget()
        return [known.get(index, {}) for index in indices]

    def _forget(self) -> None:
        """Drop the oldest answers; most candidates are judged once."""
        keys = [key for key in self._known if key != self.run.original.candidate.key]
        for key in keys[:-NUM_KEPT]:
            del self._known[key]


def captured(
    files: EnsembleFiles, member: str, rows: Sequence[Row], folder: Path
) -> list[dict[str, Array]]:
    """Return the member's inputs for each of these requests to the ensemble. They are asked for as
    further outputs, so that the server runs only the steps before the member. `folder` is for the
    repository that is served. ConfigError if the data or the ensemble does not allow it."""
    (step,) = steps_of(files.config, member)
    config, model = files.config, files.members[member]
    given = {spec.name for spec in config.inputs}
    made = {spec.name for spec in config.outputs}
    wanted = {key: tensor for key, tensor in step.inputs.items() if tensor not in given}
    specs = {spec.name: spec for spec in model.inputs}
    found: Answers = [{} for _ in rows]
    if wanted:
        added = {tensor: specs[key] for key, tensor in wanted.items() if tensor not in made}
        build = _with_outputs(files, added, model, folder)
        try:
            with ServedEndpoint(build, "") as endpoint:
                found = endpoint.answers_once(rows, math.inf, tuple(set(wanted.values())))
        except BackendFailed as error:
            raise ConfigError([f"the steps before '{member}': {error}"]) from error
    return [
        _inputs(step, specs, {**row, **answer}) for row, answer in zip(rows, found, strict=True)
    ]


def _inputs(step: EnsembleStep, specs: dict[str, TensorSpec], known: Row) -> dict[str, Array]:
    inputs: dict[str, Array] = {}
    for key, tensor in step.inputs.items():
        if tensor in known:
            array, rank = np.asarray(known[tensor]), len(specs[key].shape)
            if array.ndim == rank + 1 and len(array) != 1:
                problem = f"expected one row of the model for each example, got {len(array)}"
                raise ConfigError([f"tensor '{tensor}': {problem}"])
            inputs[key] = array[0] if array.ndim == rank + 1 else array
    return inputs


def _with_outputs(
    files: EnsembleFiles, added: dict[str, TensorSpec], member: ModelConfig, folder: Path
) -> Build:
    """Write the ensemble with further outputs, and its members."""
    config = files.config
    home = folder / config.name
    shutil.rmtree(folder, ignore_errors=True)
    folders.link_tree(files.root, folder)
    # Without a batch of its own, the ensemble has one of the member's rows.
    has_rows = config.max_batch_size == 0 and member.max_batch_size > 0
    outputs = [
        TensorSpec(tensor, spec.datatype, (-1, *spec.shape) if has_rows else spec.shape)
        for tensor, spec in added.items()
    ]
    config = replace(config, outputs=(*config.outputs, *outputs))
    own = config.version if layout.has_own_config(home, config.version) else ""
    text = pbtxt.write(config, layout.read_message(home, own))
    (home / own / layout.CONFIG).write_text(text, encoding="utf-8")
    # It has the digest of another configuration.
    (home / config.version / manifests.NAME).unlink(missing_ok=True)
    return replace(files.build, folder=folder)
