"""Which shards accept, on a fake clock."""

from collections.abc import Iterator, Mapping

import pytest

from penstock.serving.accept_policy import (
    GROW_AT,
    GROW_S,
    SETTLE_S,
    SHRINK_S,
    AcceptDecision,
    AcceptorUse,
    AcceptPolicy,
)

TICK_S = 0.25


class Clock:
    """Lets time pass in ticks, with the same use of the shards; the last decision."""

    def __init__(self, policy: AcceptPolicy) -> None:
        self.policy = policy
        self.now = 100.0

    def run(self, seconds: float, uses: Mapping[int, AcceptorUse]) -> AcceptDecision:
        *_, last = self.decisions(seconds, uses)
        return last

    def decisions(
        self, seconds: float, uses: Mapping[int, AcceptorUse]
    ) -> Iterator[AcceptDecision]:
        until = self.now + seconds
        while self.now < until:
            self.now += TICK_S
            yield self.policy.decide(self.now, uses)


def uses(*busy: float, clients: int = 4) -> dict[int, AcceptorUse]:
    return {number: AcceptorUse(each, clients) for number, each in enumerate(busy)}


@pytest.fixture
def clock() -> Clock:
    return Clock(AcceptPolicy(8))


class TestNumber:
    def test_one_accepts_at_low_rates(self, clock: Clock) -> None:
        for decision in clock.decisions(60, uses(0.4, *[0.0] * 7, clients=0)):
            assert decision == AcceptDecision((0,), (0,))

    def test_a_short_burst_changes_nothing(self, clock: Clock) -> None:
        for _ in range(20):
            assert clock.run(GROW_S / 2, uses(1.0, *[0.0] * 7)).accepting == (0,)
            assert clock.run(TICK_S, uses(0.1, *[0.0] * 7)).accepting == (0,)

    def test_saturated_shards_double_until_all_accept(self, clock: Clock) -> None:
        seen = []
        for number in (1, 2, 4, 8):
            busy = [1.0] * number + [0.0] * (8 - number)
            seen.append(len(clock.run(1.0, uses(*busy)).accepting))
        assert seen == [2, 4, 8, 8]

    def test_busy_shards_grow_to_what_the_work_needs(self, clock: Clock) -> None:
        assert clock.run(1.0, uses(0.7, *[0.0] * 7)).accepting == (0, 1)
        assert clock.run(60.0, uses(0.35, 0.35, *[0.0] * 6)).accepting == (0, 1)
        assert clock.run(1.0, uses(0.8, 0.8, *[0.0] * 6)).accepting == (0, 1, 2, 3)

    def test_fewer_accept_after_a_while_of_low_load(self, clock: Clock) -> None:
        clock.run(1.0, uses(1.0, *[0.0] * 7))
        clock.run(1.0, uses(1.0, 1.0, *[0.0] * 6))
        low = uses(0.1, 0.1, 0.1, 0.0, *[0.0] * 4)
        assert len(clock.run(SHRINK_S - 2 * TICK_S, low).accepting) == 4
        assert len(clock.run(2 * TICK_S + TICK_S, low).accepting) == 3
        assert len(clock.run(SHRINK_S - 3 * TICK_S, low).accepting) == 3
        assert clock.run(100 * SHRINK_S, low).accepting == (0,)

    def test_a_load_between_the_limits_changes_nothing(self, clock: Clock) -> None:
        clock.run(1.0, uses(0.7, *[0.0] * 7))
        for busy in (0.19, 0.25, 0.55):
            assert clock.run(10 * SHRINK_S, uses(busy, busy, *[0.0] * 6)).accepting == (0, 1)

    def test_dead_shards_are_skipped(self, clock: Clock) -> None:
        alive = {1: AcceptorUse(0.1, 2), 3: AcceptorUse(0.0, 0)}
        assert clock.run(1.0, alive).targets == (1,)
        assert clock.run(1.0, {3: AcceptorUse(0.0, 0)}).targets == (3,)
        assert clock.run(1.0, {}).targets == tuple(range(8))
        assert clock.run(1.0, uses(*[0.0] * 8)).targets == (0,)

    def test_all_accept_if_told(self) -> None:
        clock = Clock(AcceptPolicy(4, accepts_all=True))
        crowded = {0: AcceptorUse(1.0, 100), 1: AcceptorUse(0.0, 0), 3: AcceptorUse(0.0, 0)}
        assert clock.run(100.0, crowded) == AcceptDecision((0, 1, 3), (0, 1, 3))


