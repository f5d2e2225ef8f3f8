"""cuBLASLt as far as penstock.kernels.cublaslt calls it, on the CPU: it reads the descriptors and
the memory that the real one would, counts by columns as that does, and multiplies with numpy.
Algorithms are numbers; `wrong` are those that compute something else."""

import ctypes
from dataclasses import dataclass, field

import numpy as np
import torch

OK, NOT_SUPPORTED = 0, 15
HALF, E4M3 = 2, 28
BYTES = {HALF: 2, 14: 2, E4M3: 1}


def at(reference, kind):
    """What a reference refers to."""
    return ctypes.cast(reference, ctypes.POINTER(kind)).contents


@dataclass
class FakeCublasLt:
    version: int = 130_000
    num_algorithms: int = 3
    wrong: frozenset[int] = frozenset()
    # Whether what is too large for e4m3 becomes its largest number.
    saturates: bool = True
    num_products: int = 0
    used: list[int] = field(default_factory=list)
    destroyed: int = 0
    _made: list[dict] = field(default_factory=list)

    def cublasLtGetVersion(self):
        return self.version

    def cublasLtCreate(self, handle):
        return self._new(handle, {})

    def cublasLtDestroy(self, handle):
        self.destroyed += 1
        return OK

    def cublasLtMatmulDescCreate(self, description, compute, scale):
        assert (compute, scale) == (68, 0)
        return self._new(description, {})

    def cublasLtMatmulDescSetAttribute(self, description, attribute, value, size):
        given = at(value, ctypes.c_uint8 * size.value)
        self._of(description)[attribute] = int.from_bytes(bytes(given), "little")
        return OK

    def cublasLtMatrixLayoutCreate(self, layout, kind, rows, columns, leading):
        made = {"kind": kind, "shape": (rows.value, columns.value), "leading": leading.value}
        return self._new(layout, made)

    def cublasLtMatmulPreferenceCreate(self, preference):
        return self._new(preference, {})

    def cublasLtMatmulPreferenceSetAttribute(self, preference, attribute, value, size):
        self._of(preference)[attribute] = at(value, ctypes.c_size_t).value
        return OK

    def cublasLtMatmulPreferenceDestroy(self, preference):
        return OK

    def cublasLtMatmulAlgoGetHeuristic(
        self, handle, description, a, b, c, d, preference, most, found, num
    ):
        if self._of(a)["shape"][0] % 8:
            return NOT_SUPPORTED
        for number in range(min(most, self.num_algorithms)):
            found[number].algorithm[0] = number
        at(num, ctypes.c_int).value = min(most, self.num_algorithms)
        return OK

    def cublasLtMatmul(
        self, handle, description, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout,
        algorithm, workspace, workspace_bytes, stream,
    ):  # fmt: skip
        asked = self._of(description)
        factor = at(beta, ctypes.c_float).value
        assert at(alpha, ctypes.c_float).value == 1.0 and factor in (0.0, 1.0)
        assert (asked[3], asked[4]) == (1, 0), "A is transposed, B is not"
        left, right = self._read(a, a_layout), self._read(b, b_layout)
        result = left.T @ right
        if 17 in asked:
            result = result * self._scales(asked, 17, 31, len(result))[:, None]
            result = result * self._scales(asked, 18, 32, result.shape[1])[None, :]
        if factor:
            result = result + factor * self._read(c, c_layout)
        result = result + self._numbers(asked[8], len(result), asked[26])[:, None]
        if asked[7] == 36:
            tensor = torch.from_numpy(result)
            result = torch.nn.functional.gelu(tensor, approximate="tanh").numpy()
        if 20 in asked:
            result = result * np.float32(ctypes.c_float.from_address(asked[20]).value)
        number = at(algorithm, ctypes.c_uint64).value
        self.used.append(number)
        self.num_products += 1
        self._write(d, d_layout, result * (3.0 if number in self.wrong else 1.0))
        return OK

    def _new(self, pointer, made):
        self._made.append(made)
        at(pointer, ctypes.c_void_p).value = len(self._made)
        return OK

    def _of(self, pointer):
        return self._made[pointer.value - 1]

    def _scales(self, asked, attribute, mode, count):
        count = count if asked[mode] == 3 else 1
        found = (ctypes.c_float * count).from_address(asked[attribute])
        return np.broadcast_to(np.array(found), count)

    def _numbers(self, address, count, kind):
        raw = (ctypes.c_uint8 * (count * BYTES[kind])).from_address(address)
        types = {HALF: torch.float16, 14: torch.bfloat16, E4M3: torch.float8_e4m3fn}
        return torch.frombuffer(raw, dtype=types[kind]).float().numpy()

    def _read(self, pointer, layout):
        made = self._of(layout)
        rows, columns = made["shape"]
        assert made["leading"] == rows
        numbers = self._numbers(pointer.value, rows * columns, made["kind"])
        return numbers.reshape(columns, rows).T

    def _write(self, pointer, layout, result):
        made = self._of(layout)
        assert made["shape"] == result.shape
        types = {HALF: torch.float16, 14: torch.bfloat16, E4M3: torch.float8_e4m3fn}
        tensor = torch.from_numpy(np.ascontiguousarray(result.T).astype(np.float32))
        if made["kind"] == E4M3:
            is_beyond = tensor.abs() > 448
            tensor = tensor.clamp(-448, 448) if self.saturates else tensor
            tensor = tensor if self.saturates else tensor.masked_fill(is_beyond, float("nan"))
        small = tensor.to(types[made["kind"]]).contiguous()
        ctypes.memmove(pointer.value, small.data_ptr(), small.numel() * small.element_size())
