"""Commit and promote: whole or not at all, whoever else writes, whenever one is killed."""

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import ConfigError, StorageFull
from penstock.repository import history, layout, manifest, staging, versions
from penstock.repository.history import Cause
from penstock.types import TensorSpec

WriteOnnx = Callable[..., Path]

# Of the null backend, which needs no file.
MODEL = ModelConfig(
    name="model",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "FP32", (4,)),),
    outputs=(TensorSpec("y", "FP32", (4,)),),
    max_batch_size=8,
    batching=BatchPolicy(8, is_dynamic=True),
)
LABELLED = replace(MODEL, outputs=(TensorSpec("y", "FP32", (4,), label_file="labels.txt"),))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "repository").mkdir()
    return tmp_path / "repository"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "parts").mkdir(parents=True)
    (folder / "weights").write_bytes(b"weights")
    (folder / "parts" / "a").write_bytes(b"")
    return folder


def served(root: Path) -> list[ModelConfig]:
    found = layout.read(root)
    assert found.problems == {}
    return found.configs


def model_level(root: Path) -> model_config_pb2.ModelConfig:
    text = (root / "model" / "config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def refusal(*args: Any) -> list[str]:
    """Why a commit is refused; it leaves nothing behind."""
    root = Path(args[0])
    before = sorted(root.rglob("*"))
    with pytest.raises(ConfigError) as caught:
        versions.commit(*args)
    assert sorted(root.rglob("*")) == before
    return list(caught.value.problems)


# What a commit writes


def test_the_first_commit_makes_a_model_that_triton_loads_too(root: Path, source: Path) -> None:
    assert versions.commit(root, "model", source, MODEL) == "1"
    [config] = served(root)
    assert replace(config, artifact="", manifest="") == MODEL
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*"))
    assert names == [
        "model",
        "model/1",
        "model/1/config.pbtxt",
        "model/1/manifest.json",
        "model/1/parts",
        "model/1/parts/a",
        "model/1/weights",
        "model/config.pbtxt",
    ]
    message = model_level(root)
    assert (message.name, message.backend) == ("model", "null")
    assert not message.HasField("version_policy")


def test_each_commit_is_the_next_version_with_a_configuration_of_its_own(
    root: Path, source: Path
) -> None:
    versions.commit(root, "model", source, MODEL)
    changed = replace(MODEL, max_batch_size=16, batching=BatchPolicy(16), num_instances=3)
    assert versions.commit(root, "model", source, changed) == "2"
    [config] = served(root)
    assert (config.version, config.max_batch_size, config.num_instances) == ("2", 16, 3)
    assert model_level(root).max_batch_size == 8, "a commit does not change what others live by"


def test_the_manifest_holds_every_file_but_itself(root: Path, source: Path) -> None:
    evidence = {"slo": "p99 < 20ms", "hardware": {"cpu": "any"}, "own": [1, None]}
    versions.commit(root, "model", source, MODEL, evidence)
    written = manifest.read(root / "model" / "1")
    assert written is not None
    assert sorted(written.files) == ["config.pbtxt", "parts/a", "weights"]
    assert written.files["weights"].sha256 == hashlib.sha256(b"weights").hexdigest()
    assert written.evidence == evidence
    manifest.check_digests(root / "model" / "1")


def test_files_may_be_given_by_the_names_they_shall_have(root: Path, source: Path) -> None:
    versions.commit(root, "model", {"net/weights.bin": source / "weights"}, MODEL)
    assert (root / "model" / "1" / "net" / "weights.bin").read_bytes() == b"weights"


def test_a_version_can_be_the_source_of_the_next(root: Path, source: Path) -> None:
    versions.commit(root, "model", source, MODEL, {"slo": "p99 < 20ms"})
    [first] = served(root)
    changed = replace(first, num_instances=2)
    assert versions.commit(root, "model", root / "model" / "1", changed) == "2"
    [second] = served(root)
    assert second.num_instances == 2
    assert second.slo == "", "the promise was made for the other version"


def test_what_python_caches_and_names_with_a_dot_do_not_come_along(
    root: Path, source: Path
) -> None:
    for name in ("__pycache__/a.pyc", "parts/__pycache__/b.pyc", ".git/config", "parts/.hidden"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(b"")
    versions.commit(root, "model", source, MODEL)
    written = manifest.read(root / "model" / "1")
    assert written is not None
    assert sorted(written.files) == ["config.pbtxt", "parts/a", "weights"]
    assert len(served(root)) == 1


def test_links_to_files_are_followed(root: Path, source: Path) -> None:
    """The cache of Hugging Face, for one, is made of them."""
    (source / "link").symlink_to("weights")
    versions.commit(root, "model", source, MODEL)
    copied = root / "model" / "1" / "link"
    assert copied.read_bytes() == b"weights" and not copied.is_symlink()


def test_everybody_may_read_what_the_umask_allows(root: Path, source: Path) -> None:
    """A server often runs as somebody else than who commits."""
    old = os.umask(0o022)
    try:
        versions.commit(root, "model", source, MODEL)
    finally:
        os.umask(old)
    for path in (root / "model", root / "model" / "1", root / "model" / "1" / "parts"):
        assert path.stat().st_mode & 0o777 == 0o755
    assert (root / "model" / "1" / "weights").stat().st_mode & 0o777 == 0o644


def test_an_onnx_model_is_committed_and_resolved(
    root: Path, tmp_path: Path, write_identity: WriteOnnx
) -> None:
    file = write_identity(tmp_path / "import" / "model" / "1" / "model.onnx")
    [config] = served(tmp_path / "import")
    versions.commit(root, "model", {"model.onnx": file}, config)
    [again] = served(root)
    assert replace(again, artifact="", manifest="") == replace(config, artifact="")


def test_what_the_models_config_says_beyond_ours_goes_into_the_version(
    root: Path, source: Path
) -> None:
    versions.commit(root, "model", source, MODEL)
    with open(root / "model" / "config.pbtxt", "a") as file:
        file.write('metric_tags { key: "team" value: "vision" }\n')
        file.write("version_policy { all { } }\n")
    versions.commit(root, "model", source, MODEL)
    text = (root / "model" / "2" / "config.pbtxt").read_text()
    assert "vision" in text and "version_policy" not in text


def test_labels_are_part_of_the_version_and_of_the_new_model(root: Path, source: Path) -> None:
    (source / "labels.txt").write_text("cat\ndog\n")
    versions.commit(root, "model", source, LABELLED)
    [config] = served(root)
    assert config.outputs[0].labels == ("cat", "dog")
    assert (root / "model" / "labels.txt").read_text() == "cat\ndog\n", "where Triton looks"


def test_labels_that_do_not_come_along_are_the_models(root: Path, source: Path) -> None:
    (root / "model").mkdir()
    (root / "model" / "labels.txt").write_text("cat\n")
    versions.commit(root, "model", source, LABELLED)
    assert (root / "model" / "1" / "labels.txt").read_text() == "cat\n"


def test_labels_are_those_of_the_configuration_where_there_is_no_file(
    root: Path, source: Path, tmp_path: Path
) -> None:
    """Triton's label files lie beside the versions, not in them."""
    spec = replace(LABELLED.outputs[0], labels=("cat", "", "dog"))
    versions.commit(root, "model", source, replace(LABELLED, outputs=(spec,)))
    assert served(root)[0].outputs == (spec,)
    (source / "labels.txt").write_text("of the files\n")
    versions.commit(root, "model", source, replace(LABELLED, outputs=(spec,)))
    assert served(root)[0].outputs[0].labels == ("of the files",)


def test_an_empty_folder_becomes_a_model(root: Path, source: Path) -> None:
    (root / "model").mkdir()
    assert versions.commit(root, "model", source, MODEL) == "1"
    assert model_level(root).backend == "null"


def test_versions_that_live_without_a_config_keep_doing_so(
    root: Path, source: Path, write_identity: WriteOnnx
) -> None:
    write_identity(root / "model" / "1" / "model.onnx")
    versions.commit(root, "model", source, MODEL)
    assert not (root / "model" / "config.pbtxt").exists()
    assert [(config.version, config.backend) for config in served(root)] == [("2", "null")]


def test_a_number_that_is_taken_by_anything_is_not_given(root: Path, source: Path) -> None:
    versions.commit(root, "model", source, MODEL)
    (root / "model" / "2").write_text("a file")
    assert versions.commit(root, "model", source, MODEL) == "3"


def test_numbers_end_where_no_client_can_ask_for_the_next(root: Path, source: Path) -> None:
    (root / "model" / str(layout.MAX_VERSION)).mkdir(parents=True)
    assert "no version number left" in refusal(root, "model", source, MODEL)[0]


# What is refused


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "/etc", ".hidden", ".staging-1", "a\0b", "a\nb", "é" * 200],
)
def test_a_name_that_is_no_plain_folder_name_is_refused(
    root: Path, source: Path, name: str
) -> None:
    [problem] = refusal(root, name, source, replace(MODEL, name=name))
    assert problem.startswith("name: ")
    with pytest.raises(ConfigError, match="name: "):
        versions.promote(root, name, "1")


