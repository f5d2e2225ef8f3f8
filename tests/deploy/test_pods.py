"""Two rendered pods behind haproxy under open-loop load: updates, evictions and killed pods lose no
request. The test is the controller (`pods`). Run by `make verify-deploy`."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop
from haproxy import Proxy, haproxy
from open_loop import OpenLoop, OpenTally, intended_times, percentile
from podman import Podman, free_ports
from pods import Kubelet, Pod, render_deployment
from served import null_model, python_model

pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]

# Each pod can answer 1,000/s (batches of 16 rows in 16 ms).
# Shorter than the 30 s after which haproxy closes connections that are idle.
RATE, DURATION_S = 300.0, 27.0
NUM_CONNECTIONS = 64
# As docs/deploy.md says: one late answer does not take a pod out of the Service.
CHECKS = "inter 1s fall 2 rise 1"
# Long enough for haproxy, which is told at once.
STOPPING = {"deregister_s": 1, "drain_s": 20}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)
    root = null_model(tmp_path / "models", "model", max_batch=16, a_ms=4, c_ms=0.75)
    root.chmod(0o755)
    return root


@pytest.fixture
def kubelet(podman: Podman, image: str, models: Path, tmp_path: Path) -> Iterator[Kubelet]:
    deployment = render_deployment(models, image, min_replicas=2, **STOPPING)
    made = Kubelet(podman, deployment, models, tmp_path)
    try:
        yield made
    finally:
        made.close()


def under_load(
    kubelet: Kubelet, folder: Path, retries: bool, change: Callable[[Proxy, list[int]], None]
) -> tuple[OpenTally, float, int]:
    """Start two pods, change something while requests come, and return what became of them, how
    long the change took and how many requests haproxy sent again. The change gets the ports of a
    third pod."""
    ports = free_ports(3)
    pods = [kubelet.create(slot) for slot in ("a", "b")]
    known = {pod.slot: pod.http_port for pod in pods}

    async def scenario(proxy: Proxy) -> tuple[OpenTally, float]:
        times = intended_times(RATE, 1.0, DURATION_S, seed=1)
        running = asyncio.create_task(
            OpenLoop(proxy.port, "model", times).run(NUM_CONNECTIONS, patience_s=5.0)
        )
        await asyncio.sleep(3)
        began = time.monotonic()
        await asyncio.to_thread(change, proxy, ports)
        took_s = time.monotonic() - began
        assert took_s < DURATION_S - 5, f"the load ended before the change, which took {took_s} s"
        return await running, took_s

    with haproxy(folder, known, retries, later={"c": ports[0]}, checks=CHECKS) as proxy:
        tally, took_s = uvloop.run(scenario(proxy))
        num_retries = int(proxy.stats("BACKEND")["wretr"])
    return tally, took_s, num_retries


def check(what: str, found: tuple[OpenTally, float, int]) -> None:
    tally, took_s, num_retries = found
    p99_s = percentile(tally.answered_s, 0.99)
    print(
        f"\n{what} in {took_s:.1f} s at {RATE:g}/s: "
        f"{tally.num_due - len(tally.answered_s)} of {tally.num_due} requests lost, "
        f"{num_retries} sent again by haproxy, p99 {p99_s * 1e3:.0f} ms"
    )
    assert tally.num_cut == 0
    assert set(tally.statuses) == {200}, tally.statuses
    assert len(tally.answered_s) == tally.num_due


def test_a_rolling_update_loses_nothing(kubelet: Kubelet, tmp_path: Path):
    """maxSurge 1, maxUnavailable 0: a new pod is ready before an old one goes. Nothing is sent
    again: pods leave the Service before they stop."""

    def update(proxy: Proxy, ports: list[int]) -> None:
        one, other = kubelet.pods
        kubelet.join(kubelet.create("c", ports, "v2"), proxy)
        kubelet.delete(one, proxy)
        kubelet.join(kubelet.create("a", one.ports, "v2"), proxy)
        kubelet.delete(other, proxy)

    found = under_load(kubelet, tmp_path, retries=False, change=update)
    check("rolling update of 2 pods", found)
    assert kubelet.exit_codes == [0, 0]
    names = [pod.get("/v2")[1] for pod in kubelet.pods]
    assert len(names) == 2 and all('"v2"' in each for each in names)


def test_evictions_one_by_one_lose_nothing(kubelet: Kubelet, tmp_path: Path):
    """The drain of a node: the PodDisruptionBudget lets one pod go at a time."""

    def drain(proxy: Proxy, ports: list[int]) -> None:
        for pod in list(kubelet.pods):
            kubelet.delete(pod, proxy)
            kubelet.join(kubelet.create(pod.slot, pod.ports), proxy)

    check("2 pods drained", under_load(kubelet, tmp_path, retries=False, change=drain))
    assert kubelet.exit_codes == [0, 0]


def test_pods_that_stop_at_once_lose_nothing(kubelet: Kubelet, tmp_path: Path):
    """SIGTERM while the pod is still in the Service: haproxy sends what is refused to another."""

    def stop(proxy: Proxy, ports: list[int]) -> None:
        for pod in list(kubelet.pods):
            kubelet.exit_codes.append(pod.stop())
            pod.remove()
            kubelet.pods.remove(pod)
            kubelet.join(kubelet.create(pod.slot, pod.ports), proxy)

    check("2 pods stopped", under_load(kubelet, tmp_path, retries=True, change=stop))
    assert kubelet.exit_codes == [0, 0]


def test_killed_pods_lose_nothing(kubelet: Kubelet, tmp_path: Path):
    """kill -9 of a whole container, three times: haproxy sends what had no answer to the other
    pod, and the container is started again."""

    def kill(proxy: Proxy, ports: list[int]) -> None:
        for pod in [*kubelet.pods, kubelet.pods[0]]:
            pod.kill()
            time.sleep(0.5)
            pod.wait_until("startup")
            proxy.wait_until_up(pod.slot)

    check("3 kill -9", under_load(kubelet, tmp_path, retries=True, change=kill))


LOADS_SLOWLY = """
import time
time.sleep(4)
def infer(inputs):
    return {"y": inputs["x"]}
