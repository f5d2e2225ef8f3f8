"""Python models without a configuration: which function it is, its tensors, how it is called."""

from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
from suites.backend import model_config

import penstock
from penstock.backends import Batch, PerRequest, Runner, backend
from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.repository.model_source import resolve
from penstock.types import TensorSpec
from penstock.wire.frames import RequestPart

HEAD = """
from dataclasses import dataclass
from typing import Annotated, NamedTuple, TypedDict
import numpy as np
import penstock
from penstock import Tensor

Rows = Annotated[np.ndarray, Tensor("FP32", [-1, 3])]
Sums = Annotated[np.ndarray, Tensor("FP32", [-1])]
"""
PIECES = {
    "function": "def double(x: Rows) -> Rows:\n    return x * 2",
    "named infer": "def other(a, b): pass\ndef infer(x: Rows) -> Rows:\n    return x * 2",
    "asynchronous": "async def double(x: Rows) -> Rows:\n    return x * 2",
    "class": "class Model:\n    def infer(self, x: Rows) -> Rows:\n        return x * 2",
    "marked class": """
        @penstock.model()
        class Doubler:
            def load(self): self.factor = 2
            def predict(self, x: Rows) -> Rows:
                return x * self.factor
        """,
    "marked function": """
        def helper(x): return x * 2
        def other(y): pass
        @penstock.model(outputs={"output": Tensor("FP32", [-1, 3])})
        def double(x: Rows):
            return helper(x)
        """,
    "mapping": """
        kind = Tensor("FP32", [-1, 3])
        @penstock.model({"x": kind}, {"output": kind})
        def double(inputs):
            return {"output": inputs["x"] * 2}
        """,
}


def write(folder: Path, code: str) -> Path:
    path = folder / "model.py"
    path.write_text(HEAD + dedent(code))
    return path


def config_of(folder: Path, code: str) -> ModelConfig:
    found = resolve(write(folder, code)).read()
    assert found.problems == {}
    return found.configs[0]


def problem_of(folder: Path, code: str) -> str:
    (problem,) = resolve(write(folder, code)).read().problems["model"]
    assert problem.startswith("model.py: ")
    return problem.removeprefix("model.py: ")


def shown(specs: tuple[TensorSpec, ...]) -> list[str]:
    return [f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in specs]


def answer(folder: Path, code: str, **inputs: Any) -> dict[str, Any]:
    with penstock.load(str(write(folder, code))) as model:
        found = model.infer({name: np.asarray(value) for name, value in inputs.items()})
    return {name: array.tolist() for name, array in found.items()}


@pytest.mark.parametrize("form", PIECES)
def test_a_function_of_arrays_gets_whole_batches(tmp_path: Path, form: str) -> None:
    config = config_of(tmp_path, PIECES[form])
    assert shown(config.inputs) == ["x FP32 [3]"]
    assert shown(config.outputs) == ["output FP32 [3]"]
    assert (config.backend, config.max_batch_size) == ("python", 64)
    assert config.batching.is_dynamic
    found = answer(tmp_path, PIECES[form], x=np.ones((2, 3), np.float32))
    assert found == {"output": [[2, 2, 2], [2, 2, 2]]}


def test_plain_types_are_one_row(tmp_path: Path) -> None:
    code = """
    def describe(text: str, raw: bytes, n: int, f: float, b: bool, many: list[float]) -> str:
        assert [type(each) for each in (text, raw, n, f, b)] == [str, bytes, int, float, bool]
        return f"{text} {raw!r} {n} {f} {b} {many}"
    """
    config = config_of(tmp_path, code)
    assert shown(config.inputs) == [
        "text BYTES []",
        "raw BYTES []",
        "n INT64 []",
        "f FP64 []",
        "b BOOL []",
        "many FP64 [-1]",
    ]
    assert shown(config.outputs) == ["output BYTES []"]
    assert any("one row at a time" in note for note in config.notes)
    found = answer(
        tmp_path,
        code,
        text=np.array(["é", "b"], object),
        raw=np.array([b"\xff", b""], object),
        n=[1, 2],
        f=[0.5, 2.0],
        b=[True, False],
        many=[[1.0, 2.0], [3.0, 4.0]],
    )
    assert [text.decode() for text in found["output"]] == [
        "é b'\\xff' 1 0.5 True [1.0, 2.0]",
        "b b'' 2 2.0 False [3.0, 4.0]",
    ]


