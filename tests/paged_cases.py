"""Sequences with keys and values in blocks that lie in no order, and attention over them, in
FP64."""

from dataclasses import dataclass

import torch

from penstock.kernels import Paged
from penstock.llm.operations import NUM_COLUMNS, tokens_of_line


@dataclass
class Case:
    queries: torch.Tensor
    paged: Paged
    batch_table: torch.Tensor
    lines: torch.Tensor
    # Length of each sequence, and how many of its tokens, the last, are computed.
    sequences: list[tuple[int, int]]


def a_case(
    sequences,
    group,
    num_kv_heads,
    size,
    block_size=16,
    dtype=torch.float16,
    device="cpu",
    window=0,
    cap=0.0,
) -> Case:
    """A sequence of length 0 is a place without a token."""
    torch.manual_seed(5)
    most = max(-(-length // block_size) for length, _ in sequences)
    num_blocks = sum(-(-length // block_size) for length, _ in sequences) + 3
    order = torch.randperm(num_blocks).tolist()
    table = torch.full((len(sequences) + 2, most + 1), 1 << 28, dtype=torch.int32)
    rows: list[list[int]] = []
    lines: list[list[int]] = []
    # Rows of the table are in no order, either.
    places = torch.randperm(len(sequences) + 2).tolist()
    for number, (length, count) in enumerate(sequences):
        row = places[number]
        own = [order.pop() for _ in range(-(-length // block_size))]
        table[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
        first, start = len(rows), length - count
        for at in range(start, max(length, start + 1)):
            rows.append([0, at if length else -1, row, *[0] * (NUM_COLUMNS - 3)])
        for at in range(0, count, tokens_of_line(group)):
            lines.append([row, first + at, first + count, start + at])
    keys, values = torch.randn(2, num_blocks * block_size, num_kv_heads, size, dtype=dtype)
    # Blocks of nobody are never looked at.
    unused = torch.tensor(order)[:, None] * block_size + torch.arange(block_size)
    keys[unused], values[unused] = float("nan"), float("nan")
    queries = torch.randn(len(rows), group * num_kv_heads, size, dtype=dtype)
    paged = Paged(keys.to(device), values.to(device), table.to(device), block_size, window, cap)
    return Case(
        queries.to(device),
        paged,
        torch.tensor(rows, dtype=torch.int32, device=device),
        torch.tensor(lines, dtype=torch.int32, device=device),
        sequences,
    )


def plain(case: Case) -> torch.Tensor:
    """What is to be found."""
    paged, found, at = case.paged, [], 0
    table = paged.table.cpu()
    queries, keys, values = (
        each.cpu().double() for each in (case.queries, paged.keys, paged.values)
    )
    for length, count in case.sequences:
        if not length:
            found.append(torch.zeros_like(queries[at : at + 1]))
            at += 1
            continue
        row = int(case.batch_table[at, 2])
        seen = torch.arange(length)
        slots = table[row, seen // paged.block_size].long() * paged.block_size
        slots += seen % paged.block_size
        own = torch.arange(length - count, length)[:, None]
        mask = seen <= own
        if paged.window:
            mask &= seen > own - paged.window
        group = queries.shape[1] // keys.shape[1]
        all_keys, all_values = (each[slots].repeat_interleave(group, 1) for each in (keys, values))
        scores = torch.einsum("qhs,khs->hqk", queries[at : at + count], all_keys)
        scores /= queries.shape[2] ** 0.5
        if paged.cap:
            scores = paged.cap * (scores / paged.cap).tanh()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(2)
        found.append(torch.einsum("hqk,khs->qhs", weights, all_values))
        at += count
    return torch.cat(found).float()
