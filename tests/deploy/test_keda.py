"""The query of the exported ScaledObject, asked of a real Prometheus that scrapes two servers: its
answer follows the load, and so does the number of replicas. Run by `make verify-deploy`."""

import asyncio
import math
import time
from contextlib import ExitStack
from pathlib import Path

import prometheus
import pytest
import uvloop
import yaml
from open_loop import OpenLoop, intended_times
from podman import KEYS, SECRET
from prometheus import Prometheus, ScrapeJob
from served import Served, null_model

from penstock.api.export import export_kubernetes
from penstock.api.export_options import KubernetesOptions

pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]

# Each server answers 200/s: batches of 4 rows in 20 ms.
CAPACITY, OVERLOAD, NUM_SERVERS = 200.0, 1.5, 2
DURATION_S = 25.0


def replicas(value: float, spec: dict) -> int:
    """The number that the HPA of KEDA asks for: an AverageValue is the total by the threshold."""
    [trigger] = spec["triggers"]
    wanted = math.ceil(value / float(trigger["metadata"]["threshold"]))
    return min(max(wanted, spec["minReplicaCount"]), spec["maxReplicaCount"])


def test_the_query_follows_the_load(tmp_path: Path):
    slow = 'parameters { key: "penstock.max_wait_ms" value { string_value: "0" } }'
    root = null_model(tmp_path / "models", "model", max_batch=4, a_ms=20, config=slow)
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    options = KubernetesOptions(image="i", name="digits", namespace="vision", out="-")
    files = export_kubernetes(str(root), options).files
    spec = yaml.safe_load(files["scaledobject.yaml"])["spec"]
    query = spec["triggers"][0]["metadata"]["query"]
    with ExitStack() as stack:
        serve = lambda: stack.enter_context(Served(root, "--api-keys", str(keys)))  # noqa: E731
        servers = [serve() for _ in range(NUM_SERVERS)]
        targets = [each.metrics_url.split("/")[2] for each in servers]
        # The job and the namespace are those that the operator's ServiceMonitor gives.
        job = ScrapeJob("digits", "vision", SECRET)
        found = stack.enter_context(prometheus.running(targets, job=job))
        idle = found.read_value(query)
        busy = uvloop.run(overload(servers, found, query))
        after = wait_for_zero(found, query)
        other = found.read_value(query.replace('job="digits"', 'job="other"'))
    print(
        f"\nqueued requests by KEDA's query: idle {idle:.1f} ({replicas(idle, spec)} replicas), "
        f"at {OVERLOAD:g} times the capacity {busy:.0f} ({replicas(busy, spec)} replicas), "
        f"0 again after {after:.0f} s"
    )
    assert idle == 0 and replicas(idle, spec) == spec["minReplicaCount"]
    assert replicas(busy, spec) == spec["maxReplicaCount"]
    assert after < 90 and other == 0


async def overload(servers: list[Served], found: Prometheus, query: str) -> float:
    """Return the answer at the end of some time at a rate that queues grow with."""
    times = intended_times(OVERLOAD * CAPACITY, 1.0, DURATION_S, seed=1)
    loads = [OpenLoop(each.port, "model", times, key=SECRET) for each in servers]
    running = [asyncio.create_task(each.run(num_connections=4000)) for each in loads]
    await asyncio.sleep(DURATION_S - 1)
    value = await asyncio.to_thread(found.read_value, query)
    await asyncio.gather(*running)
    return value


def wait_for_zero(found: Prometheus, query: str) -> float:
    """Return the seconds until no request waits; the query's window passes first."""
    began = time.monotonic()
    while found.read_value(query):
        assert time.monotonic() < began + 180, found.read_value(query)
        time.sleep(0.5)
    return time.monotonic() - began