class World:
    """Shards whose clients send all they can, and reconnect where the targets are."""

    def __init__(self, num_shards: int, num_clients: int, demand: float) -> None:
        self.policy = AcceptPolicy(num_shards)
        self.clients = [num_clients, *[0] * (num_shards - 1)]
        # Cores that the clients would keep busy.
        self.demand = demand
        self.num_moved = 0
        self.now = 0.0

    def run(self, seconds: float) -> None:
        num_clients, until = sum(self.clients), self.now + seconds
        while self.now < until:
            self.now += TICK_S
            each = self.demand / num_clients
            shown = {n: AcceptorUse(min(1.0, each * c), c) for n, c in enumerate(self.clients)}
            decision = self.policy.decide(self.now, shown)
            for shard, count in decision.moves.items():
                assert 0 < count <= self.clients[shard]
                self.clients[shard] -= count
                self.num_moved += count
                for index in range(count):
                    self.clients[decision.targets[index % len(decision.targets)]] += 1


class TestMoves:
    def test_clients_spread_when_one_shard_is_not_enough(self) -> None:
        world = World(8, 128, demand=20.0)
        world.run(4.0)
        assert max(world.clients) - min(world.clients) <= 4
        moved = world.num_moved
        assert moved <= 2 * 128
        world.run(600.0)
        assert world.num_moved == moved, "then nobody moves any more"

    def test_few_clients(self) -> None:
        world = World(8, 3, demand=20.0)
        world.run(5.0)
        assert max(world.clients) == 1
        world = World(8, 1, demand=20.0)
        world.run(60.0)
        assert world.num_moved == 0

    def test_nobody_moves_at_low_rates(self) -> None:
        world = World(8, 128, demand=0.5)
        world.run(600.0)
        assert world.clients[0] == 128

    def test_clients_return_after_a_peak(self) -> None:
        world = World(4, 64, demand=20.0)
        world.run(5.0)
        assert min(world.clients) > 10
        world.demand = 0.3
        world.run(10 * SHRINK_S)
        assert world.clients == [64, 0, 0, 0]

    def test_a_shard_that_is_added_to_busy_ones_gets_clients(self) -> None:
        """Seven with 18 clients each are below 1.25 times the mean of eight."""
        policy = AcceptPolicy(8)
        policy.number = 8
        busy = {number: AcceptorUse(0.99, 18) for number in range(7)}
        decision = policy.decide(100.0, {**busy, 7: AcceptorUse(0.0, 0)})
        assert decision.targets == (7,)
        assert sum(decision.moves.values()) == 14
        even = {number: AcceptorUse(0.99, 16) for number in range(8)}
        assert not policy.decide(200.0, even).moves

    def test_moving_clients_are_not_asked_twice(self) -> None:
        policy = AcceptPolicy(2)
        clock = Clock(policy)
        crowd = {0: AcceptorUse(1.0, 64), 1: AcceptorUse(0.0, 0)}
        (first,) = [each.moves for each in clock.decisions(1.0, crowd) if each.moves]
        assert first == {0: 32}
        on_the_way = {0: AcceptorUse(1.0, 32, 32), 1: AcceptorUse(0.0, 0)}
        assert not any(each.moves for each in clock.decisions(10.0, on_the_way))

    def test_it_waits_until_those_that_moved_are_back(self) -> None:
        clock = Clock(AcceptPolicy(2))
        crowd = {0: AcceptorUse(1.0, 64), 1: AcceptorUse(0.0, 0)}
        moved_at = []
        for decision in clock.decisions(5.0, crowd):
            if decision.moves:
                moved_at.append(clock.now)
                assert decision.targets == (1,)
        gaps = [after - before for before, after in zip(moved_at, moved_at[1:], strict=False)]
        assert gaps and min(gaps) >= SETTLE_S

    def test_idle_shards_keep_their_clients(self) -> None:
        """An uneven number of clients does no harm while the loops have room."""
        clock = Clock(AcceptPolicy(2))
        clock.run(1.0, uses(0.7, 0.0))
        uneven = {0: AcceptorUse(GROW_AT - 0.01, 40), 1: AcceptorUse(0.2, 4)}
        assert not any(each.moves for each in clock.decisions(100.0, uneven))
