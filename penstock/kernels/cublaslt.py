"""GEMMs of cuBLASLt with bias, GELU and a residual as epilogue, called through ctypes on the
library that torch has loaded. torch takes the algorithm that cuBLASLt expects to be fastest; here
the caller chooses among those it proposes. Only the result is allocated, so a CUDA graph can hold a
call.

cuBLASLt is column-major: a matrix [rows, columns] here is its transpose there, and x W^T is
requested as W x^T.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

# Scales of operands in e4m3: one each, or one per row. Other types have none.
Scaling = Literal["", "one", "rows"]
E4M3 = torch.float8_e4m3fn
# cudaDataType.
TYPES = {torch.float16: 2, torch.bfloat16: 14, E4M3: 28}
# Constants of cublasLt.h from here on.
FLOAT, COMPUTE_FLOAT = 0, 68
TRANSPOSE_A, TRANSPOSE_B, EPILOGUE, BIAS_POINTER, BIAS_TYPE = 3, 4, 7, 8, 26
A_SCALE, B_SCALE, D_SCALE, FAST_SUMS, A_SCALE_MODE, B_SCALE_MODE = 17, 18, 20, 25, 31, 32
WITH_BIAS, WITH_GELU_AND_BIAS = 4, 36
SCALE_MODES: dict[Scaling, int] = {"one": 0, "rows": 3}
MAX_WORKSPACE_BYTES = 1
VERSION_OF_MAJOR = 10_000
# The same size as torch's on Hopper.
WORKSPACE_BYTES = 32 << 20
# Algorithms to request.
NUM_ALGORITHMS = 8
# cublasStatus_t by name, as users search for them.
STATUSES = {
    1: "CUBLAS_STATUS_NOT_INITIALIZED",
    3: "CUBLAS_STATUS_ALLOC_FAILED",
    7: "CUBLAS_STATUS_INVALID_VALUE",
    8: "CUBLAS_STATUS_ARCH_MISMATCH",
    13: "CUBLAS_STATUS_EXECUTION_FAILED",
    14: "CUBLAS_STATUS_INTERNAL_ERROR",
    15: "CUBLAS_STATUS_NOT_SUPPORTED",
}
# Required alignment of addresses.
ALIGNMENT = 256
OLDEST = 12


class Unavailable(RuntimeError):
    """cuBLASLt cannot be called, or refuses; a RuntimeError like torch's own for libraries."""


@dataclass(frozen=True, slots=True)
class GemmForm:
    """Everything that the choice of an algorithm depends on."""

    num_rows: int
    depth: int
    width: int
    dtype: torch.dtype
    out: torch.dtype
    # GELU in its tanh form.
    has_gelu: bool = False
    scaling: Scaling = ""
    # Whether a matrix of the result's shape and type is added; not with GELU.
    has_residual: bool = False

    def __str__(self) -> str:
        kinds = [str(each).removeprefix("torch.") for each in (self.dtype, self.out)]
        size = f"{self.num_rows}x{self.depth} to {self.width}, {kinds[0]} to {kinds[1]}"
        scales = f", scales: {self.scaling}" * bool(self.scaling)
        return f"{size}{scales}{', gelu' * self.has_gelu}{', residual' * self.has_residual}"

    @property
    def num_operations(self) -> int:
        return 2 * self.num_rows * self.depth * self.width