@pytest.mark.parametrize(
    "result",
    [
        "@dataclass\nclass Result:\n    label: str\n    scores: list[float]\n",
        "class Result(TypedDict):\n    label: str\n    scores: list[float]\n",
        "class Result(NamedTuple):\n    label: str\n    scores: list[float]\n",
    ],
    ids=["dataclass", "TypedDict", "NamedTuple"],
)
def test_results_may_have_several_fields(tmp_path: Path, result: str) -> None:
    code = result + "def f(x: int) -> Result:\n    return Result(label=str(x), scores=[x, 1])\n"
    assert shown(config_of(tmp_path, code).outputs) == ["label BYTES []", "scores FP64 [-1]"]
    found = answer(tmp_path, code, x=[7, 8])
    assert found == {"label": [b"7", b"8"], "scores": [[7, 1], [8, 1]]}


def test_parameters_with_defaults_are_optional(tmp_path: Path) -> None:
    code = "def f(x: int, factor: int = 10) -> int:\n    return x * factor"
    assert [spec.is_optional for spec in config_of(tmp_path, code).inputs] == [False, True]
    assert answer(tmp_path, code, x=[1, 2]) == {"output": [10, 20]}
    assert answer(tmp_path, code, x=[1, 2], factor=[3, 4]) == {"output": [3, 8]}


def test_lists_may_be_batches(tmp_path: Path) -> None:
    code = """
    @penstock.model(batched=True, max_batch_size=128)
    def lengths(texts: list[str]) -> list[int]:
        assert all(isinstance(text, str) for text in texts)
        return [len(text) for text in texts]
    """
    config = config_of(tmp_path, code)
    assert shown(config.inputs) == ["texts BYTES []"] and config.max_batch_size == 128
    assert answer(tmp_path, code, texts=np.array(["a", "bcd"], object)) == {"output": [1, 3]}


def test_arrays_may_be_rows(tmp_path: Path) -> None:
    code = """
    @penstock.model(batched=False)
    def add(x: Annotated[np.ndarray, Tensor("FP32", [3])], y: float) -> float:
        assert x.shape == (3,)
        return float(x.sum()) + y
    """
    assert shown(config_of(tmp_path, code).inputs) == ["x FP32 [3]", "y FP64 []"]
    assert answer(tmp_path, code, x=np.ones((2, 3), np.float32), y=[1.0, 2.0]) == {"output": [4, 5]}


def test_batching_can_be_switched_off(tmp_path: Path) -> None:
    code = """
    @penstock.model(max_batch_size=0)
    def f(x: Rows) -> Sums:
        return x.sum(1)
    """
    config = config_of(tmp_path, code)
    assert shown(config.inputs) == ["x FP32 [-1, 3]"] and config.max_batch_size == 0
    assert config.notes == ("no batching, as the file allows none",)
    assert answer(tmp_path, code, x=np.ones((2, 3), np.float32)) == {"output": [3, 3]}


