"""Writing config.pbtxt: what is written reads back to the same; editing loses nothing."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from example_counts import at_most
from google.protobuf import json_format, text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2

from penstock import slo
from penstock.config import (
    MAX_INSTANCES,
    BatchPolicy,
    MemoryPolicy,
    ModelConfig,
    PadAxis,
    Padding,
    Postprocess,
    Preprocess,
    QueuePolicy,
    ScalingConfig,
)
from penstock.errors import ConfigError
from penstock.repository import parameters, pbtxt
from penstock.types import DATATYPES, TensorSpec

MODEL = ModelConfig(
    name="model",
    version="3",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "FP32", (4,)),),
    outputs=(TensorSpec("y", "FP32", (4,)),),
    max_batch_size=8,
    batching=BatchPolicy(8),
)

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
microseconds = st.integers(0, 10**12).map(lambda number: number / 1e6)
shapes = st.lists(st.just(-1) | st.integers(1, 2**40), max_size=4).map(tuple)
queues = st.builds(
    QueuePolicy,
    timeout_action=st.sampled_from(["REJECT", "DELAY"]),
    default_timeout_s=microseconds,
    allow_timeout_override=st.booleans(),
    max_queue_size=st.integers(0, 2**32 - 1),
)
memories = st.builds(
    MemoryPolicy,
    slab_bytes=st.none() | st.integers(1, 1 << 40),
    max_slabs=st.integers(1, 4096),
    spill_bytes=st.integers(1, 1 << 40),
)
promises = st.sampled_from(
    ["", "off", "p99 < 20ms", "p50 < 250us, p99.9 < 1.5s at 200/s gamma 3", "throughput >= 5/s"]
)


@st.composite
def tensors(draw: st.DrawFn, is_output: bool) -> tuple[TensorSpec, ...]:
    names = draw(st.lists(texts, min_size=1, max_size=3, unique=True))
    datatypes = st.sampled_from(sorted(DATATYPES))
    if is_output:
        labels = draw(st.sampled_from(["", "labels.txt"]))
        words = ("cat", "dog") if labels else ()
        return tuple(
            TensorSpec(name, draw(datatypes), draw(shapes), label_file=labels, labels=words)
            for name in names
        )
    return tuple(
        TensorSpec(name, draw(datatypes), draw(shapes), is_optional=draw(st.booleans()))
        for name in names
    )


functions = st.sampled_from(["code.py:first", "code.py:_other"])
# Without what separates them where they are listed in one parameter.
model_tensors = st.lists(
    st.builds(
        TensorSpec,
        st.text("abAB_.0/", min_size=1, max_size=8),
        st.sampled_from(sorted(DATATYPES)),
        shapes,
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda spec: spec.name,
).map(tuple)


@st.composite
def policies(draw: st.DrawFn, max_batch: int, latency_s: float | None) -> BatchPolicy:
    plain = BatchPolicy(max(1, max_batch), slo_latency_s=latency_s)
    if not max_batch or draw(st.booleans()):
        return plain
    levels = draw(st.integers(0, 4))
    queue = draw(st.lists(queues, min_size=levels + 1, max_size=levels + 1))
    can_overtake = levels > 1 or any(q.timeout_action == "DELAY" for q in queue)
    return replace(
        plain,
        is_dynamic=True,
        preferred_batch_sizes=tuple(sorted(draw(st.sets(st.integers(1, max_batch), max_size=3)))),
        max_queue_delay_s=draw(microseconds),
        preserve_ordering=not can_overtake and draw(st.booleans()),
        num_priorities=levels,
        default_priority=draw(st.integers(1, levels)) if levels else 0,
        policies=tuple(queue),
    )


@st.composite
def paddings(draw: st.DrawFn, inputs: tuple[TensorSpec, ...]) -> Padding | None:
    axes = [
        PadAxis(spec.name, axis, float(draw(st.booleans())))
        for spec in inputs
        for axis, size in enumerate(spec.shape)
        if size == -1 and spec.datatype != "BYTES" and spec.name.isidentifier()
    ]
    buckets = draw(st.sets(st.integers(1, 1 << 20), min_size=1, max_size=5))
    return Padding(tuple(axes), tuple(sorted(buckets))) if axes and draw(st.booleans()) else None


places = st.sampled_from(["cpu", "cuda", "cuda:0", "cuda:1", "cuda:7"])


seconds = st.floats(1e-3, 1e9)
# Any number at the start is between these limits; on GPUs, some backends allow no more than it.
scalings = st.builds(ScalingConfig, st.none() | st.just(0), st.none(), seconds, seconds, seconds)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    max_batch = draw(st.sampled_from([0, 1, 64]))
    promised = draw(promises)
    latency_s = slo.parse(promised).latency_s if promised not in ("", "off") else None
    inputs = draw(tensors(is_output=False))
    preprocess = draw(st.none() | st.builds(Preprocess, functions, model_tensors))
    padding = draw(paddings(preprocess.inputs if preprocess else inputs))
    batching = draw(policies(max_batch, latency_s))
    waits = st.none() | st.integers(0, 10**9).map(lambda number: number / 1e3)
    batching = replace(batching, max_wait_s=draw(waits))
    if batching.is_dynamic and padding is not None and preprocess is None:
        most = draw(st.none() | st.integers(padding.buckets[-1], 1 << 40))
        batching = replace(batching, max_tokens=most)
    config = replace(
        MODEL,
        inputs=inputs,
        padding=None if preprocess else padding,
        preprocess=replace(preprocess, padding=padding) if preprocess else None,
        postprocess=draw(st.none() | st.builds(Postprocess, functions, model_tensors)),
        tolerance=draw(st.none() | st.floats(1e-9, 1.0)),
        outputs=draw(tensors(is_output=True)),
        max_batch_size=max_batch,
        batching=batching,
        gpu_memory_bytes=draw(st.none() | st.integers(1, 1 << 50)),
        memory=draw(memories),
        scaling=draw(scalings),
        hang_s=draw(st.floats(1e-3, 1e9)),
        load_timeout_s=draw(st.floats(1e-3, 1e9)),
        memory_bytes=draw(st.none() | st.integers(1, 1 << 50)),
        env=draw(st.lists(st.sampled_from(["TOKEN", "_a1", "MY_*"]), max_size=3).map(tuple)),
        file=draw(st.sampled_from(["", "net.bin", "parts/net.bin"])),
        options=draw(st.dictionaries(texts, texts, max_size=3)),
        slo=promised,
    )
    return config.on(draw(st.lists(places, min_size=1, max_size=MAX_INSTANCES)))


def read_back(text: str, root: str) -> ModelConfig:
    """Through files, as a version of the model `model`."""
    folder = Path(root).resolve() / "3"
    (folder / "parts").mkdir(parents=True)
    for name in ("labels.txt", "net.bin", "parts/net.bin", "code.py"):
        (folder / name).write_text("cat\ndog\n")
    return replace(pbtxt.resolve(pbtxt.parse(text), "model", folder), artifact="")


@settings(max_examples=at_most(300))
@given(configs())
def test_what_is_written_reads_back_to_an_equal_configuration(config: ModelConfig) -> None:
    with tempfile.TemporaryDirectory() as root:
        text = pbtxt.write(config)
        again = read_back(text, root)
        assert again == config
        assert pbtxt.write(again) == text
        shown = json_format.ParseDict(pbtxt.to_json(again), model_config_pb2.ModelConfig())
        assert shown == pbtxt.to_served(again), "gRPC answers with the JSON of /config"


def test_the_file_chooses_no_version() -> None:
    assert not pbtxt.parse(pbtxt.write(MODEL)).HasField("version_policy")


def test_an_slo_of_the_evidence_is_described_and_not_written() -> None:
    config = replace(
        MODEL,
        slo="p99 < 20ms",
        is_slo_from_evidence=True,
        batching=replace(MODEL.batching, slo_latency_s=0.02),
    )
    assert (
        pbtxt.parse(pbtxt.describe(config)).parameters[parameters.SLO].string_value == "p99 < 20ms"
    )
    assert parameters.SLO not in pbtxt.parse(pbtxt.write(config)).parameters


# Everything here is read and not interpreted, or is interpreted and the same as in MODEL.
UNINTERPRETED = """
name: "model"
backend: "null"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 4 format: FORMAT_NCHW is_shape_tensor: true }
output { name: "y" data_type: TYPE_FP32 dims: 4 is_shape_tensor: true }
instance_group {
  name: "both" count: 1 kind: KIND_CPU host_policy: "numa"
  rate_limiter { priority: 2 resources { name: "R" count: 4 } }
}
optimization { priority: PRIORITY_MAX graph { level: 1 } input_pinned_memory { enable: true } }
metric_tags { key: "team" value: "vision" }
parameters { key: "mine" value { string_value: "1" } }
model_warmup { name: "zeros" batch_size: 1 inputs { key: "x" value {
  data_type: TYPE_FP32 dims: 4 zero_data: true } } }
