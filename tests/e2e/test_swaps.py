"""Changes of what is served, at 70 % of what the models can do: nothing is lost, and it stays fast.

Open-loop load, so a pause shows in the latencies of all requests that were due in it.
"""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from open_loop import OpenLoop, OpenTally, intended_times, percentile
from served import Served, null_model

pytestmark = [pytest.mark.verify, pytest.mark.timeout(300)]
# Two instances that take 8 ms for one request each.
RATE = 0.7 * 2 * 125
STEADY_S, PAUSE_S = 10.0, 0.5
# A request that is answered later than this after the last one was due counts as lost.
PATIENCE_S = 5.0
SEEDS = {"steady": 1, "changing": 2}
COUNTED = "instance_group {{ kind: KIND_CPU count: {} }}"
ENSEMBLE = """
platform: "ensemble" max_batch_size: 1
input { name: "x" data_type: TYPE_INT32 dims: 1 }
output { name: "y" data_type: TYPE_INT32 dims: 1 }
ensemble_scheduling {
  step { model_name: "main" model_version: -1
    input_map { key: "x" value: "x" } output_map { key: "y" value: "between" } }
  step { model_name: "last" model_version: -1
    input_map { key: "x" value: "between" } output_map { key: "y" value: "y" } }
}
"""
Change = Callable[[Served, int], None]


@pytest.fixture(scope="module", params=["1", "2"], ids=["core", "shards"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    root = tmp_path_factory.mktemp("repository")
    for name in ("main", "last"):
        null_model(root, name, config=COUNTED.format(2), max_batch=1, a_ms=8)
    for name in ("other", "third"):
        null_model(root, name)
    (root / "both" / "1").mkdir(parents=True)
    (root / "both" / "config.pbtxt").write_text(ENSEMBLE)
    flags = ("--model-control-mode", "explicit", "--load-model", "*")
    with Served(root, "--shards", request.param, *flags) as server:
        server.root = root
        yield server


def control(served: Served, name: str, action: str) -> None:
    status, answer = served.post(f"/v2/repository/models/{name}/{action}")
    assert status == 200, answer


def reload(served: Served, number: int) -> None:
    control(served, "main", "load")


def change_instances(served: Served, number: int) -> None:
    """Have three instances and two in turns."""
    path: Path = served.root / "main" / "config.pbtxt"
    before, after = (COUNTED.format(count) for count in ((2, 3) if number % 2 else (3, 2)))
    path.write_text(path.read_text().replace(before, after))
    control(served, "main", "load")


def unload_others(served: Served, number: int) -> None:
    for name in ("other", "third"):
        control(served, name, "unload" if number % 2 else "load")


def reload_members(served: Served, number: int) -> None:
    control(served, ("main", "last", "both")[number % 3], "load")


async def measure(served: Served, model: str, duration_s: float, seed: int) -> OpenTally:
    times = intended_times(RATE, 1.0, duration_s, seed)
    return await OpenLoop(served.port, model, times).run(32, PATIENCE_S)


@pytest.mark.parametrize(
    ("model", "change"),
    [
        ("main", reload),
        ("main", change_instances),
        ("main", unload_others),
        ("both", reload_members),
    ],
    ids=["reload", "instances", "unload of others", "ensemble"],
)
def test_changes_at_70_percent_load_lose_nothing_and_stay_fast(
    served: Served, model: str, change: Change
) -> None:
    async def scenario() -> tuple[OpenTally, OpenTally, int]:
        steady = await measure(served, model, STEADY_S, SEEDS["steady"])
        loading = asyncio.ensure_future(measure(served, model, STEADY_S, SEEDS["changing"]))
        await asyncio.sleep(1.5)
        num_changes = 0
        while not loading.done():
            num_changes += 1
            await asyncio.to_thread(change, served, num_changes)
            await asyncio.sleep(PAUSE_S)
        return steady, loading.result(), num_changes

    steady, changing, num_changes = asyncio.run(scenario())
    before, during = (percentile(each.answered_s, 0.99) for each in (steady, changing))
    print(
        f"\n{model}: steady p99 {before * 1e3:.1f} ms; during {num_changes} changes "
        f"{during * 1e3:.1f} ms; {changing.num_due} requests, statuses {changing.statuses}"
    )
    assert changing.statuses == {200: changing.num_due}
    assert changing.num_cut == 0
    assert during <= 2 * before
