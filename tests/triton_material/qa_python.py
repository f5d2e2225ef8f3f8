"""QA's tests of the Python backend (qa/L0_backend_python), with the models of its scripts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from triton_material.checkouts import Checkouts
from triton_material.layouts import (
    CONFIG,
    QaModel,
    add_generated,
    add_python_example,
    add_qa_models,
    edit_config,
)
from triton_material.scenes import Scene, TestFile

FOLDER = "L0_backend_python"
# QA's switch for machines on which it tests neither a GPU nor Triton's own shared memory.
NO_GPU = {"TEST_JETSON": "1"}
# What its models that call others are told to test.
BLS_KIND = {"BLS_KIND": "non_decoupled"}
EXPLICIT = ("--model-control-mode", "explicit")
# It fills Triton's own pool of shared memory with a body of more than 1 GiB.
GROWTH = ("PythonTest::test_growth_error",)
# Batches of three requests must come together.
QUEUE = "dynamic_batching {{ preferred_batch_size: [8], max_queue_delay_microseconds: {} }}"
EIGHT = f"max_batch_size: 8\n{QUEUE.format(12_000_000)}"
BLS_MODELS = ("bls", "bls_memory", "bls_memory_async", "bls_async")
READINESS = {
    "is_ready_fn_returns_true": ("true", "0.1"),
    "is_ready_fn_returns_false": ("false", "0.1"),
    "is_ready_fn_raises_error": ("exception", "0.1"),
    "is_ready_fn_returns_non_boolean": ("non_boolean", "0.1"),
    "is_ready_fn_timeout": ("true", "8"),
    "is_ready_fn_coroutine_returns_true": ("coroutine", "0.1"),
}


def with_type(name: str, datatype: str, *others: tuple[str, str]) -> QaModel:
    return QaModel("identity_fp32", name, (("TYPE_FP32", f"TYPE_{datatype}"), *others))


def sender(kind: str, more: str) -> QaModel:
    file = "model_async.py" if "async" in kind else "model.py"
    return QaModel("response_sender", f"response_sender{kind}", more=more, file=file)


DECOUPLED = "model_transaction_policy { decoupled: True }\n"
BATCHING = "dynamic_batching { max_queue_delay_microseconds: 500000 }\n"
SENDERS = [
    sender(f"{decoupled}{kind}{batching}", (DECOUPLED if decoupled else "") + (more))
    for decoupled in ("", "_decoupled")
    for kind in ("", "_async")
    for batching, more in (("", ""), ("_batching", BATCHING))
]
MODELS: dict[str, list[QaModel | str]] = {
    "main": [
        *["identity_fp32", "identity_bf16", "pytorch_fp32_fp32", "delayed_model", "optional"],
        *["non_contiguous", "string", "string_fixed", "dlpack_identity"],
        with_type("identity_uint8", "UINT8", ("^max_batch_size:.*", EIGHT)),
        with_type("identity_uint8_nobatch", "UINT8", ("^max_batch_size:.*", "")),
        with_type("identity_uint32", "UINT32"),
        with_type("identity_bool", "BOOL"),
    ],
    "lifecycle": [
        *["error_code", "execute_cancel", "decoupled_grpc_error", "execute_return_error"],
        QaModel(
            "execute_error",
            replace=(("^max_batch_size:.*", "max_batch_size: 8"),),
            more=QUEUE.format(12_000_000),
        ),
        QaModel(
            "execute_grpc_error",
            replace=(("^max_batch_size:.*", "max_batch_size: 8"),),
            more=QUEUE.format(1_200_000),
        ),
        QaModel("wrong_model", replace=(("TYPE_FP32", "TYPE_UINT32"),)),
    ],
    "bls": [
        *["dlpack_add_sub", "add_sub", "execute_error", "identity_fp32", "dlpack_identity"],
        *["dlpack_square", "identity_fp32_timeout"],
        *BLS_MODELS,
    ],
    "decoupled": [
        *["identity_fp32", "execute_cancel", "response_sender_until_cancelled", "dlpack_add_sub"],
    ],
    "response_sender": [*SENDERS],
    "response_sender_complete_final": ["response_sender_complete_final"],
    "io": ["dlpack_empty_output", "add_sub", "dlpack_io_identity_decoupled"],
    "ensemble": [
        "ensemble",
        QaModel("add_sub", "add_sub_1"),
        QaModel("add_sub", "add_sub_2"),
    ],
    "async_execute": ["async_execute_decouple", "async_execute_decouple_bls"],
    "parameters": [
        *["response_parameters", "response_parameters_decoupled", "response_parameters_bls"],
    ],
    "model_control": ["identity_fp32", "simple_identity_fp32"],
    "custom_metrics": ["custom_metrics"],
    "bls_parameters": ["bls_parameters"],
    "bls_model_loading": ["bls_model_loading"],
    "logging": ["identity_fp32_logging"],
}


def scenes(checkouts: Checkouts) -> list[Scene]:
    qa = checkouts.qa / FOLDER

    def build_of(group: str, *more: Callable[[Path], None]) -> Callable[[Path], None]:
        def build(root: Path) -> None:
            add_qa_models(root, checkouts, *MODELS.get(group, []))
            for each in more:
                each(root)

        return build

    def add_bls(root: Path) -> None:
        add_python_example(root, checkouts, "decoupled", "square_int32", "square_")
        add_generated(root, checkouts, "implicit", "onnx_nobatch_sequence_int32")
        for name in ("libtorch_cpu", "libtorch_gpu"):
            model = "libtorch_nobatch_float32_float32_float32"
            add_generated(root, checkouts, "libtorch", model, name)

    def add_decoupled(root: Path) -> None:
        shutil.copytree(qa / "decoupled" / "models", root, dirs_exist_ok=True)
        add_python_example(root, checkouts, "decoupled", "square_int32", "square_")

    def add_onnx(root: Path) -> None:
        add_generated(root, checkouts, "onnx", "onnx_int32_int32_int32")

    def add_argument_validation(root: Path) -> None:
        shutil.copytree(qa / "argument_validation" / "models", root, dirs_exist_ok=True)

    def add_llm(root: Path) -> None:
        source = qa / "io" / "requested_output_model"
        (root / "llm" / "1").mkdir(parents=True)
        shutil.copy(source / CONFIG, root / "llm")
        shutil.copy(source / "model.py", root / "llm" / "1")

    def add_readiness(root: Path) -> None:
        source = qa / "model_readiness" / "test_models"
        add_qa_models(root, checkouts, "identity_fp32")
        for name, (returns, delay) in READINESS.items():
            add_qa_models(root, checkouts, QaModel("identity_fp32", name))
            kind = "readiness_coroutine_model" if "coroutine" in name else "readiness_model"
            shutil.copy(source / f"{kind}.py", root / name / "1" / "model.py")
            edit_config(root / name, (), parameters(returns, delay))
        decoupled = root / "is_ready_fn_returns_true_decoupled"
        (decoupled / "1").mkdir(parents=True)
        shutil.copy(source / decoupled.name / "model.py", decoupled / "1")
        shutil.copy(source / decoupled.name / CONFIG, decoupled)

    def tests(
        folder: str,
        file: str,
        *only: str,
        log: str = "",
        without: tuple[str, ...] = (),
        model: str = "",
    ) -> TestFile:
        title = f"{FOLDER}/{folder}/{file}".replace("//", "/").replace("bls/../", "")
        environment = {"MODEL_NAME": model} if model else {}
        title += f" ({model})" if model else ""
        return TestFile(title, file, qa / folder, only, without, NO_GPU | environment, log)

    def one(group: str, *checks: TestFile, flags: tuple[str, ...] = (), more: object = ()) -> Scene:
        title = f"{FOLDER}, {group}"
        return Scene(title, build_of(group, *more), checks, flags, environment=BLS_KIND)

    leak = "../test_infer_shm_leak.py"
    return [
        one("main", tests("", "python_test.py", without=GROWTH), flags=("--shared-memory",)),
        one("lifecycle", tests("lifecycle", "lifecycle_test.py", log="lifecycle_server.log")),
        one("ensemble", tests("ensemble", "ensemble_test.py", "EnsembleTest::test_ensemble")),
        one("bls", *(tests("bls", leak, model=each) for each in BLS_MODELS), more=[add_bls]),
        one("bls_parameters", tests("bls", "bls_parameters_test.py")),
        one(
            "bls_model_loading",
            tests("bls", leak, model="bls_model_loading"),
            flags=(*EXPLICIT, "--load-model", "bls_model_loading"),
            more=[add_onnx],
        ),
        one(
            "decoupled",
            tests("decoupled", "decoupled_test.py", log="decoupled_server.log"),
            more=[add_decoupled],
        ),
        one(
            "response_sender",
            tests("response_sender", "response_sender_test.py", log="server.log"),
        ),
        one(
            "response_sender_complete_final",
            tests("response_sender", "response_sender_complete_final_test.py", log="server.log"),
        ),
        one(
            "io",
            tests(
                "io",
                "io_test.py",
                *(f"IOTest::{each}" for each in ("test_empty_gpu_output",)),
                "IOTest::test_requested_output_default",
                "IOTest::test_requested_output_decoupled",
                "IOTest::test_requested_output_decoupled_bls",
            ),
            more=[add_llm],
        ),
        one("async_execute", tests("async_execute", "concurrency_test.py", log="server.log")),
        one("parameters", tests("parameters", "response_parameters_test.py")),
        one("model_control", tests("model_control", "model_control_test.py"), flags=EXPLICIT),
        one("custom_metrics", tests("bls", leak, model="custom_metrics")),
        one(
            "argument_validation",
            tests("bls", leak, model="argument_validation"),
            more=[add_argument_validation],
        ),
        one("logging", tests("logging", "logging_test.py")),
        one(
            "model_readiness",
            tests(
                "model_readiness",
                "test_model_readiness.py",
                "TestUserDefinedModelReadinessFunction",
                "TestModelReadiness::test_model_ready",
            ),
            more=[add_readiness],
        ),
    ]


def parameters(returns: str, delay: str) -> str:
    values = {"READINESS_FN_RETURN_VALUE": returns, "READINESS_FN_DELAY_SECS": delay}
    return "\n".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in values.items()
    )