@dataclass(frozen=True, slots=True)
class Operands:
    """x [rows, depth], weight [width, depth], bias [width]; FP32 scales of e4m3 operands, and the
    factor of an e4m3 result before rounding; a residual [rows, width] that is added."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    x_scale: torch.Tensor | None = None
    weight_scale: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    residual: torch.Tensor | None = None

    @property
    def are_aligned(self) -> bool:
        added = () if self.residual is None else (self.residual,)
        tensors = (self.x, self.weight, self.bias, *added)
        return all(each.is_contiguous() and each.data_ptr() % ALIGNMENT == 0 for each in tensors)


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("num_waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    description: ctypes.c_void_p
    # For the weight, x, the residual and the result.
    layouts: tuple[ctypes.c_void_p, ...]
    algorithms: Sequence[_Found]


class Products:
    """GEMMs of one device, by the library `calls`. For one stream, as they share a workspace."""

    def __init__(self, calls: ctypes.CDLL, device: torch.device | str) -> None:
        self._calls = calls
        self.device = torch.device(device)
        self.version = int(calls.cublasLtGetVersion())
        self._plans: dict[GemmForm, _Plan] = {}
        self._handle = self._create("cublasLtCreate")
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # Not at interpreter exit: CUDA may be gone by then.
        weakref.finalize(self, calls.cublasLtDestroy, self._handle).atexit = False

    def num_algorithms(self, form: GemmForm, operands: Operands) -> int:
        """Return the number of algorithms; 0 if cuBLASLt has none."""
        return len(self._plan(form, operands).algorithms)

    def multiply(self, form: GemmForm, operands: Operands, number: int) -> torch.Tensor:
        """Multiply with one of the algorithms, on the current stream."""
        assert operands.are_aligned
        assert form.has_residual == (operands.residual is not None)
        plan = self._plan(form, operands)
        if not 0 <= number < len(plan.algorithms):
            raise Unavailable(f"{form}: no algorithm {number} among {len(plan.algorithms)}")
        self._point(plan.description, form, operands)
        x = operands.x
        out = torch.empty(form.num_rows, form.width, dtype=form.out, device=x.device)
        weight_layout, x_layout, added_layout, out_layout = plan.layouts
        # Without a residual, C is multiplied by 0; it cannot be the output in e4m3, where it has
        # another type.
        added = out if operands.residual is None else operands.residual
        one, factor = ctypes.c_float(1.0), ctypes.c_float(float(form.has_residual))
        status = self._calls.cublasLtMatmul(
            self._handle, plan.description,
            ctypes.byref(one), _address(operands.weight), weight_layout, _address(x), x_layout,
            ctypes.byref(factor), None if form.out == E4M3 else _address(added), added_layout,
            _address(out), out_layout,
            ctypes.byref(plan.algorithms[number].algorithm),
            _address(self._workspace), ctypes.c_size_t(WORKSPACE_BYTES),
            ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0),
        )  # fmt: skip
        _check("cublasLtMatmul", status)
        return out

    def _plan(self, form: GemmForm, operands: Operands) -> _Plan:
        if form not in self._plans:
            description = self._description(form, operands)
            layouts = self._layouts(form)
            found = self._proposed(description, layouts)
            self._plans[form] = _Plan(description, layouts, found)
        return self._plans[form]

    def _description(self, form: GemmForm, operands: Operands) -> ctypes.c_void_p:
        description = self._create("cublasLtMatmulDescCreate", COMPUTE_FLOAT, FLOAT)
        epilogue = WITH_GELU_AND_BIAS if form.has_gelu else WITH_BIAS
        self._set(description, TRANSPOSE_A, ctypes.c_int32(1))
        self._set(description, TRANSPOSE_B, ctypes.c_int32(0))
        self._set(description, EPILOGUE, ctypes.c_int32(epilogue))
        self._set(description, BIAS_TYPE, ctypes.c_int32(TYPES[operands.bias.dtype]))
        if form.scaling:
            self._set(description, FAST_SUMS, ctypes.c_int8(1))
            for attribute in (A_SCALE_MODE, B_SCALE_MODE):
                self._set(description, attribute, ctypes.c_int32(SCALE_MODES[form.scaling]))
        self._point(description, form, operands)
        return description

    def _point(self, description: ctypes.c_void_p, form: GemmForm, operands: Operands) -> None:
        """Set the pointers to the bias and scales of this GEMM."""
        self._set(description, BIAS_POINTER, _address(operands.bias))
        if form.scaling:
            scales = operands.weight_scale, operands.x_scale, operands.factor
            for attribute, each in zip((A_SCALE, B_SCALE, D_SCALE), scales, strict=True):
                if each is not None:
                    self._set(description, attribute, _address(each))

    def _layouts(self, form: GemmForm) -> tuple[ctypes.c_void_p, ...]:
        def create(dtype: torch.dtype, high: int, wide: int) -> ctypes.c_void_p:
            sizes = ctypes.c_uint64(high), ctypes.c_uint64(wide), ctypes.c_int64(high)
            return self._create("cublasLtMatrixLayoutCreate", TYPES[dtype], *sizes)

        weight = create(form.dtype, form.depth, form.width)
        x = create(form.dtype, form.depth, form.num_rows)
        added = torch.bfloat16 if form.out == E4M3 else form.out
        outs = [create(dtype, form.width, form.num_rows) for dtype in (added, form.out)]
        return (weight, x, *outs)

    def _proposed(
        self, description: ctypes.c_void_p, layouts: tuple[ctypes.c_void_p, ...]
    ) -> list[_Found]:
        calls = self._calls
        preference = self._create("cublasLtMatmulPreferenceCreate")
        size = ctypes.c_size_t(WORKSPACE_BYTES)
        status = calls.cublasLtMatmulPreferenceSetAttribute(
            preference, MAX_WORKSPACE_BYTES, ctypes.byref(size), ctypes.c_size_t(8)
        )
        _check("cublasLtMatmulPreferenceSetAttribute", status)
        found, num = (_Found * NUM_ALGORITHMS)(), ctypes.c_int()
        status = calls.cublasLtMatmulAlgoGetHeuristic(
            self._handle, description, *layouts,
            preference, NUM_ALGORITHMS, found, ctypes.byref(num),
        )  # fmt: skip
        calls.cublasLtMatmulPreferenceDestroy(preference)
        # cuBLASLt returns an error for unsupported forms; we return no algorithms.
        usable = [] if status else list(found)[: num.value]
        return [each for each in usable if each.state == 0]

    def _create(self, name: str, *arguments: object) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        _check(name, getattr(self._calls, name)(ctypes.byref(made), *arguments))
        return made

    def _set(
        self,
        description: ctypes.c_void_p,
        attribute: int,
        value: ctypes._SimpleCData[int] | ctypes.c_void_p,
    ) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        status = self._calls.cublasLtMatmulDescSetAttribute(
            description, attribute, ctypes.byref(value), size
        )
        _check(f"cublasLtMatmulDescSetAttribute {attribute}", status)


def open_products(device: torch.device) -> Products:
    """Open the library; raise Unavailable if it is missing or of another version than torch's."""
    if device.type != "cuda" or torch.version.cuda is None:
        raise Unavailable(f"'{device}' is no NVIDIA GPU")
    major = int(torch.version.cuda.partition(".")[0])
    name = f"libcublasLt.so.{major}"
    try:
        calls = ctypes.CDLL(name)
        calls.cublasLtGetVersion.restype = ctypes.c_size_t
        version = int(calls.cublasLtGetVersion())
    except (OSError, AttributeError) as error:
        raise Unavailable(f"{name}: {error}") from None
    if major < OLDEST or version // VERSION_OF_MAJOR != major:
        raise Unavailable(f"{name} is version {version}; expected one of {max(major, OLDEST)}")
    with torch.cuda.device(device):
        return Products(calls, device)


def _check(name: str, status: int) -> None:
    if status:
        raise Unavailable(f"{name} gives status {status} ({STATUSES.get(status, 'of no name')})")


def _address(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
