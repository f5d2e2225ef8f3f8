"""Operator times of ONNX Runtime: our own session with the backend's options, and its profile.

Prepacked weights are missing from the profile, so shapes come from one run of a second session
without prepacking; times come only from the first session.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.config import ModelConfig
from penstock.errors import BackendFailed, ConfigError
from penstock.profiling.work import Event, OperatorTime, Shaped, Timed
from penstock.types import Array

KERNEL = "_kernel_time"
RUN = "model_run"
DATATYPES = {"float": "fp32", "double": "fp64", "float16": "fp16", "bfloat16": "bf16"}
# Their time is the sum of the operators inside them.
CONTROL_FLOW = ("If", "Loop", "Scan")
# Runs that are not counted.
NUM_WARM_UP = 2
SIDES = ("input_type_shape", "output_type_shape")
NO_PACKING = {"session.disable_prepacking": "1"}

Key = tuple[str, str]
# An event of ONNX Runtime's profile.
RawEvent = Mapping[str, Any]


def timed(config: ModelConfig, inputs: Mapping[str, Array], num_runs: int) -> Timed:
    shapes: dict[Key, list[RawEvent]] = {}
    notes: list[str] = []
    try:
        shapes = nodes(_profile(config, inputs, 1, NO_PACKING), 1)
    except Exception as error:  # The library raises its own types, some of them bare.
        notes.append(f"weights are not in the bytes: {str(error).splitlines()[0]}")
    return read(_profile(config, inputs, num_runs, {}), num_runs, shapes, notes)


def read(
    raw: Sequence[RawEvent],
    num_runs: int,
    shapes: Mapping[Key, Sequence[RawEvent]],
    notes: Sequence[str] = (),
) -> Timed:
    """Read the last `num_runs` runs of a profile. For nodes in `shapes`, shapes come from there."""
    runs = _runs(raw, num_runs)
    start_us = min(run["ts"] for run in runs)
    operators = []
    for key, events in nodes(raw, num_runs).items():
        num_calls = max(1, round(len(events) / len(runs)))
        seconds = statistics.median(each["dur"] for each in events) * num_calls / 1e6
        details = shapes.get(key, events)[0]["args"]
        inputs, outputs = (_tensors(details.get(side, ())) for side in SIDES)
        weights = float(details.get("parameter_size", 0))
        kind = events[0]["args"]["op_name"]
        operators.append(OperatorTime(key[1], kind, seconds, inputs, outputs, weights, num_calls))
    profiled_s = statistics.median(run["dur"] for run in runs) / 1e6
    return Timed(operators, profiled_s, _events(raw, start_us), notes)


def nodes(raw: Sequence[RawEvent], num_runs: int) -> dict[Key, list[RawEvent]]:
    """Return the kernels of the last runs, by node index and name."""
    start_us = min(run["ts"] for run in _runs(raw, num_runs))
    found: dict[Key, list[RawEvent]] = {}
    for event in raw:
        if _is_kernel(event) and event["ts"] >= start_us:
            key = (event["args"].get("node_index", ""), event["name"].removesuffix(KERNEL))
            found.setdefault(key, []).append(event)
    return found


def _runs(raw: Sequence[RawEvent], num_runs: int) -> list[RawEvent]:
    runs = [event for event in raw if event.get("name") == RUN][-num_runs:]
    if not runs:
        raise BackendFailed("ONNX Runtime's profile holds no run of the model")
    return runs


def _is_kernel(event: RawEvent) -> bool:
    is_kernel = event.get("cat") == "Node" and event["name"].endswith(KERNEL)
    return is_kernel and (event.get("args") or {}).get("op_name", "") not in ("", *CONTROL_FLOW)


def _tensors(listed: Sequence[Mapping[str, Sequence[int]]]) -> tuple[Shaped, ...]:
    pairs = [pair for each in listed for pair in each.items()]
    return tuple(Shaped(DATATYPES.get(name, name), tuple(shape)) for name, shape in pairs)


def _events(raw: Sequence[RawEvent], start_us: float) -> list[Event]:
    found = []
    for event in raw:
        if event["ts"] < start_us or not (event.get("name") == RUN or _is_kernel(event)):
            continue
        given = event.get("args") or {}
        known = [key for key in (*SIDES, "provider") if key in given]
        details = {key.removesuffix("_type_shape"): str(given[key]) for key in known}
        name, kind = event["name"].removesuffix(KERNEL), given.get("op_name", "run")
        start_s, seconds = (event["ts"] - start_us) / 1e6, event["dur"] / 1e6
        found.append(Event(name, kind, start_s, seconds, details))
    return found


def _profile(
    config: ModelConfig, inputs: Mapping[str, Array], num_runs: int, entries: Mapping[str, str]
) -> list[RawEvent]:
    import onnxruntime as ort

    from penstock.backends.onnxruntime import providers_of, session_options

    problems: list[str] = []
    options = session_options(config, problems)
    providers = providers_of(config, problems)
    if problems:
        raise ConfigError(problems)
    for key, value in entries.items():
        with suppress(Exception):  # One that the configuration sets already.
            options.add_session_config_entry(key, value)
    with tempfile.TemporaryDirectory(prefix="penstock-profile-") as folder:
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = ort.InferenceSession(config.artifact, options, providers=providers)
        names = [spec.name for spec in config.outputs]
        for _ in range(NUM_WARM_UP + num_runs):
            session.run(names, dict(inputs))
        raw: list[RawEvent] = json.loads(Path(session.end_profiling()).read_text())
    return raw
