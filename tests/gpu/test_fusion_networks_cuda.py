"""Whole networks on a GPU, fused: the answers of torch's own operators, kernels of ours among the
choices, none of them dropped as wrong; `make test-gpu`. Without a GPU: tests/backends and
tests/kernels."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
fusion = pytest.importorskip("penstock.backends.torch_fusion")
convolution = pytest.importorskip("penstock.kernels.convolution")
tracing = pytest.importorskip("penstock.backends.torch_tracing")
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"))
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.timeout(300),
]
TOLERANCE = {torch.float32: 5e-3, torch.float16: 2e-2}
# A problem that says that a kernel computed something else, or did not compile.
WRONG = ("off by", "CompilationError", "OutOfResources", "InterpreterError")


def spread(module):
    """Weights that make the answers of all classes differ, and statistics as after training."""
    generator = torch.Generator().manual_seed(5)
    for each in module.modules():
        if isinstance(each, torch.nn.Linear):
            each.weight.data.normal_(0, 0.05, generator=generator)
        elif isinstance(each, torch.nn.BatchNorm2d):
            each.running_mean.normal_(0, 0.1, generator=generator)
            each.running_var.uniform_(0.75, 1.25, generator=generator)
    for name, each in module.named_parameters():
        if name.endswith("layer_scale"):
            each.data.fill_(0.3)
    return module.eval()


@torch.inference_mode()
def check(module, shape, dtype, what="on", batch=2):
    """Compare with FP32 by torch's operators; return the fusion."""
    x = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(1)).cuda()
    sample = tracing.TraceInputs([torch.zeros(2, *shape)], {}, has_batch=True)
    device = torch.device("cuda")
    tuner = convolution.Tuner(convolution.GpuTimer(device), device)
    torch.backends.cudnn.allow_tf32 = False
    try:
        found = fusion.fuse(module.cpu(), tuner, sample, what)
        wanted = value(module.cuda()(x))
        fused = found.module.to(device, dtype).to(memory_format=torch.channels_last)
        given = x.to(dtype).contiguous(memory_format=torch.channels_last)
        found.prepare({"x": given}, lambda: fused(given))
        answer = value(fused(given)).float()
    finally:
        torch.backends.cudnn.allow_tf32 = True
    error = float((answer - wanted).norm() / wanted.norm())
    assert error < TOLERANCE[dtype], error
    wrong = {case: why for case, why in tuner.problems.items() if any(w in why for w in WRONG)}
    assert not wrong, wrong
    return found


def value(answer):
    return next(iter(answer.values())) if isinstance(answer, dict) else answer


