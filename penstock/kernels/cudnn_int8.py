"""INT8 convolutions of cuDNN, through its graph API (the package nvidia-cudnn-frontend): a graph
is a convolution, scale, offset, ReLU and rounding. Layers with a residual are faster in our own
kernels. cuDNN proposes plans; the caller chooses among them by number, so a choice can be stored.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from penstock.kernels.conv import ConvWindow
    from penstock.kernels.int8_triton import Int8Epilogue

# Plans to try: cuDNN lists the most promising first.
MAX_PLANS = 5
MAX_WORKSPACE_BYTES = 64 << 20


class CudnnGraph(Protocol):
    """The methods of cudnn.pygraph that we call."""

    def build_plan_at_index(self, index: int) -> None: ...

    def get_workspace_size_plan_at_index(self, index: int) -> int: ...

    def execute_plan_at_index(
        self, pack: Mapping[object, torch.Tensor], workspace: torch.Tensor, index: int, handle: int
    ) -> None: ...


@functools.cache
def has_cudnn() -> bool:
    return importlib.util.find_spec("cudnn") is not None


@dataclass(frozen=True, slots=True)
class Int8Form:
    """Everything that a graph depends on."""

    x: tuple[int, ...]
    out: int
    window: ConvWindow
    has_relu: bool


@dataclass(frozen=True, slots=True)
class BuiltGraph:
    graph: CudnnGraph
    # Tensors of the graph by their role.
    tensors: Mapping[str, object]
    num_plans: int
    # Plans that are ready to run: building one takes cuDNN up to a second.
    ready: set[int] = field(default_factory=set)


class Int8Graphs:
    """Graphs of one device, for one stream, as they share a workspace."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._handle: int | None = None
        self._built: dict[Int8Form, BuiltGraph] = {}
        self._workspace: torch.Tensor | None = None

    def num_plans(self, form: Int8Form) -> int:
        """Return how many plans cuDNN proposes; 0 if it does not support the form."""
        try:
            return self._find(form).num_plans
        except Exception:  # The package raises its own types, and RuntimeError.
            return 0

    def convolve(
        self, form: Int8Form, x: torch.Tensor, weight: torch.Tensor, after: Int8Epilogue, plan: int
    ) -> torch.Tensor:
        """Convolve channels-last images; `after.offset` is the plain one."""
        import cudnn

        built = self._find(form)
        if plan not in built.ready:
            built.graph.build_plan_at_index(plan)
            if built.graph.get_workspace_size_plan_at_index(plan) > MAX_WORKSPACE_BYTES:
                raise RuntimeError(f"plan {plan} needs more than {MAX_WORKSPACE_BYTES} bytes")
            built.ready.add(plan)
        out_h, out_w = form.window.out(x.shape[2], x.shape[3])
        y = torch.empty((len(x), out_h, out_w, form.out), dtype=torch.int8, device=x.device)
        pack = {"x": x, "weight": weight, "scale": after.scale, "offset": after.offset}
        pack["y"] = y
        if self._workspace is None:
            self._workspace = torch.empty(
                MAX_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device
            )
        cudnn.set_stream(self._open(), torch.cuda.current_stream(x.device).cuda_stream)
        by_tensor = {built.tensors[name]: tensor for name, tensor in pack.items()}
        built.graph.execute_plan_at_index(by_tensor, self._workspace, plan, handle=self._open())
        return y.permute(0, 3, 1, 2)

    def _open(self) -> int:
        if self._handle is None:
            import cudnn

            self._handle = cudnn.create_handle()
        return self._handle

    def _find(self, form: Int8Form) -> BuiltGraph:
        if form not in self._built:
            self._built[form] = _build(form, self._open())
        return self._built[form]


def _build(form: Int8Form, handle: int) -> BuiltGraph:
    import cudnn

    int8, whole, real = (getattr(cudnn.data_type, name) for name in ("INT8", "INT32", "FLOAT"))
    graph = cudnn.pygraph(
        handle=handle,
        io_data_type=int8,
        intermediate_data_type=real,
        compute_data_type=real,
    )
    batch, channels, high, wide = form.x
    out_h, out_w = form.window.out(high, wide)
    size_h, size_w = form.window.size

    def tensor(name: str, sizes: tuple[int, ...], kind: object) -> object:
        count, depth, rows, columns = sizes
        strides = [depth * rows * columns, 1, depth * columns, depth]
        return graph.tensor(name=name, dim=list(sizes), stride=strides, data_type=kind)

    found = {
        "x": tensor("x", (batch, channels, high, wide), int8),
        "weight": tensor("weight", (form.out, channels, size_h, size_w), int8),
        "scale": tensor("scale", (1, form.out, 1, 1), real),
        "offset": tensor("offset", (1, form.out, 1, 1), real),
    }
    y = graph.conv_fprop(
        image=found["x"],
        weight=found["weight"],
        padding=list(form.window.padding),
        stride=list(form.window.stride),
        dilation=[1, 1],
        compute_data_type=whole,
    )
    y.set_data_type(whole)
    y = graph.bias(input=graph.scale(input=y, scale=found["scale"]), bias=found["offset"])
    if form.has_relu:
        y = graph.relu(input=y)
    sizes = [batch, form.out, out_h, out_w]
    y.set_output(True).set_data_type(int8).set_dim(sizes)
    y.set_stride([form.out * out_h * out_w, 1, form.out * out_w, form.out])
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.B])
    graph.check_support()
    found["y"] = y
    return BuiltGraph(graph, found, min(MAX_PLANS, graph.get_execution_plan_count()))
