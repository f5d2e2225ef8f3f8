"""Reads and writes `sequence_batching` of config.pbtxt. The rules are Triton's.

Sequences themselves are decided in `serving.sequences`; control inputs and states are made in
`backends.stateful`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from penstock.config import (
    BatchPolicy,
    ModelConfig,
    SequenceControl,
    SequencePolicy,
    SequenceState,
)
from penstock.repository.pbtxt_fields import Proto, datatype_name
from penstock.repository.pbtxt_views import Problem
from penstock.types import DATATYPES, TensorSpec, num_elements, shape_fits

PATH = "sequence_batching"
# Next to the version folders, as in Triton.
FOLDER = "initial_state"
DEFAULT_IDLE_S = 1.0
MAX_CANDIDATES = 65536
# The datatypes of a control input, by the field that gives its two values.
SIGNALS = {"int32_false_true": "INT32", "fp32_false_true": "FP32", "bool_false_true": "BOOL"}
ID_TYPES = ("UINT64", "INT64", "UINT32", "INT32", "BYTES")
KINDS: tuple[Literal["START", "READY", "END", "CORRID"], ...] = ("START", "READY", "END", "CORRID")


def read(message: Proto, model_folder: Path, problem: Problem) -> SequencePolicy | None:
    """Return the policy of a model of sequences; None for others."""
    if not message.HasField(PATH):
        return None
    batching = message.sequence_batching
    is_direct = not batching.HasField("oldest")
    candidates = 0 if is_direct else batching.oldest.max_candidate_sequences
    if not is_direct and not 1 <= candidates <= MAX_CANDIDATES:
        path = f"{PATH}.oldest.max_candidate_sequences"
        problem(path, f"{candidates}; expected 1 to {MAX_CANDIDATES}")
    share = batching.direct.minimum_slot_utilization if is_direct else 0.0
    if not 0 <= share <= 1:
        path = f"{PATH}.direct.minimum_slot_utilization"
        problem(path, f"{share:g}; expected a share from 0 to 1")
    return SequencePolicy(
        is_direct=is_direct,
        max_idle_s=batching.max_sequence_idle_microseconds / 1e6 or DEFAULT_IDLE_S,
        max_candidates=candidates,
        min_utilization=share,
        controls=_read_controls(batching.control_input, problem),
        states=_read_states(batching.state, model_folder / FOLDER, problem),
    )


def read_batching(message: Proto, max_batch: int, problem: Problem) -> BatchPolicy:
    """Return how the requests of different sequences share batches."""
    batching = message.sequence_batching
    if not batching.HasField("oldest"):
        delay_s = batching.direct.max_queue_delay_microseconds / 1e6
        is_dynamic, most = max_batch > 1, max(1, max_batch)
        return BatchPolicy(most, is_dynamic, max_queue_delay_s=delay_s)
    oldest = batching.oldest
    preferred = tuple(sorted(set(oldest.preferred_batch_size)))
    if any(size < 1 or size > max(1, max_batch) for size in preferred):
        text = f"{list(preferred)}: each must be from 1 to max_batch_size {max_batch}"
        problem(f"{PATH}.oldest.preferred_batch_size", text)
    return BatchPolicy(
        max(1, max_batch),
        is_dynamic=max_batch > 1,
        preferred_batch_sizes=preferred,
        max_queue_delay_s=oldest.max_queue_delay_microseconds / 1e6,
        preserve_ordering=oldest.preserve_ordering,
    )


def tensor_names(message: Proto) -> frozenset[str]:
    """Return the tensors of the model's file that clients neither send nor get."""
    if not message.HasField(PATH):
        return frozenset()
    batching = message.sequence_batching
    made = (control.name for control in batching.control_input)
    states = (name for state in batching.state for name in (state.input_name, state.output_name))
    return frozenset((*made, *states))


def _read_controls(messages: Sequence[Proto], problem: Problem) -> tuple[SequenceControl, ...]:
    found: list[SequenceControl] = []
    for index, message in enumerate(messages):
        path = f"{PATH}.control_input[{index}]"
        if not message.name:
            problem(f"{path}.name", "missing")
        if len(message.control) != 1:
            text = f"'{message.name}' has {len(message.control)} controls; expected one"
            problem(f"{path}.control", text)
            continue
        control = _read_control(message.name, message.control[0], f"{path}.control[0]", problem)
        if control is not None:
            found.append(control)
    for kind, count in Counter(control.kind for control in found).items():
        if count > 1:
            problem(f"{PATH}.control_input", f"{count} inputs for CONTROL_SEQUENCE_{kind}")
    return tuple(found)


