"""What a client may send with a load, and what is refused before anything is written."""

from pathlib import PurePosixPath

import pytest

from penstock.config import LoadPermissions
from penstock.errors import BackendFailed, InvalidRequest, NotAllowed
from penstock.repository import load_request, pbtxt
from penstock.repository.load_request import check_name, check_settings, parse

FILES = LoadPermissions(files=True)
ALL = LoadPermissions(files=True, code=True)
ONNX = {"config": '{"backend": "onnxruntime"}'}


def test_without_parameters_the_repository_is_loaded():
    assert parse({}, {}, LoadPermissions()).config is None


def test_a_configuration_alone_needs_no_flag():
    request = parse({"config": '{"max_batch_size": 3}'}, {}, LoadPermissions())
    assert request.config.max_batch_size == 3 and request.files == {}


def test_files_are_kept_by_their_path_below_the_model():
    files = {"file:1/model.onnx": b"a", "file:12/sub/weights.bin": b"b"}
    request = parse(ONNX, files, FILES)
    assert {str(path): data for path, data in request.files.items()} == {
        "1/model.onnx": b"a",
        "12/sub/weights.bin": b"b",
    }
    assert "12/sub/weights.bin (1 bytes)" in request.describe()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("file:../model.onnx", "'..' is no version number"),
        ("file:1/../../model.onnx", "'..' is not allowed"),
        ("file:1/./model.onnx", "'.' is not allowed"),
        ("file:/etc/passwd", "'' is no version number"),
        ("file:1//model.onnx", "'' is not allowed"),
        ("file:1/model.onnx/", "'' is not allowed"),
        ("file:01/model.onnx", "'01' is no version number"),
        ("file:0/model.onnx", "'0' is no version number"),
        (f"file:{2**63}/model.onnx", "is no version number"),
        ("file:model.onnx", "'model.onnx' is no version number"),
        ("file:1", "no file is named"),
        ("file:", "'' is no version number"),
        ("file:1/.hidden.onnx", "'.hidden.onnx' is not allowed"),
        ("file:1/a\0.onnx", "is not allowed"),
        ("file:1/a\n.onnx", "is not allowed"),
        ("file:1/a\\b.onnx", "is not allowed"),
        ("file:1/-rf.onnx", "is not allowed"),
        ("file:1/" + "a/" * 9 + "b.onnx", "more than 8 folders"),
        ("file:1/config.pbtxt", "cannot be sent"),
        ("file:1/manifest.json", "cannot be sent"),
        ("1/model.onnx", "expected text"),
    ],
)
def test_names_that_are_not_files_of_a_version_are_refused(name, why):
    with pytest.raises(InvalidRequest, match="parameter") as refused:
        parse(ONNX, {name: b""}, ALL)
    assert why in str(refused.value)


@pytest.mark.parametrize("name", ["file:" + "A" * 256, "file:1/" + "ä" * 128 + "/model.onnx"])
def test_names_that_no_file_system_takes_fail_as_in_triton(name):
    for allowed in (LoadPermissions(), ALL):
        with pytest.raises(BackendFailed, match="^failed to poll from model repository: 'file:"):
            parse(ONNX, {name: b""}, allowed)


@pytest.mark.parametrize(
    ("parameters", "files", "why"),
    [
        ({"confg": "{}"}, {}, "unrecognized load parameter 'confg'"),
        ({"config": 3}, {}, "expected a configuration as JSON text"),
        ({"config": "{"}, {}, "parameter 'config'"),
        ({"config": "[1]"}, {}, "parameter 'config'"),
        ({"config": '{"no_such_field": 1}'}, {}, "no_such_field"),
        ({"config": '{"max_batch_size": "many"}'}, {}, "max_batch_size"),
        ({"config": '{"a":' * 5000}, {}, "parameter 'config'"),
        ({"config": "{}", "file:1/model.onnx": "text"}, {}, "expected the bytes of a file"),
        ({}, {"file:1/model.onnx": b""}, "need 'config'"),
        (ONNX, {"file:1/a": b"", "file:1/a/b": b""}, "cannot be a file and a folder"),
        (ONNX, {f"file:1/{n}.bin": b"" for n in range(257)}, "at most 256"),
    ],
)
def test_malformed_parameters_are_refused(parameters, files, why):
    with pytest.raises(InvalidRequest) as refused:
        parse(parameters, files, ALL)
    assert why in str(refused.value) and "\n" not in str(refused.value)