def test_a_configuration_of_another_name_is_refused(root: Path, source: Path) -> None:
    assert refusal(root, "other", source, MODEL) == [
        "name: 'model' but the model's folder is 'other'"
    ]


def test_every_problem_is_told_at_once(root: Path, tmp_path: Path) -> None:
    files = {
        "../x": tmp_path,
        "config.pbtxt": Path(__file__),
        "manifest.json": Path(__file__),
        "weights": tmp_path / "nowhere",
    }
    found = refusal(root, "other", files, MODEL, {"slo": "soon"})
    starts = (
        "name: ",
        "evidence.slo: ",
        "config.pbtxt: ",
        "manifest.json: ",
        "'../x': ",
        "weights",
    )
    assert all(any(problem.startswith(start) for problem in found) for start in starts)


@pytest.mark.parametrize("kind", ["nowhere", "file", "pipe", "folder link"])
def test_a_source_that_cannot_be_copied_whole_is_refused(
    root: Path, source: Path, kind: str
) -> None:
    if kind == "pipe":
        os.mkfifo(source / "pipe")
    elif kind == "folder link":
        (source / "link").symlink_to("parts")
    else:
        source = source / ("weights" if kind == "file" else "nowhere")
    assert refusal(root, "model", source, MODEL)


def test_a_version_that_could_not_be_loaded_is_not_committed(root: Path, source: Path) -> None:
    assert refusal(root, "model", source, replace(MODEL, backend="onnxruntime")) == [
        "1/model.onnx: no such file"
    ]
    assert "label_filename" in refusal(root, "model", source, LABELLED)[0]


