"""A backend that computes nothing and takes a given time: for tests and server overhead.

Outputs repeat the inputs of the same position (zeros where datatypes or shapes differ).
`docs/backends.md` explains the options. With `null.copy_ms`, which simulates a GPU, each batch has
a copy that overlaps with the computation of others, and `start` waits for neither.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from penstock.backends import GPU_MEMORY, Batch, Execution, Outputs, Runner
from penstock.backends.finished import Finished
from penstock.config import CPU, ModelConfig
from penstock.errors import BackendFailed, ConfigError
from penstock.types import DATATYPES, Array

TIMES = ("a_ms", "c_ms", "load_ms", "stall_ms", "copy_ms")
OPTIONS = (*TIMES, "crash_on", "hang_on", "fail_on", "stall_on", GPU_MEMORY)


@dataclass(slots=True)
class Ahead:
    """A batch in flight that ends at a given time."""

    outputs: Outputs
    ends_at: float
    prepare_s: float
    finish_s: float = 0.0

    def wait(self) -> Iterable[Outputs]:
        time.sleep(max(0.0, self.ends_at - time.perf_counter()))
        return (self.outputs,)


class NullRunner(Runner):
    keeps_rows_apart = True

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._options = _numbers(config)
        self._triggers = [name for name in self._options if name.endswith("_on")]
        self.runs_ahead = "copy_ms" in self._options
        # When everything launched so far is copied, and computed.
        self._copied_at = self._computed_at = 0.0
        time.sleep(self._options.get("load_ms", 0.0) / 1e3)

    def built(self) -> Mapping[str, str]:
        options = {name: str(value) for name, value in self._options.items()}
        if self._config.device == CPU:
            return options
        # The values it would have if it computed anything.
        memory = str(int(self._options.get(GPU_MEMORY, 0)))
        return options | {"device": self._config.device, GPU_MEMORY: memory}

    def start(self, batch: Batch) -> Execution:
        began = time.perf_counter()
        options = self._options
        if self._triggers:
            self._misbehave(batch)
        cost_s = (options.get("a_ms", 0.0) + options.get("c_ms", 0.0) * batch.num_rows) / 1e3
        outputs = self._outputs(batch)
        if self.runs_ahead:
            copy_s = options["copy_ms"] / 1e3
            self._copied_at = max(began, self._copied_at) + copy_s
            self._computed_at = max(self._copied_at, self._computed_at) + cost_s
            return Ahead(outputs, self._computed_at, copy_s)
        left_s = cost_s - (time.perf_counter() - began)
        if left_s > 0:
            time.sleep(left_s)
        return Finished(outputs)

    def _outputs(self, batch: Batch) -> Outputs:
        outputs: dict[str, Array] = {}
        sources = [spec for spec in self._config.inputs if spec.name in batch.inputs]
        has_batch = self._config.max_batch_size > 0
        for index, spec in enumerate(self._config.outputs):
            source = sources[index] if index < len(sources) else None
            form = spec.datatype, spec.shape
            if source is not None and (source.datatype, source.shape) == form:
                outputs[spec.name] = batch.inputs[source.name]
                continue
            shape = tuple(max(1, size) for size in spec.shape)
            full = (batch.num_rows, *shape) if has_batch else shape
            empty = b"" if spec.datatype == "BYTES" else 0
            outputs[spec.name] = np.full(full, empty, dtype=DATATYPES[spec.datatype].numpy)
        return outputs

    def _misbehave(self, batch: Batch) -> None:
        values = batch.inputs.get(self._config.inputs[0].name)
        if values is None or values.size == 0 or values.dtype == np.object_:
            return
        num_rows = values.shape[0] if self._config.max_batch_size > 0 else 1
        firsts = values.reshape(num_rows, -1)[:, 0]
        for name in self._triggers:
            value = self._options[name]
            if not np.any(firsts == value):
                continue
            if name == "crash_on":
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                os.abort()
            if name == "hang_on":
                while True:
                    time.sleep(3600)
            if name == "fail_on":
                raise BackendFailed(f"null.fail_on: a row starts with {value:g}")
            time.sleep(self._options.get("stall_ms", 0.0) / 1e3)


def load(config: ModelConfig) -> NullRunner:
    return NullRunner(config)


def _numbers(config: ModelConfig) -> dict[str, float]:
    numbers: dict[str, float] = {}
    problems: list[str] = []
    for key, text in config.options.items():
        name = key.removeprefix("null.")
        if name == key:
            continue
        if name not in OPTIONS:
            problems.append(f"parameters.{key}: unknown; expected one of {', '.join(OPTIONS)}")
            continue
        try:
            number = float(text)
        except ValueError:
            problems.append(f"parameters.{key}: '{text}' is not a number")
            continue
        if name.endswith("_ms") and not 0 <= number < 1e9:
            problems.append(f"parameters.{key}: '{text}' is not a time in milliseconds")
        numbers[name] = number
    if problems:
        raise ConfigError(problems)
    return numbers
