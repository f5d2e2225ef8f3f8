"""Frames of HTTP/2, and the allowance for those without use; connections are in test_h2."""

import pytest

from penstock.wire import h2_frames as h2
from penstock.wire.h2_frames import Allowance, H2Error, Violation


def test_frames_have_the_layout_of_the_rfc():
    assert h2.frame(h2.PING, h2.ACK, 0, b"12345678").hex() == "0000080601000000003132333435363738"
    assert h2.frame_head(0x010203, h2.DATA, 1, 0x7FFFFFFF).hex() == "01020300017fffffff"
    assert h2.window_update(5, 65536).hex() == "00000408000000000500010000"
    assert h2.reset(3, H2Error.CANCEL).hex() == "00000403000000000300000008"
    assert h2.goaway(7, H2Error.NO_ERROR, "a").hex() == "000009070000000000000000070000000061"
    assert h2.settings({h2.MAX_FRAME_SIZE: 16384}).hex() == "000006040000000000000500004000"


def test_settings_are_read_in_their_order():
    payload = h2.settings({h2.ENABLE_PUSH: 0})[9:] + h2.settings({0xABCD: 7})[9:]
    assert h2.read_settings(payload) == [(h2.ENABLE_PUSH, 0), (0xABCD, 7)]


def test_the_reserved_bit_of_a_number_is_ignored():
    assert h2.read_number(b"\xff\xff\xff\xff") == h2.MAX_NUMBER


def test_padding_and_priority_are_stripped():
    assert h2.strip_padding(0, b"abc") == b"abc"
    assert h2.strip_padding(h2.PADDED, b"\x02abc\0\0") == b"abc"
    assert h2.strip_padding(h2.PADDED | h2.HAS_PRIORITY, b"\x0112345abc\0") == b"abc"
    with pytest.raises(Violation):
        h2.strip_padding(h2.HAS_PRIORITY, b"1234")


def test_an_allowance_is_refilled_by_time_and_by_calls():
    allowance = Allowance(0.0, rate=10.0, limit=5.0, per_call=2.0)
    for _ in range(5):
        allowance.use(0.0)
    with pytest.raises(Violation) as caught:
        allowance.use(0.0)
    assert caught.value.code == H2Error.ENHANCE_YOUR_CALM
    allowance.use(0.1)
    with pytest.raises(Violation):
        allowance.use(0.15)
    allowance.earn()
    allowance.use(0.15)
    allowance.use(0.15)
    for _ in range(100):
        allowance.earn()
    for _ in range(5):
        allowance.use(0.15)
    with pytest.raises(Violation):
        allowance.use(0.15)