@pytest.mark.parametrize(
    "change",
    [
        {"batching": replace(MODEL.batching, max_pending=7)},
        {"batching": replace(MODEL.batching, slo_latency_s=0.02)},
        {"options": {"penstock.max_slabs": "2"}},
    ],
)
def test_what_config_pbtxt_cannot_say_is_not_silently_lost(
    root: Path, source: Path, change: dict[str, Any]
) -> None:
    [*found] = refusal(root, "model", source, replace(MODEL, **change))
    assert any(problem.startswith(f"{next(iter(change))}: ") for problem in found)


def test_evidence_must_be_json(root: Path, source: Path) -> None:
    [problem] = refusal(root, "model", source, MODEL, {"latency_s": float("nan")})
    assert problem.startswith("evidence: ")


def test_a_root_or_model_that_is_no_folder_is_refused(root: Path, source: Path) -> None:
    (root / "model").write_text("")
    assert "is not a folder" in refusal(root, "model", source, MODEL)[0]
    assert "no such folder" in refusal(root / "nowhere", "model", source, MODEL)[0]


def test_a_model_that_links_out_of_the_repository_is_refused(
    root: Path, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (root / "model").symlink_to(tmp_path / "elsewhere")
    assert "out of the repository" in refusal(root, "model", source, MODEL)[0]


# Reading what was committed


def test_a_committed_version_that_lost_something_is_not_loaded(root: Path, source: Path) -> None:
    versions.commit(root, "model", source, MODEL)
    (root / "model" / "1" / "weights").write_bytes(b"weight")
    (root / "model" / "1" / "parts" / "a").unlink()
    found = layout.read(root)
    assert found.configs == []
    assert [problem.partition(": ")[0] for problem in found.problems["model"]] == [
        "1/parts/a",
        "1/weights",
    ]
    assert all("version 1 is incomplete" in problem for problem in found.problems["model"])


# Promotion


@pytest.fixture
def two(root: Path, source: Path) -> Path:
    """Two versions that differ."""
    (source / "labels.txt").write_text("one\n")
    versions.commit(root, "model", source, LABELLED)
    (source / "labels.txt").write_text("two\n")
    changed = replace(LABELLED, num_instances=2)
    versions.commit(root, "model", source, changed, {"slo": "p99 < 20ms"})
    return root


def promotions(root: Path) -> list[tuple[str, list[str]]]:
    lines = (root / "model" / history.NAME).read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert all(entry["time"] for entry in entries)
    return [(entry["version"], entry["previous"]) for entry in entries]


def test_promotion_chooses_one_version_and_rollback_is_the_same(two: Path) -> None:
    for version, instances, labels in (("1", 1, "one"), ("2", 2, "two"), ("1", 1, "one")):
        versions.promote(two, "model", version)
        [config] = served(two)
        assert (config.version, config.num_instances) == (version, instances)
        assert config.outputs[0].labels == (labels,)
        message = model_level(two)
        assert list(message.version_policy.specific.versions) == [int(version)]
        assert message.instance_group[0].count == instances, "what Triton will do"
        assert (two / "model" / "labels.txt").read_text() == f"{labels}\n"
    assert promotions(two) == [("1", ["2"]), ("2", ["1"]), ("1", ["2"])]
    assert not list(two.rglob(".staging-*"))


def test_promotion_replaces_the_file_and_never_writes_into_it(two: Path) -> None:
    """Whoever reads meanwhile has the old one, whole."""
    path = two / "model" / "config.pbtxt"
    before = path.read_bytes()
    with open(path, "rb") as file:
        versions.promote(two, "model", "1")
        assert file.read() == before
    assert path.read_bytes() != before


def test_after_a_promotion_commits_wait_for_theirs(two: Path, source: Path) -> None:
    versions.promote(two, "model", "1")
    assert versions.commit(two, "model", source, LABELLED) == "3"
    assert [config.version for config in served(two)] == ["1"]
    assert "version_policy" not in (two / "model" / "3" / "config.pbtxt").read_text()


def test_promotion_keeps_what_is_not_interpreted(two: Path) -> None:
    folder = two / "model" / "3"
    shutil.copytree(two / "model" / "1", folder)
    (folder / manifest.NAME).unlink()
    with open(folder / "config.pbtxt", "a") as file:
        file.write('metric_tags { key: "team" value: "vision" }')
    versions.promote(two, "model", "3")
    assert model_level(two).metric_tags == {"team": "vision"}


def test_versions_made_by_hand_keep_the_config_and_labels_they_lived_by(
    root: Path, source: Path
) -> None:
    folder = root / "model"
    for version in ("1", "2"):
        (folder / version).mkdir(parents=True)
    (folder / "labels.txt").write_text("by hand\n")
    (folder / "config.pbtxt").write_text(
        'backend: "null" max_batch_size: 4 version_policy { all { } }'
        'input { name: "x" data_type: TYPE_FP32 dims: 4 }'
        'output { name: "y" data_type: TYPE_FP32 dims: 4 label_filename: "labels.txt" }'
    )
    before = served(root)
    (source / "labels.txt").write_text("committed\n")
    versions.commit(root, "model", source, LABELLED)
    versions.promote(root, "model", "3")
    assert served(root)[0].outputs[0].labels == ("committed",)
    for version, old in zip(("1", "2"), before, strict=True):
        versions.promote(root, "model", version)
        assert served(root) == [old]
    assert promotions(root)[0] == ("3", ["1", "2", "3"])


def test_a_worked_out_version_stays_worked_out(
    root: Path, source: Path, write_identity: WriteOnnx
) -> None:
    write_identity(root / "model" / "1" / "model.onnx")
    before = served(root)
    versions.commit(root, "model", source, MODEL)
    versions.promote(root, "model", "2")
    versions.promote(root, "model", "1")
    assert served(root) == before


def test_a_version_that_is_not_there_or_not_whole_is_not_promoted(two: Path) -> None:
    before = (two / "model" / "config.pbtxt").read_bytes()
    (two / "model" / "1" / "weights").write_bytes(b"WEIGHTS")
    for version, reason in (("3", "there are 1, 2"), ("01", "there are"), ("1", "differs from")):
        with pytest.raises(ConfigError, match=reason):
            versions.promote(two, "model", version)
    with pytest.raises(ConfigError, match="no such model"):
        versions.promote(two, "other", "1")
    assert (two / "model" / "config.pbtxt").read_bytes() == before
    assert not (two / "model" / history.NAME).exists()


# Removal


PRUNED = Cause("pruned", "ada", "old")


def test_a_removed_version_is_gone_and_the_history_says_who_removed_it(two: Path) -> None:
    (two / "model" / "1" / "parts" / "b").symlink_to("a")
    event = versions.remove(two, "model", "1", PRUNED)
    assert (event.kind, event.version, event.previous) == ("pruned", "1", ("2",))
    assert (event.actor, event.reason) == ("ada", "old")
    assert layout.version_folders(two / "model") == ["2"]
    assert history.read(two / "model") == [event]
    assert not list(two.rglob(".staging-*"))


def test_a_version_that_is_a_link_is_removed_without_what_it_leads_to(two: Path) -> None:
    (two / "elsewhere").mkdir()
    (two / "elsewhere" / "weights").write_bytes(b"w")
    (two / "model" / "3").symlink_to(two / "elsewhere")
    versions.promote(two, "model", "2")
    versions.remove(two, "model", "3", PRUNED)
    assert layout.version_folders(two / "model") == ["1", "2"]
    assert (two / "elsewhere" / "weights").read_bytes() == b"w"


def test_a_served_or_missing_version_is_not_removed(two: Path) -> None:
    with pytest.raises(ConfigError, match="model: version 2 is served; promote another one first"):
        versions.remove(two, "model", "2", PRUNED)
    for version in ("3", "0", "01", "../model/1", ""):
        with pytest.raises(ConfigError, match="there are 1, 2"):
            versions.remove(two, "model", version, PRUNED)
    assert layout.version_folders(two / "model") == ["1", "2"]
    assert not (two / "model" / history.NAME).exists()


def test_the_code_in_the_documentation_runs(tmp_path: Path, examples: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "repository.md").read_text()
    first, second = re.findall(r"```python\n(.*?)```", text, re.S)
    shutil.copytree(examples / "digits", tmp_path / "made" / "digits")
    (tmp_path / "models").mkdir()
    code = first + first + second
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    [config] = served(tmp_path / "models")
    assert (config.version, config.slo, config.outputs[0].labels[0]) == ("2", "p99 < 20ms", "zero")


# Others at the same time, and death


def commit_some(root: Path, source: Path, count: int) -> list[str]:
    return [versions.commit(root, "model", source, MODEL) for _ in range(count)]


def test_writers_at_the_same_time_get_different_versions(root: Path, source: Path) -> None:
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(commit_some, root, source, 5) for _ in range(4)]
        numbers = [number for future in futures for number in future.result()]
    assert sorted(map(int, numbers)) == list(range(1, 21))
    assert layout.version_folders(root / "model") == sorted(numbers, key=int)
    for number in numbers:
        manifest.check_digests(root / "model" / number)
    assert not list(root.rglob(".staging-*"))


