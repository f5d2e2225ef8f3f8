"""Bounded memory of what ran."""

from penstock.serving.batches import MAX_SHAPES, NUM_RECENT, BatchRecord, History


def record(number: int, shapes: tuple[tuple[int, ...], ...] = ((4,),)) -> BatchRecord:
    return BatchRecord(
        float(number), 3, 2, shapes, 0.001, 0.002, 0.01, 0.011, 0, "queue empty", "answered"
    )


def test_the_last_batches_are_kept():
    history = History()
    for number in range(NUM_RECENT + 10):
        history.note(record(number))
    assert [each.ended for each in history.recent] == list(range(10, NUM_RECENT + 10))


def test_requests_rows_and_batches_are_counted_by_shape():
    history = History()
    for shapes in (((4,),), ((5,),), ((4,),)):
        history.note(record(0, shapes))
    seen = history.shapes[((4,),)]
    assert (seen.num_batches, seen.num_requests, seen.num_rows) == (2, 4, 6)
    assert history.shapes[((5,),)].num_batches == 1


def test_shapes_beyond_the_limit_are_counted_together():
    history = History()
    for size in range(MAX_SHAPES + 7):
        history.note(record(0, ((size,),)))
    assert len(history.shapes) == MAX_SHAPES
    assert history.others.num_batches == 7
    assert history.others.num_requests == 14
