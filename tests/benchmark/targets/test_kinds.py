"""Which target an address stands for."""

import pytest
import text_server
from e2e.served import null_model

from penstock.benchmark.targets import TargetSpec
from penstock.benchmark.targets.in_process import InProcess
from penstock.benchmark.targets.in_process_text import InProcessText
from penstock.benchmark.targets.kinds import CLASSES, kind_of, open_target
from penstock.benchmark.targets.plain import PlainHttp
from penstock.benchmark.targets.v2_target import V2HttpTarget
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    "spec, kind",
    [
        (TargetSpec("http://a:8000/v2/models/m"), "v2 HTTP"),
        (TargetSpec("https://a/prefix/v2/models/m/versions/1/infer"), "v2 HTTP"),
        (TargetSpec("http://a:8000", model="m"), "v2 HTTP"),
        (TargetSpec("http://a:8000/v2"), "v2 HTTP"),
        (TargetSpec("grpc://a:8001/m"), "v2 gRPC"),
        (TargetSpec("grpcs://a:8001/m/1"), "v2 gRPC"),
        (TargetSpec("openai+http://a:8000/v1", model="m"), "OpenAI"),
        (TargetSpec("openai+https://a/v1"), "OpenAI"),
        (TargetSpec("http://a/v1/chat/completions", model="m"), "OpenAI"),
        (TargetSpec("http://a/v1/completions"), "OpenAI"),
        (TargetSpec("http://a/v1/completions", body="{prompt}"), "HTTP"),
        (TargetSpec("http://a/v2/models/m/infer", body="{}"), "HTTP"),
        (TargetSpec("http://a/predict"), "HTTP"),
        (TargetSpec("http://a"), "HTTP"),
    ],
)
def test_an_address_says_what_it_is(spec, kind):
    assert kind_of(spec) == kind
    assert kind in CLASSES


def test_a_folder_is_a_model_in_this_process(tmp_path):
    assert kind_of(TargetSpec(str(tmp_path))) == "in process"


@pytest.mark.parametrize(
    "address, problem",
    [
        ("no/such/folder", "no such file or folder; expected model.onnx"),
        ("localhost:8000/v2/models/m", "did you mean http://localhost:8000/v2/models/m"),
        ("me:secret@localhost/v2", r"^[^s]*\*\*\*"),
        ("redis://a", "unknown protocol 'redis'; expected http://"),
        ("", "no model is given"),
    ],
)
def test_anything_else_is_refused_with_what_was_expected(address, problem):
    with pytest.raises(ConfigError, match=problem):
        kind_of(TargetSpec(address))


def test_a_target_is_made():
    assert isinstance(open_target(TargetSpec("http://a/v2/models/m")), V2HttpTarget)
    assert isinstance(open_target(TargetSpec("http://a/predict")), PlainHttp)


@pytest.fixture
def root(tmp_path):
    null_model(tmp_path, "m")
    text_server.write_model(tmp_path)
    return tmp_path


def test_a_language_model_takes_text(root):
    specs = [TargetSpec(str(root / "smol")), TargetSpec(str(root), model="smol")]
    for spec in specs:
        assert kind_of(spec) == "text in process"
        assert isinstance(open_target(spec), InProcessText)


def test_a_gguf_file_is_one(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert kind_of(TargetSpec(str(tmp_path / "x.gguf"))) == "text in process"


def test_others_take_tensors_and_what_is_wrong_is_told_by_them(root):
    for spec in (
        TargetSpec(str(root / "m")),
        TargetSpec(str(root), model="m"),
        TargetSpec(str(root), model="none"),
        TargetSpec(str(root)),
    ):
        assert kind_of(spec) == "in process" and isinstance(open_target(spec), InProcess)
