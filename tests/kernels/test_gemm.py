"""Which way products are computed, with a fake cuBLASLt and a fake clock; tests/gpu has the real
one."""

import copy
import gc
import weakref
from dataclasses import dataclass, field, replace

import msgspec
import pytest

torch = pytest.importorskip("torch")

from fake_cublaslt import FakeCublasLt  # noqa: E402

from penstock.kernels.convolution import remembered  # noqa: E402
from penstock.kernels.cublaslt import (  # noqa: E402
    E4M3,
    GemmForm,
    Operands,
    Products,
    Unavailable,
)
from penstock.kernels.gemm import Gemm, Multiplier, open_multiplier  # noqa: E402

HALF = torch.float16
CPU = torch.device("cpu")


@dataclass
class FakeTimer:
    """Seconds by algorithm; -1 is torch's way."""

    library: FakeCublasLt
    seconds_of: dict[int, float]
    num_timed: int = 0
    num_done: int = 0
    order: list[int] = field(default_factory=list)

    def seconds(self, call) -> float:
        before = self.library.num_products
        call()
        self.num_timed += 1
        is_its = self.library.num_products > before
        self.order.append(self.library.used[-1] if is_its else -1)
        return self.seconds_of[self.order[-1]]

    def done(self) -> None:
        self.num_done += 1


@pytest.fixture(autouse=True)
def _alignment(monkeypatch):
    """That of torch's tensors on a CPU."""
    monkeypatch.setattr("penstock.kernels.cublaslt.ALIGNMENT", 64)


def a_multiplier(told=None, times=None, **library):
    library = FakeCublasLt(**library)
    timer = FakeTimer(library, times or {-1: 4.0, 0: 3.0, 1: 1.0, 2: 2.0})
    return Multiplier(Products(library, CPU), timer, told or {}), library, timer


def a_product(num_rows=8, seed=0):
    torch.manual_seed(seed)
    x, weight, bias = (torch.randn(each, dtype=HALF) for each in ((num_rows, 16), (24, 16), (24,)))
    form = GemmForm(num_rows, 16, 24, HALF, HALF)
    return Gemm(form, Operands(x, weight, bias), lambda x: torch.addmm(bias, x, weight.t()))


def choices(multiplier) -> dict[str, str]:
    (content,) = multiplier.files().values()
    return remembered(content, CPU)


def test_the_fastest_runs_from_then_on():
    multiplier, library, timer = a_multiplier()
    product = a_product()
    wanted = multiplier.run(product)
    assert library.num_products == 0
    multiplier.tune()
    assert timer.num_timed == 4 and timer.num_done == 1
    found = multiplier.run(product)
    assert library.used[-1] == 1 and torch.allclose(found, wanted, atol=2e-2)
    facts = multiplier.facts()
    assert facts["products"] == "1 by cublaslt" and facts["products_timed"] == "1 forms"
    assert facts["cublaslt"] == "130000" and "products_dropped" not in facts


def test_torch_stays_where_it_is_the_fastest():
    multiplier, library, _ = a_multiplier(times={-1: 0.5, 0: 3.0, 1: 1.0, 2: 2.0})
    multiplier.run(a_product())
    multiplier.tune()
    before = library.num_products
    multiplier.run(a_product())
    assert library.num_products == before
    assert list(choices(multiplier).values()) == ["torch"]


@pytest.mark.parametrize(("seconds", "is_taken"), [(0.96, False), (0.94, True)])
def test_of_many_rows_it_must_be_clearly_faster(monkeypatch, seconds, is_taken):
    """Power is the limit there, and a moment does not tell who takes less of it."""
    monkeypatch.setattr("penstock.kernels.gemm.MANY_ROWS", 16)
    for num_rows in (8, 16):
        times = {-1: 1.0, 0: 3.0, 1: seconds, 2: 2.0}
        multiplier, library, _ = a_multiplier(times=times)
        multiplier.run(a_product(num_rows))
        multiplier.tune()
        used = library.num_products
        multiplier.run(a_product(num_rows))
        assert (library.num_products > used) == (is_taken or num_rows == 8)


def test_what_is_wrong_is_never_chosen_and_told():
    multiplier, library, timer = a_multiplier(wrong=frozenset({1}))
    multiplier.run(a_product())
    multiplier.tune()
    multiplier.run(a_product())
    assert library.used[-1] == 2 and 1 not in timer.order
    assert multiplier.facts()["products_dropped"].endswith("its results are off by 2")