def test_files_need_the_operator_to_allow_them():
    with pytest.raises(NotAllowed, match="--allow-load-files"):
        parse(ONNX, {"file:1/model.onnx": b""}, LoadPermissions())


@pytest.mark.parametrize("name", ["model.py", "model.pt", "model.pt2", "x.so", "model.plan", "run"])
def test_code_needs_the_operator_to_allow_it(name):
    files = {"file:1/model.onnx": b"", f"file:1/{name}": b""}
    with pytest.raises(NotAllowed, match="--allow-load-code"):
        parse(ONNX, files, FILES)
    assert PurePosixPath("1", name) in parse(ONNX, files, ALL).files


@pytest.mark.parametrize(
    "config",
    [
        '{"backend": "python", "default_model_filename": "weights.bin"}',
        '{"backend": "pytorch", "default_model_filename": "weights.bin"}',
        '{"platform": "tensorrt_plan", "default_model_filename": "weights.bin"}',
        '{"platform": "pytorch_libtorch", "default_model_filename": "weights.bin"}',
        '{"default_model_filename": "weights.bin"}',
        '{"backend": "pytorch", "cc_model_filenames": {"9.0": "weights.bin"}}',
        '{"cc_model_filenames": {"9.0": "weights.bin"}}',
        '{"model_operations": {"op_library_filename": ["weights.bin"]}}',
        '{"optimization": {"execution_accelerators": {"gpu_execution_accelerator": [{"name": '
        '"tensorrt", "parameters": {"trt_extra_plugin_lib_paths": "/tmp/x"}}]}}}',
        '{"parameters": {"session.x": {"string_value": "y"}}}',
        '{"parameters": {"provider_options.T.lib": {"string_value": "/tmp/x.so"}}}',
    ],
)
def test_data_that_a_backend_would_run_is_code(config):
    with pytest.raises(NotAllowed, match="--allow-load-code"):
        parse({"config": config}, {"file:1/weights.bin": b""}, FILES)


def test_a_configuration_chooses_no_code_that_the_repository_does_not():
    own = pbtxt.parse(
        'backend: "python" parameters { key: "providers" value { string_value: "a" }}'
    )
    check_settings(own, own)
    accelerated = pbtxt.parse(
        "optimization { execution_accelerators { gpu_execution_accelerator { "
        'name: "tensorrt" parameters { key: "trt_x" value: "y" } } } }'
    )
    check_settings(accelerated, accelerated)
    with pytest.raises(NotAllowed, match="execution_accelerators"):
        check_settings(accelerated, own)
    for text, why in (
        ('backend: "python" default_model_filename: "labels.txt"', "may be run as code"),
        ('default_model_filename: "labels.txt"', "may be run as code"),
        ('parameters { key: "providers" value { string_value: "b" }}', "parameters.providers"),
        ('parameters { key: "penstock.follow_links" value { string_value: "true" }}', "links"),
    ):
        with pytest.raises(NotAllowed, match=why):
            check_settings(pbtxt.parse(text), own)
    check_settings(pbtxt.parse('backend: "python" default_model_filename: "model.py"'), None)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", ".hidden", "-x", "a b", "a" * 256])
def test_names_of_models_are_single_folders(name):
    with pytest.raises(InvalidRequest, match="cannot be the name of a model"):
        check_name(name)
    check_name("a-b_c.1")


def test_data_backends_are_known_ones():
    assert {*pbtxt.FILES, "null"} >= load_request.DATA_BACKENDS
