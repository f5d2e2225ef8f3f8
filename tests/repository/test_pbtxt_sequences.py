"""`sequence_batching` in config.pbtxt; the rules are Triton's."""

from pathlib import Path

import pytest

from penstock.config import ModelConfig, SequenceControl, SequenceState
from penstock.errors import ConfigError
from penstock.repository import pbtxt

BASE = """
backend: "null" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
sequence_batching { %s }
"""
FULL = """
  max_sequence_idle_microseconds: 5000000
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [0, 2] } }
  control_input { name: "END"
    control { kind: CONTROL_SEQUENCE_END bool_false_true: [false, true] } }
  control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }
  state { input_name: "in" output_name: "out" data_type: TYPE_INT32 dims: [ 2, -1 ]
    use_same_buffer_for_input_output: true
    initial_state { name: "first" data_type: TYPE_INT32 dims: [ 2, 3 ] %s } }
"""
START = (
    'control_input { name: "S" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] }}'
)


def resolve(text: str, root: Path) -> ModelConfig:
    folder = root / "model" / "1"
    folder.mkdir(parents=True, exist_ok=True)
    return pbtxt.resolve(pbtxt.parse(text), "model", folder)


def problems(text: str, root: Path) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        resolve(BASE % text, root)
    return caught.value.problems


def test_every_field_is_read_and_written_back(tmp_path: Path):
    (tmp_path / "model" / "initial_state").mkdir(parents=True)
    (tmp_path / "model" / "initial_state" / "first.bin").write_bytes(bytes(24))
    for initial, file in (("zero_data: true", ""), ('data_file: "first.bin"', "first.bin")):
        config = resolve(BASE % (FULL % initial), tmp_path)
        policy = config.sequences
        assert policy is not None
        assert policy.is_direct
        assert policy.max_idle_s == 5.0
        assert policy.controls == (
            SequenceControl("START", "START", "FP32", (0.0, 1.0)),
            SequenceControl("READY", "READY", "INT32", (0.0, 2.0)),
            SequenceControl("END", "END", "BOOL", (0.0, 1.0)),
            SequenceControl("ID", "CORRID", "BYTES"),
        )
        shapes = ((2, -1), (2, 3))
        state = SequenceState("in", "out", "INT32", *shapes, file, "first", has_same_buffer=True)
        assert policy.states == (state,)
        assert config.warnings == ()
        assert config.has_one_owner
        assert resolve(pbtxt.describe(config), tmp_path) == config
        shown = pbtxt.to_json(config)["sequence_batching"]
        assert isinstance(shown, dict)
        assert [each["name"] for each in shown["control_input"]] == ["START", "READY", "END", "ID"]


def test_the_model_has_tensors_that_clients_do_not_see(tmp_path: Path):
    config = resolve(BASE % (FULL % "zero_data: true"), tmp_path)
    own = config.in_sequences
    assert [spec.name for spec in config.inputs] == ["x"]
    assert [spec.name for spec in own.inputs] == ["x", "START", "READY", "END", "ID", "in"]
    assert [spec.name for spec in own.outputs] == ["y", "out"]
    assert own.sequences is None


def test_oldest(tmp_path: Path):
    text = """oldest { max_candidate_sequences: 9 preferred_batch_size: [ 4, 2 ]
      max_queue_delay_microseconds: 100 preserve_ordering: true }"""
    config = resolve(BASE % text, tmp_path)
    assert config.sequences is not None
    assert not config.sequences.is_direct
    assert config.num_sequence_slots == 9
    assert config.batching.preferred_batch_sizes == (2, 4)
    assert config.batching.max_queue_delay_s == 1e-4
    assert config.batching.preserve_ordering
    assert resolve(pbtxt.describe(config), tmp_path) == config