response_cache { }
"""


def parsed(text: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def test_editing_leaves_everything_that_is_not_interpreted() -> None:
    base = parsed(UNINTERPRETED)
    assert parsed(pbtxt.write(replace(MODEL, options={"mine": "1"}), base)) == base


def test_editing_changes_what_was_changed_and_nothing_else() -> None:
    base = parsed(UNINTERPRETED + "dynamic_batching { preferred_batch_size: 4 }")
    expected = parsed(UNINTERPRETED + "dynamic_batching { priority_levels: 0 }")
    expected.max_batch_size = 16
    expected.instance_group[0].count = 3
    expected.input[0].dims[:] = [5]
    expected.parameters["mine"].string_value = "2"
    # It does not fit the new input.
    expected.ClearField("model_warmup")
    edited = replace(
        MODEL,
        inputs=(TensorSpec("x", "FP32", (5,)),),
        max_batch_size=16,
        batching=BatchPolicy(16, is_dynamic=True),
        num_instances=3,
        options={"mine": "2"},
    )
    assert parsed(pbtxt.write(edited, base)) == expected


def test_groups_that_say_the_same_in_other_words_stay() -> None:
    base = parsed(UNINTERPRETED)
    base.instance_group.add(count=2, kind=model_config_pb2.ModelInstanceGroup.KIND_MODEL)
    written = parsed(pbtxt.write(replace(MODEL, num_instances=3), base))
    assert written.instance_group == base.instance_group


def test_platform_of_another_backend_goes() -> None:
    base = parsed('platform: "onnxruntime_onnx"')
    assert parsed(pbtxt.write(MODEL, base)).platform == ""
    onnx = replace(MODEL, backend="onnxruntime")
    assert parsed(pbtxt.write(onnx, base)).platform == "onnxruntime_onnx"


def test_the_same_configuration_is_always_the_same_text() -> None:
    options = {f"key{number}": str(number) for number in range(50)}
    backwards = dict(reversed(options.items()))
    one, other = (pbtxt.write(replace(MODEL, options=each)) for each in (options, backwards))
    assert one == other


def test_an_escape_that_nobody_knows_is_no_warning() -> None:
    assert pbtxt.parse(r'name: "a\ b"').name == "a\\ b"


class TestServed:
    """What `/config` returns."""

    text = """
    platform: "onnxruntime_onnx"
    max_batch_size: 8
    version_policy { all { } }
    input { name: "x" data_type: TYPE_FP32 dims: [ 4, 4, 4 ] format: FORMAT_NCHW }
    output { name: "y" data_type: TYPE_FP32 dims: 4 }
    dynamic_batching { preferred_batch_size: [ 8, 4 ] }
    optimization { priority: PRIORITY_MAX }
    metric_tags { key: "team" value: "vision" }
    model_warmup { name: "w" inputs { key: "x" value {
      data_type: TYPE_FP32 dims: [ 4, 4, 4 ] random_data: true } } }
    parameters { key: "penstock.hang_s" value { string_value: "30" } }
    parameters { key: "mine" value { string_value: "1" } }
    """

    def served(self, text: str, root: Path) -> model_config_pb2.ModelConfig:
        folder = root / "model" / "1"
        folder.mkdir(parents=True)
        (folder / "model.onnx").write_bytes(b"")
        return pbtxt.to_served(pbtxt.resolve(pbtxt.parse(text), "model", folder))

    def test_it_says_what_is_written(self, tmp_path: Path) -> None:
        served, written = self.served(self.text, tmp_path), parsed(self.text)
        for field, value in written.ListFields():
            if field.name not in ("input", "output"):
                assert getattr(served, field.name) == value, field.name
        assert served.input[0] == written.input[0]
        assert served.output[0] == written.output[0]

    def test_what_was_worked_out_is_added(self, tmp_path: Path) -> None:
        served = self.served(self.text, tmp_path)
        assert (served.name, served.backend) == ("model", "onnxruntime")
        assert served.instance_group[0].count == 1

    def test_without_a_word_it_is_as_in_triton(self, tmp_path: Path) -> None:
        text = """max_batch_size: 8 backend: "onnxruntime"
        input { name: "x" data_type: TYPE_FP32 dims: 4 }
        output { name: "y" data_type: TYPE_FP32 dims: 4 }"""
        served = self.served(text, tmp_path)
        assert served.version_policy.latest.num_versions == 1
        assert served.platform == "onnxruntime_onnx"

    def test_an_slo_of_the_evidence_is_told(self, tmp_path: Path) -> None:
        folder = tmp_path / "model" / "1"
        folder.mkdir(parents=True)
        (folder / "model.onnx").write_bytes(b"")
        config = pbtxt.resolve(pbtxt.parse(self.text), "model", folder)
        config = replace(config, slo="p99 < 20ms", is_slo_from_evidence=True)
        assert pbtxt.to_served(config).parameters[parameters.SLO].string_value == "p99 < 20ms"


@pytest.mark.parametrize("tag", ["model", "le", "my-team", "1st", "__name__", ""])
def test_a_tag_that_is_no_label_is_refused(tag: str, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    message = pbtxt.to_message(MODEL)
    message.metric_tags[tag] = "x"
    with pytest.raises(ConfigError) as caught:
        pbtxt.resolve(message, "model", tmp_path / "1")
    assert caught.value.problems[0].startswith(f"metric_tags.{tag}: ")


ON_A_GPU = """
platform: "onnxruntime_onnx"
max_batch_size: 16
input [{ name: "x", data_type: TYPE_FP32, dims: [4] }]
output [{ name: "y", data_type: TYPE_FP32, dims: [4] }]
dynamic_batching { }
parameters { key: "penstock.dtype" value { string_value: "fp16" } }
"""


def test_onnx_files_have_the_options_of_the_engine_that_runs_them_on_a_gpu(tmp_path: Path) -> None:
    text = ON_A_GPU + "instance_group [{ count: 2, kind: KIND_GPU }]"
    config = pbtxt.resolve(pbtxt.parse(text), "m", tmp_path, tmp_path / "model.onnx")
    assert (config.engine, config.device, config.num_instances) == ("pytorch", "cuda", 2)
    assert config.options == {"penstock.dtype": "fp16"}
    assert not config.is_gpu_optional
    assert config.warnings == ()


def test_a_file_that_cannot_be_read_is_the_only_problem(tmp_path: Path) -> None:
    """Batching is not: the file might have allowed it."""
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.onnx").write_bytes(b"no model")
    for batch in ("", "max_batch_size: 8 "):
        text = f'platform: "onnxruntime_onnx" {batch}dynamic_batching {{ }}'
        with pytest.raises(ConfigError) as caught:
            pbtxt.resolve(pbtxt.parse(text), "m", tmp_path / "1")
        [problem] = caught.value.problems
        assert problem.startswith("1/model.onnx: cannot be read as ONNX")


def test_pytorch_takes_an_onnx_file_by_its_name(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Relu", ["x"], ["y"])],
        "made",
        [value("x", onnx.TensorProto.FLOAT, ["n", 4])],
        [value("y", onnx.TensorProto.FLOAT, ["n", 4])],
    )
    (tmp_path / "1").mkdir()
    onnx.save(onnx.helper.make_model(graph), tmp_path / "1" / "model.onnx")
    text = 'backend: "pytorch" default_model_filename: "model.onnx" max_batch_size: 8'
    config = pbtxt.resolve(pbtxt.parse(text), "m", tmp_path / "1")
    assert config.engine == "pytorch" and Path(config.artifact).name == "model.onnx"
    assert [spec.shape for spec in (*config.inputs, *config.outputs)] == [(4,), (4,)]


NOT_OF_PYTORCH = ["execution_mode", "gpu_mem_limit", "session.x"]
KIND = "instance_group [{ kind: KIND_%s }]"


@pytest.mark.parametrize(
    ("file", "text", "unknown"),
    [
        ("model.onnx", 'backend: "onnxruntime" ' + KIND % "CPU", ["FOO", "gpu_mem_limit"]),
        ("model.onnx", ON_A_GPU + KIND % "GPU", ["FOO", *NOT_OF_PYTORCH]),
        # Where there is no GPU, ONNX Runtime runs the model.
        ("model.onnx", ON_A_GPU + KIND % "AUTO", ["FOO", "gpu_mem_limit"]),
        ("model.xml", 'backend: "openvino"', ["FOO", "execution_mode", "gpu_mem_limit"]),
        ("model.py", 'backend: "python"', []),
    ],
)
def test_keys_that_the_engine_does_not_know_are_told(
    tmp_path: Path, file: str, text: str, unknown: list[str]
) -> None:
    keys = ["FOO", "execution_mode", "gpu_mem_limit", "session.x", "NUM_STREAMS"]
    used = {"model.onnx": ["session.x"], "model.xml": ["NUM_STREAMS"]}.get(file, [])
    for key in keys[:3] + used:
        text += f' parameters {{ key: "{key}" value {{ string_value: "1" }} }}'
    if "input" not in text:
        text += ' input { name: "x" data_type: TYPE_FP32 dims: [4] }'
        text += ' output { name: "y" data_type: TYPE_FP32 dims: [4] }'
    config = pbtxt.resolve(pbtxt.parse(text), "m", tmp_path, tmp_path / file)
    told = [each for each in config.warnings if "does not know it" in each]
    assert [each.partition(":")[0] for each in told] == [f"parameters.{key}" for key in unknown]
    assert all("it knows i" in each for each in told), told


def test_these_options_have_no_effect_on_a_cpu(tmp_path: Path) -> None:
    text = ON_A_GPU + "instance_group [{ kind: KIND_CPU }]"
    config = pbtxt.resolve(pbtxt.parse(text), "m", tmp_path, tmp_path / "model.onnx")
    (warning,) = config.warnings
    assert warning.startswith("parameters.penstock.dtype: has no effect; ONNX Runtime runs the")
