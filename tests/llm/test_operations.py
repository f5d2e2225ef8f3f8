"""What lies between products, in plain torch; tests/kernels has the kernels beside it."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from paged_cases import a_case, plain  # noqa: E402

from penstock.llm import operations  # noqa: E402
from penstock.llm.cuda_runner import parameters_of  # noqa: E402
from penstock.llm.models.products import Product, Small, fp8_product  # noqa: E402
from penstock.llm.operations import KEY, Places  # noqa: E402
from penstock.llm.sampling import STEPS, Row, sample  # noqa: E402
from penstock.sampling_params import SamplingParams  # noqa: E402


def test_every_token_sees_its_sequence_up_to_itself():
    case = a_case([(30, 30), (17, 1), (0, 1), (9, 4)], 3, 2, 16, 4, torch.float32)
    found = operations.attend(case.queries, case.paged, Places(case.sheet, 0, 1, case.lines))
    torch.testing.assert_close(found, plain(case), atol=1e-5, rtol=0)


def test_tokens_that_only_the_device_knows():
    sheet = torch.zeros(4, operations.NUM_COLUMNS, dtype=torch.int32)
    sheet[:, operations.TOKEN] = torch.tensor([5, -1, 0, -1])
    sheet[:, operations.ROW] = torch.tensor([0, 2, 1, 0])
    last = torch.tensor([70, 71, 72], dtype=torch.int32)
    assert operations.known(sheet, last).tolist() == [5, 72, 0, 70]


def test_products_in_fp8_get_what_they_take():
    weight, x = torch.randn(16, 32), torch.randn(3, 32)
    norm = torch.ones(32)
    for product, kind in (
        (Product(weight, None), torch.Tensor),
        (fp8_product(weight, None), Small),
    ):
        taken, total = operations.add_norm(x, x, norm, 1e-5, product)
        assert isinstance(taken, kind) and torch.equal(total, x + x)
        assert isinstance(operations.gate(torch.cat([x, x], 1), product), kind)


def test_tokens_are_drawn_as_they_are_from_rows():
    torch.manual_seed(3)
    samplings = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9, seed=5),
        SamplingParams(temperature=1.3, seed=2**63, top_k=9),
        SamplingParams(temperature=0.7, seed=2**32 - 1, top_p=0.6),
        SamplingParams(temperature=2.0, seed=9, min_p=0.2, top_k=30),
    ]
    logits = torch.randn(5, 200)
    for position in range(20):
        rows = [Row(each, position) for each in samplings]
        sheet = np.zeros((5, operations.NUM_COLUMNS), np.int32)
        sheet[:, KEY:] = [parameters_of(each) for each in samplings]
        moved = np.full(5, position, np.uint32) * np.uint32(STEPS[0])
        sheet[:, KEY] += moved.view(np.int32)
        sheet[:, operations.TARGET] = [4, 3, 2, 1, 0]
        drawn, last = torch.zeros(5, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
        operations.draw(logits, torch.from_numpy(sheet), drawn, last)
        assert drawn.tolist() == sample(logits, rows).tokens.tolist()
        assert last.tolist() == [*reversed(drawn.tolist()), 0]
