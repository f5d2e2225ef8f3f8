"""Which requests and keys are refused for having killed workers, on a clock of its own."""

import pytest
from doubles import FakeClock

from penstock.serving.quarantine import (
    MAX_REMEMBERED,
    MAX_SUSPECTS,
    QUARANTINE_S,
    Quarantine,
    QuarantineTable,
    fingerprint,
)
from penstock.types import Buffer, Tensor

NO_KEY = b""


def part(name: str, shape: tuple[int, ...], data: Buffer) -> Tensor:
    return Tensor(name, "UINT8", shape, data)


def table(quarantine: Quarantine) -> QuarantineTable:
    """What those who admit requests know."""
    copied = QuarantineTable()
    copied.replace(quarantine.bodies, quarantine.keys)
    return copied


def kill(quarantine: Quarantine, body: bytes, clock: FakeClock, key: bytes = NO_KEY):
    """A pinned death between two answers of other requests."""
    quarantine.answered()
    return quarantine.died(body, key, clock())


def test_a_body_that_killed_twice_is_quarantined_for_ten_minutes():
    quarantine, clock = Quarantine(), FakeClock()
    first = kill(quarantine, b"poison", clock)
    assert first.is_excused and not first.quarantines_body
    assert not table(quarantine).is_active, "no body is hashed yet"
    clock.advance(5)
    second = kill(quarantine, b"poison", clock)
    assert second.is_excused and second.quarantines_body
    assert table(quarantine).has_bodies
    assert table(quarantine).body_left_s(b"poison", clock()) == QUARANTINE_S == 600
    assert table(quarantine).body_left_s(b"other", clock()) == 0
    clock.advance(QUARANTINE_S - 1)
    assert table(quarantine).body_left_s(b"poison", clock()) == 1
    clock.advance(1)
    assert table(quarantine).body_left_s(b"poison", clock()) == 0
    quarantine.expire(clock())
    assert not table(quarantine).is_active, "bodies are hashed no longer"


def test_after_its_quarantine_a_body_starts_anew():
    quarantine, clock = Quarantine(), FakeClock()
    for _ in range(2):
        kill(quarantine, b"poison", clock)
    clock.advance(QUARANTINE_S)
    assert not kill(quarantine, b"poison", clock).quarantines_body
    assert kill(quarantine, b"poison", clock).quarantines_body


def test_deaths_that_are_long_ago_do_not_count():
    quarantine, clock = Quarantine(), FakeClock()
    for _ in range(10):
        assert not kill(quarantine, b"poison", clock, b"key").quarantines_body
        clock.advance(QUARANTINE_S)
    assert not table(quarantine).is_active


def test_a_key_whose_requests_killed_five_times_is_quarantined():
    quarantine, clock = Quarantine(), FakeClock()
    for number in range(4):
        assert not kill(quarantine, b"%d" % number, clock, b"key").quarantines_key
    for number in range(10):
        kill(quarantine, b"nameless %d" % number, clock)
    assert not table(quarantine).is_active
    assert kill(quarantine, b"last", clock, b"key").quarantines_key
    assert table(quarantine).is_active and not table(quarantine).has_bodies
    assert table(quarantine).key_left_s(b"key", clock()) == QUARANTINE_S
    assert table(quarantine).key_left_s(b"other", clock()) == 0
    assert table(quarantine).key_left_s(NO_KEY, clock()) == 0, "clients without a key are nobody"
    clock.advance(QUARANTINE_S)
    quarantine.expire(clock())
    assert not table(quarantine).is_active


def test_a_model_that_dies_on_any_request_is_at_fault_itself():
    quarantine, clock = Quarantine(), FakeClock()
    bodies = [b"%d" % number for number in range(MAX_SUSPECTS + 3)]
    verdicts = [quarantine.died(body, b"key", clock()) for body in bodies for _ in range(2)]
    excused = [verdict.is_excused for verdict in verdicts]
    assert excused == [True] * 2 * MAX_SUSPECTS + [False] * 6
    assert not table(quarantine).has_bodies, "those that were quarantined before are pardoned"
    quarantine.answered()
    assert quarantine.died(b"poison", NO_KEY, clock()).is_excused