def test_a_second_start_times_nothing():
    first, _, _ = a_multiplier()
    first.run(a_product())
    first.tune()
    second, library, timer = a_multiplier(told=choices(first))
    second.run(a_product())
    second.tune()
    second.run(a_product())
    # To look at its results, and twice for whoever asked.
    assert timer.num_timed == timer.num_done == 0 and library.used == [1, 1, 1]
    assert second.facts()["products_timed"] == "0 forms"
    assert second.files() == first.files()


def test_of_a_second_start_torch_is_not_timed_either():
    slow = {-1: 0.5, 0: 3.0, 1: 1.0, 2: 2.0}
    first, _, _ = a_multiplier(times=slow)
    first.run(a_product())
    first.tune()
    second, library, timer = a_multiplier(told=choices(first))
    second.run(a_product())
    second.tune()
    assert timer.num_timed == 0 and library.num_products == 0


def test_what_was_right_once_is_looked_at_again():
    first, _, _ = a_multiplier()
    first.run(a_product())
    first.tune()
    second, library, timer = a_multiplier(told=choices(first), wrong=frozenset({1}))
    second.run(a_product())
    second.tune()
    second.run(a_product())
    assert timer.num_timed == 3 and library.used[-1] == 2


@pytest.mark.parametrize("name", ["cublaslt 9", "cublaslt x", "cublaslt -1", "else", ""])
def test_choices_that_make_no_sense_are_made_anew(name):
    first, _, _ = a_multiplier()
    first.run(a_product())
    first.tune()
    second, library, timer = a_multiplier(told=dict.fromkeys(choices(first), name))
    second.run(a_product())
    second.tune()
    assert timer.num_timed == 4


def test_of_another_library_nothing_is_taken_over():
    first, _, _ = a_multiplier()
    first.run(a_product())
    first.tune()
    second, _, timer = a_multiplier(told=choices(first), version=130_100)
    second.run(a_product())
    second.tune()
    assert timer.num_timed == 4


def test_each_number_of_tokens_is_prepared_once_and_only_before_answers_are_waited_for():
    multiplier, library, timer = a_multiplier()
    calls = []

    def call(num_rows):
        calls.append(num_rows)
        multiplier.run(a_product(num_rows))

    multiplier.prepare(8, lambda: call(8))
    multiplier.prepare(8, lambda: call(8))
    assert calls == [8] and timer.num_timed == 4
    multiplier.settle()
    multiplier.prepare(16, lambda: call(16))
    multiplier.run(a_product(16))
    multiplier.tune()
    assert calls == [8] and timer.num_timed == 4 and len(choices(multiplier)) == 1


def test_what_an_earlier_start_knows_need_not_be_called_first():
    first, _, _ = a_multiplier()
    first.run(a_product(8))
    first.tune()
    calls = []
    for version, expected in ((130_000, [16]), (130_100, [8, 16])):
        second, _, _ = a_multiplier(told=choices(first), version=version)
        calls.clear()
        for count in (8, 16):
            second.prepare(count, lambda count=count: calls.append(count))
        assert calls == expected


def test_one_product_may_be_part_of_torchs_way_to_another():
    multiplier, library, timer = a_multiplier()
    inner = a_product()
    form = replace(inner.form, has_gelu=True)

    def by_torch(x):
        part = replace(inner, operands=replace(inner.operands, x=x))
        return torch.nn.functional.gelu(multiplier.run(part), approximate="tanh")

    outer = Gemm(form, inner.operands, by_torch)
    wanted = multiplier.run(outer)
    multiplier.tune()
    assert len(choices(multiplier)) == 2
    assert torch.allclose(multiplier.run(outer), wanted, atol=2e-2)


@pytest.mark.parametrize("saturates", [True, False])
def test_what_gives_nan_beyond_the_range_of_e4m3_is_dropped(saturates):
    multiplier, library, _ = a_multiplier(saturates=saturates)
    torch.manual_seed(0)
    x, weight = (torch.randn(each).mul(50).to(E4M3) for each in ((64, 16), (32, 16)))
    bias, scale, factor = (
        torch.zeros(32, dtype=HALF),
        torch.full((1,), 0.02),
        torch.full((1,), 50.0),
    )

    def by_torch(x):
        sums = x.float() @ weight.float().t() * scale * scale + bias.float()
        bent = torch.nn.functional.gelu(sums, approximate="tanh") * factor
        return bent.clamp(-448, 448).to(E4M3)

    form = GemmForm(64, 16, 32, E4M3, E4M3, True, "one")
    product = Gemm(form, Operands(x, weight, bias, scale, scale, factor), by_torch)
    multiplier.run(product)
    multiplier.tune()
    assert list(choices(multiplier).values()) == ["cublaslt 1" if saturates else "torch"]
    assert ("products_dropped" in multiplier.facts()) != saturates


