"""`model_warmup`: what fits the model is run, what does not is a problem of the model."""

from pathlib import Path

import pytest

from penstock.config import Warmup, WarmupInput
from penstock.errors import ConfigError
from penstock.repository import pbtxt, pbtxt_warmup
from penstock.types import TensorSpec

INPUTS = (
    TensorSpec("x", "FP32", (-1, 3)),
    TensorSpec("text", "BYTES", (1,)),
    TensorSpec("extra", "INT64", (1,), is_optional=True),
)


def tensor(name: str, kind: str, dims: str, source: str) -> str:
    return (
        f'inputs {{ key: "{name}" value {{ data_type: TYPE_{kind} dims: [ {dims} ] {source} }} }}'
    )


X = tensor("x", "FP32", "5, 3", "random_data: true")
TEXT = tensor("text", "STRING", "1", "zero_data: true")


SOURCE = 'input_data_file: "raw"'


def read(text: str, folder: Path, max_batch: int = 8) -> tuple[tuple[Warmup, ...], list[str]]:
    problems: list[str] = []
    warmups = pbtxt_warmup.read(
        pbtxt.parse(text).model_warmup,
        INPUTS,
        max_batch,
        folder,
        lambda path, why: problems.append(f"{path}: {why}"),
    )
    return warmups, problems


def test_what_fits_is_read(tmp_path: Path):
    text = f'model_warmup {{ name: "one" batch_size: 4 count: 3 {X} {TEXT} }}'
    warmups, skipped = read(text, tmp_path)
    assert skipped == []
    assert warmups == (
        Warmup(
            "one",
            4,
            (WarmupInput("text", "BYTES", (1,)), WarmupInput("x", "FP32", (5, 3), "random")),
            3,
        ),
    )
    assert warmups[0].folder == str(tmp_path / "warmup")


def test_without_counts_it_runs_once_with_one_row(tmp_path: Path):
    (warmup,), _ = read(f"model_warmup {{ {X} {TEXT} }}", tmp_path)
    assert (warmup.num_rows, warmup.count) == (1, 1)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (X, "inputs: expected every input, text too"),
        (f"{X} {TEXT} batch_size: 9", "batch_size: 9; expected at most max_batch_size 8"),
        (f"{X} {TEXT} count: 100000", "count: 100000; expected at most 10000"),
        (f"{X} {TEXT} {tensor('z', 'FP32', '1', '')}", "inputs.z: no such input; expected one of"),
        (f"{TEXT} {tensor('x', 'INT8', '5, 3', '')}", "inputs.x.data_type: INT8; expected FP32"),
        (f"{TEXT} {tensor('x', 'FP32', '5, 4', '')}", "inputs.x.dims: [5, 4]; expected a shape"),
        (f"{TEXT} {tensor('x', 'FP32', '-1, 3', '')}", "inputs.x.dims: [-1, 3]; expected a shape"),
        (f"{TEXT} {tensor('x', 'FP32', '3', '')}", "inputs.x.dims: [3]; expected a shape that"),
        (
            TEXT + tensor("x", "FP32", "5, 3", 'input_data_file: "../../passwd"'),
            "inputs.x.input_data_file: '../../passwd' leaves the folder warmup",
        ),
    ],
)
def test_what_does_not_fit_is_a_problem(body: str, reason: str, tmp_path: Path):
    good = f"model_warmup {{ {X} {TEXT} }}"
    _, [problem] = read(good + f"model_warmup {{ {body} }}", tmp_path)
    assert problem.startswith(f"model_warmup[1].{reason}")


def test_rows_of_a_model_without_batches_are_a_problem(tmp_path: Path):
    _, [problem] = read(f"model_warmup {{ {X} {TEXT} batch_size: 2 }}", tmp_path, max_batch=0)
    assert problem == "model_warmup[0].batch_size: 2; expected 1 without a batch dimension"


def test_a_file_that_is_missing_is_found_before_the_model_is_loaded(tmp_path: Path):
    text = f"model_warmup {{ {TEXT} {tensor('x', 'FP32', '5, 3', SOURCE)} }}"
    warmups, problems = read(text, tmp_path)
    assert problems == []
    with pytest.raises(ConfigError, match="no file 'raw' in the folder warmup beside the versions"):
        pbtxt_warmup.check_files(warmups)


def test_what_a_changed_model_does_not_take_is_not_kept():
    from_file = tensor("x", "FP32", "5, 3", SOURCE)
    text = f"model_warmup {{ {X} {TEXT} }} model_warmup {{ {TEXT} {from_file} }}"
    plain, with_file = pbtxt.parse(text).model_warmup
    for message, has_files, expected in (
        (plain, False, True),
        (with_file, True, True),
        (with_file, False, False),
    ):
        assert pbtxt_warmup.fits(message, INPUTS, 8, has_files=has_files) is expected
    assert not pbtxt_warmup.fits(plain, INPUTS[1:], 8, has_files=True)


def test_a_file_of_the_folder_beside_the_versions_is_taken(tmp_path: Path):
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "raw").write_bytes(bytes(60))
    text = f"model_warmup {{ {TEXT} {tensor('x', 'FP32', '5, 3', SOURCE)} }}"
    (warmup,), skipped = read(text, tmp_path)
    assert skipped == []
    pbtxt_warmup.check_files([warmup])
    assert warmup.inputs[1] == WarmupInput("x", "FP32", (5, 3), "file", "raw")
