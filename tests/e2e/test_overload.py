"""The real server under more load than it can serve: slo mode beside Triton's rules.

The model computes nothing for 4 ms + 0.75 ms a row, 16 rows at most: 16 rows in 16 ms, a capacity
of 1,000/s. SLO: p99 < 50 ms. The load generator is open-loop and shares the machine's cores with
the server, so its own lateness is part of every figure. Run by `make verify`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from open_loop import OpenLoop, OpenTally, intended_times, percentile
from served import Served, null_model

pytestmark = [pytest.mark.verify, pytest.mark.timeout(120)]

CAPACITY = 1000.0
SLO_S = 0.050
DURATION_S = 6.0
NUM_CONNECTIONS = 256
SLO = 'parameters { key: "penstock.slo" value { string_value: "p99 < 50ms" } }'
# A model that is slower: 32 rows in 148 ms, a capacity of 216/s.
SLOW_SLO = SLO.replace("50ms", "250ms")
SLOW_CAPACITY, SLOW_SLO_S = 32 / 0.148, 0.250
# The default of penstock.max_wait_ms, a batch, and what the client and the sockets add.
MAX_WAIT_S = 1.0 + 0.016 + 0.1


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root: Path = tmp_path_factory.mktemp("overload")
    null_model(root, "slo", config=SLO, max_batch=16, a_ms=4, c_ms=0.75)
    null_model(root, "fixed", max_batch=16, a_ms=4, c_ms=0.75)
    null_model(root, "slow", config=SLOW_SLO, max_batch=32, a_ms=20, c_ms=4)
    served = Served(root)
    yield served
    assert served.terminate() == 0


def offer(
    served: Served,
    model: str,
    load: float,
    cv: float,
    slo_s: float = SLO_S,
    num_connections: int = NUM_CONNECTIONS,
) -> OpenTally:
    capacity = SLOW_CAPACITY if model == "slow" else CAPACITY
    times = intended_times(load * capacity, cv, DURATION_S, seed=int(load + cv))
    tally = uvloop.run(OpenLoop(served.port, model, times).run(num_connections))
    print(
        f"\n{model:5} {load:4g}x {'Poisson' if cv == 1 else f'gamma CV {cv:g}':10} "
        f"goodput {tally.goodput(slo_s):5.0f}/s, "
        f"accepted p99 {percentile(tally.answered_s, 0.99) * 1e3:7.1f} ms, "
        f"refused {len(tally.refused_s)} p99 {percentile(tally.refused_s, 0.99) * 1e3:.1f} ms, "
        f"no answer {tally.num_due - len(tally.answered_s) - len(tally.refused_s)}"
    )
    assert tally.num_cut == 0
    assert set(tally.statuses) <= {200, 503}
    return tally


@pytest.mark.parametrize("cv", [1.0, 3.0], ids=["poisson", "gamma3"])
@pytest.mark.parametrize("load", [2.0, 10.0], ids=["2x", "10x"])
def test_slo_mode_keeps_goodput_and_latency(served: Served, load: float, cv: float):
    tally = offer(served, "slo", load, cv)
    assert tally.goodput(SLO_S) >= 0.90 * CAPACITY
    assert percentile(tally.answered_s, 0.99) <= SLO_S
    assert percentile(tally.refused_s, 0.99) <= 0.010
    assert len(tally.answered_s) + len(tally.refused_s) == tally.num_due


@pytest.mark.parametrize("cv", [1.0, 3.0], ids=["poisson", "gamma3"])
@pytest.mark.parametrize("load", [2.0, 10.0], ids=["2x", "10x"])
def test_tritons_rules_beside_it_lose_everything(served: Served, load: float, cv: float):
    tally = offer(served, "fixed", load, cv)
    assert tally.goodput(SLO_S) < 0.5 * CAPACITY


@pytest.mark.parametrize("load", [2.0, 10.0], ids=["2x", "10x"])
def test_slow_models_keep_both_promises_too(served: Served, load: float):
    tally = offer(served, "slow", load, 1.0, SLOW_SLO_S)
    assert tally.goodput(SLOW_SLO_S) >= 0.75 * SLOW_CAPACITY
    assert percentile(tally.answered_s, 0.99) <= SLOW_SLO_S
    assert percentile(tally.refused_s, 0.99) <= 0.010


def test_without_an_slo_no_request_waits_longer_than_the_default(served: Served):
    # As many connections as requests that may wait in the server, and more.
    tally = offer(served, "fixed", 2.0, 1.0, MAX_WAIT_S, num_connections=2000)
    assert tally.goodput(MAX_WAIT_S) >= 0.85 * CAPACITY
    assert percentile(tally.answered_s, 0.99) <= MAX_WAIT_S
    assert percentile(tally.refused_s, 0.99) <= 0.050
