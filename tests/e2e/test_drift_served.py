"""Drift of live inputs: in process, behind workers that run ahead, and in servers with one shard
and with two."""

import json
import logging
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tiny_pretrained as tiny
from drifting import SIZE, Clients, commit, normal, scraped
from served import Served
from waiting import wait_until

import penstock
from penstock.optimizer.input_record import statistics_of
from penstock.repository import layout, versions
from penstock.serving import input_sketch


@pytest.fixture
def looks_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers in this process measure every batch."""
    monkeypatch.setattr(input_sketch, "ROW_EVERY_S", 0.0)
    monkeypatch.setattr(input_sketch, "MAX_SHARE", 1e9)
    monkeypatch.setattr(input_sketch, "SEND_EVERY_S", 0.0)


AHEAD = 'parameters { key: "null.copy_ms" value { string_value: "0" } }'


@pytest.mark.parametrize("config", ["", AHEAD], ids=["one thread", "ahead"])
@pytest.mark.usefixtures("looks_at_all")
def test_in_process_models_notice_drift(
    tmp_path: Path, config: str, caplog: pytest.LogCaptureFixture
) -> None:
    repository = commit(tmp_path, config)
    with caplog.at_level(logging.INFO), penstock.load(repository / "m") as model:
        for row in normal(400, 5):
            model.infer(row[None])
        wait_until(lambda: model.drift()[0].num_rows >= 399)
        (state,) = model.drift()
        assert (state.tensor, state.quantity, state.is_alarm) == ("x", "value", False)
        assert state.distance < 0.1 and state.outside_share < 0.02
        for row in normal(400, 6, shift=8.0):
            model.infer(row[None])
        wait_until(lambda: model.drift()[0].is_alarm)
    assert "m/1: inputs have drifted: input 'x'" in caplog.text


@pytest.mark.usefixtures("looks_at_all")
def test_large_arrays_are_sketched_where_they_are(tmp_path: Path) -> None:
    with penstock.load(commit(tmp_path) / "m") as model:
        rows = np.repeat(normal(8, 5, shift=50.0), 1, axis=0)
        for _ in range(300):
            assert model.infer(rows)["y"].shape == (8, SIZE)
        wait_until(lambda: model.drift()[0].is_alarm)


@pytest.mark.usefixtures("looks_at_all")
def test_stages_are_compared_with_their_own_inputs(tmp_path: Path) -> None:
    """Of an image model: the sizes of the files, and the pixels that the network gets."""
    draft = tmp_path / "draft" / "photo"
    (draft / "1").mkdir(parents=True)
    lines = [
        'backend: "null" max_batch_size: 4 instance_group { kind: KIND_CPU }',
        'input { name: "PHOTO" data_type: TYPE_STRING dims: 1 }',
        'output { name: "y" data_type: TYPE_FP32 dims: 5 }',
        'parameters { key: "penstock.model_inputs" value { string_value: "x:FP32[3,24,24]" } }',
        'parameters { key: "penstock.image" value { string_value: "resize=shortest 28" } }',
    ]
    (draft / "config.pbtxt").write_text("\n".join(lines))
    config = layout.read(draft).configs[-1]
    photos = [tiny.draw_image(50 + n, 40, seed=n, form="JPEG") for n in range(12)]
    rows = [{"PHOTO": np.array([photo], object)} for photo in photos]
    evidence = {"input_statistics": msgspec.to_builtins(statistics_of(config, rows))}
    (tmp_path / "models").mkdir()
    versions.commit(tmp_path / "models", "photo", draft / "1", config, evidence)
    with penstock.load(tmp_path / "models" / "photo") as model:
        for number in range(100):
            model.infer(np.array([[photos[number % 12]]], object))
        wait_until(lambda: len(model.drift()) == 2)
        wait_until(lambda: min(each.num_rows for each in model.drift()) > 90)
        assert [each.tensor for each in model.drift()] == ["PHOTO", "x"]


def test_a_model_without_evidence_is_not_watched(tmp_path: Path) -> None:
    repository = commit(tmp_path)
    (repository / "m" / "1" / "manifest.json").unlink()
    with penstock.load(repository / "m") as model:
        model.infer(normal(1, 1))
        assert list(model.drift()) == []


@pytest.mark.slow
@pytest.mark.parametrize("shards", ["1", "2"])
def test_a_server_raises_an_alarm_within_seconds(tmp_path: Path, shards: str) -> None:
    with Served(commit(tmp_path), "--shards", shards) as served:
        wait_until(lambda: shards == "1" or served.has_shards(2))
        clients = Clients(served)
        wait_until(lambda: scraped(served, "penstock_drift_rows") > 260)
        assert scraped(served, "penstock_drift_alarm") == 0
        assert scraped(served, "penstock_drift_distance") < 0.1
        clients.stop()
        assert "drifted" not in served.logged()
        clients = Clients(served, shift=6.0)
        wait_until(lambda: scraped(served, "penstock_drift_alarm") == 1)
        notes = json.loads(served.get("/v2/models/m/explain")[1])["notes"]
        clients.stop()
        assert any(note.startswith("inputs have drifted: input 'x'") for note in notes)
        assert scraped(served, "penstock_drift_out_of_range_share") > 0.02
        assert served.logged().count("inputs have drifted") == 1
