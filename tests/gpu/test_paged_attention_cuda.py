"""The kernels of language models on a real GPU, against FP64 or plain torch; `make test-gpu`.
Without one: tests/kernels."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
pytest.importorskip("triton")

from expert_cases import experts_case, one_by_one  # noqa: E402
from paged_cases import a_case, plain  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from penstock.kernels import decoding, grouped_gemm, paged_attention, token_sampling  # noqa: E402
from penstock.llm import operations, sampling  # noqa: E402
from penstock.llm.logits import without  # noqa: E402
from penstock.llm.models.fp8 import fp8_linear, in_fp8  # noqa: E402
from penstock.llm.models.norms import rms_norm  # noqa: E402
from penstock.llm.operations import Places  # noqa: E402

TYPES = [torch.float16, torch.bfloat16]
# Size and group of heads, heads of keys: SmolLM2's, Qwen3's, Llama's, one without groups, and one
# with large ones. Each is compiled, so there are few.
HEADS = [
    (torch.bfloat16, 64, 3, 3),
    (torch.bfloat16, 128, 2, 8),
    (torch.bfloat16, 128, 4, 8),
    (torch.bfloat16, 64, 1, 4),
    (torch.float16, 128, 8, 2),
]
has_fp8 = pytest.mark.skipif(
    torch.cuda.get_device_capability() < (8, 9), reason="the GPU has no FP8"
)


def relative(found, wanted) -> float:
    found, wanted = found.double().cpu(), wanted.double().cpu()
    assert bool(found.isfinite().all())
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("dtype", "size", "group", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("splits", [1, 4, 64])
def test_one_token_for_each_sequence(dtype, size, group, num_kv_heads, splits):
    lengths = [1, 2000, 63, 64, 65, 0, 777, 16, 128]
    case = a_case([(n, 1) for n in lengths], group, num_kv_heads, size, 16, dtype, "cuda")
    out = torch.full_like(case.queries, float("nan"))
    batch_table = case.batch_table
    paged_attention.attend_one(
        case.queries, case.paged, batch_table[:, 1], batch_table[:, 2], out, splits
    )
    assert relative(out, plain(case)) < 5e-3


@pytest.mark.parametrize(
    ("dtype", "size", "group", "num_kv_heads", "block_size"),
    [(*each, 16) for each in HEADS] + [(*HEADS[2], 256)],
)
def test_prompts_and_parts_of_them(dtype, size, group, num_kv_heads, block_size):
    sequences = [(1500, 1500), (900, 20), (65, 64), (3, 2), (512, 1), (700, 300)]
    case = a_case(sequences, group, num_kv_heads, size, block_size, dtype, "cuda")
    out = torch.full_like(case.queries, float("nan"))
    paged_attention.attend_many(case.queries, case.paged, case.lines, out)
    assert relative(out, plain(case)) < 5e-3


@pytest.mark.parametrize(("window", "cap"), [(33, 0.0), (512, 2.0), (0, 1.5)])
def test_windows_and_caps(window, cap):
    form = {"window": window, "cap": cap}
    ones = [(n, 1) for n in (1, 2000, 63, 64, 65, 0, 777, 16, 128)]
    for splits in (1, 16):
        case = a_case(ones, 2, 4, 128, 16, torch.bfloat16, "cuda", **form)
        out = torch.full_like(case.queries, float("nan"))
        where = case.batch_table[:, 1], case.batch_table[:, 2]
        paged_attention.attend_one(case.queries, case.paged, *where, out, splits)
        assert relative(out, plain(case)) < 5e-3
    sequences = [(1500, 1500), (900, 20), (65, 64), (3, 2), (700, 300)]
    case = a_case(sequences, 2, 4, 128, 16, torch.bfloat16, "cuda", **form)
    out = torch.full_like(case.queries, float("nan"))
    paged_attention.attend_many(case.queries, case.paged, case.lines, out)
    assert relative(out, plain(case)) < 5e-3


@pytest.mark.parametrize("num_tokens", [1, 7, 64, 1000])
@pytest.mark.parametrize(
    ("num_experts", "num_used", "width", "inner"), [(8, 2, 1024, 1792), (128, 8, 2048, 768)]
)
def test_experts(num_tokens, num_experts, num_used, width, inner):
    sizes = num_tokens, num_experts, num_used, width, inner
    case = experts_case(*sizes, torch.bfloat16, "cuda")
    assert relative(grouped_gemm.run_experts(*case), one_by_one(*case)) < 1e-2


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 4096), (300, 1024), (5, 576)])
def test_add_norm(dtype, num_rows, width):
    weight = 1 + 0.2 * torch.randn(width, device="cuda", dtype=dtype)
    added, residual = torch.randn(2, num_rows, width, device="cuda", dtype=dtype)
    found, total = decoding.add_norm(added, residual, weight, 1e-5)
    assert torch.equal(total, added + residual)
    assert relative(found, rms_norm(total.double(), weight.double(), 1e-5)) < 5e-3


@has_fp8
def test_what_products_take_in_e4m3():
    weight = 1 + 0.2 * torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    added, residual = torch.randn(2, 77, 4096, device="cuda", dtype=torch.bfloat16)
    scales = torch.full((77, 1), float("nan"), device="cuda")
    found, total = decoding.add_norm(added, residual, weight, 1e-5, scales)
    assert relative(found.float() * scales, rms_norm(total.float(), weight.float(), 1e-5)) < 4e-2
    x = torch.randn(77, 2 * 14336, device="cuda", dtype=torch.bfloat16)
    small = decoding.gate(x, scales)
    gate, up = x.double().chunk(2, 1)
    assert relative(small.float() * scales, F.silu(gate) * up) < 4e-2


@has_fp8
@pytest.mark.parametrize("num_rows", [1, 3, 64, 1000])
def test_a_product_in_fp8(num_rows):
    x = torch.randn(num_rows, 1024, device="cuda", dtype=torch.bfloat16)
    weight = 0.02 * torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)
    found = fp8_linear(weight, None)(in_fp8(x))
    assert found.dtype == torch.bfloat16
    assert relative(found, x.double() @ weight.double().t()) < 5e-2


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(
    ("dtype", "size", "group", "num_kv_heads"), [*HEADS[:3], (torch.bfloat16, 96, 1, 4)]
)
def test_turn(dtype, size, group, num_kv_heads, has_norms):
    case = a_case([(9, 3), (0, 0), (20, 1), (90, 40)], group, num_kv_heads, size, 16, dtype, "cuda")
    places = Places(case.batch_table, 0, 1)
    width = (group + 2) * num_kv_heads * size
    qkv = torch.randn(len(case.batch_table), width, device="cuda", dtype=dtype)
    norms = None
    if has_norms:
        norms = tuple(1 + 0.3 * torch.randn(2, size, device="cuda", dtype=dtype))
    angles = torch.rand(100, size // 2) * 6
    turns = torch.stack([angles.cos(), angles.sin()], 1).cuda()
    host = a_case([(9, 3), (0, 0), (20, 1), (90, 40)], group, num_kv_heads, size, 16, dtype)
    wanted = qkv.cpu().clone()
    norms_there = None if norms is None else (norms[0].cpu(), norms[1].cpu())
    there = Places(host.batch_table, 0, 1)
    operations.rope_to_cache(wanted, host.paged, there, turns.cpu(), norms_there, 1e-5)
    found = qkv.clone()
    decoding.apply_rope(found, case.paged, turns, places.positions, places.rows, norms, 1e-5)
    is_there = host.batch_table[:, 1] >= 0
    queries = group * num_kv_heads * size
    assert relative(found.cpu()[is_there][:, :queries], wanted[is_there][:, :queries]) < 5e-3
    for one, other in (
        (case.paged.keys, host.paged.keys),
        (case.paged.values, host.paged.values),
    ):
        assert relative(one.nan_to_num(), other.nan_to_num()) < 5e-3


@pytest.mark.parametrize("dtype", TYPES)
def test_gate(dtype):
    x = 3 * torch.randn(33, 2 * 3072, device="cuda", dtype=dtype)
    gate, up = x.double().chunk(2, 1)
    assert relative(decoding.gate(x), F.silu(gate) * up) < 5e-3


class TestDrawing:
    SIZE = 151_936

    def rows(self, num, **values):
        return [
            torch.full((num,), values.get(name, default), dtype=dtype, device="cuda")
            for name, default, dtype in (
                ("temperature", 1.0, torch.float32),
                ("top_k", 0, torch.int32),
                ("top_p", 1.0, torch.float32),
                ("min_p", 0.0, torch.float32),
            )
        ]

    @pytest.mark.parametrize("dtype", TYPES)
    @pytest.mark.parametrize(
        "values",
        [
            {"top_k": 50},
            {"top_k": 1},
            {"top_p": 0.9},
            {"min_p": 0.1},
            {"top_k": 200, "top_p": 0.8, "min_p": 0.01, "temperature": 0.6},
        ],
    )
    def test_those_that_are_left(self, dtype, values):
        torch.manual_seed(4)
        logits = 2 * torch.randn(5, self.SIZE, device="cuda", dtype=dtype)
        temperature, top_k, top_p, min_p = self.rows(5, **values)
        lowest = token_sampling.cut(logits, temperature, top_k, top_p, min_p)
        warm = logits.float() / temperature[:, None]
        wanted = without(warm, top_k, top_p, min_p) > float("-inf")
        least = torch.where(wanted, logits.float(), float("inf")).amin(1)
        # Those as likely as the last stay, and sums are rounded otherwise.
        found = logits.float() >= lowest[:, None]
        assert bool((found.sum(1) >= 1).all())
        if "top_p" in values:
            sums = [warm.softmax(1).masked_fill(~each, 0).sum(1) for each in (found, wanted)]
            assert bool(((sums[0] - sums[1]).abs() < 0.02).all())
        else:
            assert torch.equal(found, logits.float() >= least[:, None])

    def test_draws_are_those_of_the_noise(self):
        torch.manual_seed(4)
        logits = 2 * torch.randn(9, self.SIZE, device="cuda", dtype=torch.bfloat16)
        keys = torch.tensor([sampling.key_of(seed, 31) for seed in range(9)])
        drawn, last = (torch.full((9,), -1, dtype=torch.int32, device="cuda") for _ in range(2))
        temperature = torch.full((9,), 0.7, device="cuda")
        rows = torch.arange(9, dtype=torch.int32, device="cuda").flip(0)
        lowest = torch.full((9,), float("-inf"), device="cuda")
        token_sampling.sample(
            logits, lowest, temperature, keys.int().cuda(), drawn, last, rows.contiguous()
        )
        noised = logits.float() / 0.7 + sampling.noise(keys.cuda(), self.SIZE)
        best = noised.gather(1, drawn.long()[:, None])[:, 0]
        assert bool((noised.amax(1) - best < 1e-3).all())
        assert torch.equal(last, drawn.flip(0))

    def test_shares_are_those_of_the_softmax(self):
        """Over many keys each of few tokens is drawn as often as it is likely."""
        num = 20_000
        logits = torch.full((1, 1024), -40.0, device="cuda", dtype=torch.bfloat16)
        logits[0, [3, 500, 1023]] = torch.tensor([1.0, 2.0, 0.0], device="cuda").bfloat16()
        logits = logits.expand(num, -1).contiguous()
        keys = torch.tensor([sampling.key_of(5, n) for n in range(num)]).int().cuda()
        drawn = torch.empty(num, dtype=torch.int32, device="cuda")
        rows = torch.arange(num, dtype=torch.int32, device="cuda")
        lowest = torch.full((num,), float("-inf"), device="cuda")
        ones = torch.ones(num, device="cuda")
        token_sampling.sample(logits, lowest, ones, keys, drawn, torch.empty_like(drawn), rows)
        shares = drawn.long().bincount(minlength=1024) / num
        wanted = logits[0].float().softmax(0)
        assert float((shares - wanted).abs().max()) < 0.015
