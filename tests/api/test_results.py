"""Results of the public functions: values that print well and render in notebooks."""

import asyncio
import json
from pathlib import Path

import pytest

import penstock
from penstock.api.bench_plan import parse_batch_sizes
from penstock.benchmark.run_files import read_run
from penstock.errors import CommandLineError, ConfigError
from penstock.system import devices
from penstock.system.devices import Gpu

SHORT = {"duration": 0.3, "warm_up": "0s"}


@pytest.fixture(scope="module")
def identity(examples: Path) -> str:
    return str(examples / "identity")


def test_a_bench_is_figures_a_table_and_files(identity: str, tmp_path: Path) -> None:
    found = penstock.bench(identity, concurrency="1,2", slo="p99 < 30s", **SHORT)
    assert [level.label for level in found.levels] == ["concurrency 1", "concurrency 2"]
    assert all(level.num_good > 0 for level in found.levels)
    assert found.is_passed and found.headline.startswith("SLO kept")
    assert str(found).startswith("SLO kept")
    assert "SLO kept" in found._repr_html_() and "<svg" in found._repr_html_()
    for name in ("run.json", "run.html", "run.csv"):
        found.save(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 0
    assert read_run(tmp_path / "run.json").command.startswith("penstock.bench(")
    with pytest.raises(ConfigError, match="ends in .json or .html or .csv"):
        found.save(tmp_path / "run.txt")


def test_a_missed_slo_does_not_pass(identity: str) -> None:
    found = penstock.bench(identity, slo="p99 < 1us", **SHORT)
    assert not found.is_passed


def test_a_sweep_of_batch_sizes_has_a_run_for_each(identity: str, tmp_path: Path) -> None:
    found = penstock.bench(identity, batch_size="1:2", **SHORT)
    assert [run.batch_size for run in found.runs] == [1, 2]
    assert "highest throughput" in str(found) and "inferences/s" in str(found)
    found.save(tmp_path / "run.json")
    assert read_run(tmp_path / "run-b2.json").batch_size == 2
    found.save(tmp_path / "run.html")
    assert "batch size 2" in (tmp_path / "run.html").read_text()


def test_a_bench_runs_where_an_event_loop_runs(identity: str) -> None:
    async def in_a_notebook() -> bool:
        return penstock.bench(identity, **SHORT).is_passed

    assert asyncio.run(in_a_notebook())


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8", [8]),
        ("1,8,32", [1, 8, 32]),
        ("1:32", [1, 2, 4, 8, 16, 32]),
        ("1:32:8", [1, 8, 16, 24, 32]),
        ("4:12:4", [4, 8, 12]),
    ],
)
def test_batch_sizes(text: str, sizes: list[int]) -> None:
    assert parse_batch_sizes(text) == sizes


@pytest.mark.parametrize("text", ["0", "x", "8:1", "8:1:2", "1:8:0", "1:2:3:4", ""])
def test_wrong_batch_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a batch size|begins above its end"):
        parse_batch_sizes(text)


def test_options_are_checked_before_anything_is_measured(identity: str) -> None:
    with pytest.raises(CommandLineError, match="--max-rate needs --slo"):
        penstock.bench(identity, max_rate=True)
    with pytest.raises(TypeError, match="did you mean rate?"):
        penstock.bench(identity, rat=1)  # type: ignore[call-arg]


def test_an_inspection_says_whether_a_gpu_is_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model" / "1").mkdir(parents=True)
    (tmp_path / "model" / "config.pbtxt").write_text(
        'backend: "null" max_batch_size: 4 instance_group { kind: KIND_GPU }\n'
        'input { name: "x" data_type: TYPE_FP32 dims: 4 }\n'
        'output { name: "y" data_type: TYPE_FP32 dims: 4 }\n'
    )
    gpus: tuple[Gpu, ...] = (Gpu(0, "MIG-0", "Made Up MIG 1g.18gb", 1 << 34, 1 << 33, True),)
    monkeypatch.setattr(devices, "read_gpus", lambda: gpus)
    monkeypatch.setattr(devices, "mps", lambda: "on")
    (found,) = penstock.inspect(tmp_path / "model").models
    assert "MPS: on" in found.notes
    assert "instances: 0 on cuda:0 (Made Up MIG 1g.18gb)" in found.notes


def test_an_inspection_has_the_configuration(examples: Path) -> None:
    found = penstock.inspect(examples / "digits")
    [model] = found.models
    assert (model.name, model.version, found.problems) == ("digits", "1", {})
    assert "max_batch_size: 64" in model.config_text
    assert "# digits, version 1" in str(found) and "<pre" in found._repr_html_()


def test_an_explanation_by_name_or_url(examples: Path) -> None:
    options = {"http_port": 0, "grpc": False, "metrics": False}
    with penstock.serve(examples / "digits", **options) as server:
        by_name = penstock.explain("digits", url=server.url)
        by_url = penstock.explain(f"{server.url}/v2/models/digits")
        assert by_name.explanation.model == by_url.explanation.model == "digits"
        assert by_name.verdicts
        assert "Why batches are as they are" in str(by_name)
        assert "<pre" in by_name._repr_html_()
        with pytest.raises(CommandLineError, match="names no model"):
            penstock.explain(server.url)


@pytest.mark.slow
def test_a_profile_shows_and_saves(
    examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = penstock.profile(examples / "digits", batch_size=2, runs=3, threads=1)
    assert found.total_s > 0
    assert found.recommendation in str(found).replace("\n", " ")
    found.save(tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text())["model"] == "digits"
    found.save(tmp_path / "p.html")
    with pytest.raises(ConfigError, match="ends in .html or .json"):
        found.save(tmp_path / "p.txt")


def test_an_optimisation_names_everything_that_is_missing() -> None:
    with pytest.raises(CommandLineError) as caught:
        penstock.optimize("model.onnx")
    assert any("--slo is required" in problem for problem in caught.value.problems)
    assert any("--out is required" in problem for problem in caught.value.problems)
