"""What a module's parameters are before weights are loaded; test_pytorch has the loading."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from penstock.backends.torch_weights import undrawn  # noqa: E402


class Layers(nn.Module):
    """All the ways in which torch's own layers draw."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.words = nn.Embedding(5, 3)
        self.image = nn.Conv2d(2, 2, 3)
        self.norm = nn.LayerNorm(4)
        nn.init.xavier_normal_(self.linear.weight)
        nn.init.kaiming_normal_(self.image.weight)


class WithRandomBuffer(nn.Module):
    """Not among the weights: what it is depends on all that was drawn before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.register_buffer("features", torch.randn(4, 2), persistent=False)


class Seeded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.linear = nn.Linear(3, 4)
        self.features = torch.rand(3)


def test_parameters_are_not_drawn():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    module = undrawn(Layers)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(module.norm.weight, torch.ones(4)) and isinstance(module, Layers)
    # Outside of it they are.
    Layers()
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("module", [WithRandomBuffer, Seeded])
def test_what_is_drawn_beside_them_is_what_it_would_have_been(module):
    torch.manual_seed(3)
    wanted = module().features
    torch.manual_seed(3)
    assert torch.equal(undrawn(module).features, wanted)


def test_numbers_of_somebodys_own_generator_come_in_order():
    def make():
        generator = torch.Generator().manual_seed(7)
        layer = nn.Linear(2, 2)
        nn.init.normal_(layer.weight, generator=generator)
        layer.features = torch.rand(3, generator=generator)
        return layer

    assert torch.equal(undrawn(make).features, make().features)


def test_a_buffer_that_is_drawn_by_itself_is_drawn():
    def make():
        layer = nn.BatchNorm1d(3)
        layer.running_mean.normal_()
        return layer

    torch.manual_seed(3)
    wanted = make().running_mean
    torch.manual_seed(3)
    assert torch.equal(undrawn(make).running_mean, wanted)


def test_an_error_is_the_makers():
    def make():
        nn.Linear(2, 2)
        raise ValueError("no such size")

    with pytest.raises(ValueError, match="no such size"):
        undrawn(make)
    before = torch.get_rng_state()
    nn.Linear(2, 2)
    assert not torch.equal(torch.get_rng_state(), before)
