"""`instance_group` changed while a model serves: workers come and go, and nothing else does."""

import asyncio
import json
from collections.abc import Iterator

import pytest
import tritonclient.http as httpclient
from load import Load
from served import Served, null_model
from test_sequences_served import SLOTS, SLOTS_CONFIG, add, ask
from tritonclient.utils import InferenceServerException
from waiting import wait_until

COUNTED = "instance_group {{ kind: KIND_CPU count: {} }}"
# Cannot be loaded any more once there is a mark beside the models.
FRAGILE = """
import pathlib
mark = pathlib.Path(__file__).parents[2] / "mark"
if mark.exists():
    raise RuntimeError("no second instance")
def infer(inputs):
    return {"y": inputs["x"]}
"""


@pytest.fixture(scope="module", params=["1", "2"], ids=["core", "shards"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    root = tmp_path_factory.mktemp("repository")
    null_model(root, "echo", config=COUNTED.format(1))
    add(root, "slots", SLOTS_CONFIG % 60_000_000, SLOTS)
    null_model(root, "fragile", config=COUNTED.format(1))
    text = (root / "fragile" / "config.pbtxt").read_text().replace('"null"', '"python"')
    (root / "fragile" / "config.pbtxt").write_text(text)
    (root / "fragile" / "1" / "model.py").write_text(FRAGILE)
    flags = ("--model-control-mode", "explicit", "--load-model", "*")
    with Served(root, "--shards", request.param, *flags) as server:
        server.root = root
        yield server


def pids(served: Served, model: str) -> list[int]:
    return [each["pid"] for each in explain(served, model)["instances"] if each["pid"]]


def explain(served: Served, model: str) -> dict:
    return json.loads(served.get(f"/v2/models/{model}/explain")[1])


def set_count(served: Served, model: str, before: int, after: int) -> None:
    """Change the number of instances in the file, and load the model."""
    path = served.root / model / "config.pbtxt"
    text = path.read_text().replace(f"count: {before}", f"count: {after}")
    assert text != path.read_text()
    path.write_text(text)
    load(served, model)


def load(served: Served, model: str, **more: str) -> None:
    with httpclient.InferenceServerClient(served.address) as client:
        client.load_model(model, **more)


def test_workers_come_and_go_under_load_and_the_others_stay(served: Served) -> None:
    async def run() -> Load:
        (first,) = pids(served, "echo")
        async with Load(served.port, 8, model="echo") as clients:
            await asyncio.to_thread(set_count, served, "echo", 1, 3)
            three = await asyncio.to_thread(pids, served, "echo")
            assert len(three) == 3 and three[0] == first
            config = {"instance_group": [{"kind": "KIND_CPU", "count": 2}], "backend": "null"}
            shown = json.loads(served.get("/v2/models/echo/config")[1])
            given = json.dumps({**shown, **config})
            await asyncio.to_thread(load, served, "echo", config=given)
            await asyncio.to_thread(wait_until, lambda: pids(served, "echo") == three[:2])
        return clients

    clients = asyncio.run(run())
    tally = clients.tally
    assert tally.num_good == tally.num_sent and tally.num_wrong == tally.num_cut == 0
    statistics = json.loads(served.get("/v2/models/echo/stats")[1])["model_stats"]
    assert statistics[0]["inference_stats"]["success"]["count"] == tally.num_good
    assert served.logged().count("echo/1 loads") == 1


def test_sequences_go_on_also_those_of_an_instance_that_ends(served: Served) -> None:
    with httpclient.InferenceServerClient(served.address) as client:
        assert ask(client, "slots", 1, 5, "s")[0] == 5
        set_count(served, "slots", 1, 2)
        assert len(pids(served, "slots")) == 2
        places = {1: ask(client, "slots", 1, 5)[2]}
        for number in (2, 3, 4):
            places[number] = ask(client, "slots", number, number, "s")[2]
        assert len(set(places.values())) == 2, "both instances have sequences"
        set_count(served, "slots", 2, 1)
        for number, sum in ((1, 20), (2, 12), (3, 13), (4, 14)):
            assert ask(client, "slots", number, 10) == [sum, number, places[number]]
        assert len(pids(served, "slots")) == 2
        for number in (1, 2, 3, 4):
            ask(client, "slots", number, 1, "e")
        wait_until(lambda: pids(served, "slots") == [places[1]])
        assert ask(client, "slots", 5, 7, "se")[2] == places[1]


def test_a_change_that_fails_keeps_what_was_served(served: Served) -> None:
    before = pids(served, "fragile")
    (served.root / "mark").touch()
    with pytest.raises(InferenceServerException, match="no second instance"):
        set_count(served, "fragile", 1, 2)
    # The worker that failed has said so before it ends.
    wait_until(lambda: pids(served, "fragile") == before)
    assert served.status("/v2/models/fragile/ready") == 200
    assert served.infer("fragile", "x", "INT32", [4])[0] == 200
