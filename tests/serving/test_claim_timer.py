"""The timer claims once, at its time, and never after it was disarmed."""

import time

import pytest
from waiting import wait_until

from penstock.config import BatchPolicy
from penstock.processes.channel import Channel, socket_pair
from penstock.serving.claim_timer import ClaimTimer
from penstock.serving.claims import Claims, Offer
from penstock.serving.shard_link import ShardLink
from penstock.serving.shares import Queued
from penstock.wire import frames


class Claiming:
    """A worker's claims, with one shard whose socket is `sock`, and a batch that runs."""

    def __init__(self, batch_s: float) -> None:
        self.sock, theirs = socket_pair()
        self.link = ShardLink(1, Channel(theirs))
        self.claims = Claims(BatchPolicy(8, is_dynamic=True))
        self.claims.seed({1: batch_s, 8: batch_s})
        self.claims.attach(1)
        self.timer = ClaimTimer(self.claims, {0: self.link})
        self.claims.offered(Offer(1, 8, "g", queued=Queued((3,))))
        (self.batch,) = self.claims.decide(time.monotonic())

    def received(self) -> bytes:
        try:
            return self.sock.recv(frames.MAX_FRAME_BYTES)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        self.timer.close()
        self.link.close()
        self.sock.close()


@pytest.fixture
def quick():
    claiming = Claiming(0.02)
    yield claiming
    claiming.close()


@pytest.fixture
def endless():
    claiming = Claiming(3600.0)
    yield claiming
    claiming.close()


def test_the_next_batch_is_claimed_once_when_its_time_has_come(quick):
    due = quick.claims.wake_at
    quick.timer.arm_for_next()
    data = b""

    def has_come() -> bytes:
        nonlocal data
        data = data or quick.received()
        return data

    wait_until(has_come)
    assert time.monotonic() >= due
    claim = frames.decode_worker_to_shard(memoryview(data))
    assert isinstance(claim, frames.Claim) and claim.max_rows == 8 and claim.round == 1
    quick.timer.disarm()
    assert quick.received() == b"" and quick.claims.is_claiming


def test_disarmed_it_claims_nothing(endless):
    endless.timer.arm_for_next()
    endless.timer.disarm()
    assert not endless.claims.is_claiming and endless.received() == b""


def test_closed_while_armed_it_ends(endless):
    endless.timer.arm_for_next()
    endless.timer.close()
    assert not endless.claims.is_claiming and endless.received() == b""


def test_a_shard_that_is_gone_does_not_stop_the_thread(quick):
    quick.sock.close()
    quick.timer.arm_for_next()
    wait_until(lambda: quick.claims.is_claiming)
    quick.timer.disarm()