"""


def test_probes_say_what_the_pod_does(podman: Podman, image: str, tmp_path: Path):
    """Asked with the paths, ports and thresholds of the exported pod."""
    tmp_path.chmod(0o755)
    root = python_model(tmp_path / "models", "slow", LOADS_SLOWLY, max_batch=8)
    null_model(root, "model", max_batch=8, a_ms=3000)
    for folder in (root, *root.rglob("*")):
        folder.chmod(0o755)
    deployment = render_deployment(root, image, **STOPPING)
    pod = Pod(deployment, "probed", podman, root, free_ports(3))
    try:
        pod.create(tmp_path)
        # Live before it is ready, and started only when it is ready.
        ends = time.monotonic() + 60
        while not pod.probe("liveness"):
            assert time.monotonic() < ends, pod.logs()
        assert not pod.probe("startup") and not pod.probe("readiness")
        pod.wait_until("startup")
        assert pod.probe("readiness") and pod.probe("liveness")
        budget = pod.container["startupProbe"]
        assert budget["periodSeconds"] * budget["failureThreshold"] >= 600
        # A request of 3 s is answered while the pod drains: not ready, but alive.
        asyncio.run(_drain(pod))
        # A stuck event loop fails the liveness probe on the metrics port.
        pod.remove()
        pod.create(tmp_path)
        pod.wait_until("startup")
        [core] = [
            each.pid
            for each in pod.processes()
            if "penstock serve /models" in each.command and "tini" not in each.command
        ]
        pod.exec("sh", "-c", f"kill -STOP {core}")
        assert not pod.probe("liveness")
    finally:
        pod.remove()


async def _drain(pod: Pod) -> None:
    body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "INT32", "data": [1000]}]}
    answering = asyncio.create_task(asyncio.to_thread(pod.infer, "model", body))
    await asyncio.sleep(0.5)
    stopping = asyncio.create_task(asyncio.to_thread(pod.stop))
    await asyncio.sleep(1)
    assert not await asyncio.to_thread(pod.probe, "readiness")
    assert await asyncio.to_thread(pod.probe, "liveness")
    assert (await answering)[0] == 200
    assert await stopping == 0
