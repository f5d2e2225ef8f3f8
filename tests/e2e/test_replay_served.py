"""`penstock bench --replay` against real servers: recorded traffic, sent again at its times."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from made_recordings import write_recording
from served import Served, null_model
from waiting import wait_until

import penstock
from penstock.data.recordings import open_recording

TIMES = [0.0, 0.1, 0.12, 0.5, 0.52, 1.0]


def recorded(folder: Path, wrong: int = 0) -> Path:
    """Six requests to the null model, whose answers repeat the inputs; some answers are wrong."""
    inputs = [{"x": np.full((1, 1), number, np.int32)} for number in range(6)]
    answers = [{"y": each["x"] + (number < wrong)} for number, each in enumerate(inputs)]
    return write_recording(folder, inputs, answers, times=TIMES)


def parameters(share: str) -> str:
    return f'parameters {{ key: "penstock.record_share" value {{ string_value: "{share}" }} }}'


@pytest.mark.parametrize("shards", ["1", "2"])
def test_a_replay_sends_the_same_requests_at_the_same_times(tmp_path: Path, shards: str) -> None:
    folder = recorded(tmp_path / "first")
    null_model(tmp_path / "models", "m", config=parameters("1"))
    second = tmp_path / "second"
    flags = "--record", str(second), "--shards", shards
    with Served(tmp_path / "models", *flags, grpc=True) as served:
        wait_until(lambda: shards == "1" or served.has_shards(2))
        url = f"http://{served.address}/v2/models/m"
        run = penstock.bench(url, replay=folder, warm_up=0).run
        over_grpc = penstock.bench(f"grpc://{served.grpc_address}/m", replay=folder, warm_up=0)
    (level,) = run.levels
    assert level.ending == "through" and sum(each.num_due for each in level.windows) == 6
    assert (level.agreement.num_compared, level.agreement.num_agreed) == (6, 6)
    assert over_grpc.run.levels[0].agreement == level.agreement
    # The first request of each run only tries the target; the next six are the replay.
    found = open_recording(second).entries
    assert len(found) == 14
    values = [int(each.inputs()["x"][0, 0]) for each in found[1:7]]
    assert values == list(range(6))
    # Nothing is sent before it is due, however busy the machine is.
    assert found[6].record.arrived - found[1].record.arrived > 0.5


def test_answers_that_differ_are_counted(tmp_path: Path) -> None:
    folder = recorded(tmp_path, wrong=2)
    model = null_model(tmp_path / "models", "m")
    result = penstock.bench(str(model), replay=folder, warm_up=0, speed=10)
    assert (result.run.levels[0].agreement.num_agreed) == 4
    assert "Agreement with the recorded answers: 4 of 6 answers, 67 %." in str(result)
    shutil.rmtree(folder)
