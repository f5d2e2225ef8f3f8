"""Nothing in config.pbtxt is silently ignored: every field works, is shown, is refused or is warned
about. The fields come from the message itself, so a new one cannot be forgotten."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2

from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.repository import layout, pbtxt, pbtxt_fields
from penstock.system.devices import Gpu

BASE = """
backend: "null"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
"""
WARMUP = (
    'model_warmup { name: "w" inputs { key: "x" value { data_type: TYPE_FP32 dims: 4 %s } } %s }'
)
BUCKETS = (
    "model_metrics { metric_control { metric_identifier { "
    'family: "nv_inference_first_response_histogram_ms" } histogram_options { buckets: 7 } } }'
)
BUCKET_FIELDS = ("metric_identifier.family", "histogram_options.buckets")
ON_GPU = "instance_group { kind: KIND_GPU }"
SHAPE = '%s { name: "%s" data_type: TYPE_INT32 dims: 2 is_shape_tensor: true }'
QUEUES = "dynamic_batching { priority_levels: 1 default_priority_level: 1 %s }"
BATCH_FIELDS = ("kind", "target_name", "data_type", "source_input")
BATCH_INPUT = (
    "batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: 'ends' "
    "data_type: TYPE_INT32 source_input: 'x' }"
)
BATCH_OUTPUT = (
    "batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: 'y' source_input: 'x' }"
)
SEQUENCES = "sequence_batching { %s }"
CONTROL = SEQUENCES % 'control_input { name: "c" control { kind: CONTROL_SEQUENCE_%s } }'
STATE = SEQUENCES % 'state { input_name: "i" output_name: "o" data_type: TYPE_INT32 dims: -1 %s }'
INITIAL = STATE % "initial_state { data_type: TYPE_INT32 dims: %s }"
# For each field that is read: what it is set beside, and a value that changes something.
LIMITED = 'instance_group { rate_limiter { resources { name: "R" count: 3 } } }'
# A step as model, version, input and output.
STEP = (
    'platform: "ensemble" ensemble_scheduling { step { model_name: "%s" model_version: %s '
    'input_map { key: "a" value: "%s" } output_map { key: "%s" value: "y" } } }'
)
FIRST_STEP = ("first", "1", "x", "b")
READ = {
    **{
        f"ensemble_scheduling.step.{name}": (
            STEP % FIRST_STEP,
            STEP % (*FIRST_STEP[:place], value, *FIRST_STEP[place + 1 :]),
        )
        for place, (name, value) in enumerate(
            {"model_name": "m", "model_version": "2", "input_map": "z", "output_map": "c"}.items()
        )
    },
    "name": ("", 'name: "other"'),
    "platform": ("", 'platform: "tensorrt_plan"'),
    "backend": ("", 'backend: "nonsense"'),
    "version_policy.latest.num_versions": ("", "version_policy { latest { num_versions: 2 } }"),
    "version_policy.all": ("", "version_policy { all { } }"),
    "version_policy.specific.versions": ("", "version_policy { specific { versions: 1 } }"),
    "max_batch_size": ("", "max_batch_size: 4"),
    "input.name": ("", 'input { name: "a" data_type: TYPE_FP32 dims: 1 }'),
    "input.data_type": ("", 'input { name: "a" data_type: TYPE_FP32 dims: 1 }'),
    "input.dims": ("", 'input { name: "a" data_type: TYPE_FP32 dims: 1 }'),
    "input.optional": ("", 'input { name: "a" data_type: TYPE_FP32 dims: 1 optional: true }'),
    "input.reshape.shape": (
        "",
        'input { name: "a" data_type: TYPE_FP32 dims: 1 reshape { shape: [ 1, 1 ] } }',
    ),
    "input.allow_ragged_batch": (
        "",
        'input { name: "a" data_type: TYPE_FP32 dims: 1 allow_ragged_batch: true }',
    ),
    "output.reshape.shape": (
        "",
        'output { name: "b" data_type: TYPE_FP32 dims: 1 reshape { shape: [ 1, 1 ] } }',
    ),
    **{f"batch_input.{name}": ("", BATCH_INPUT) for name in BATCH_FIELDS},
    **{f"batch_output.{name}": ("", BATCH_OUTPUT) for name in BATCH_FIELDS if name != "data_type"},
    "output.name": ("", 'output { name: "b" data_type: TYPE_FP32 dims: 1 }'),
    "output.data_type": ("", 'output { name: "b" data_type: TYPE_FP32 dims: 1 }'),
    "output.dims": ("", 'output { name: "b" data_type: TYPE_FP32 dims: 1 }'),
    "output.label_filename": (
        "",
        'output { name: "b" data_type: TYPE_FP32 dims: 1 label_filename: "l.txt" }',
    ),
    "dynamic_batching.preferred_batch_size": ("", "dynamic_batching { preferred_batch_size: 4 }"),
    "dynamic_batching.max_queue_delay_microseconds": (
        "dynamic_batching { }",
        "dynamic_batching { max_queue_delay_microseconds: 7 }",
    ),
    "dynamic_batching.preserve_ordering": (
        "dynamic_batching { }",
        "dynamic_batching { preserve_ordering: true }",
    ),
    "dynamic_batching.priority_levels": ("", QUEUES % ""),
    "dynamic_batching.default_priority_level": ("", QUEUES % ""),
    "instance_group.kind": ("", "instance_group { kind: KIND_GPU }"),
    "instance_group.count": ("", "instance_group { count: 3 }"),
    "instance_group.gpus": ("", "instance_group { gpus: 0 }"),
    **{
        f"optimization.execution_accelerators.{kind}_execution_accelerator.{field}": (
            "",
            f"optimization {{ execution_accelerators {{ {kind}_execution_accelerator {text} }} }}",
        )
        for kind in ("gpu", "cpu")
        for field, text in (
            ("name", '{ name: "tensorrt" }'),
            ("parameters", '{ parameters { key: "k" value: "v" } }'),
        )
    },
    "instance_group.host_policy": ("", 'instance_group { host_policy: "numa" }'),
    "instance_group.passive": ("", "instance_group { passive: true }"),
    **{
        f"instance_group.secondary_devices.{name}": (
            "",
            "instance_group { secondary_devices { kind: KIND_NVDLA device_id: 1 } }",
        )
        for name in ("kind", "device_id")
    },
    "input.is_shape_tensor": ("", SHAPE % ("input", "a")),
    "output.is_shape_tensor": ("", SHAPE % ("output", "b")),
    "runtime": ("", 'runtime: "model.py"'),
    "cc_model_filenames": (
        ON_GPU,
        ON_GPU + 'cc_model_filenames { key: "9.0" value: "net.bin" }',
    ),
    **{
        f"model_repository_agents.agents.{name}": (
            "",
            "model_repository_agents { agents { name: 'checksum' parameters { key: 'MD5:1/net.bin' "
            "value: '" + "0" * 32 + "' } } }",
        )
        for name in ("name", "parameters")
    },
    "default_model_filename": ("", 'default_model_filename: "net.bin"'),
    "metric_tags": ("", 'metric_tags { key: "team" value: "vision" }'),
    "parameters.string_value": ("", 'parameters { key: "k" value { string_value: "v" } }'),
    "model_transaction_policy.decoupled": ("", "model_transaction_policy { decoupled: true }"),
    "response_cache.enable": ("", "response_cache { enable: true }"),
    "instance_group.rate_limiter.priority": (
        LIMITED,
        LIMITED.replace("rate_limiter {", "rate_limiter { priority: 2"),
    ),
    **{
        f"instance_group.rate_limiter.resources.{name}": (LIMITED, LIMITED.replace(old, new))
        for name, old, new in (
            ("name", '"R"', '"S"'),
            ("count", "count: 3", "count: 4"),
            ("global", "count", "global: true count"),
        )
    },
    **{f"model_metrics.metric_control.{name}": ("", BUCKETS) for name in BUCKET_FIELDS},
    "model_warmup.name": (WARMUP % ("zero_data: true", ""), 'model_warmup { name: "v" }'),
    "model_warmup.batch_size": ("", WARMUP % ("zero_data: true", "batch_size: 3")),
    "model_warmup.inputs.data_type": ("", WARMUP % ("zero_data: true", "")),
    "model_warmup.inputs.dims": ("", WARMUP % ("zero_data: true", "")),
    "model_warmup.inputs.zero_data": ("", WARMUP % ("zero_data: true", "")),
    "model_warmup.inputs.random_data": ("", WARMUP % ("random_data: true", "")),
    "model_warmup.inputs.input_data_file": ("", WARMUP % ('input_data_file: "raw"', "")),
    "model_warmup.count": ("", WARMUP % ("zero_data: true", "count: 3")),
}
for name, base, value in (
    ("direct.max_queue_delay_microseconds", "", "direct { max_queue_delay_microseconds: 7 }"),
    ("direct.minimum_slot_utilization", "", "direct { minimum_slot_utilization: 0.5 }"),
    ("max_sequence_idle_microseconds", "", "max_sequence_idle_microseconds: 7"),
    ("oldest.max_candidate_sequences", "", "oldest { max_candidate_sequences: 7 }"),
    *(
        (f"oldest.{field}", "oldest { max_candidate_sequences: 7 }", text)
        for field, text in (
            ("preferred_batch_size", "oldest { preferred_batch_size: 2 }"),
            ("max_queue_delay_microseconds", "oldest { max_queue_delay_microseconds: 7 }"),
            ("preserve_ordering", "oldest { preserve_ordering: true }"),
        )
    ),
):
    READ[f"sequence_batching.{name}"] = SEQUENCES % base, SEQUENCES % value
for name, base, value in (
    ("name", "", ""),
    ("control.kind", "START int32_false_true: [0, 1]", "END int32_false_true: [0, 1]"),
    ("control.int32_false_true", "START", "START int32_false_true: [0, 1]"),
    ("control.fp32_false_true", "START", "START fp32_false_true: [0, 1]"),
    ("control.bool_false_true", "START", "START bool_false_true: [false, true]"),
    ("control.data_type", "CORRID data_type: TYPE_INT32", "CORRID data_type: TYPE_INT64"),
):
    tried = CONTROL % (value or "START int32_false_true: [0, 1]")
    READ[f"sequence_batching.control_input.{name}"] = base and CONTROL % base, tried
for name, base, value in (
    ("input_name", SEQUENCES % "", STATE % ""),
    ("output_name", SEQUENCES % "", STATE % ""),
    ("data_type", STATE % "", (STATE % "").replace("INT32", "INT64")),
    ("dims", STATE % "", STATE % "dims: 2"),
    (
        "use_same_buffer_for_input_output",
        STATE % "",
        STATE % "use_same_buffer_for_input_output: true",
    ),
    ("use_growable_memory", STATE % "", STATE % "use_growable_memory: true"),
    ("initial_state.data_type", "", (INITIAL % "1 zero_data: true").replace("INT32", "INT64", 1)),
    ("initial_state.dims", INITIAL % "1 zero_data: true", INITIAL % "2 zero_data: true"),
    ("initial_state.zero_data", INITIAL % "1", INITIAL % "1 zero_data: true"),
    ("initial_state.data_file", INITIAL % "1", INITIAL % "1 data_file: 'first'"),
    ("initial_state.name", INITIAL % "1 zero_data: true", INITIAL % "1 zero_data: true name: 'n'"),
):
    READ[f"sequence_batching.state.{name}"] = base, value
for kind, head in (
    ("default_queue_policy", "default_queue_policy { %s }"),
    ("priority_queue_policy", "priority_queue_policy { key: 1 value { %s } }"),
):
    for name, value in (
        ("timeout_action", "DELAY"),
        ("default_timeout_microseconds", "7"),
        ("allow_timeout_override", "true"),
        ("max_queue_size", "7"),
    ):
        READ[f"dynamic_batching.{kind}.{name}"] = (
            QUEUES % "",
            QUEUES % (head % f"{name}: {value}"),
        )


def fields(descriptor: Any, path: str = "", above: tuple[str, ...] = ()) -> Iterator[str]:
    """The path of every field of a message, and of those in it, without indices and keys."""
    for field in descriptor.fields:
        name = f"{path}{field.name}"
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            inner = inner.fields_by_name["value"].message_type
        if inner is None or not inner.fields or inner.full_name in above:
            yield name
        else:
            yield from fields(inner, f"{name}.", (*above, inner.full_name))


ALL = sorted(fields(model_config_pb2.ModelConfig.DESCRIPTOR))


def fill(message: Any, path: str) -> None:
    """Set the field at the path, and only what it needs to be there, to something that is not its
    default."""
    head, _, rest = path.partition(".")
    field = message.DESCRIPTOR.fields_by_name[head]
    value = getattr(message, head)
    is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
    if is_map:
        entry = field.message_type.fields_by_name
        key = 1 if entry["key"].cpp_type != entry["key"].CPPTYPE_STRING else "key"
        if entry["value"].message_type is not None:
            fill(value[key], rest)
        else:
            value[key] = "value"
    elif field.message_type is not None:
        item = value.add() if field.is_repeated else value
        item.SetInParent()
        if rest:
            fill(item, rest)
    else:
        plain = {field.CPPTYPE_STRING: "text", field.CPPTYPE_BOOL: True}.get(field.cpp_type, 1)
        if field.is_repeated:
            value.append(plain)
        else:
            setattr(message, head, plain)


def group(path: str) -> str:
    """The group that a field belongs to by the tables; a table may name a whole message."""
    above = ["."] + [path[: match.start()] for match in re.finditer(r"\.|$", path)]
    for name, table in (
        ("read", pbtxt_fields.READ),
        ("shown", pbtxt_fields.SHOWN),
        ("granted", pbtxt_fields.GRANTED),
        ("refused", pbtxt_fields.REFUSED),
    ):
        if any(each in table for each in above):
            return name
    return "warned"


def resolve(text: str, root: Path) -> ModelConfig:
    folder = root / "model" / "1"
    if not folder.exists():
        folder.mkdir(parents=True)
        (folder / "model.onnx").write_text("")
        (root / "model" / "l.txt").write_text("cat\ndog\n")
        (root / "model" / "warmup").mkdir()
        (root / "model" / "warmup" / "raw").write_bytes(bytes(16))
        (folder / "net.bin").write_text("")
    return pbtxt.resolve(pbtxt.parse(text), "model", folder)


@pytest.mark.parametrize("path", ALL)
def test_a_field_that_is_not_read_is_shown_refused_or_warned_about(path: str, tmp_path: Path):
    message = pbtxt.parse(BASE)
    fill(message, path)
    text = pbtxt.to_text(message)
    match group(path):
        case "warned":
            [warning] = [w for w in pbtxt_fields.unused(message) if "has no effect" in w]
            place = warning.split(":")[0]
            names = re.sub(r"\[\d+\]|\.key\b|\.1\b", "", place)
            assert path == names or path.startswith(f"{names}.")
        case "refused":
            with pytest.raises(ConfigError) as caught:
                resolve(text, tmp_path)
            head = path.split(".")[0]
            assert any(problem.startswith(head) for problem in caught.value.problems)
        case "read" | "granted" | "shown":
            assert pbtxt_fields.unused(message) == []


def test_what_is_only_shown_is_in_the_answer_of_the_api(tmp_path: Path):
    text = BASE.replace("dims: 4", "dims: [ 4, 4, 4 ] format: FORMAT_NHWC", 1)
    shown = pbtxt.to_json(resolve(text + 'instance_group { name: "both" }', tmp_path))
    assert shown["input"][0]["format"] == "FORMAT_NHWC"
    assert shown["instance_group"][0]["name"] == "both"
    assert {"input.format", "instance_group.name"} == pbtxt_fields.SHOWN


def test_every_field_that_is_read_is_tried_here():
    assert READ.keys() == pbtxt_fields.READ
    assert set(ALL) >= pbtxt_fields.READ | pbtxt_fields.SHOWN | pbtxt_fields.GRANTED


@pytest.mark.parametrize("path", sorted(pbtxt_fields.READ))
def test_a_field_that_is_read_changes_something(path: str, tmp_path: Path, monkeypatch):
    """The configuration, which versions are served, or that the model can be loaded at all."""
    gpu = Gpu(0, "GPU-0", "Made Up", 1 << 34, 1 << 34, compute_capability="9.0")
    monkeypatch.setattr("penstock.system.devices.read_gpus", lambda: (gpu,))
    beside, text = READ[path]

    def outcome(text: str) -> object:
        try:
            config = resolve(text, tmp_path)
        except ConfigError as error:
            return error.problems
        return config, config.warnings, layout.chosen(folder, pbtxt.parse(text), [])

    base = BASE
    if path in ("max_batch_size", "backend"):
        base = re.sub(rf"{path}: .*", "", BASE)
    if path == "platform" or path.startswith("ensemble_scheduling."):
        base = base.replace('backend: "null"', "")
    folder = tmp_path / "model"
    (folder / "2").mkdir(parents=True)
    assert outcome(base + text) != outcome(base + beside)


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        (
            "instance_group { } instance_group { profile: '1' }",
            "instance_group[1].profile: has no effect; the first profile",
        ),
        ("optimization { cuda { graphs: true } }", "optimization.cuda: has no effect; for CUDA"),
        ("optimization { priority: PRIORITY_MAX }", "optimization.priority: has no effect"),
        ("input { is_non_linear_format_io: true }", "input[1].is_non_linear_format_io: has no"),
    ],
)
def test_the_warning_has_the_place_and_what_to_do(text: str, warning: str):
    [found] = pbtxt_fields.unused(pbtxt.parse(BASE + text))
    assert found.startswith(warning)


def test_fields_that_are_set_to_nothing_are_no_warning():
    text = "optimization { } response_cache { } model_transaction_policy { } model_metrics { }"
    found = pbtxt_fields.unused(pbtxt.parse(BASE + text + "instance_group { passive: false }"))
    assert found == []


def test_a_field_that_a_later_message_adds_is_warned_about():
    class Field:
        name, message_type, is_repeated = "brand_new", None, False

    class Message:
        def ListFields(self):
            return [(Field, 1)]

    [warning] = pbtxt_fields.unused(Message())
    assert warning.startswith("brand_new: has no effect")


@pytest.mark.parametrize(
    ("text", "warnings"),
    [
        (
            'parameters { key: "penstock.slo" value { string_value: "p99 < 20ms" } } '
            "dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 9 "
            "default_queue_policy { default_timeout_microseconds: 9 } }",
            [
                "dynamic_batching.preferred_batch_size",
                "dynamic_batching.max_queue_delay_microseconds",
                "dynamic_batching.default_queue_policy.default_timeout_microseconds",
            ],
        ),
        (
            'parameters { key: "penstock.slo" value { string_value: "p99 < 20ms" } } '
            'parameters { key: "penstock.max_wait_ms" value { string_value: "9" } }',
            ["parameters.penstock.max_wait_ms"],
        ),
        ("dynamic_batching { preferred_batch_size: 4 }", []),
        ('platform: "onnxruntime_onnx"', ["platform"]),
    ],
)
def test_what_has_no_effect_beside_the_rest_is_warned_about(text, warnings, tmp_path: Path):
    config = resolve(BASE + text, tmp_path)
    assert [warning.split(": ")[0] for warning in config.warnings] == warnings


def test_memory_that_is_not_to_be_pinned_is_a_warning() -> None:
    both = "input_pinned_memory { enable: false } output_pinned_memory { enable: %s }"
    for last, names in (("false", ("input", "output")), ("true", ("input",))):
        message = pbtxt.parse(BASE + f"optimization {{ {both % last} }}")
        assert pbtxt_fields.unused(message) == [
            f"optimization.{name}_pinned_memory.enable: has no effect; memory that a GPU copies is "
            "always pinned"
            for name in names
        ]