NETWORKS = {
    "resnet18": 0, "mobilenet_v2": 0, "mobilenet_v3_large": 8, "efficientnet_b0": 16,
    "regnet_y_400mf": 16, "convnext_tiny": 0, "shufflenet_v2_x1_0": 0, "vit_b_32": 0,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_torchvision(name, dtype):
    zoo = pytest.importorskip("torchvision").models
    torch.manual_seed(0)
    module = spread(getattr(zoo, name)(weights=None))
    found = check(module, (3, 224, 224), dtype)
    kinds = [type(layer).__name__ for layer in found.layers]
    assert kinds.count("GatedConvolution") == NETWORKS[name]
    if name == "vit_b_32":
        assert kinds.count("Attention") == 12 and kinds.count("ResidualNorm") == 25
    left = {type(each).__name__ for each in found.module.modules()}
    assert not left & {"BatchNorm2d", "SiLU", "ReLU6", "MultiheadAttention"}


@pytest.mark.parametrize("name", ["YOLO-like", "diffusion UNet", "EfficientNet-B0", "ViT-B/16"])
def test_networks_of_the_benchmarks_tiny(name):
    models = pytest.importorskip("models")
    network = models.NETWORKS[name]
    found = check(getattr(models, network.tiny)(), network.tiny_shape, torch.float16, batch=4)
    assert found.facts()["fusion"].partition(" ")[0].isdigit()
    if name == "diffusion UNet":
        kinds = [type(layer).__name__ for layer in found.layers]
        assert kinds.count("ImageNorm") == 9 and kinds.count("Attention") == 4
        left = {type(each).__name__ for each in found.module.modules()}
        assert not left & {"GroupNorm", "SiLU", "Conv2d", "Linear"}


class UnetBlock(torch.nn.Module):
    """A block as diffusion models have them, with a time embedding, attention to other tokens and a
    gated linear unit."""

    def __init__(self, channels: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        norms = (torch.nn.GroupNorm(32, channels) for _ in range(3))
        convs = (torch.nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norms, self.convs = torch.nn.ModuleList(norms), torch.nn.ModuleList(convs)
        self.time, self.tokens = (torch.nn.Linear(channels, channels) for _ in range(2))
        self.into, self.out = (torch.nn.Conv2d(channels, channels, 1) for _ in range(2))
        self.query, self.key, self.value = (torch.nn.Linear(channels, channels) for _ in range(3))
        self.inner = torch.nn.Linear(channels, 8 * channels)
        self.outer = torch.nn.Linear(4 * channels, channels)
        self.norm = torch.nn.LayerNorm(channels)

    def forward(self, x):
        silu, mean = torch.nn.functional.silu, x.mean((2, 3))
        y = self.convs[0](silu(self.norms[0](x))) + self.time(silu(mean))[:, :, None, None]
        x = x + self.convs[1](silu(self.norms[1](y)))
        tokens = self.into(self.norms[2](x)).flatten(2).transpose(1, 2)
        other = self.tokens(mean)[:, None, :].expand(-1, 7, -1)
        heads = [
            each.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for each in (self.query(tokens), self.key(other), self.value(other))
        ]
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads)
        tokens = tokens + mixed.transpose(1, 2).flatten(2)
        value, gate = self.inner(self.norm(tokens)).chunk(2, dim=-1)
        tokens = tokens + self.outer(value * torch.nn.functional.gelu(gate))
        return x + self.out(tokens.transpose(1, 2).unflatten(2, (16, 16)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_a_block_of_a_diffusion_unet(dtype):
    torch.manual_seed(0)
    found = check(UnetBlock(320, 5).eval(), (320, 16, 16), dtype)
    nodes = [node for node in found.module.graph.nodes if node.op == "call_module"]
    layers = {node.name: found.module.get_submodule(node.target) for node in nodes}
    norms = [node for node in nodes if type(layers[node.name]).__name__ == "ImageNorm"]
    # The second has the time embedding.
    assert [len(node.args) for node in norms] == [1, 2, 1]
    kinds = [type(layer).__name__ for layer in layers.values()]
    assert kinds.count("GatedProduct") == kinds.count("Attention") == 1
    assert kinds.count("Convolution") == 4 and kinds.count("ResidualNorm") == 1


# Batch, channels, groups, height and width.
GROUP_NORMS = [
    (2, 320, 32, 64, 64), (2, 960, 32, 32, 32), (16, 1280, 32, 8, 8), (1, 128, 32, 512, 512),
    (3, 30, 5, 17, 23), (2, 48, 1, 33, 31), (2, 7, 7, 1, 1), (1, 2048, 1, 5, 5),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", GROUP_NORMS, ids=str)
@torch.inference_mode()
def test_every_kernel_for_group_norm_is_right(sizes, dtype):
    image_norm = pytest.importorskip("penstock.kernels.image_norm")
    silu = pytest.importorskip("penstock.kernels.activation").SILU
    batch, channels, num_groups, height, width = sizes
    torch.manual_seed(0)
    weight, bias = (
        torch.nn.Parameter(torch.randn(channels).to("cuda", dtype), requires_grad=False)
        for _ in range(2)
    )
    x = (torch.randn(batch, channels, height, width, device="cuda") * 3 + 5).to(dtype)
    last = x.contiguous(memory_format=torch.channels_last)
    added = torch.randn(batch, channels, 1, 1, device="cuda").to(dtype)
    layer = image_norm.ImageNorm(num_groups, weight, bias, 1e-5, silu, None)
    for images in (x, last):
        for time in (None, added):
            total = images.double() if time is None else images.double() + time.double()
            wanted = torch.nn.functional.group_norm(
                total, num_groups, weight.double(), bias.double(), 1e-5
            )
            runs = layer.implementations(images, time)
            assert "triton in parts" in runs and ("triton whole" in runs) == (height < 512)
            for name, run in runs.items():
                found = run(images, time)
                limit = 1e-5 if dtype == torch.float32 else convolution.TOLERANCE[dtype]
                convolution.check_close(found, silu(wanted), limit)
                assert torch.equal(found, run(images, time)), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [2560, 26, 1])
@torch.inference_mode()
def test_the_kernel_for_gated_products_is_right(width, dtype):
    fused_linear = pytest.importorskip("penstock.kernels.fused_linear")
    gelu = pytest.importorskip("penstock.kernels.activation").GELU
    x = torch.randn(3, 1000, 2 * width, device="cuda").to(dtype)
    for is_first in (False, True):
        layer = fused_linear.GatedProduct(-1, gelu, is_first, None)
        runs = layer.implementations(x, None)
        assert set(runs) == {"torch", "triton"}
        convolution.check_close(runs["triton"](x, None), runs["torch"](x, None), 1e-3)


DEPTHWISE = [(3, 1), (3, 2), (5, 1), (5, 2), (7, 1)]


@pytest.mark.parametrize(("size", "stride"), DEPTHWISE)
@torch.inference_mode()
def test_every_kernel_for_depthwise_convolutions_is_right(size, stride):
    act = pytest.importorskip("penstock.kernels.activation").HARD_SWISH
    geometry = convolution.ConvGeometry((stride,) * 2, (size // 2,) * 2, groups=72)
    weight = torch.nn.Parameter(torch.randn(72, 1, size, size).cuda().half(), requires_grad=False)
    bias = torch.nn.Parameter(torch.randn(72).cuda().half(), requires_grad=False)
    device = torch.device("cuda")
    tuner = convolution.Tuner(convolution.GpuTimer(device), device)
    layer = convolution.Convolution(weight, bias, geometry, act, tuner)
    x = torch.randn(4, 72, 28, 28).cuda().half().contiguous(memory_format=torch.channels_last)
    wanted = layer.implementations(x, None)["torch"](x, None)
    runs = {name: run for name, run in layer.implementations(x, None).items() if "depth" in name}
    assert len(runs) >= (3 if size == 3 else 2)
    for name, run in runs.items():
        convolution.check_close(run(x, None), wanted, 5e-3)
        assert run(x, None).is_contiguous(memory_format=torch.channels_last), name


@pytest.mark.parametrize("kind", ["", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("num_rows", [197, 2048])
@torch.inference_mode()
def test_every_implementation_of_a_linear_layer_is_right(kind, num_rows):
    fused_linear = pytest.importorskip("penstock.kernels.fused_linear")
    activation = pytest.importorskip("penstock.kernels.activation")
    act = activation.Activation(kind) if kind else None
    device = torch.device("cuda")
    tuner = convolution.Tuner(convolution.GpuTimer(device), device)
    weight = fused_linear.as_window(torch.randn(768, 256).cuda().half() / 16)
    bias = torch.nn.Parameter(torch.randn(768).cuda().half(), requires_grad=False)
    weight = torch.nn.Parameter(weight, requires_grad=False)
    layer = fused_linear.FusedLinear(weight, bias, act, tuner, adds_last=True)
    x, residual = torch.randn(num_rows, 256).cuda().half(), torch.randn(num_rows, 768).cuda().half()
    for added in (None, residual):
        runs = layer.implementations(x, added)
        wanted = runs["torch"](x, added)
        for run in runs.values():
            convolution.check_close(run(x, added), wanted, 5e-3)
        assert {name.partition(" ")[0] for name in runs} >= {"cublas", "cublaslt", "triton"}


@torch.inference_mode()
def test_a_second_start_times_and_compiles_nothing():
    models = pytest.importorskip("models")
    device = torch.device("cuda")
    found = check(models.efficientnet_tiny(), (3, 32, 32), torch.float16)
    files = found.files()
    choices = convolution.remembered(files["fusion.json"], device)
    assert choices and len(files["fusion.bin"]) > 0
    tuner = convolution.Tuner(convolution.GpuTimer(device), device, choices)
    again = fusion.fuse(models.efficientnet_tiny(), tuner, None, "on")
    fused = again.module.to(device, torch.float16).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 32, 32, device=device, dtype=torch.float16)
    x = x.contiguous(memory_format=torch.channels_last)
    again.prepare({"x": x}, lambda: fused(x))
    assert tuner.num_tuned == 0
