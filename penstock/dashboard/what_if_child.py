"""`python -m penstock.dashboard.what_if_child FD`: simulates a model at given rates.

Reads a `WhatIfJob` from the descriptor and prints a `WhatIfResult`. It is a process of its own
because a simulation takes a second of CPU time, which the server's event loop does not have.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import msgspec
import numpy as np

from penstock.config import ModelConfig
from penstock.optimizer.simulate import (
    DISPATCH_S,
    TimeTable,
    capacity,
    percentile,
    simulate_rate,
)
from penstock.slo import Slo, parse
from penstock.wire.live import Prediction, WhatIfJob, WhatIfResult

# The server's own processes go first.
NICENESS = 10
# All rows have the same length.
ONE_LENGTH = {0: 1.0}


def simulate(job: WhatIfJob) -> WhatIfResult:
    """Predict each rate with the server's own batcher."""
    times_s = {
        # The simulation adds the dispatch.
        rows: max(time_s - DISPATCH_S, time_s / 10) if job.has_dispatch else time_s
        for rows, time_s in job.times_s.items()
    }
    table = TimeTable(job.num_instances, 1, {0: times_s}, num_free_cores=job.num_cores)
    config = replace(job.config, padding=None, num_instances=job.num_instances, spread=())
    slo = parse(job.slo) if job.slo else Slo(())
    predictions = [predict(table, config, slo, rate) for rate in job.rates]
    return WhatIfResult(capacity(table, config, ONE_LENGTH), predictions)


def predict(table: TimeTable, config: ModelConfig, slo: Slo, rate: float) -> Prediction:
    outcome = simulate_rate(table, config, replace(slo, rate=None), rate, ONE_LENGTH)
    latencies_s = outcome.counted_s
    answered_s = latencies_s[np.isfinite(latencies_s)]
    p50_s, p95_s, p99_s = (
        percentile(answered_s, percent) if len(answered_s) else None for percent in (50, 95, 99)
    )
    # Requests come for as long as this; batches may end later.
    span_s = max(len(outcome.latencies_s) / rate, outcome.busy_s / table.num_instances)
    limits = [each for each in slo.objectives if each.metric == "latency"]
    return Prediction(
        rate=rate,
        num_instances=table.num_instances,
        p50_s=p50_s,
        p95_s=p95_s,
        p99_s=p99_s,
        refused=1 - len(answered_s) / len(latencies_s),
        busy=min(1.0, outcome.busy_s / table.num_instances / span_s),
        batch_rows=outcome.num_rows / outcome.num_batches if outcome.num_batches else None,
        keeps_slo=all((latencies_s < each.limit_s).mean() >= each.share for each in limits)
        if limits
        else None,
    )


def main() -> None:
    os.nice(NICENESS)
    with open(int(sys.argv[1]), "rb") as file:
        job = msgspec.json.decode(file.read(), type=WhatIfJob)
    sys.stdout.write(msgspec.json.encode(simulate(job)).decode())


if __name__ == "__main__":
    main()