def test_a_triton_model_completes_its_own_configuration(tmp_path: Path) -> None:
    code = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        @staticmethod
        def auto_complete_config(config):
            config.add_input({"name": "a", "data_type": "TYPE_INT32", "dims": [2]})
            config.add_output({"name": "b", "data_type": "TYPE_STRING", "dims": [1]})
            config.set_max_batch_size(16)
            config.set_dynamic_batching()
            return config

        def execute(self, requests):
            raise NotImplementedError
    """
    config = config_of(tmp_path, code)
    assert shown(config.inputs) == ["a INT32 [2]"] and shown(config.outputs) == ["b BYTES [1]"]
    assert config.max_batch_size == 16
    without = "class TritonPythonModel:\n    def execute(self, requests): pass"
    assert "auto_complete_config" in problem_of(tmp_path, without)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def f(x) -> str: return ''", ["config.pbtxt", "@penstock.model"]),
        ("def f(x: float, y) -> str: return ''", ["input 'y': no annotation", "penstock.Tensor"]),
        ("def f(x: np.ndarray) -> Rows: return x", ["input 'x'", "penstock.Tensor"]),
        ("def f(x: complex) -> str: return ''", ["input 'x': annotated as complex", "float"]),
        ("def f(x: str): return ''", ["does not say what it returns", "dataclass"]),
        ("def f(x: str) -> dict: return {}", ["does not say what it returns"]),
        ("def f(x: Rows, y: float) -> Rows: return x", ["'x'", "'y'", "batched=False"]),
        ("@penstock.model(batched=True)\ndef f(x: str) -> str: return x", ["list[...]"]),
        ("def f(x: 'Nothing') -> str: return ''", ["annotations", "Nothing"]),
        ('K = Tensor("FP31")\n@penstock.model({"x": K}, {"y": K})\ndef f(x): pass', ["FP31"]),
        ("def f(x: str) -> str: return x\ndef g(x: str) -> str: return x", ["f, g", "mark"]),
        ("@penstock.model()\ndef f(x): 1\n@penstock.model()\ndef g(x): 1", ["marks f, g"]),
        ("raise ValueError('no weights here')", ["line 10", "no weights here"]),
        ("import nowhere_to_be_found", ["nowhere_to_be_found"]),
        ("import os\nos._exit(3)", ["exited with status 3"]),
        ("x = 1", ["defines no model"]),
    ],
)
def test_what_is_missing_is_told_with_what_to_write(
    tmp_path: Path, code: str, words: list[str]
) -> None:
    text = problem_of(tmp_path, code)
    assert all(word in text for word in words), text


def test_reading_runs_no_code_in_this_process(tmp_path: Path) -> None:
    code = "import os\nopen(__file__ + '.pid', 'w').write(str(os.getpid()))\nprint('noise')\n"
    config_of(tmp_path, code + "def f(x: int) -> int: return x")
    import os

    assert (tmp_path / "model.py.pid").read_text() != str(os.getpid())


def test_a_change_of_the_file_or_of_a_module_beside_it_is_seen(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("Kind = int")
    code = "from beside import Kind\ndef f(x: Kind) -> Kind: return x"
    assert shown(config_of(tmp_path, code).inputs) == ["x INT64 []"]
    (tmp_path / "beside.py").write_text("Kind = float")
    assert shown(config_of(tmp_path, code).inputs) == ["x FP64 []"]


def runner_of(folder: Path, code: str) -> Runner:
    specs = (TensorSpec("x", "INT64", ()),), (TensorSpec("output", "INT64", ()),)
    return backend("python")(model_config("python", write(folder, code), *specs, 8, {}))


def test_a_row_that_fails_fails_only_its_request(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "def f(x: int) -> int:\n    return 12 // x")
    parts = [RequestPart("a", 1), RequestPart("b", 2), RequestPart("c", 1)]
    batch = Batch({"x": np.array([3, 0, 1, 4])}, 4, parts)
    [found] = runner.start(batch).wait()
    assert isinstance(found, PerRequest)
    good, bad, last = found.answers
    assert isinstance(bad, ZeroDivisionError)
    assert isinstance(good, dict) and good["output"].tolist() == [4]
    assert isinstance(last, dict) and last["output"].tolist() == [3]
    runner.close()


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("1.5", "output 'output': expected values of INT64, got float64"),
        ("[1] * x", "different shapes"),
        ("'text'", "expected values of INT64"),
    ],
)
def test_results_of_another_type_are_refused(tmp_path: Path, result: str, words: str) -> None:
    runner = runner_of(tmp_path, f"def f(x: int) -> int:\n    return {result}")
    with pytest.raises(Exception, match=words):
        runner.start(Batch({"x": np.array([1, 2])}, 2)).wait()
    runner.close()


def test_a_configuration_that_is_written_needs_no_annotations(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text("def infer(inputs):\n    return {'y': inputs['x']}")
    with pytest.raises(ConfigError, match=r"1/model\.py: does not say what tensors"):
        penstock.load(str(folder))
    (folder / "config.pbtxt").write_text(
        'backend: "python" max_batch_size: 4 input { name: "x" data_type: TYPE_INT8 dims: 1 } '
        'output { name: "y" data_type: TYPE_INT8 dims: 1 }'
    )
    with penstock.load(str(folder)) as model:
        assert model.infer(np.int8([[5]]))["y"].tolist() == [[5]]
