"""A profile in the terminal."""

import io

import pytest
from rich.console import Console

from penstock.profiling.results import Profile
from penstock.report import profile_table


def shown(profile: Profile) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(profile_table.shown(profile))
    return out.getvalue()


def test_the_verdict_is_the_first_line(profile) -> None:
    first = shown(profile).splitlines()[0]
    assert first.startswith("Compute-bound: 80 % of the time, most of it MatMul. Next: INT8")


def test_operators_roofs_and_the_way_are_told(profile) -> None:
    text = shown(profile)
    line = next(line for line in text.splitlines() if "/encoder/layer.0/dense/MatMul" in line)
    assert line.split()[1:6] == ["MatMul", "compute", "80", "%", "16.0"]
    assert line.split()[-2:] == ["67", "%"]
    assert "FP32 100 GFLOP/s, INT8 400 GFLOP/s; memory 10.0 GB/s" in text
    assert "queue" in text
    # What users name is shown as it is.
    assert "<b>sum</b>" in text


def test_without_operators_the_way_is_left(profile) -> None:
    profile.operators = []
    text = shown(profile)
    assert "Longest operators" not in text
    assert "One request, alone" in text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (12.0, "12.0 B"), (2.5e9, "2.50 GB"), (3e15, "3000 TB")]
)
def test_amounts_have_a_prefix(value, text) -> None:
    assert profile_table.scaled(value, "B") == text


def test_kernels_of_a_gpu_are_listed(profile, gpu) -> None:
    assert "Longest kernels" not in shown(profile)
    profile.gpu = gpu
    text = shown(profile)
    line = next(line for line in text.splitlines() if line.startswith("gemm<128>"))
    assert line.split()[1:] == ["83", "%", "5.00", "1"]


def test_commands_of_other_tools_run_the_same_model() -> None:
    nsys, ncu = profile_table.tool_commands("models/my net", "net", 8)
    assert nsys.startswith("nsys profile --trace=cuda,nvtx,cublas,cudnn --output=penstock penstock")
    assert "penstock bench 'models/my net' --concurrency 1 -b 8 --model net --duration 5s" in nsys
    assert ncu.startswith("ncu --set=roofline ")
    assert "--model" not in profile_table.tool_commands("models/net", "", 1)[0]
