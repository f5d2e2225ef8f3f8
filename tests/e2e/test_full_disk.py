"""A disk that is full: repository, log and cache lie on a tmpfs of 1 MiB.

Serving needs no room on the disk, even if the log line of each request cannot be
written. What has to write (a commit, the load of a model that unpacks its weights) fails with an
error that says so, and works again when there is room.
"""

import asyncio
import errno
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from load import Load
from served import Served, null_model

from penstock.errors import StorageFull
from penstock.repository import layout, versions

# Writes 64 KiB when it is loaded, as those do that unpack or compile their weights.
UNPACKING = """
class Model:
    def load(self):
        with open("{path}", "wb") as file:
            file.write(bytes(64 << 10))

    def infer(self, x):
        return {{"y": x["x"]}}
"""
CONFIG = """
backend: "python" max_batch_size: 4
input { name: "x" data_type: TYPE_INT32 dims: 1 }
output { name: "y" data_type: TYPE_INT32 dims: 1 }
"""


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here; this needs root")
    yield folder
    # Also where a server that a failed test has left still has files there.
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Leave no byte free."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
    return ballast


def post(served: Served, path: str) -> tuple[int, str]:
    status, body = served.post(path)
    return status, json.loads(body)["error"] if body else ""


def try_to_commit(root: Path) -> str:
    """Why a version of `model` cannot be committed; empty if one was."""
    config = next(each for each in layout.read(root).configs if each.name == "model")
    weights = root.parent.parent / "weights"
    weights.write_bytes(bytes(32 << 10))
    try:
        versions.commit(root, "model", {"weights": weights}, config)
    except StorageFull as error:
        return str(error)
    return ""


def try_to_promote(root: Path, version: str) -> str:
    try:
        versions.promote(root, "model", version)
    except StorageFull as error:
        return str(error)
    return ""


def list_files(root: Path) -> dict[str, bytes]:
    files = (path for path in root.rglob("*") if path.is_file() and "__pycache__" not in str(path))
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def kill_a_worker(served: Served) -> None:
    """And wait until another one is there."""
    victim = served.workers()[0]
    os.kill(victim.pid, signal.SIGKILL)
    ends = time.monotonic() + 30
    while victim.is_running() or served.status("/v2/models/model/ready") != 200:
        assert time.monotonic() < ends
        time.sleep(0.05)


def act_without_room(served: Served, root: Path) -> dict[str, tuple[int, str] | str]:
    """Return the answer to each change; inference is not affected."""
    answers: dict[str, tuple[int, str] | str] = {
        "load": post(served, "/v2/repository/models/unpacking/load"),
        "reload": post(served, "/v2/repository/models/model/load"),
        "index": (served.post("/v2/repository/index")[0], ""),
        "commit": try_to_commit(root),
        "promote": try_to_promote(root, "1"),
    }
    kill_a_worker(served)
    return answers


def make_repository(root: Path, unpacked: Path) -> None:
    null_model(root, "model", a_ms=1)
    (root / "unpacking" / "1").mkdir(parents=True)
    (root / "unpacking" / "1" / "model.py").write_text(UNPACKING.format(path=unpacked))
    (root / "unpacking" / "config.pbtxt").write_text(CONFIG)


def test_a_load_without_room_gets_507(tmp_path: Path):
    make_repository(tmp_path / "repository", Path("/dev/full"))
    served = Served(tmp_path / "repository", "--model-control-mode", "explicit")
    status, error = post(served, "/v2/repository/models/unpacking/load")
    assert status == 507 and "No space left on device" in error
    assert post(served, "/v2/repository/models/model/load") == (200, "")
    assert served.terminate() == 0


@pytest.fixture
def served(small: Path) -> Iterator[Served]:
    """Repository, log and cache on the small disk, with a line of log for each request."""
    make_repository(small / "repository", small / "unpacked")
    server = Served(
        small / "repository",
        *("--model-control-mode", "explicit", "--load-model", "model", "--log-requests"),
        environment={"TMPDIR": str(small)},
        log_folder=small,
    )
    yield server
    if server.process.poll() is None:
        assert server.terminate() == 0


@pytest.mark.verify
@pytest.mark.timeout(180)
def test_a_full_disk_loses_no_request_and_no_state(small: Path, served: Served):
    root = small / "repository"

    async def scenario() -> tuple[Load, dict[str, tuple[int, str] | str], dict[str, bytes], str]:
        async with Load(served.port, 8, model="model") as load:
            await asyncio.sleep(0.3)
            before = list_files(root)
            ballast = fill(small)
            log_before = served.logged()
            answers = await asyncio.to_thread(act_without_room, served, root)
            await asyncio.sleep(5)
            assert len(served.logged()) - len(log_before) < 8192, "the disk was not full"
            assert list_files(root) == before, "a failed call left something behind"
            ballast.unlink()
            (small / "unpacked").unlink(missing_ok=True)
            await asyncio.sleep(0.2)
        return load, answers, before, log_before

    load, answers, before, log_before = asyncio.run(scenario())
    tally = load.tally
    num_lost = tally.num_sent - tally.num_good
    print(
        f"\nfull disk: {num_lost} of {tally.num_sent} requests lost; load answered "
        f"{answers['load'][0]}, reload of the served model {answers['reload'][0]}"
    )
    assert num_lost == tally.num_wrong == tally.num_cut == 0
    assert set(tally.statuses) == {200}, tally.statuses
    status, error = answers["load"]
    assert status == 507, error
    assert "failed to load 'unpacking'" in error and "No space left on device" in error
    assert answers["reload"] == (200, "") and answers["index"] == (200, "")
    assert "version was not committed: No space left on device" in answers["commit"]
    assert "version 1 was not promoted: No space left on device" in answers["promote"]
    # With room again, each of them works, and the log gets new lines.
    assert len(served.logged()) > len(log_before)
    assert try_to_commit(root) == "" and try_to_promote(root, "1") == ""
    changed = list_files(root)
    assert {name for name in changed if name.startswith("model/2/")} and len(changed) > len(before)
    for name in ("unpacking", "model"):
        assert post(served, f"/v2/repository/models/{name}/load") == (200, "")
        assert served.infer(name, "x", "INT32", [7])[0] == 200
    assert not list(root.rglob(".staging-*"))
    assert served.terminate() == 0
