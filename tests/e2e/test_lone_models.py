"""Files by themselves behind a real server: ONNX, a classifier of skl2onnx, a Python function that
is reloaded while clients call it."""

import json
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served import EXAMPLES, Served
from suites.classifiers import write_classifier

FUNCTION = """
from beside import FACTOR


def scale(x: float, label: str = "x") -> dict_of_two:
    return {"value": x * FACTOR, "text": label}
"""
HEAD = """
from typing import TypedDict


class dict_of_two(TypedDict):
    value: float
    text: str

"""


def infer(served: Served, name: str, *inputs: dict[str, Any]) -> dict[str, Any]:
    body = json.dumps({"inputs": inputs}).encode()
    url = f"http://{served.address}/v2/models/{name}/infer"
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer:
        outputs = json.loads(answer.read())["outputs"]
    return {each["name"]: each["data"] for each in outputs}


def tensor(name: str, datatype: str, *data: Any) -> dict[str, Any]:
    array = np.asarray(data, object)
    return {"name": name, "datatype": datatype, "shape": list(array.shape), "data": list(data)}


def test_an_onnx_file_is_served_and_can_be_reloaded(tmp_path: Path) -> None:
    path = tmp_path / "add and subtract.onnx"
    path.write_bytes((EXAMPLES / "simple" / "1" / "model.onnx").read_bytes())
    flags = ("--model-control-mode", "explicit", "--load-model", "*")
    with Served(path, *flags) as served:
        row = list(range(16))
        inputs = [tensor(name, "INT32", row) for name in ("INPUT0", "INPUT1")]
        for each in inputs:
            each["shape"] = [1, 16]
        assert infer(served, "add-and-subtract", *inputs)["OUTPUT0"] == [2 * n for n in row]
        assert "add-and-subtract/1: batches of up to 64 rows, as the first" in served.logged()
        repository = f"http://{served.address}/v2/repository"
        ask = urllib.request.Request(f"{repository}/models/add-and-subtract/load", b"{}")
        assert urllib.request.urlopen(ask, timeout=60).status == 200
        with urllib.request.urlopen(
            urllib.request.Request(f"{repository}/index", b""), timeout=60
        ) as answer:
            (entry,) = json.loads(answer.read())
        assert (entry["name"], entry["version"], entry["state"]) == (
            "add-and-subtract",
            "1",
            "READY",
        )
        assert infer(served, "add-and-subtract", *inputs)["OUTPUT1"] == [0] * 16


def test_a_classifier_of_skl2onnx_gives_its_probabilities(tmp_path: Path) -> None:
    write_classifier(tmp_path / "spam.onnx", classlabels_int64s=[0, 1])
    with Served(tmp_path / "spam.onnx") as served:
        rows = {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [0, 0, 0, 50]}
        found = infer(served, "spam", rows)
        assert found["label"] == [0, 1]
        assert found["probability"] == pytest.approx([0.5, 0.5, 0, 1])


def test_a_changed_function_is_reloaded_and_no_request_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "scales.py"
    path.write_text(HEAD + FUNCTION)
    beside = tmp_path / "beside.py"
    beside.write_text("FACTOR = 2")
    with Served(path, "--reload") as served:
        answer = infer(served, "scales", tensor("x", "FP64", 1.5, 2.5))
        assert answer == {"value": [3.0, 5.0], "text": ["x", "x"]}
        answers: list[float] = []
        failures: list[Exception] = []
        is_over = threading.Event()

        def keep_asking() -> None:
            while not is_over.is_set():
                try:
                    answers.extend(infer(served, "scales", tensor("x", "FP64", 1.0))["value"])
                except Exception as error:
                    failures.append(error)

        asking = threading.Thread(target=keep_asking)
        asking.start()
        try:
            beside.write_text("FACTOR = 30")
            wait_for(lambda: 30.0 in answers[-1:])
            path.write_text("this is no Python")
            wait_for(lambda: "keeps the code it had" in served.logged())
            asked = len(answers)
            wait_for(lambda: len(answers) > asked + 5)
        finally:
            is_over.set()
            asking.join()
        assert failures == [] and set(answers) == {2.0, 30.0} and answers[-1] == 30.0
        assert served.logged().count("scales cannot be loaded") == 1


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
