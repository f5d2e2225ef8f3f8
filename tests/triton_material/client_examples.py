"""Triton's example repository and the example clients of tritonclient, as shipped."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from triton_material import stand_ins
from triton_material.checkouts import Checkouts
from triton_material.gpu import has_gpu
from triton_material.layouts import add_python_example
from triton_material.scenes import Check, Scene

CUDA = ("simple_http_cudashm_client", "simple_grpc_cudashm_client")
MODEL_CONTROL = ("simple_http_model_control", "simple_grpc_model_control")
# Clients that are given flags: (flags, what the output must contain).
IMAGE = ("-m", "densenet_onnx", "-s", "INCEPTION", "-c", "1", "-b", "1")
OVER_GRPC = ("-i", "grpc", "-u", "localhost:8001")
VARIANTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "image_client": (
        IMAGE,
        (*IMAGE, "-a"),
        (*IMAGE, *OVER_GRPC),
        (*IMAGE, "-a", *OVER_GRPC),
        (*IMAGE, "-a", "--streaming", *OVER_GRPC),
    ),
    "grpc_image_client": (IMAGE, (*IMAGE, "-a"), (*IMAGE, "-a", "--streaming")),
    "ensemble_image_client": ((), OVER_GRPC),
    "reuse_infer_objects_client": ((), OVER_GRPC),
    "memory_growth_test": ((), ("-i", "grpc")),
    "simple_http_infer_client": (
        (),
        ("-H", "abc:xyz"),
        ("--request-compression-algorithm", "gzip", "--response-compression-algorithm", "deflate"),
    ),
    "simple_http_aio_infer_client": (
        (),
        ("--request-compression-algorithm", "deflate", "--response-compression-algorithm", "gzip"),
    ),
    "simple_grpc_infer_client": ((), ("-C", "gzip"), ("-t", "30")),
    "simple_grpc_aio_infer_client": ((), ("-C", "deflate")),
    "simple_http_sequence_sync_infer_client": ((), ("-d",), ("-o", "100")),
    "simple_grpc_sequence_sync_infer_client": ((), ("-d",), ("-o", "100")),
    "simple_grpc_sequence_stream_infer_client": ((), ("-d",), ("-o", "100")),
    "simple_grpc_aio_sequence_stream_infer_client": ((), ("-d",), ("-o", "100")),
}
TAKES_IMAGES = {"image_client", "grpc_image_client", "ensemble_image_client"}


def example_models(checkouts: Checkouts) -> Path:
    return checkouts.server / "docs" / "examples" / "model_repository"


def scenes(checkouts: Checkouts) -> list[Scene]:
    def build_examples(root: Path) -> None:
        shutil.copytree(example_models(checkouts), root, dirs_exist_ok=True)
        stand_ins.add_densenet(root / "densenet_onnx")
        stand_ins.add_inception(root / "inception_onnx")

    def build_all(root: Path) -> None:
        build_examples(root)
        add_python_example(root, checkouts, "decoupled", "repeat_int32", "repeat_")
        stand_ins.add_identity(root, "custom_identity_int32", "INT32")
        stand_ins.add_string_sequence(root, root / "simple_dyna_sequence")
        labels = root / "inception_onnx" / "inception_labels.txt"
        stand_ins.add_image_ensemble(root, labels)

    def build_for_control(root: Path) -> None:
        """This client counts seven models: it is older than the network that was added last."""
        build_examples(root)
        shutil.rmtree(root / "inception_onnx")

    names = example_names(checkouts)
    others = [name for name in names if name not in MODEL_CONTROL]
    return [
        Scene("example repository", build_examples, loads="at start"),
        Scene(
            "client examples",
            build_all,
            tuple(check for name in others for check in checks_of(checkouts, name)),
            ("--shared-memory",),
        ),
        *(
            Scene(
                f"client examples, {name}",
                build_for_control if "http" in name else build_examples,
                tuple(checks_of(checkouts, name)),
                ("--model-control-mode", "explicit"),
            )
            for name in MODEL_CONTROL
            if name in names
        ),
    ]


def example_names(checkouts: Checkouts) -> list[str]:
    folder = checkouts.client / "src" / "python" / "examples"
    return sorted(path.stem for path in folder.glob("*.py"))


def checks_of(checkouts: Checkouts, name: str) -> list[Check]:
    if name in CUDA and not has_gpu():
        return []
    folder = checkouts.client / "src" / "python" / "examples"
    checks = []
    for flags in VARIANTS.get(name, ((),)):
        arguments = [str(folder / f"{name}.py"), *flags]
        if name in TAKES_IMAGES:
            arguments.append(str(checkouts.images / "vulture.jpeg"))
        shown = tuple(each for each in flags if each not in IMAGE)
        checks.append(
            Check(
                " ".join([f"{name}.py", *shown]),
                (sys.executable, *arguments),
                folder,
                stand_ins.LABEL if name in TAKES_IMAGES else passes(folder / f"{name}.py"),
            )
        )
    return checks


def passes(example: Path) -> str:
    """Return what the example prints when all is well, if it does."""
    return "PASS" if "PASS" in example.read_text() else ""