def test_direct(tmp_path: Path):
    text = "direct { max_queue_delay_microseconds: 100 minimum_slot_utilization: 0.5 }"
    config = resolve(BASE % text, tmp_path)
    assert config.sequences is not None
    assert config.sequences.is_direct
    assert config.sequences.min_utilization == 0.5
    assert config.sequences.max_idle_s == 1.0, "the default"
    assert config.num_sequence_slots == 4
    assert resolve(pbtxt.describe(config), tmp_path) == config


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("oldest { }", "sequence_batching.oldest.max_candidate_sequences: 0; expected 1 to"),
        (
            "oldest { max_candidate_sequences: 1 preferred_batch_size: 5 }",
            "sequence_batching.oldest.preferred_batch_size: [5]: each must be from 1 to",
        ),
        (
            "direct { minimum_slot_utilization: 1.5 }",
            "sequence_batching.direct.minimum_slot_utilization: 1.5; expected a share",
        ),
        (
            "iterative_sequence: true",
            "sequence_batching: iterative_sequence is not supported",
        ),
        (START + START.replace('"S"', '"T"'), "2 inputs for CONTROL_SEQUENCE_START"),
        (START.replace('"S"', '"x"'), "input 'x' is given 2 times"),
        (START.replace("[0, 1]", "[0]"), "1 values for CONTROL_SEQUENCE_START; expected 2"),
        (START.replace("int32_false_true: [0, 1]", ""), "nothing given; expected one of int32"),
        (
            START.replace("[0, 1]", "[0, 1] fp32_false_true: [0, 1]"),
            "int32_false_true and fp32_false_true given; expected one",
        ),
        (START.replace("[0, 1]", "[0, 1] data_type: TYPE_INT32"), "data_type: not for"),
        ('control_input { name: "S" }', "'S' has 0 controls; expected one"),
        ("control_input { control { } }", "sequence_batching.control_input[0].name: missing"),
        (
            'control_input { name: "c" control { kind: CONTROL_SEQUENCE_CORRID '
            "data_type: TYPE_FP32 } }",
            "FP32; expected TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 or TYPE_STRING",
        ),
        (
            'control_input { name: "c" control { kind: CONTROL_SEQUENCE_CORRID '
            "int32_false_true: [0, 1] } }",
            "int32_false_true: not for CONTROL_SEQUENCE_CORRID",
        ),
        ("state { }", "sequence_batching.state[0].input_name: missing"),
        ("state { }", "sequence_batching.state[0].data_type: INVALID is no datatype"),
    ],
)
def test_wrong_fields_are_refused(text: str, problem: str, tmp_path: Path):
    found = problems(text, tmp_path)
    assert any(problem in each for each in found), found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("dims: 0", "dims: [0]: each must be positive or -1"),
        ("dims: 1 use_growable_memory: true", "use_growable_memory: not supported"),
        ("dims: 1 initial_state { data_type: TYPE_FP32 dims: 1 }", "expected zero_data: true or a"),
        (
            "dims: 1 initial_state { data_type: TYPE_INT32 dims: 1 zero_data: true }",
            "INT32; expected the state's FP32",
        ),
        (
            "dims: -1 initial_state { data_type: TYPE_FP32 dims: -1 zero_data: true }",
            "[-1]; expected a shape that fits the state's [-1]",
        ),
        (
            'dims: 1 initial_state { data_type: TYPE_FP32 dims: 1 data_file: "no" }',
            "no file 'no' in the folder initial_state beside the versions",
        ),
        (
            'dims: 1 initial_state { data_type: TYPE_FP32 dims: 1 data_file: "../config.pbtxt" }',
            "leaves the folder initial_state",
        ),
        (
            'dims: 1 initial_state { data_type: TYPE_FP32 dims: 1 data_file: "short" }',
            "'short' has 3 bytes, but [1] of FP32 take 4",
        ),
    ],
)
def test_wrong_states_are_refused(text: str, problem: str, tmp_path: Path):
    (tmp_path / "model" / "initial_state").mkdir(parents=True)
    (tmp_path / "model" / "initial_state" / "short").write_bytes(b"abc")
    state = f'state {{ input_name: "a" output_name: "b" data_type: TYPE_FP32 {text} }}'
    found = problems(state, tmp_path)
    assert any(problem in each for each in found), found


@pytest.mark.parametrize(
    ("field", "value"),
    [("slo", "p99 < 20ms"), ("max_instances", "4"), ("preprocess", "steps.py:read")],
)
def test_what_does_not_fit_sequences_is_refused(field: str, value: str, tmp_path: Path):
    parameter = f'parameters {{ key: "penstock.{field}" value {{ string_value: "{value}" }} }}'
    folder = tmp_path / "model" / "1"
    folder.mkdir(parents=True)
    (folder / "steps.py").write_text("def read(x):\n    return x\n")
    with pytest.raises(ConfigError) as caught:
        resolve(BASE % "" + parameter, tmp_path)
    assert any("sequence" in each for each in caught.value.problems), caught.value.problems


def test_a_state_that_is_shown_must_agree_with_its_output(tmp_path: Path):
    state = 'state { input_name: "a" output_name: "y" data_type: TYPE_INT32 dims: 1 }'
    (problem,) = problems(state, tmp_path)
    assert "output 'y' has another datatype or other dims in output" in problem
