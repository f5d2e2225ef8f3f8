"""A version is committed beside the one that serves; the next load takes it, and nobody notices."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from onnx import TensorProto, helper
from served import Served
from waiting import wait_until

import penstock
from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.repository import layout, versions

WriteOnnx = Callable[..., Path]


@pytest.fixture
def add(tmp_path: Path, write_onnx: WriteOnnx) -> Callable[[float], str]:
    """Commit a version of `model` that adds this number to its input."""

    def commit(number: float) -> str:
        file = write_onnx(
            tmp_path / "made" / "model" / "1" / "model.onnx",
            [helper.make_node("Add", ["x", "number"], ["y"])],
            {"x": ("FP32", ["batch", 1])},
            {"y": ("FP32", ["batch", 1])},
            [helper.make_tensor("number", TensorProto.FLOAT, [1], [number])],
        )
        [config] = layout.read(tmp_path / "made").configs
        root = tmp_path / "repository"
        root.mkdir(exist_ok=True)
        return versions.commit(root, "model", {"model.onnx": file}, config)

    return commit


@pytest.fixture
def served(tmp_path: Path, add: Callable[[float], str]) -> Iterator[Served]:
    """Version 1 adds 1."""
    add(1)
    flags = ("--model-control-mode", "explicit", "--load-model", "model")
    server = Served(tmp_path / "repository", *flags)
    yield server
    assert server.terminate() == 0


def ask(served: Served) -> tuple[str, float]:
    """The version that answered, and what it added to 0.5."""
    status, answer = served.infer("model", "x", "FP32", [0.5])
    assert status == 200, answer
    return answer["model_version"], answer["outputs"][0]["data"][0] - 0.5


def load(served: Served) -> tuple[int, str]:
    status, body = served.post("/v2/repository/models/model/load")
    return status, json.loads(body)["error"] if body else ""


@contextmanager
def clients(served: Served, count: int = 4) -> Iterator[list[tuple[str, float]]]:
    """Ask all the time; the list of answers grows. What one client raises is raised here."""
    answers: list[tuple[str, float]] = []
    errors: list[BaseException] = []
    is_over = threading.Event()

    def run() -> None:
        try:
            while not is_over.is_set():
                answers.append(ask(served))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def test_a_commit_is_taken_by_the_next_load_without_a_lost_answer(served, add):
    with clients(served) as answers:
        assert ask(served) == ("1", 1.0)
        assert add(2) == "2"
        assert ask(served) == ("1", 1.0), "a commit alone changes nothing"
        assert load(served) == (200, "")
        assert ask(served) == ("2", 2.0)
        wait_until(lambda: ("2", 2.0) in answers)
    assert {("1", 1.0), ("2", 2.0)} == set(answers)


def test_promotion_and_rollback_are_a_load_away(served, add, tmp_path):
    add(2)
    for version in ("2", "1", "2", "1"):
        versions.promote(tmp_path / "repository", "model", version)
        assert load(served) == (200, "")
        assert ask(served) == (version, float(version))


@pytest.mark.parametrize("damage", ["cut", "changed", "missing"])
def test_a_damaged_version_is_not_loaded_and_the_old_one_stays(served, add, tmp_path, damage):
    add(2)
    file = tmp_path / "repository" / "model" / "2" / "model.onnx"
    whole = bytearray(file.read_bytes())
    file.unlink()
    if damage == "cut":
        file.write_bytes(whole[:-1])
    elif damage == "changed":
        # The file is still a good model: it adds 3.
        whole[whole.index(b"\x00\x00\x00\x40") + 2] |= 0x40
        file.write_bytes(whole)
    status, error = load(served)
    assert status == 400
    assert "2/model.onnx" in error
    assert ("differs from what was committed" if damage == "changed" else "incomplete") in error
    assert ask(served) == ("1", 1.0)


def test_what_a_dead_committer_left_disturbs_nobody(served, tmp_path):
    left = tmp_path / "repository" / "model" / ".staging-1-dead" / "2"
    left.mkdir(parents=True)
    (left / "model.onnx").write_bytes(b"half")
    (left / "config.pbtxt").write_text("{{{")
    assert load(served) == (200, "")
    assert ask(served) == ("1", 1.0)


def test_evidence_is_what_the_served_model_promises(tmp_path, add):
    add(1)
    root = tmp_path / "repository"
    source = root / "model" / "1"
    [config] = layout.read(root).configs
    versions.commit(root, "model", source, config, {"slo": "p99 < 500ms"})
    server = Served(root)
    status, body = server.get("/v2/models/model/config")
    assert status == 200
    parameters = json.loads(body)["parameters"]
    assert parameters["penstock.slo"] == {"string_value": "p99 < 500ms"}
    assert ask(server) == ("2", 1.0)
    assert server.terminate() == 0


def test_a_model_in_this_process_is_checked_too(tmp_path, add):
    add(1)
    folder = tmp_path / "repository" / "model"
    with penstock.load(str(folder)) as model:
        assert isinstance(model.config, ModelConfig) and model.config.manifest
    text = (folder / "1" / "config.pbtxt").read_text()
    changed = text.replace("max_batch_size: 64", "max_batch_size: 32")
    assert changed != text and len(changed) == len(text)
    (folder / "1" / "config.pbtxt").write_text(changed)
    with pytest.raises(ConfigError, match=r"1/config.pbtxt: differs from what was committed"):
        penstock.load(str(folder))
