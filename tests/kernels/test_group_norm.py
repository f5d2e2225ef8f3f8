"""Group norm of images by our kernels is what torch gives: on a GPU, or interpreted on a CPU."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
functional = torch.nn.functional
group_norm = pytest.importorskip("penstock.kernels.group_norm")
activation = pytest.importorskip("penstock.kernels.activation")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RUNS = (group_norm.whole, group_norm.in_parts)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
# Of Triton's interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def drawn(*shape: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    made = torch.randn(shape, generator=generator).to(DEVICE, dtype)
    return made.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else made


def wanted_of(x, form, added=None):
    x = x.double() + (0 if added is None else added.double()[:, :, None, None])
    given = (None if each is None else each.double() for each in (form.weight, form.bias))
    normed = functional.group_norm(x, form.num_groups, *given, form.epsilon)
    return normed if form.activation is None else form.activation(normed)


def check(run, x, form, added=None):
    found, tolerance = run(x, form, added), TOLERANCE[x.dtype]
    assert found.shape == x.shape and found.dtype == x.dtype
    assert found.is_contiguous(memory_format=torch.channels_last)
    wanted = wanted_of(x, form, added)
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)


# Channels, groups, height and width.
SIZES = [
    (32, 32, 8, 8), (30, 3, 5, 7), (40, 4, 1, 1), (70, 7, 1, 33), (6, 1, 9, 11), (96, 32, 16, 9),
    (7, 7, 3, 2), (1, 1, 4, 5),
]  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size, run):
    channels, num_groups, height, width = size
    form = group_norm.GroupNormForm(
        num_groups, 1e-5, drawn(channels) + 1, drawn(channels) * 0.5, activation.SILU
    )
    check(run, drawn(3, channels, height, width) * 3 - 1, form)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("has_added", [False, True])
def test_datatypes_weights_and_an_addition_by_channel(has_added, has_weights, dtype, run):
    weight, bias = (
        (drawn(24, dtype=dtype) + 1, drawn(24, dtype=dtype)) if has_weights else (None,) * 2
    )
    form = group_norm.GroupNormForm(4, 1e-6, weight, bias)
    added = drawn(2, 24, dtype=dtype) * 2 if has_added else None
    check(run, drawn(2, 24, 7, 6, dtype=dtype), form, added)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", activation.TORCH)
def test_activations(kind, run):
    numbers = {"clamp": (0.0, 0.7), "leaky_relu": (0.2, 0.0), "hard_sigmoid": (0.2, 0.5)}
    act = activation.Activation(kind, *numbers.get(kind, (0.0, 0.0)))
    form = group_norm.GroupNormForm(2, 1e-5, drawn(8), drawn(8), act)
    check(run, drawn(1, 8, 6, 5) * 4, form)


@pytest.mark.parametrize("run", RUNS)
def test_images_of_many_parts(run):
    # Not a multiple of the parts, nor of their steps.
    form = group_norm.GroupNormForm(2, 1e-5, drawn(12), drawn(12), activation.SILU)
    check(run, drawn(1, 12, 67, 61), form)


@pytest.mark.parametrize("run", RUNS)
def test_parts_without_pixels(run, monkeypatch):
    # 33 pixels in 8 parts of 5: the last has none.
    monkeypatch.setattr(group_norm, "PIXELS", 1)
    monkeypatch.setattr(group_norm, "MAX_PARTS", 8)
    check(run, drawn(1, 4, 3, 11), group_norm.GroupNormForm(2, 1e-5))


@pytest.mark.parametrize("run", RUNS)
def test_a_mean_far_from_zero_loses_nothing(run):
    form = group_norm.GroupNormForm(2, 1e-5)
    x = (drawn(2, 8, 16, 16) + 1000).contiguous(memory_format=torch.channels_last)
    found = run(x, form)
    # E[x^2] - E[x]^2 in FP32 is off by more than a tenth here.
    torch.testing.assert_close(found.double(), wanted_of(x, form), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("value", [0.0, 3.3, -1e4])
def test_a_constant_is_its_bias(value, run):
    bias = drawn(6)
    form = group_norm.GroupNormForm(3, 1e-5, None, bias)
    x = torch.full((2, 6, 13, 9), value, device=DEVICE)
    found = run(x.contiguous(memory_format=torch.channels_last), form)
    torch.testing.assert_close(found, bias[None, :, None, None].expand_as(found))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_no_number_spoils_its_group_only(value, run):
    x = drawn(2, 8, 9, 9)
    x[1, 3, 4, 4] = value
    form = group_norm.GroupNormForm(4, 1e-5, drawn(8), drawn(8), activation.SILU)
    found = run(x, form)
    wanted = wanted_of(x, form).float()
    assert found[1, 2:4].isnan().all() and int(found.isnan().sum()) == 2 * 81
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("run", RUNS)
def test_squares_do_not_overflow_in_half_precision(run):
    x = (drawn(1, 8, 8, 8) * 9000).clamp(-60000, 60000).half()
    check(run, x, group_norm.GroupNormForm(2, 1e-5))


@pytest.mark.parametrize("run", RUNS)
def test_answers_are_the_same_every_time(run):
    x, form = drawn(2, 20, 17, 19), group_norm.GroupNormForm(4, 1e-5)
    assert torch.equal(run(x, form), run(x, form))
