"""ONNX's own node tests as cases to import, run on a device, and compare."""

import re
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx.backend.test.case.test_case import TestCase as Case

from penstock.backends.onnx_import.importer import import_model
from penstock.backends.onnx_import.weights import read_tensor
from penstock.errors import ConfigError
from penstock.types import Array

# Reasons to refuse a case; any other error is a failure.
REFUSALS = {
    "control flow": "control flow (Loop|Scan|SequenceMap|If) ",
    "texts and sequences": (
        "operator (String.*|RegexFullMatch|TfIdfVectorizer|Sequence.*|SplitToSequence|Optional.*) "
        "|sequences|texts|tensor '.*': datatype STRING"
    ),
    "random numbers": "operator (Bernoulli|RandomUniformLike|Dropout) ",
    "trees and encoders": r"operator ai\.onnx\.ml\.",
    "training": r"operator ai\.onnx\.preview\.training\.|operator set 1;",
    "subgraphs as functions": r"operator ai\.onnx\.preview\.FlexAttention ",
    "encoded images": "operator ImageDecoder ",
    "datatypes without torch": "datatype (U?INT2|FLOAT4E2M1|FLOAT8E8M0)",
}
# Cases in which PyTorch and ONNX Runtime differ from ONNX's reference, and we with them.
AS_ONNX_RUNTIME = {
    "test_resize_downsample_scales_linear_align_corners",
    "test_resize_downsample_scales_cubic_align_corners",
}
TOLERANCES = {torch.float16: (2e-3, 2e-3), torch.bfloat16: (2e-2, 2e-3)}
BY_BITS = {
    torch.bfloat16: np.uint16,
    torch.float8_e4m3fn: np.uint8,
    torch.float8_e4m3fnuz: np.uint8,
    torch.float8_e5m2: np.uint8,
    torch.float8_e5m2fnuz: np.uint8,
}


@cache
def cases() -> list[Case]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        # Cases are computed with numpy, which warns of overflow and more.
        warnings.simplefilter("ignore")
        return [case for case in collect_testcases(None) if case.model is not None]


def operators(case: Case) -> set[str]:
    return {f"{node.domain}.{node.op_type}".lstrip(".") for node in case.model.graph.node}


def tensor(value: object) -> torch.Tensor | None:
    if value is None:
        return None
    if isinstance(value, onnx.TensorProto):
        return read_tensor(value, Path())
    if isinstance(value, list | dict):
        raise ConfigError(["sequences"])
    array: Array = np.asarray(value)
    if array.dtype.kind in "OUS":
        raise ConfigError(["texts"])
    for dtype, bits in BY_BITS.items():
        if array.dtype.name == str(dtype).removeprefix("torch."):
            return torch.from_numpy(array.view(bits).copy()).view(dtype).reshape(array.shape)
    if array.dtype.name in ("int4", "uint4"):
        return torch.from_numpy(array.astype(np.int8 if array.dtype.name == "int4" else np.uint8))
    return torch.from_numpy(np.array(array))


def check(case: Case, device: str = "cpu") -> None:
    imported = import_model(case.model)
    module = imported.module.to(device)
    names = [value.name for value in case.model.graph.input]
    for given, expected in case.data_sets:
        inputs = {name: tensor(value) for name, value in zip(names, given, strict=False)}
        given = (inputs[name] for name in imported.inputs)
        with torch.no_grad():
            found = module(*(None if each is None else each.to(device) for each in given))
        for value, wanted in zip(found, map(tensor, expected), strict=True):
            compare(value.cpu(), wanted, case)


def compare(value: torch.Tensor, wanted: torch.Tensor | None, case: Case) -> None:
    assert wanted is not None
    assert (value.dtype, value.shape) == (wanted.dtype, wanted.shape)
    relative, absolute = TOLERANCES.get(wanted.dtype, (1e-3, 1e-5))
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    if wanted.dtype in (torch.uint64, torch.int64):
        wide = torch.int64
    torch.testing.assert_close(
        value.to(wide),
        wanted.to(wide),
        rtol=max(relative, case.rtol),
        atol=max(absolute, case.atol),
        equal_nan=True,
    )


def refusal(error: ConfigError) -> str:
    """Return the reason by which a case may be refused; empty if there is none."""
    text = " ".join(error.problems)
    return next((why for why, pattern in REFUSALS.items() if re.search(pattern, text)), "")


def outcomes(chosen: Iterable[Case], device: str = "cpu") -> dict[str, str]:
    """Return "" for cases that pass, and why the others do not."""
    found = {}
    for case in chosen:
        if case.name in AS_ONNX_RUNTIME:
            found[case.name] = "as ONNX Runtime"
            continue
        try:
            check(case, device)
            found[case.name] = ""
        except ConfigError as error:
            found[case.name] = refusal(error) or f"FAILED: {error}"
        except Exception as error:
            found[case.name] = f"FAILED: {type(error).__name__}: {error}"
    return found
