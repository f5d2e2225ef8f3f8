"""Which fields of config.pbtxt have an effect. Owns the table; `pbtxt` reads models with it.

Every field of Triton's ModelConfig message is in exactly one of five groups: read by `pbtxt`, only
shown to clients (`/config`), granted anyway, refused, or without effect. A field without effect
gives a warning, so nothing in a file is silently ignored. Fields added by a later version of the
message have no effect until they are listed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

# A protobuf message, or a part of one; the generated classes have no types.
Proto: TypeAlias = Any
_QUEUE = "timeout_action default_timeout_microseconds allow_timeout_override max_queue_size"
_BATCHING = (
    "preferred_batch_size max_queue_delay_microseconds preserve_ordering priority_levels "
    "default_priority_level"
)
# Read, with an effect on the server: fields by their message, without indices and keys of maps.
_READ = {
    "": "name platform backend max_batch_size default_model_filename metric_tags runtime "
    "cc_model_filenames",
    "model_repository_agents.": "agents.name agents.parameters",
    "version_policy.": "latest.num_versions all specific.versions",
    "input.": "name data_type dims optional reshape.shape allow_ragged_batch is_shape_tensor",
    "output.": "name data_type dims label_filename reshape.shape is_shape_tensor",
    "batch_input.": "kind target_name data_type source_input",
    "batch_output.": "kind target_name source_input",
    "dynamic_batching.": _BATCHING,
    "sequence_batching.": "max_sequence_idle_microseconds",
    "sequence_batching.direct.": "max_queue_delay_microseconds minimum_slot_utilization",
    "sequence_batching.oldest.": (
        "max_candidate_sequences preferred_batch_size max_queue_delay_microseconds "
        "preserve_ordering"
    ),
    "sequence_batching.control_input.": "name",
    "sequence_batching.control_input.control.": (
        "kind int32_false_true fp32_false_true bool_false_true data_type"
    ),
    "sequence_batching.state.": (
        "input_name output_name data_type dims use_same_buffer_for_input_output use_growable_memory"
    ),
    "sequence_batching.state.initial_state.": "data_type dims zero_data data_file name",
    "dynamic_batching.default_queue_policy.": _QUEUE,
    "dynamic_batching.priority_queue_policy.": _QUEUE,
    "instance_group.": "kind count gpus passive host_policy secondary_devices.kind "
    "secondary_devices.device_id",
    "instance_group.rate_limiter.": "priority",
    "instance_group.rate_limiter.resources.": "name global count",
    "optimization.execution_accelerators.gpu_execution_accelerator.": "name parameters",
    "optimization.execution_accelerators.cpu_execution_accelerator.": "name parameters",
    "parameters.": "string_value",
    "model_transaction_policy.": "decoupled",
    "response_cache.": "enable",
    "model_metrics.metric_control.": "metric_identifier.family histogram_options.buckets",
    "model_warmup.": "name batch_size count",
    "model_warmup.inputs.": "data_type dims zero_data random_data input_data_file",
    "ensemble_scheduling.step.": "model_name model_version input_map output_map",
}
READ = frozenset(f"{start}{name}" for start, names in _READ.items() for name in names.split())
# Only shown to clients, in `/config`.
SHOWN = frozenset(("input.format", "instance_group.name"))
# Requests for what the server does anyway: it pins memory wherever a GPU copies from or to it.
# Asking for the contrary has no effect.
GRANTED = frozenset(
    ("optimization.input_pinned_memory.enable", "optimization.output_pinned_memory.enable")
)
# Refused if set: they change what a model does, and are not supported.
_REFUSED = "model_operations sequence_batching.iterative_sequence"
REFUSED = frozenset(_REFUSED.split())
# Without effect, and what to do instead. A path covers everything below it.
REASONS = {
    "input.is_non_linear_format_io": "a plan says so itself, and is refused",
    "output.is_non_linear_format_io": "a plan says so itself, and is refused",
    "optimization.graph": "see the backend's own parameters for graph optimisations",
    "optimization.priority": "set parameters.penstock.stream_priority to high or low",
    "optimization.cuda": "for CUDA graphs set parameters.penstock.cuda_graphs",
    "optimization.gather_kernel_buffer_threshold": "inputs are gathered in shared memory",
    "optimization.eager_batching": "batches are formed while the instances compute",
    "ensemble_scheduling.max_inflight_requests": "the members' own queues are limited",
    "ensemble_scheduling.step.model_namespace": "names of models are unique in a server",
    "instance_group.profile": "the first profile that allows a batch is used",
}
# What a model with a response cache cannot have: its answers depend on more than one request, or
# are more than one.
NOT_CACHED = {
    "sequence_batching": "an answer depends on the requests before it",
    "model_transaction_policy.decoupled": "a request may have several answers",
    "ensemble_scheduling": "enable it in the models of the steps",
}


def datatype_name(tensor: Proto) -> str:
    """Return the v2 datatype of a tensor: INVALID if none is given, empty for unknown numbers."""
    known = tensor.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    number = tensor.data_type
    name = known[number].name.removeprefix("TYPE_") if number in known else ""
    return "BYTES" if name == "STRING" else name


def unused(message: Proto) -> list[str]:
    """Return a warning for each field that is set without effect, beginning with its path."""
    return [f"{path}: has no effect; {reason}" for path, reason in _unused(message, "", "")]


def _unused(message: Proto, path: str, where: str) -> Iterator[tuple[str, str]]:
    """`path` names the field in the tables, `where` in this message."""
    for field, value in message.ListFields():
        name = f"{path}{field.name}"
        place = f"{where}{field.name}"
        if name in READ or name in SHOWN or name in GRANTED or name in REFUSED:
            continue
        if name in REASONS:
            yield place, REASONS[name]
        elif f"{name}.enable" in GRANTED and not value.enable:
            yield f"{place}.enable", "memory that a GPU copies is always pinned"
        elif field.message_type is None:
            yield place, "Penstock does not know this field"
        else:
            for item_place, item in _messages(field, value, place):
                yield from _unused(item, f"{name}.", f"{item_place}.")


def _messages(field: Proto, value: Proto, place: str) -> Iterator[tuple[str, Proto]]:
    """Yield the messages of a field, each with its place. A map of plain values has none."""
    if field.message_type.GetOptions().map_entry:
        if field.message_type.fields_by_name["value"].message_type is not None:
            for key in sorted(value):
                yield f"{place}.{key}", value[key]
    elif field.is_repeated:
        for index, item in enumerate(value):
            yield f"{place}[{index}]", item
    else:
        yield place, value
