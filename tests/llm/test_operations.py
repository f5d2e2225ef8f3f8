"""What lies between linear layers, in plain torch; tests/kernels has the kernels beside it."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from paged_cases import a_case, plain  # noqa: E402

from penstock.llm import operations  # noqa: E402
from penstock.llm.cuda_runner import parameters_of  # noqa: E402
from penstock.llm.logits import SamplingRow  # noqa: E402
from penstock.llm.models.fp8 import fp8_linear  # noqa: E402
from penstock.llm.models.linear import Linear, Small  # noqa: E402
from penstock.llm.operations import KEY, Places  # noqa: E402
from penstock.llm.sampling import STEPS, sample  # noqa: E402
from penstock.sampling_params import SamplingParams  # noqa: E402


@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (5, 0.0), (12, 2.0)])
def test_every_token_sees_its_sequence_up_to_itself(window, cap):
    sequences = [(30, 30), (17, 1), (0, 1), (9, 4)]
    case = a_case(sequences, 3, 2, 16, 4, torch.float32, window=window, cap=cap)
    found = operations.attend(case.queries, case.paged, Places(case.batch_table, 0, 1, case.lines))
    torch.testing.assert_close(found, plain(case), atol=1e-5, rtol=0)


def test_tokens_that_only_the_device_knows():
    batch_table = torch.zeros(4, operations.NUM_COLUMNS, dtype=torch.int32)
    batch_table[:, operations.TOKEN] = torch.tensor([5, -1, 0, -1])
    batch_table[:, operations.ROW] = torch.tensor([0, 2, 1, 0])
    last = torch.tensor([70, 71, 72], dtype=torch.int32)
    assert operations.read_tokens(batch_table, last).tolist() == [5, 72, 0, 70]


def test_products_in_fp8_get_what_they_take():
    weight, x = torch.randn(16, 32), torch.randn(3, 32)
    norm = torch.ones(32)
    for linear, kind in (
        (Linear(weight, None), torch.Tensor),
        (fp8_linear(weight, None), Small),
    ):
        taken, total = operations.add_norm(x, x, norm, 1e-5, linear)
        assert isinstance(taken, kind) and torch.equal(total, x + x)
        assert isinstance(operations.gate(torch.cat([x, x], 1), linear), kind)


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
        rows = [SamplingRow(each, position) for each in samplings]
        batch_table = np.zeros((5, operations.NUM_COLUMNS), np.int32)
        batch_table[:, KEY:] = [parameters_of(each) for each in samplings]
        moved = np.full(5, position, np.uint32) * np.uint32(STEPS[0])
        batch_table[:, KEY] += moved.view(np.int32)
        batch_table[:, operations.TARGET] = [4, 3, 2, 1, 0]
        drawn, last = torch.zeros(5, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
        operations.sample_rows(logits, torch.from_numpy(batch_table), drawn, last)
        assert drawn.tolist() == sample(logits, rows).tokens.tolist()
        assert last.tolist() == [*reversed(drawn.tolist()), 0]