def promote_often(root: Path, version: str, count: int) -> list[tuple[str, ...]]:
    return [versions.promote(root, "model", version).previous for _ in range(count)]


def test_promotions_at_the_same_time_come_one_after_the_other(two: Path) -> None:
    """Labels and configuration are of the same version, and the history is that of what happened:
    each promotion has replaced the version of the line before it."""
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(promote_often, two, version, 8) for version in "121"]
        for future in futures:
            future.result()
    events = history.read(two / "model")
    assert len(events) == 24 and history.unreadable_lines(two / "model") == []
    before = ("2",)
    for event in events:
        assert event.previous == before
        before = (event.version,)
    [config] = served(two)
    assert (config.version,) == before
    labels = (two / "model" / "labels.txt").read_text()
    assert labels == {"1": "one\n", "2": "two\n"}[config.version]
    assert not list(two.rglob(".staging-*"))


def test_a_writer_that_takes_too_long_is_reported(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "LOCK_WAIT_S", 0.05)
    reason = "another process has been changing it for 0 s; try again"
    with staging.lock(two / "model"), pytest.raises(ConfigError, match=reason):
        versions.promote(two, "model", "1")
    versions.promote(two, "model", "1")


def test_a_model_that_appears_meanwhile_gets_the_next_version(
    root: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two first commits: the second finds the place taken when it comes to rename."""
    rename = os.rename

    def late(old: Path, new: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        assert versions.commit(root, "model", source, MODEL) == "1"
        rename(old, new)

    monkeypatch.setattr(os, "rename", late)
    assert versions.commit(root, "model", source, MODEL) == "2"
    assert [config.version for config in served(root)] == ["2"]


def test_an_error_of_the_disk_reaches_the_caller_and_leaves_nothing(
    root: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFull, match="No space left"):
        versions.commit(root, "model", source, MODEL)
    assert list(root.iterdir()) == []


def test_a_promotion_without_room_for_its_line_changes_nothing(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions.promote(two, "model", "1")

    def full(path: Path, line: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(staging, "append", full)
    with pytest.raises(StorageFull, match="version 2 was not promoted: No space left"):
        versions.promote(two, "model", "2")
    assert [config.version for config in served(two)] == ["1"]
    assert promotions(two) == [("1", ["2"])]
    assert not list(two.rglob(".staging-*"))


def crash(tmp_path: Path, how: str, kind: str, rounds: int) -> dict[str, int]:
    script = Path(__file__).parents[1] / "crash_points.py"
    command = [sys.executable, str(script), str(tmp_path), how, kind, str(rounds)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, int] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize("kind", ["new", "next", "promote", "remove"])
@pytest.mark.parametrize("how", ["each", "fail"])
def test_ended_before_any_step_it_is_done_or_it_never_was(
    tmp_path: Path, how: str, kind: str
) -> None:
    found = crash(tmp_path, how, kind, 0)
    assert found["rounds"] > (10 if kind == "remove" else 20)
    assert found["done"] and found["not done"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["new", "next", "promote"])
def test_killed_at_any_moment_it_is_done_or_it_never_was(tmp_path: Path, kind: str) -> None:
    assert crash(tmp_path, "random", kind, 25)["not done"]


@pytest.mark.verify
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["new", "next", "promote"])
def test_killed_a_thousand_times_it_is_done_or_it_never_was(tmp_path: Path, kind: str) -> None:
    found = crash(tmp_path, "random", kind, 1000)
    print(f"\n{kind}: {found}")
    assert found["done"] and found["not done"]