def _read_control(name: str, message: Proto, path: str, problem: Problem) -> SequenceControl | None:
    kind = KINDS[message.kind]
    given = [field for field in SIGNALS if len(getattr(message, field))]
    if kind == "CORRID":
        datatype = datatype_name(message)
        if given:
            problem(f"{path}.{given[0]}", "not for CONTROL_SEQUENCE_CORRID, which has a data_type")
        elif datatype not in ID_TYPES:
            names = "TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 or TYPE_STRING"
            problem(f"{path}.data_type", f"{datatype or message.data_type}; expected {names}")
        return SequenceControl(name, kind, datatype)
    if len(given) != 1:
        text = f"{' and '.join(given) or 'nothing'} given; expected one of {', '.join(SIGNALS)}"
        problem(path, f"{text} for CONTROL_SEQUENCE_{kind}")
        return None
    if message.data_type:
        problem(f"{path}.data_type", f"not for CONTROL_SEQUENCE_{kind}; {given[0]} has the type")
    values = [float(value) for value in getattr(message, given[0])]
    if len(values) != 2:
        text = f"{len(values)} values for CONTROL_SEQUENCE_{kind}; expected 2, for false and true"
        problem(f"{path}.{given[0]}", text)
        return None
    return SequenceControl(name, kind, SIGNALS[given[0]], (values[0], values[1]))


def _read_states(
    messages: Sequence[Proto], folder: Path, problem: Problem
) -> tuple[SequenceState, ...]:
    found: list[SequenceState] = []
    for index, message in enumerate(messages):
        path = f"{PATH}.state[{index}]"
        for field in ("input_name", "output_name"):
            if not getattr(message, field):
                problem(f"{path}.{field}", "missing")
        datatype, dims = datatype_name(message), tuple(message.dims)
        if datatype not in DATATYPES:
            problem(f"{path}.data_type", f"{datatype or message.data_type} is no datatype")
        if any(size == 0 or size < -1 for size in dims):
            problem(f"{path}.dims", f"{list(dims)}: each must be positive or -1")
        if message.use_growable_memory:
            text = "not supported; leave it out: states of any size are kept"
            problem(f"{path}.use_growable_memory", text)
        shape, file, name = _read_initial(message, folder, path, problem)
        found.append(
            SequenceState(
                message.input_name,
                message.output_name,
                datatype,
                dims,
                shape or tuple(max(1, size) for size in dims),
                file,
                name,
                message.use_same_buffer_for_input_output,
                str(folder),
            )
        )
    return tuple(found)


def _read_initial(
    message: Proto, folder: Path, path: str, problem: Problem
) -> tuple[tuple[int, ...], str, str]:
    """Return the shape of the initial state, empty if it follows from the dims, the name of its
    file, and its name."""
    if not message.initial_state:
        return (), "", ""
    path = f"{path}.initial_state"
    if len(message.initial_state) > 1:
        problem(path, f"{len(message.initial_state)} initial states; expected one")
    initial = message.initial_state[0]
    shape = tuple(initial.dims)
    if initial.data_type != message.data_type:
        text = f"{datatype_name(initial)}; expected the state's {datatype_name(message)}"
        problem(f"{path}[0].data_type", text)
    if min(shape, default=1) <= 0 or not shape_fits(shape, message.dims):
        text = f"{list(shape)}; expected a shape that fits the state's {list(message.dims)}"
        problem(f"{path}[0].dims", text)
    elif initial.data_file and not (found := _file_problem(initial, shape, folder)):
        return shape, initial.data_file, initial.name
    elif initial.data_file:
        problem(f"{path}[0].data_file", found)
    elif initial.WhichOneof("state_data") is None:
        problem(f"{path}[0]", "expected zero_data: true or a data_file")
    return shape, "", initial.name


def _file_problem(initial: Proto, shape: tuple[int, ...], folder: Path) -> str:
    file = initial.data_file
    try:
        path = (folder / file).resolve()
        if not path.is_relative_to(folder.resolve()):
            return f"'{file}' leaves the folder {FOLDER}"
        if not path.is_file():
            return f"no file '{file}' in the folder {FOLDER} beside the versions"
        nbytes = path.stat().st_size
    except (OSError, ValueError, RuntimeError):
        return f"'{file}' is not the name of a file"
    datatype = DATATYPES.get(datatype_name(initial))
    if datatype is None or datatype.itemsize is None:
        return ""
    expected = num_elements(shape) * datatype.itemsize
    what = f"{list(shape)} of {datatype} take {expected}"
    return "" if nbytes == expected else f"'{file}' has {nbytes} bytes, but {what}"


