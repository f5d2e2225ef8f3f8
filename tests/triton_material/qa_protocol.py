"""QA's tests of HTTP, gRPC and of features that need no backend written in C++."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from triton_material import stand_ins
from triton_material.checkouts import Checkouts
from triton_material.layouts import (
    QaModel,
    add_generated,
    add_python_example,
    add_qa_models,
    edit_config,
)
from triton_material.scenes import Scene, TestFile

EXPLICIT = ("--model-control-mode", "explicit")
# It makes a body of 2.7 GiB, and copies of it.
LARGE = ("HttpTest::test_loading_large_invalid_model",)
ALL = (*EXPLICIT, "--load-model", "*")
# Models of the example repository; the tests count them.
SEVEN = (
    *("densenet_onnx", "simple", "simple_dyna_sequence", "simple_identity"),
    *("simple_int8", "simple_sequence", "simple_string"),
)
QUEUE = """dynamic_batching {
  max_queue_delay_microseconds: 1000000
  preferred_batch_size: [ 8 ]
  default_queue_policy { max_queue_size: 1 }
}"""
RAGGED = """batch_output [{
  target_name: "OUTPUT0" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "INPUT0"
}]
dynamic_batching { max_queue_delay_microseconds: 1000000 }"""
WITH_ZERO = "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO"
DECOUPLED_TESTS = (
    *("test_one_to_none", "test_one_to_one", "test_one_to_many", "test_one_to_multi_many"),
    *("test_no_streaming", "test_response_order", "test_wrong_shape"),
)


def scenes(checkouts: Checkouts) -> list[Scene]:
    return [
        *http_scenes(checkouts),
        *grpc_scenes(checkouts),
        *feature_scenes(checkouts),
    ]


def tests(checkouts: Checkouts, path: str, *only: str, without: tuple[str, ...] = ()) -> TestFile:
    folder, _, file = path.rpartition("/")
    return TestFile(path, file, checkouts.qa / folder, only, without)


def http_scenes(checkouts: Checkouts) -> list[Scene]:
    def identities(root: Path) -> None:
        def add(
            model: str, name: str = "", edits: tuple[tuple[str, str], ...] = (), more: str = ""
        ) -> None:
            add_generated(root, checkouts, "identity", model, name, edits, more)

        for model in ("zero_1_float32", "zero_1_object", "zero_1_float16", "zero_3_float32"):
            add(f"onnx_{model}")
        add("onnx_zero_1_object", "onnx_zero_1_object_1_element", (("-1", "1"),))
        add("onnx_zero_1_float32", "onnx_zero_1_float32_queue", (), QUEUE)
        add_example(root, checkouts, "simple_identity")
        add_example(root, checkouts, "simple_identity", "simple_identity_int64")
        edit_config(root / "simple_identity_int64", (("TYPE_STRING", "TYPE_INT64"),))

    def simple(root: Path) -> None:
        add_example(root, checkouts, "simple")
        add_example(root, checkouts, "simple_identity")

    def seven(root: Path) -> None:
        for name in SEVEN:
            add_example(root, checkouts, name)
        stand_ins.add_densenet(root / "densenet_onnx")

    def generate(root: Path) -> None:
        add_qa_models(root, checkouts, QaModel("generate_models/mock_llm"))

    return [
        Scene(
            "L0_http", identities, (tests(checkouts, "L0_http/http_test.py", without=LARGE),), ALL
        ),
        Scene(
            "L0_http, generate", generate, (tests(checkouts, "L0_http/generate_endpoint_test.py"),)
        ),
        Scene(
            "L0_http, aio",
            seven,
            (tests(checkouts, "L0_http/python_http_aio_test.py"),),
            ("--shared-memory",),
        ),
        Scene(
            "L0_http, restricted APIs",
            simple,
            (tests(checkouts, "L0_http/http_restricted_api_test.py"),),
            (
                *("--http-restricted-api", "model-repository:admin-key=admin-value"),
                *("--http-restricted-api", "inference,metadata:infer-key=infer-value"),
            ),
        ),
    ]


def grpc_scenes(checkouts: Checkouts) -> list[Scene]:
    def simple_and_string(root: Path) -> None:
        add_example(root, checkouts, "simple")
        any_length = ((r"dims: \[ 1 \]", "dims: [ -1 ]"),)
        add_qa_models(root, checkouts, QaModel("string_identity", replace=any_length))

    def eight(root: Path) -> None:
        for name in (*SEVEN, "inception_onnx"):
            add_example(root, checkouts, name)
        stand_ins.add_densenet(root / "densenet_onnx")
        stand_ins.add_inception(root / "inception_onnx")

    def plugin(root: Path) -> None:
        source = checkouts.qa / "L0_grpc" / "client_plugin_models"
        shutil.copytree(source, root, dirs_exist_ok=True)

    def slow(root: Path) -> None:
        source = checkouts.qa / "L0_client_timeout" / "models"
        shutil.copytree(source, root, dirs_exist_ok=True)
        stand_ins.fill_in_identities(root)

    unit = "L0_grpc/python_unit_test.py"
    return [
        Scene("L0_grpc", simple_and_string, (tests(checkouts, unit, "GrpcTest"),)),
        Scene(
            "L0_grpc, aio",
            eight,
            (tests(checkouts, "L0_grpc/python_grpc_aio_test.py"),),
            ("--shared-memory",),
        ),
        Scene(
            "L0_grpc, restricted protocols",
            simple_and_string,
            (tests(checkouts, unit, "RestrictedProtocolTest"),),
            (
                *("--grpc-restricted-protocol", "model-repository:admin-key=admin-value"),
                *("--grpc-restricted-protocol", "inference,health:infer-key=infer-value"),
            ),
        ),
        Scene(
            "L0_grpc, client plugin",
            plugin,
            (tests(checkouts, "L0_grpc/grpc_client_plugin_test.py"),),
            ("--http-header-forward-pattern", ".*", "--grpc-header-forward-pattern", ".*"),
        ),
        Scene(
            "L0_client_timeout",
            slow,
            (tests(checkouts, "L0_client_timeout/client_infer_timeout_test.py"),),
            (*EXPLICIT, "--load-model", "custom_identity_int32", "--shared-memory"),
        ),
    ]


def feature_scenes(checkouts: Checkouts) -> list[Scene]:
    def models_of(folder: str, *others: str) -> Callable[[Path], None]:
        def build(root: Path) -> None:
            shutil.copytree(checkouts.qa / folder / "models", root, dirs_exist_ok=True)
            stand_ins.fill_in_identities(root)
            for name in others:
                add_generated(root, checkouts, "identity", name)

        return build

    def decoupled(root: Path) -> None:
        shutil.copytree(checkouts.qa / "L0_decoupled" / "models", root, dirs_exist_ok=True)
        shutil.rmtree(root / "repeat_int32", ignore_errors=True)
        stand_ins.fill_in_identities(root)
        for name, prefix in (("repeat_int32", "repeat_"), ("square_int32", "square_")):
            shutil.rmtree(root / name, ignore_errors=True)
            add_python_example(root, checkouts, "decoupled", name, prefix)
        one = ((r"dims:.*\[.*\]", "dims: [ 1 ]"),)
        add_generated(root, checkouts, "libtorch", "libtorch_nobatch_int32_int32_int32", "", one)

    def ragged(root: Path) -> None:
        def add(model: str, name: str, *edits: tuple[str, str]) -> None:
            add_generated(root, checkouts, "ragged", model, name, edits)

        add("onnx_batch_input", "ragged_element_count_acc_zero")
        shape = (WITH_ZERO, "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE")
        add("onnx_batch_input", "ragged_acc_shape", ELEMENTS_ONLY, shape)
        flat = (WITH_ZERO, "BATCH_ITEM_SHAPE_FLATTEN")
        add("onnx_batch_input", "batch_item_flatten", FIRST_DIMS, ELEMENTS_ONLY, flat)
        add("onnx_batch_item", "batch_item")
        may_be_ragged = ('name: "INPUT0"', 'name: "INPUT0"\nallow_ragged_batch: true')
        batched = ("^max_batch_size:.*", "max_batch_size: 4")
        name = "onnx_nobatch_zero_1_float32"
        edits = (may_be_ragged, batched)
        add_generated(root, checkouts, "identity", name, "ragged_io", edits, RAGGED)

    def parameters(root: Path) -> None:
        source = checkouts.qa / "L0_parameters" / "model_repository"
        shutil.copytree(source, root, dirs_exist_ok=True)
        stand_ins.fill_in_identities(root)
        (root / "ensemble" / "1").mkdir(exist_ok=True)

    def classes(root: Path) -> None:
        strings = (("TYPE_FP32", "TYPE_STRING"),)
        add_qa_models(
            root, checkouts, "identity_fp32", QaModel("identity_fp32", "identity_bytes", strings)
        )

    def strings(root: Path) -> None:
        add_generated(root, checkouts, "identity", "onnx_zero_1_object")
        eight = ((r"\[ 1 \]", "[ 8 ]"),)
        add_qa_models(root, checkouts, QaModel("string_identity", replace=eight))

    def shapes(root: Path) -> None:
        add_generated(root, checkouts, "onnx", "onnx_object_int32_int32")

    def scalars(root: Path) -> None:
        for name in ("onnx_scalar_1dim", "onnx_scalar_2dim"):
            add_generated(root, checkouts, "scalar", name)

    case = "InferenceParametersTest::test_"
    parameter_tests = "L0_parameters/parameters_test.py"
    patterns = ("--grpc-header-forward-pattern", "--http-header-forward-pattern")
    header = "[Mm][Yy]_[Hh][Ee][Aa][Dd][Ee][Rr].*"
    validation = "L0_input_validation/input_validation_test.py"
    return [
        Scene(
            "L0_decoupled",
            decoupled,
            (
                tests(
                    checkouts,
                    "L0_decoupled/decoupled_test.py",
                    *(f"DecoupledTest::{each}" for each in DECOUPLED_TESTS),
                ),
            ),
        ),
        Scene(
            "L0_optional_input",
            models_of("L0_optional_input"),
            (tests(checkouts, "L0_optional_input/optional_input_test.py"),),
        ),
        Scene(
            "L0_input_validation",
            models_of("L0_input_validation"),
            (tests(checkouts, validation, "InputValTest"),),
        ),
        Scene(
            "L0_input_validation, shapes",
            shapes,
            (tests(checkouts, validation, "InputShapeTest::test_input_string_shape_validation"),),
        ),
        Scene("L0_batch_input", ragged, (tests(checkouts, "L0_batch_input/batch_input_test.py"),)),
        Scene(
            "L0_parameters",
            parameters,
            (
                tests(
                    checkouts, parameter_tests, f"{case}params", f"{case}params_reserved_rejected"
                ),
            ),
        ),
        Scene(
            "L0_parameters, headers",
            parameters,
            (tests(checkouts, parameter_tests, f"{case}headers"),),
            tuple(each for pattern in patterns for each in (pattern, header)),
        ),
        Scene(
            "L0_parameters, reserved headers",
            parameters,
            (tests(checkouts, parameter_tests, f"{case}headers_reserved_rejected"),),
            tuple(each for pattern in patterns for each in (pattern, ".*")),
        ),
        *(
            Scene(
                f"L0_parameters, classes over {kind}",
                classes,
                (
                    TestFile(
                        f"L0_parameters/class_count_test.py ({kind})",
                        "class_count_test.py",
                        checkouts.qa / "L0_parameters",
                        environment={"CLIENT_TYPE": kind},
                    ),
                ),
            )
            for kind in ("http", "grpc")
        ),
        Scene(
            "L0_nan_inf", models_of("L0_nan_inf"), (tests(checkouts, "L0_nan_inf/nan_inf_test.py"),)
        ),
        Scene("L0_string_io", strings, (tests(checkouts, "L0_string_io/string_client_test.py"),)),
        Scene("L0_scalar_io", scalars, (tests(checkouts, "L0_scalar_io/scalar_test.py"),)),
    ]


# The whole name, not the beginning of a longer one.
ELEMENTS_ONLY = (r"\bBATCH_ELEMENT_COUNT\b", "BATCH_ACCUMULATED_ELEMENT_COUNT")
# Only where they stand first.
FIRST_DIMS = (r"\A([\s\S]*?)-1", r"\1-1, -1")


def add_example(root: Path, checkouts: Checkouts, model: str, name: str = "") -> None:
    """Add a model of Triton's example repository, under another name if one is given."""
    source = checkouts.server / "docs" / "examples" / "model_repository" / model
    target = root / (name or model)
    shutil.copytree(source, target)
    edit_config(target, (("^name:.*$", f'name: "{target.name}"'),))
