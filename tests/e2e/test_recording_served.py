"""Recordings of a real server, with one shard and with two: what clients sent and got is on disk,
bit for bit, whatever happens to the processes."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from served import Served, null_model
from waiting import wait_until

from penstock.data.recordings import Recording, open_recording

SHARDS = ["1", "2"]


def parameters(**values: str) -> str:
    return "\n".join(
        f'parameters {{ key: "penstock.{key}" value {{ string_value: "{value}" }} }}'
        for key, value in values.items()
    )


def model_folder(root: Path, **values: str) -> Path:
    """A model FP32 [64], BYTES [1] -> the same."""
    folder = root / "models" / "m"
    (folder / "1").mkdir(parents=True)
    text = """
    backend: "null" max_batch_size: 8 dynamic_batching { }
    input { name: "x" data_type: TYPE_FP32 dims: 64 }
    input { name: "s" data_type: TYPE_STRING dims: 1 }
    output { name: "y" data_type: TYPE_FP32 dims: 64 }
    output { name: "t" data_type: TYPE_STRING dims: 1 }
    """
    (folder / "config.pbtxt").write_text(text + parameters(**values))
    return root / "models"


def body(number: int) -> tuple[bytes, dict[str, str]]:
    """A binary request with the number in all values."""
    x = np.full((1, 64), number, np.float32).tobytes()
    word = f"word-{number}".encode()
    s = len(word).to_bytes(4, "little") + word
    head = {
        "id": f"id-{number}",
        "inputs": [
            {
                "name": "x",
                "datatype": "FP32",
                "shape": [1, 64],
                "parameters": {"binary_data_size": len(x)},
            },
            {
                "name": "s",
                "datatype": "BYTES",
                "shape": [1, 1],
                "parameters": {"binary_data_size": len(s)},
            },
        ],
        "parameters": {"binary_data_output": True},
    }
    text = json.dumps(head).encode()
    return text + x + s, {"Inference-Header-Content-Length": str(len(text))}


class Load:
    """Clients that ask until they are stopped; `answered` are the numbers that were."""

    def __init__(self, served: Served, num_clients: int = 4, first: int = 0) -> None:
        self._served = served
        self._is_over = False
        self.answered: set[int] = set()
        ids = [range(first + n, 10**9, num_clients) for n in range(num_clients)]
        self._threads = [threading.Thread(target=self._ask, args=(each,)) for each in ids]
        for each in self._threads:
            each.start()

    def _ask(self, numbers: Iterator[int]) -> None:
        connection = None
        for number in numbers:
            if self._is_over:
                break
            data, headers = body(number)
            try:
                if connection is None:
                    address = self._served.address
                    connection = http.client.HTTPConnection(address, timeout=30)
                connection.request("POST", "/v2/models/m/infer", data, headers)
                answer = connection.getresponse()
                answer.read()
            except (OSError, http.client.HTTPException):
                connection = None
                time.sleep(0.05)
                continue
            if answer.status == 200:
                self.answered.add(number)
        if connection is not None:
            connection.close()

    def stop(self) -> set[int]:
        self._is_over = True
        for each in self._threads:
            each.join()
        return self.answered


def numbers(recording: Recording) -> set[int]:
    """The numbers of the recorded requests; checks every bit of them."""
    found = set()
    for entry in recording.answered():
        number = int(entry.record.id.removeprefix("id-"))
        for arrays, names in ((entry.inputs(), "xs"), (entry.outputs(), "yt")):
            floats, text = arrays[names[0]], arrays[names[1]]
            assert floats.tobytes() == np.full((1, 64), number, np.float32).tobytes()
            assert text.tolist() == [[f"word-{number}".encode()]]
        assert number not in found
        found.add(number)
    return found


def scraped(served: Served, name: str) -> float:
    text = served.get("/metrics")[1].decode()
    lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
    return sum(float(line.split()[-1]) for line in lines)


def writers(folder: Path) -> set[str]:
    """The processes that have written to a recording."""
    return {path.stem.split("-")[-1] for path in folder.rglob("*.rec")}


def load_until(served: Served, folder: Path, num_writers: int, first: int) -> set[int]:
    """Ask over new connections until the load has reached `num_writers` processes; return the
    numbers of the answered requests."""
    answered: set[int] = set()
    for number in range(first, first + 10**8, 10**6):
        load = Load(served, num_clients=4, first=number)
        wait_until(lambda load=load: len(load.answered) > 40)
        answered |= load.stop()
        time.sleep(0.2)
        if len(writers(folder)) >= num_writers:
            return answered
    raise AssertionError(f"only {writers(folder)} have written")


@pytest.mark.parametrize("shards", SHARDS)
def test_all_requests_are_recorded_bit_for_bit(tmp_path: Path, shards: str) -> None:
    models = model_folder(tmp_path, record="64MB", record_share="1")
    folder = tmp_path / "recordings"
    with Served(models, "--record", str(folder), "--shards", shards) as served:
        wait_until(lambda: shards == "1" or served.has_shards(2))
        answered = load_until(served, folder, int(shards), first=0)
        wait_until(lambda: scraped(served, "penstock_recorded_requests") >= len(answered))
        assert scraped(served, "penstock_record_dropped") == 0
    recording = open_recording(folder)
    assert numbers(recording) == answered
    arrivals = [each.record.arrived for each in recording.entries]
    assert arrivals == sorted(arrivals) and abs(arrivals[-1] - time.time()) < 60
    assert len({header.shard for header in recording.headers}) == int(shards)
    modes = {path.stat().st_mode & 0o777 for path in folder.rglob("*.rec")}
    assert modes == {0o600} and (folder / "m").stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
@pytest.mark.parametrize("shards", SHARDS)
def test_what_was_written_survives_kill_9(tmp_path: Path, shards: str) -> None:
    models = model_folder(tmp_path, record="64MB", record_share="1")
    folder = tmp_path / "recordings"
    flags = "--record", str(folder), "--shards", shards
    served = Served(models, *flags)
    wait_until(lambda: shards == "1" or served.has_shards(2))
    load = Load(served)
    wait_until(lambda: len(load.answered) > 200)
    time.sleep(0.3)
    written = set(load.answered)
    time.sleep(0.3)
    children = served.processes()
    for process in children:
        process.kill()
    served.process.kill()
    answered = load.stop()
    served.finish(children)
    found = numbers(open_recording(folder))
    # What was answered in the last moments may not have been written.
    assert written <= found
    assert len(found - answered) <= 4
    # The next server writes to the same folder, and all of it reads back.
    with Served(models, *flags) as again:
        assert again.post("/v2/models/m/infer", b"{}")[0] == 400
    assert numbers(open_recording(folder)) == found


@pytest.mark.slow
def test_a_killed_shard_goes_on_recording(tmp_path: Path) -> None:
    models = model_folder(tmp_path, record="64MB", record_share="1")
    folder = tmp_path / "recordings"
    with Served(models, "--record", str(folder), "--shards", "2") as served:
        wait_until(lambda: served.has_shards(2))
        before = load_until(served, folder, 2, first=0)
        killed = served.shards()[0]
        killed.send_signal(signal.SIGKILL)
        wait_until(lambda: served.has_shards(2) and killed not in served.shards())
        later = load_until(served, folder, 3, first=10**8)
    # Nothing was in flight when the shard was killed, so nothing is lost.
    assert numbers(open_recording(folder)) == before | later


@pytest.mark.slow
def test_the_ring_stays_within_its_size_under_load(tmp_path: Path) -> None:
    models = model_folder(tmp_path, record="200kB", record_share="1")
    folder = tmp_path / "recordings"
    with Served(models, "--record", str(folder), "--shards", "2") as served:
        wait_until(lambda: served.has_shards(2))
        load = Load(served)
        while len(load.answered) < 800:
            sizes = [path.stat().st_size for path in folder.rglob("*.rec") if path.exists()]
            assert sum(sizes) <= 200_000
            time.sleep(0.05)
        load.stop()
    assert 100 < len(open_recording(folder).entries) < 600


@pytest.mark.parametrize("shards", SHARDS)
def test_redaction_leaves_no_bytes_of_the_tensor(tmp_path: Path, shards: str) -> None:
    models = model_folder(tmp_path, record="64MB", record_share="1", record_redact="BYTES, id")
    folder = tmp_path / "recordings"
    with Served(models, "--record", str(folder), "--shards", shards) as served:
        load = Load(served)
        wait_until(lambda: len(load.answered) > 100)
        load.stop()
    data = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"word-" not in data and b"id-" not in data
    assert np.full(64, 3, np.float32).tobytes() in data
    entries = open_recording(folder).entries
    assert len(entries) >= 100 and entries[0].inputs()["s"].tolist() == [[b""]]


def test_recording_is_off_unless_the_operator_gives_a_folder(tmp_path: Path) -> None:
    models = model_folder(tmp_path, record="64MB")
    command = [sys.executable, "-m", "penstock", "serve", str(models), "--http-port", "0"]
    command += ["--no-grpc", "--no-metrics"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "requests are recorded only where the operator gives a folder" in ended.stderr
    null_model(tmp_path / "plain", "m")
    with Served(tmp_path / "plain") as served:
        assert served.infer("m", "x", "INT32", [1])[0] == 200
        assert b"penstock_record" not in served.get("/metrics")[1]


def test_models_can_be_left_out(tmp_path: Path) -> None:
    null_model(tmp_path / "models", "left", config=parameters(record="off"))
    null_model(tmp_path / "models", "kept", config=parameters(record_share="1"))
    folder = tmp_path / "recordings"
    with Served(tmp_path / "models", "--record", str(folder)) as served:
        assert served.infer("left", "x", "INT32", [1])[0] == 200
        assert served.infer("kept", "x", "INT32", [1])[0] == 200
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "kept"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount a small disk")
def test_a_full_disk_stops_the_recording_and_not_the_serving(tmp_path: Path) -> None:
    models = model_folder(tmp_path, record="64MB", record_share="1")
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount")
    try:
        with Served(models, "--record", str(folder)) as served:
            load = Load(served)
            wait_until(lambda: scraped(served, "penstock_record_stopped") == 1)
            count = len(load.answered)
            wait_until(lambda: len(load.answered) > count + 200)
            load.stop()
            assert served.logged().count("is not recorded any more: No space left") == 1
            assert scraped(served, "penstock_record_dropped") > 0
        assert len(numbers(open_recording(folder))) > 50
    finally:
        subprocess.run(["umount", str(folder)], check=True)