def conflicts(config: ModelConfig, *, is_cached: bool) -> list[tuple[str, str]]:
    """Return fields that do not fit the rest of a model of sequences, and why."""
    policy = config.sequences
    if policy is None:
        return []
    found: list[tuple[str, str]] = []
    made = [control.input for control in policy.controls] + [s.input for s in policy.states]
    names = Counter([*(spec.name for spec in config.inputs), *made])
    for name, count in names.items():
        if count > 1:
            why = f"input '{name}' is given {count} times; the server makes controls and states"
            found.append((PATH, why))
    given = Counter(state.output for state in policy.states)
    found += [
        (f"{PATH}.state", f"output '{n}' is given {c} times") for n, c in given.items() if c > 1
    ]
    found += _output_conflicts(policy, config.outputs)
    if not config.inputs:
        found.append((PATH, "needs an input that clients send"))
    if config.is_processed or config.padding is not None:
        found.append((PATH, "not with pre- or postprocessing or penstock.pad"))
    if config.joins_requests:
        found.append((PATH, "not with allow_ragged_batch, batch_input or batch_output"))
    if config.batching.slo_latency_s is not None or config.batching.max_tokens is not None:
        found.append((PATH, "not with penstock.slo or penstock.max_batch_tokens"))
    if config.min_instances < max(1, config.max_instances):
        why = "sequences stay with their instance, so the number of instances cannot follow load"
        found.append(("parameters.penstock.min_instances", why))
    if is_cached:
        found.append(("response_cache.enable", "an answer depends on the sequence so far"))
    return found


def _output_conflicts(
    policy: SequencePolicy, outputs: Sequence[TensorSpec]
) -> list[tuple[str, str]]:
    shown = {spec.name: (spec.datatype, spec.shape) for spec in outputs}
    return [
        (f"{PATH}.state", f"output '{state.output}' has another datatype or other dims in output")
        for state in policy.states
        if shown.get(state.output, (state.datatype, state.shape)) != (state.datatype, state.shape)
    ]


def describe(message: Proto, config: ModelConfig) -> None:
    """Write the policy of a configuration."""
    policy = config.sequences
    message.ClearField(PATH)
    if policy is None:
        return
    target = message.sequence_batching
    target.SetInParent()
    target.max_sequence_idle_microseconds = round(policy.max_idle_s * 1e6)
    delay = round(config.batching.max_queue_delay_s * 1e6)
    if policy.is_direct:
        target.direct.max_queue_delay_microseconds = delay
        target.direct.minimum_slot_utilization = policy.min_utilization
    else:
        target.oldest.max_candidate_sequences = policy.max_candidates
        target.oldest.preferred_batch_size.extend(config.batching.preferred_batch_sizes)
        target.oldest.max_queue_delay_microseconds = delay
        target.oldest.preserve_ordering = config.batching.preserve_ordering
    fields = {datatype: field for field, datatype in SIGNALS.items()}
    for control in policy.controls:
        item = target.control_input.add(name=control.input).control.add()
        item.kind = KINDS.index(control.kind)
        if control.kind == "CORRID":
            item.data_type = _type_number(item, control.datatype)
        else:
            to_wire = {"FP32": float, "BOOL": bool}.get(control.datatype, int)
            getattr(item, fields[control.datatype]).extend(map(to_wire, control.false_true))
    for state in policy.states:
        _describe_state(target.state.add(), state)


def _describe_state(item: Proto, state: SequenceState) -> None:
    item.input_name, item.output_name = state.input, state.output
    item.data_type = _type_number(item, state.datatype)
    item.dims[:] = state.shape
    item.use_same_buffer_for_input_output = state.has_same_buffer
    initial = item.initial_state.add(name=state.name, data_type=item.data_type)
    initial.dims[:] = state.initial_shape
    if state.file:
        initial.data_file = state.file
    else:
        initial.zero_data = True


def _type_number(item: Proto, datatype: str) -> int:
    types = item.DESCRIPTOR.fields_by_name["data_type"].enum_type
    name = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
    number: int = types.values_by_name[name].number
    return number