def test_every_key_is_quarantined_after_its_own_five_deaths_also_without_answers():
    quarantine, clock = Quarantine(), FakeClock()
    keys = [b"a", b"b", b"c"]
    for number in range(5):
        for key in keys:
            assert table(quarantine).key_left_s(key, clock()) == 0
            verdict = quarantine.died(key + b"%d" % number, key, clock())
            assert verdict.quarantines_key == (number == 4)
    assert not verdict.is_excused, "to the supervisor it may be a crash loop all the same"
    assert [table(quarantine).key_left_s(key, clock()) for key in keys] == [QUARANTINE_S] * 3
    assert not table(quarantine).has_bodies


def test_a_new_poison_every_second_among_others_is_always_excused():
    quarantine, clock = Quarantine(), FakeClock()
    for number in range(1000):
        for _ in range(2):
            assert kill(quarantine, b"%d" % number, clock).is_excused
        clock.advance(1)
    assert table(quarantine).body_left_s(b"999", clock()) > 0
    assert table(quarantine).body_left_s(b"1", clock()) == 0


def test_what_is_remembered_is_bounded():
    quarantine, clock = Quarantine(), FakeClock()
    for number in range(2 * MAX_REMEMBERED):
        for _ in range(2):
            kill(quarantine, b"%d" % number, clock)
    assert table(quarantine).body_left_s(b"%d" % (MAX_REMEMBERED - 1), clock()) == 0
    assert table(quarantine).body_left_s(b"%d" % (MAX_REMEMBERED + 1), clock()) > 0
    clock.advance(QUARANTINE_S)
    quarantine.expire(clock())
    assert not table(quarantine).is_active


def test_only_bodies_as_large_as_a_quarantined_one_need_a_fingerprint():
    quarantine, clock = Quarantine(), FakeClock()
    body = fingerprint([part("x", (1, 4), b"abcd"), part("y", (1, 2), b"ef")])
    kill(quarantine, body, clock)
    assert not table(quarantine).has_body_of(6)
    kill(quarantine, body, clock)
    assert [size for size in range(20) if table(quarantine).has_body_of(size)] == [6]
    clock.advance(QUARANTINE_S)
    quarantine.expire(clock())
    assert not table(quarantine).has_body_of(6)


BASE = (part("x", (1, 4), b"abcd"), part("y", (1, 2), b"ef"))


@pytest.mark.parametrize(
    ("parts", "parameters"),
    [
        ((part("x", (1, 4), b"abcx"), BASE[1]), None),
        ((part("x", (2, 2), b"abcd"), BASE[1]), None),
        ((part("z", (1, 4), b"abcd"), BASE[1]), None),
        ((part("x", (1, 5), b"abcde"), part("y", (1, 1), b"f")), None),
        (BASE, {"depth": 3}),
        (BASE[:1], None),
    ],
)
def test_everything_that_a_model_sees_is_in_the_fingerprint(parts, parameters):
    assert fingerprint(parts, parameters) != fingerprint(BASE)


def test_equal_requests_have_equal_fingerprints_wherever_their_bytes_are():
    views = [part(each.name, each.shape, memoryview(bytearray(each.data))) for each in BASE]
    assert fingerprint(views) == fingerprint(BASE, {})
    assert fingerprint(BASE, {"a": 1, "b": 2}) == fingerprint(BASE, {"b": 2, "a": 1})


def test_deaths_in_company_are_excused_while_poison_is_about_and_answers_come():
    quarantine, clock = Quarantine(), FakeClock()
    assert not quarantine.died_in_company(), "nothing says that a request did it"
    for _ in range(2):
        kill(quarantine, b"poison", clock)
    for _ in range(100):
        quarantine.answered()
        assert quarantine.died_in_company()
    verdicts = [quarantine.died_in_company() for _ in range(MAX_SUSPECTS + 2)]
    assert verdicts[0] and not verdicts[-1], "without any answer the model is at fault"


def test_a_table_forgets_what_is_over_by_itself():
    copied = QuarantineTable()
    copied.replace({b"8 bytes of size": 10.0}, {b"key": 20.0})
    assert copied.is_active and copied.has_bodies
    copied.expire(9.9)
    assert copied.has_bodies and copied.key_left_s(b"key", 9.9) == pytest.approx(10.1)
    copied.expire(10.0)
    assert copied.is_active and not copied.has_bodies
    copied.expire(20.0)
    assert not copied.is_active
    copied.expire(30.0)
    copied.replace({}, {b"key": 40.0})
    assert copied.is_active and copied.key_left_s(b"key", 30.0) == 10.0
