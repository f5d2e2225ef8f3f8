"""What several test files share: where the examples are, and small ONNX files made on the spot."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import onnx
import pytest
from example_counts import MAX_EXAMPLES
from hypothesis import HealthCheck, settings
from onnx import TensorProto, helper

# No test depends on the speed of the machine, and neither does the drawing of examples. `make test`
# draws the same examples every time, `make test-slow` more of them (profile full; see
# example_counts), and `--hypothesis-profile explore` draws new ones.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("full", settings.get_profile("explore"), derandomize=True)
settings.register_profile("penstock", settings.get_profile("full"), max_examples=MAX_EXAMPLES)
settings.load_profile("penstock")
# A shell that runs the tests in the background ignores SIGINT for them and their children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Triton reads it when it is imported: without a GPU, kernels are interpreted.
if not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ONNX_TYPES = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BF16": TensorProto.BFLOAT16,
    "BYTES": TensorProto.STRING,
}

WriteOnnx = Callable[..., Path]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Escape lone surrogates in captured output: processes of xdist exchange UTF-8 only."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report


class SignalStack(ctypes.Structure):
    """`stack_t` of sigaltstack(2)."""

    _fields_ = (
        ("ss_sp", ctypes.c_void_p),
        ("ss_flags", ctypes.c_int),
        ("ss_size", ctypes.c_size_t),
    )


@pytest.fixture(autouse=True)
def signal_stack() -> Iterator[None]:
    """Restore the alternate signal stack, which pytest's faulthandler sets: OpenVINO replaces it
    and frees the replacement, so that the next signal would crash the process."""
    libc, before = ctypes.CDLL(None), SignalStack()
    libc.sigaltstack(None, ctypes.byref(before))
    yield
    libc.sigaltstack(ctypes.byref(before), None)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tests run in as many processes as there are cores: threads of torch for tiny models would
    only wait for each other. Not by an environment variable, which servers would inherit."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def examples() -> Path:
    return Path(__file__).resolve().parents[1] / "examples" / "repository"


@pytest.fixture(scope="session")
def write_onnx() -> WriteOnnx:
    """`write_onnx(path, nodes, inputs, outputs)` with tensors as {name: (datatype, shape)}."""

    def write(
        path: Path,
        nodes: Sequence[onnx.NodeProto],
        inputs: dict[str, tuple[str, Sequence[int | str] | None]],
        outputs: dict[str, tuple[str, Sequence[int | str] | None]],
        initializers: Sequence[onnx.TensorProto] = (),
    ) -> Path:
        graph = helper.make_graph(
            list(nodes),
            "made_by_a_test",
            [_tensor(name, *kind) for name, kind in inputs.items()],
            [_tensor(name, *kind) for name, kind in outputs.items()],
            initializer=list(initializers),
        )
        opset = helper.make_opsetid("", 17)
        model = helper.make_model(graph, ir_version=9, opset_imports=[opset])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(model.SerializeToString())
        return path

    return write


@pytest.fixture(scope="session")
def write_identity(write_onnx: WriteOnnx) -> WriteOnnx:
    """`write_identity(path, datatype, shape, num_tensors)`: x0 to y0, x1 to y1, ..."""

    def write(
        path: Path,
        datatype: str = "FP32",
        shape: Sequence[int | str] = ("batch", 4),
        num_tensors: int = 1,
    ) -> Path:
        numbers = range(num_tensors)
        return write_onnx(
            path,
            [helper.make_node("Identity", [f"x{i}"], [f"y{i}"]) for i in numbers],
            {f"x{i}": (datatype, shape) for i in numbers},
            {f"y{i}": (datatype, shape) for i in numbers},
        )

    return write


def _tensor(
    name: str, datatype: str, shape: Sequence[int | str] | None = None
) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(
        name, ONNX_TYPES[datatype], None if shape is None else list(shape)
    )
