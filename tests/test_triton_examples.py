"""The runner of Triton's own examples: what it says without checkouts, and how it judges items."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton_material.scenes import Result
from triton_material.table import Row, Table

RUNNER = Path(__file__).with_name("triton_examples.py")
GOOD, BAD = Result(True), Result(False, "why")


def run(**variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    command = [sys.executable, str(RUNNER), "--list"]
    return subprocess.run(
        command, env=environment | variables, capture_output=True, text=True, timeout=60
    )


def test_without_checkouts_it_fails_and_says_how_to_get_them(tmp_path: Path) -> None:
    done = run(TRITON_SERVER=str(tmp_path))
    assert done.returncode == 1 and "TRITON_CLIENT is not set" in done.stderr
    assert f"TRITON_SERVER={tmp_path}: docs/examples/model_repository is missing" in done.stderr
    for name in ("client", "server", "python_backend"):
        url = f"https://github.com/triton-inference-server/{name}"
        assert f"git clone --depth 1 {url} triton/{name}\n" in done.stderr
    assert "make verify-triton TRITON_CLIENT=triton/client" in done.stderr


@pytest.mark.parametrize(
    ("results", "reason", "fault"),
    [
        ({1: GOOD, 2: GOOD}, "", ""),
        ({1: GOOD, 2: BAD}, "", "why"),
        ({1: GOOD, 2: BAD}, "needs a GPU", ""),
        ({1: GOOD, 2: GOOD}, "needs a GPU", "passes: take it off the list of reasons"),
    ],
)
def test_an_item_must_pass_or_have_a_reason(
    results: dict[int, Result], reason: str, fault: str
) -> None:
    assert Row("item", results, reason).fault == fault


def test_a_table_counts_what_passed_with_each_number_of_shards() -> None:
    table = Table("Clients", (1, 2), {"b": "needs a GPU"}, {"c": "needs TensorFlow"})
    table.add(1, {"a": GOOD, "b": BAD})
    table.add(2, {"a": BAD, "b": BAD})
    assert table.summary() == (
        "Clients: 1 of 2 pass with 1 shard, 0 of 2 pass with 2 shards; "
        "1 listed with a reason, 1 not run"
    )
    assert table.num_faults() == 1
    text = "\n".join(table.lines())
    assert "needs a GPU" in text and "needs TensorFlow" in text and "why" in text
