"""Python models of Triton's QA, each loaded alone, and the examples of its Python backend."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from triton_material import stand_ins
from triton_material.checkouts import Checkouts
from triton_material.layouts import (
    GENERATORS,
    QaModel,
    add_generated,
    add_python_example,
    add_qa_models,
    generate,
)
from triton_material.scenes import Check, Scene

# These models raise an error on purpose, or lack what a test adds: the load must be refused.
REFUSED = (
    "auto_complete_error",
    "bls_init_error",
    "init_error",
    "init_exit",
)
# What the scripts of the tests change before a model can be loaded.
OTHERS = {
    "multi_file": QaModel("multi_file", config_of="identity_fp32"),
    "mock_llm": QaModel("generate_models/mock_llm"),
    "resnet50": QaModel("torchvision/resnet50", "resnet50_python"),
    "sub_add": QaModel("sub_add", config_of="dlpack_sub_add"),
    "sequence_int32": QaModel(
        "sequence_int32", "python_nobatch_sequence_int32", replace=(("KIND_GPU", "KIND_CPU"),)
    ),
    "fan_add_sub": QaModel(
        "fan_add_sub", replace=(("ENSEMBLE_MODEL_NAME", "add_sub"), ("_-1", "_1"))
    ),
}
# Folders of the models that hold no model of their own.
PARTS = ("generate_models", "python_based_backends", "torchvision", "bls_simple")
# (example, name, prefix of its files)
EXAMPLES = (
    ("add_sub", "add_sub", ""),
    ("pytorch", "pytorch", ""),
    ("decoupled", "repeat_int32", "repeat_"),
    ("decoupled", "square_int32", "square_"),
    ("bls", "bls_sync", "sync_"),
    ("bls", "bls_async", "async_"),
    ("bls_decoupled", "bls_decoupled_sync", "sync_"),
    ("bls_decoupled", "bls_decoupled_async", "async_"),
    ("auto_complete", "batch_auto_complete", "batch_"),
    ("auto_complete", "nobatch_auto_complete", "nobatch_"),
    ("custom_metrics", "custom_metrics", ""),
)
CLIENTS = (
    "add_sub/client.py",
    "pytorch/client.py",
    "decoupled/repeat_client.py",
    "decoupled/square_client.py",
    "bls/sync_client.py",
    "bls/async_client.py",
    "bls_decoupled/sync_client.py",
    "bls_decoupled/async_client.py",
    "auto_complete/client.py",
    "custom_metrics/client.py",
)


def model_scenes(checkouts: Checkouts) -> list[Scene]:
    """One scene, in which models are loaded and unloaded one by one."""

    def build(root: Path) -> None:
        names = sorted(path.name for path in (checkouts.qa / "python_models").iterdir())
        plain = [name for name in names if name not in OTHERS and name not in PARTS]
        add_qa_models(root, checkouts, *plain, *OTHERS.values())
        # Members of the ensembles.
        for number in (1, 2):
            add_qa_models(root, checkouts, QaModel("add_sub", f"add_sub_{number}"))
        for number in (1, 2, 3):
            add_qa_models(
                root, checkouts, QaModel("dlpack_io_identity", f"dlpack_io_identity_{number}")
            )
        stand_ins.add_pair(root, "nop_TYPE_FP32_1", 16)
        add_generated(root, checkouts, "libtorch", "libtorch_float32_float32_float32")

    return [
        Scene(
            "Python model",
            build,
            flags=("--model-control-mode", "explicit"),
            loads="one by one",
            refused=REFUSED,
            environment={"MY_ENV": "MY_ENV", "MODEL_LOG_DIR": "/tmp"},
        )
    ]


def generated_scenes(checkouts: Checkouts) -> list[Scene]:
    """The ONNX and TorchScript models that QA's generators make."""

    def build_of(kind: str) -> Callable[[Path], None]:
        def build(root: Path) -> None:
            shutil.copytree(generate(checkouts, kind), root, dirs_exist_ok=True)

        return build

    return [
        Scene(
            f"generated, {kind}",
            build_of(kind),
            flags=("--model-control-mode", "explicit"),
            loads="one by one",
        )
        for kind in GENERATORS
    ]


def example_scenes(checkouts: Checkouts) -> list[Scene]:
    folder = checkouts.python_backend / "examples"

    def build(root: Path) -> None:
        for example, name, prefix in EXAMPLES:
            add_python_example(root, checkouts, example, name, prefix)

    def build_preprocessing(root: Path) -> None:
        source = folder / "preprocessing"
        shutil.copytree(source / "model_repository", root, dirs_exist_ok=True)
        (root / "preprocess" / "1").mkdir()
        shutil.copy(source / "model.py", root / "preprocess" / "1")
        (root / "ensemble_python_resnet50" / "1").mkdir()
        stand_ins.add_resnet(root / "resnet50_trt")

    return [
        Scene(
            "Python backend example",
            build,
            tuple(
                Check(f"examples/{client}", (sys.executable, str(folder / client)), folder, "PASS")
                for client in CLIENTS
            ),
            loads="at start",
        ),
        Scene(
            "Python backend example",
            build_preprocessing,
            (
                Check(
                    "examples/preprocessing/client.py",
                    (
                        *(sys.executable, str(folder / "preprocessing" / "client.py")),
                        *("--image", str(checkouts.images / "mug.jpg")),
                    ),
                    folder / "preprocessing",
                    "Result is class",
                ),
            ),
            loads="at start",
        ),
    ]
