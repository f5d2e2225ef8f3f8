"""Rows of the device's table of blocks."""

from penstock.llm.scheduler import Chunk
from penstock.llm.sequence import Sequence
from penstock.llm.table_rows import TableRows
from penstock.sampling_params import SamplingParams


class Table:
    """What the device has, after all that it was sent."""

    def __init__(self, num_rows=3, max_blocks=4):
        self.rows = TableRows(num_rows, max_blocks)
        self.max_blocks = max_blocks
        self.entries = {}
        self.num_sent = 0

    def take(self, *chunks):
        held, new, changes = self.rows.take(chunks)
        self.entries |= dict(zip(changes.entries, changes.blocks, strict=True))
        self.num_sent += len(changes.entries)
        for mine, chunk in zip(held, chunks, strict=True):
            first = mine.row * self.max_blocks
            assert [self.entries[first + n] for n in range(len(chunk.blocks))] == chunk.blocks
        assert len({mine.row for mine in held}) == len(chunks)
        return new


def chunk(number, blocks, num_evictions=0):
    return Chunk(
        Sequence(number, [1], SamplingParams(max_tokens=1)), 0, 1, True, num_evictions, blocks
    )


def test_only_what_is_new_is_sent():
    table, blocks = Table(), [7, 3]
    assert table.take(chunk(1, blocks), chunk(2, [5])) == [0, 1]
    assert table.take(chunk(1, blocks), chunk(2, [5])) == []
    assert table.num_sent == 3
    blocks.append(9)
    assert table.take(chunk(1, blocks)) == []
    assert table.num_sent == 4


def test_whoever_lost_its_blocks_sends_all():
    table = Table()
    table.take(chunk(1, [7, 3]))
    table.take(chunk(1, [8, 3], num_evictions=1))
    assert table.num_sent == 4


def test_rows_of_those_that_are_gone_go_to_others():
    table = Table(num_rows=2)
    for number in range(0, 20, 2):
        assert table.take(chunk(number, [number]), chunk(number + 1, [number, 99])) == [0, 1]
    # It keeps what it has while it is in the step.
    assert table.take(chunk(19, [18, 99]), chunk(50, [1])) == [1]
    assert table.take(chunk(19, [18, 99]), chunk(51, [2])) == [1]