def test_an_older_library_that_knows_less_leaves_it_to_torch(monkeypatch):
    multiplier, library, _ = a_multiplier()
    monkeypatch.setattr(library, "cublasLtMatmulDescSetAttribute", lambda *given: 7, raising=False)
    product = a_product()
    wanted = multiplier.run(product)
    multiplier.tune()
    assert torch.equal(multiplier.run(product), wanted)
    assert "gives status 7" in multiplier.facts()["products_dropped"]


class FailingTimer(FakeTimer):
    """The end of a capture that found no memory tells of the capture."""

    def seconds(self, call) -> float:
        raise RuntimeError("capture was invalidated")


def test_what_cannot_be_tried_out_goes_torchs_way_and_is_left_to_the_next_start():
    library = FakeCublasLt()
    multiplier = Multiplier(Products(library, CPU), FailingTimer(library, {}))
    product = a_product()
    wanted = multiplier.run(product)
    multiplier.tune()
    assert torch.equal(multiplier.run(product), wanted)
    assert multiplier.facts()["products"] == "1 by torch"
    assert multiplier.facts()["products_dropped"].endswith("capture was invalidated")
    assert multiplier.files() == {}


def test_of_a_count_that_was_not_tried_out_whole_nothing_is_kept():
    """Whoever finds one of its products looks for no others."""
    multiplier, _, _ = a_multiplier()
    multiplier.run(a_product(8))
    multiplier.run(a_product(16))
    strange = a_product(8)
    form = replace(strange.form, width=99)
    broken = replace(strange, form=form, by_torch=lambda x: 1 / 0)
    multiplier.prepare(8, lambda: None)
    with pytest.raises(ZeroDivisionError):
        multiplier.run(broken)
    multiplier.tune()
    assert [key for key in choices(multiplier) if " 8x" in key] == []
    assert len(choices(multiplier)) == 1


def test_once_somebody_waits_nothing_that_came_by_is_held():
    multiplier, _, timer = a_multiplier()
    product = a_product()
    multiplier.run(product)
    kept = weakref.ref(product.operands.x)
    multiplier.settle()
    del product
    gc.collect()
    assert kept() is None and timer.num_timed == 0


def test_a_gpu_without_room_to_try_anything_out_still_runs_the_model(monkeypatch):
    multiplier, library, timer = a_multiplier()
    product = a_product()
    wanted = multiplier.run(product)

    def full(*sizes, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr("torch.randn", full)
        multiplier.tune()
    assert torch.equal(multiplier.run(product), wanted)
    assert timer.num_timed == 0 and multiplier.files() == {}


def test_tensors_that_begin_elsewhere_go_torchs_way():
    multiplier, library, _ = a_multiplier()
    product = a_product()
    multiplier.run(product)
    multiplier.tune()
    before = library.num_products
    room = torch.empty(8 * 16 + 1, dtype=HALF)
    x = room[1:].view(8, 16).copy_(product.operands.x)
    found = multiplier.run(replace(product, operands=replace(product.operands, x=x)))
    assert library.num_products == before
    assert torch.equal(found, product.by_torch(x))


def test_copies_of_a_layer_share_it():
    multiplier, _, _ = a_multiplier()
    assert copy.deepcopy({"multiplier": multiplier})["multiplier"] is multiplier


def test_files_are_those_of_this_machine():
    multiplier, _, _ = a_multiplier()
    assert multiplier.files() == {}
    multiplier.run(a_product())
    multiplier.tune()
    (name, content), *_ = multiplier.files().items()
    assert name == "fusion.json"
    assert msgspec.json.decode(content)["made_for"]["device"] == "CPU"
    key = "cublaslt 130000 8x16 to 24, float16 to float16"
    assert remembered(content, CPU) == {key: "cublaslt 1"}


def test_without_a_gpu_there_is_none(tmp_path):
    with pytest.raises(Unavailable, match="no NVIDIA GPU"):
        open_multiplier(CPU, tmp_path)


def test_a_cudnn_that_torch_refuses_is_no_matter_of_products(monkeypatch):
    def refuse():
        raise RuntimeError("cuDNN version incompatibility")

    multiplier, _, _ = a_multiplier()
    multiplier.run(a_product())
    multiplier.tune()
    known = choices(multiplier)
    monkeypatch.setattr("torch.backends.cudnn.version", refuse)
    assert choices(multiplier) == known
    (content,) = multiplier.files().values()
    monkeypatch.undo()
    assert remembered(content, CPU) == {}
