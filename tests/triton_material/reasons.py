"""Items of Triton's material that do not pass, or do not run here, and why. An item that fails and
is not listed ends the run with an error, and so does one that is listed and passes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping

from triton_material.gpu import has_gpu

GPU_KIND = "Python models run on CPUs only; KIND_GPU is refused"
ITERATIVE = "iterative sequences and rescheduling are refused by name"
TEST_PATH = "checks a path below /opt/tritonserver"
TEXT = "the same status, another text"
STATUS = "the same refusal, another status (docs/from-triton.md)"
TRAILING = "a header value ends in a space, which HTTP/2 forbids (RFC 9113, 8.2.1)"
BOTH_LENGTHS = "sends Content-Length with Transfer-Encoding, which is refused (request smuggling)"
ELEMENTS = "typed contents are limited to 4 million elements; raw_input_contents is not"
RAW_BYTES = "a raw request fills any BYTES input with one element"
DEPTH = "JSON of more than 100 levels is read"
CHECKED = "shapes and datatypes of a Python model's outputs are checked"
CYCLE = "a model cannot call itself"
CANCELLED = "is_cancelled of a model that is not decoupled is always False"
SENDER = "a model that is not decoupled must send its one response before execute returns"
CALLS = "calls of models cannot be cancelled by the model"
LOG_TEXT = "looks for a text in the log that Triton writes"
LABELS = "looks for a line of the metrics whose labels are in another order"
BITS = "as_numpy of BF16 gives the bits as uint16, where Triton's raises"
SETS = "requests with other sets of optional inputs are batched apart, sooner or later than there"
MEMBERS = "members of ensembles must give every output that is wanted, and one response"
RESERVED = "headers that begin with triton_ are not refused"
LARGE_CLASSES = "a classification of more classes than the tensor has is not refused"
SHAPES = "dims: [ -1, -1 ] for an ONNX input of [ -1, 2 ] is refused"

# File of tests, reason: classes and tests.
_TESTS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("L0_http/http_test.py", TEXT): (
        "HttpTest.test_buffer_size_overflow",
        "HttpTest.test_multi_inputs",
        "HttpTest.test_multi_variable_dimensions",
        "HttpTest.test_repository_index_deeply_nested_json",
    ),
    ("L0_http/http_test.py", STATUS): ("HttpTest.test_negative_dimensions",),
    ("L0_http/http_test.py", RAW_BYTES): ("HttpTest.test_byte_too_many_elements",),
    ("L0_http/http_test.py", BOTH_LENGTHS): ("HttpTest.test_content_encoding_chunked_manually",),
    ("L0_http/http_test.py", DEPTH): ("HttpTest.test_json_recursion_depth_limit",),
    ("L0_http/generate_endpoint_test.py", TEXT): (
        "GenerateEndpointTest.test_parameters",
        "GenerateEndpointTest.test_json_dtype_size_expansion_exceeds_limit_error",
    ),
    ("L0_http/generate_endpoint_test.py", CHECKED): (
        "GenerateEndpointTest.test_0_dimension_output",
    ),
    ("L0_grpc/python_unit_test.py", ELEMENTS): (
        "GrpcTest.test_bytes_contents_many_elements_serialization",
    ),
    ("L0_grpc/python_grpc_aio_test.py", STATUS): (
        "TestGrpcAioClient.test_load_model",
        "TestGrpcAioClient.test_unload_model",
        "TestGrpcAioClient.test_register_cuda_shared_memory",
        "TestGrpcAioClient.test_register_system_shared_memory",
    ),
    ("L0_optional_input/optional_input_test.py", SETS): (
        "OptionalInputTest.test_optional_mix_inputs",
        "OptionalInputTest.test_optional_mix_inputs_2",
        "OptionalInputTest.test_optional_same_input",
        "OptionalInputTest.test_ensemble_all_inputs",
        "OptionalInputTest.test_ensemble_optional_mix_inputs",
        "OptionalInputTest.test_ensemble_optional_mix_inputs_2",
        "OptionalInputTest.test_ensemble_optional_same_input",
    ),
    ("L0_optional_input/optional_input_test.py", MEMBERS): (
        "OptionalInputTest.test_ensemble_optional_connecting_tensor",
        "OptionalInputTest.test_ensemble_optional_pipeline",
    ),
    ("L0_batch_input/batch_input_test.py", SHAPES): ("BatchInputTest.test_batch_item_shape",),
    ("L0_input_validation/input_validation_test.py", TEXT): (
        "InputShapeTest.test_input_string_shape_validation",
    ),
    ("L0_parameters/parameters_test.py", TEXT): (
        "InferenceParametersTest.test_params_reserved_rejected",
    ),
    ("L0_parameters/parameters_test.py", TRAILING): ("InferenceParametersTest.test_headers",),
    ("L0_parameters/parameters_test.py", RESERVED): (
        "InferenceParametersTest.test_headers_reserved_rejected",
    ),
    ("L0_parameters/class_count_test.py (http)", TEXT): (
        "ClassificationParameterTest.test_classificattion_unsupported_data_type",
    ),
    ("L0_parameters/class_count_test.py (grpc)", TEXT): (
        "ClassificationParameterTest.test_classificattion_unsupported_data_type",
    ),
    ("L0_parameters/class_count_test.py (http)", LARGE_CLASSES): (
        "ClassificationParameterTest.test_classification_output_tensor_too_large",
    ),
    ("L0_parameters/class_count_test.py (grpc)", LARGE_CLASSES): (
        "ClassificationParameterTest.test_classification_output_tensor_too_large",
    ),
    ("L0_backend_python/python_test.py", BITS): ("PythonTest.test_bf16",),
    ("L0_backend_python/python_test.py", TEST_PATH): ("PythonTest.test_init_args",),
    ("L0_backend_python/lifecycle/lifecycle_test.py", CANCELLED): (
        "LifecycleTest.test_execute_cancel",
    ),
    ("L0_backend_python/lifecycle/lifecycle_test.py", LABELS): (
        "LifecycleTest.test_infer_pymodel_error",
    ),
    ("L0_backend_python/bls/bls_parameters_test.py", CYCLE): (
        "TestBlsParameters.test_bls_parameters",
    ),
    ("L0_backend_python/decoupled/decoupled_test.py", CALLS): (
        "DecoupledTest.test_decoupled_bls",
        "DecoupledTest.test_decoupled_bls_stream",
        "DecoupledTest.test_decoupled_bls_cancel",
        "DecoupledTest.test_decoupled_bls_cancel_after_cancellation",
        "DecoupledTest.test_decoupled_bls_cancel_after_completion",
        "DecoupledTest.test_decoupled_bls_ignore_cancel",
    ),
    ("L0_backend_python/decoupled/decoupled_test.py", CANCELLED): (
        "DecoupledTest.test_decoupled_execute_cancel",
    ),
    ("L0_backend_python/response_sender/response_sender_test.py", SENDER): (
        "ResponseSenderTest.test_non_decoupled_multiple_requests",
        "ResponseSenderTest.test_non_decoupled_one_response_post_return",
        "ResponseSenderTest.test_non_decoupled_one_response_pre_and_on_return",
        "ResponseSenderTest.test_non_decoupled_two_response_pre_return",
        "ResponseSenderTest.test_non_decoupled_zero_response_pre_return",
    ),
    ("L0_backend_python/response_sender/response_sender_complete_final_test.py", LOG_TEXT): (
        "ResponseSenderTest.test_respond_after_complete_final",
    ),
}
# Reason: the items that fail for it.
_FAILS: Mapping[str, tuple[str, ...]] = {
    GPU_KIND: (
        "Python model: add_sub_gpu",
        "Python model: cuda_memory_consumer",
        "Python model: variable_gpu_output",
    ),
    ITERATIVE: (
        "Python model: iterative_sequence",
        "Python model: request_rescheduling_addsub",
        "Python model: wrong_return_type",
    ),
    TEST_PATH: ("Python model: init_args",),
    # Everything before its last check passes.
    "a version that is no number is refused with another text": (
        "grpc_explicit_int8_content_client.py",
    ),
}
# Module: what fails without it.
_NEEDED_MODULES: Mapping[str, tuple[str, ...]] = {
    "cupy": ("Python model: dlpack_test",),
    "torchvision": (
        "Python model: resnet50_python",
        "Python backend example: ensemble_python_resnet50",
        "Python backend example: preprocess",
        "examples/preprocessing/client.py",
    ),
}
_CUDA_EXAMPLES = ("simple_http_cudashm_client.py", "simple_grpc_cudashm_client.py")
# Group: title of an item: why it is not run.
NO_CPP = "is written in C++ and must be built with Triton"
KNOB = "needs delays that only Triton's binary can be told to make (TRITONSERVER_DELAY_*)"
_NOT_RUN: Mapping[str, Mapping[str, str]] = {
    "backend": {
        "examples/jax/client.py": "needs JAX",
        "examples/instance_kind/client.py": "loads its tools from a repository on the network",
    },
    "models": {
        "python_based_backends": "a backend written in Python, for --backend-directory",
        "bls_simple": "used by no test of Python",
    },
    "python": {
        "L0_backend_python/python_test.py: PythonTest.test_growth_error": "needs 5 GB of memory",
        "L0_backend_python/request_rescheduling": ITERATIVE,
        "L0_backend_python/python_based_backends": "needs --backend-directory",
        "L0_backend_python/env": "needs conda; EXECUTION_ENV_PATH is refused",
        "L0_backend_python/variants": "builds Triton's Python backend",
        "L0_backend_python/restart": "is switched off in QA itself",
        "L0_backend_python/examples": "is the group of the Python backend's examples here",
    },
    "protocol": {
        "L0_http/http_test.py: HttpTest.test_loading_large_invalid_model": "needs 13 GB of memory",
        "L0_http/http_input_size_limit_test.py": "expects 400 where 413 is answered",
        "L0_http/http_basic_auth_test.py": "tests nginx",
        "L0_grpc/grpc_basic_auth_test.py": "tests nginx",
        "L0_client_timeout/client_non_infer_timeout_test.py": KNOB,
        "L0_grpc_state_cleanup": "reads Triton's verbose log",
        "L0_request_cancellation/grpc_cancellation_test.py": KNOB,
        "L0_response_cache": NO_CPP,
        "L0_nan_inf": "fails to import with numpy 2",
        "L0_query": "needs the query backend, which " + NO_CPP,
        "L0_model_namespacing": "needs --model-namespacing",
        "L0_output_validation": "tests a message of one backend",
        "L0_sagemaker, L0_vertex_ai": "tests endpoints that Penstock does not have",
        "L0_storage_*": "needs cloud storage",
        "L0_trt_*": "needs TensorRT",
        "other folders of qa/": "no scene yet",
    },
}
# Scenes that nobody has judged yet; --only plays them.
UNJUDGED: Mapping[str, tuple[str, ...]] = {
    "python": (
        "L0_backend_python, bls",
        "L0_backend_python, bls_model_loading",
        "L0_backend_python, io",
        "L0_backend_python, async_execute",
        "L0_backend_python, parameters",
        "L0_backend_python, model_control",
        "L0_backend_python, custom_metrics",
        "L0_backend_python, argument_validation",
        "L0_backend_python, logging",
        "L0_backend_python, model_readiness",
    ),
    "protocol": ("L0_decoupled", "L0_client_timeout", "L0_nan_inf"),
}


def failing() -> dict[str, str]:
    """Return the reason of each item that is known to fail on this machine."""
    return dict(_failing())


def _failing() -> Iterator[tuple[str, str]]:
    for (file, reason), tests in _TESTS.items():
        yield from ((f"{file}: {test}", reason) for test in tests)
    for reason, titles in _FAILS.items():
        yield from ((title, reason) for title in titles)
    for module, titles in _NEEDED_MODULES.items():
        if importlib.util.find_spec(module) is None:
            yield from ((title, f"needs the module {module}") for title in titles)


def not_run(group: str) -> dict[str, str]:
    """Return the reason of each item of a group that is not run on this machine."""
    found = dict(_NOT_RUN.get(group, {}))
    found |= dict.fromkeys(UNJUDGED.get(group, ()), "not judged yet; --only runs it")
    if group == "clients" and not has_gpu():
        found |= dict.fromkeys(_CUDA_EXAMPLES, "needs an NVIDIA GPU")
    return found
