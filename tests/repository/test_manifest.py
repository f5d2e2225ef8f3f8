"""manifest.json: what is read, what is refused, and what a version must hold."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.repository import manifest as manifests
from penstock.repository.manifest import FileEntry, Manifest

# sha256 of b"abc", from FIPS 180-4.
ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def whole(tmp_path: Path, **changes: Any) -> Path:
    """A version folder that its manifest describes, but for changes to the manifest."""
    folder = tmp_path / "7"
    (folder / "parts").mkdir(parents=True)
    for name in ("model.bin", "parts/a"):
        (folder / name).write_bytes(b"abc")
    entry = {"size": 3, "sha256": ABC}
    content = {
        "format": 1,
        "created": "2026-01-01T00:00:00+00:00",
        "files": {"model.bin": entry, "parts/a": entry},
        "evidence": {"slo": "p99 < 20ms", "lineage": ["a", {"b": 1.5}]},
        "later": "unknown keys are nobody's problem",
    }
    (folder / manifests.NAME).write_text(json.dumps(content | changes))
    return folder


def problems(folder: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        manifests.read(folder)
    return list(caught.value.problems)


def test_a_folder_without_one_has_none(tmp_path: Path) -> None:
    assert manifests.read(tmp_path) is None


def test_what_was_written_is_read(tmp_path: Path) -> None:
    manifest = manifests.read(whole(tmp_path))
    assert manifest == Manifest(
        1,
        "2026-01-01T00:00:00+00:00",
        {"model.bin": FileEntry(3, ABC), "parts/a": FileEntry(3, ABC)},
        {"slo": "p99 < 20ms", "lineage": ["a", {"b": 1.5}]},
    )
    assert manifest.num_bytes == 6


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_evidence_is_kept_whatever_it_holds(evidence: dict[str, Any]) -> None:
    again = json.loads(Manifest(1, "", {}, evidence).encode())
    assert again["evidence"] == evidence


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), b"bytes", {1, 2}])
def test_evidence_that_is_not_json_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="evidence: cannot be written as JSON"):
        Manifest(1, "", {}, {"measured": value}).encode()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 10_000, b'{"format": 1}']
)
def test_a_manifest_that_cannot_be_read_is_a_problem_with_its_path(
    tmp_path: Path, content: bytes
) -> None:
    folder = whole(tmp_path)
    (folder / manifests.NAME).write_bytes(content)
    [problem] = problems(folder)
    assert problem.startswith("7/manifest.json: cannot be read: ")


@pytest.mark.parametrize(
    "changes",
    [{"format": "1"}, {"files": []}, {"files": {"a": {"size": "3"}}}, {"evidence": "good"}],
)
def test_a_value_of_the_wrong_kind_is_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    [problem] = problems(whole(tmp_path, **changes))
    assert f"$.{next(iter(changes))}" in problem


def test_a_format_of_the_future_says_so(tmp_path: Path) -> None:
    [problem] = problems(whole(tmp_path, format=2, files="in another form"))
    assert problem == "7/manifest.json: format 2; this version of Penstock reads 1"


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../../x", "", ".", "a//b", "./a", "a\n"]
)
def test_names_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    [problem] = problems(whole(tmp_path, files={name: {"size": 3, "sha256": ABC}}))
    assert problem.startswith("7/manifest.json: files: ")


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("nowhere", path)])
def test_a_manifest_that_is_no_file_is_not_taken_for_none(tmp_path: Path, make: Any) -> None:
    make(tmp_path / manifests.NAME)
    assert problems(tmp_path) == [f"{tmp_path.name}/manifest.json: not a file"]


def differences(folder: Path) -> list[str]:
    manifest = manifests.read(folder)
    assert manifest is not None
    return manifests.check_files(manifest, folder)


def test_a_whole_version_is_whole(tmp_path: Path) -> None:
    folder = whole(tmp_path)
    (folder / "parts" / "__pycache__").mkdir()
    (folder / "parts" / "__pycache__" / "a.pyc").write_bytes(b"cached")
    assert differences(folder) == []
    manifests.check_digests(folder)


def test_every_file_that_is_missing_or_cut_is_named(tmp_path: Path) -> None:
    folder = whole(tmp_path)
    (folder / "model.bin").write_bytes(b"ab")
    (folder / "parts" / "a").unlink()
    first, second = differences(folder)
    assert first.startswith("7/model.bin: 2 bytes, manifest.json says 3; version 7 is incomplete")
    assert second.startswith("7/parts/a: missing; version 7 is incomplete")
    with pytest.raises(ConfigError, match="incomplete"):
        manifests.check_digests(folder)


def test_every_file_that_was_added_is_named(tmp_path: Path) -> None:
    folder = whole(tmp_path)
    (folder / "model.safetensors").write_bytes(b"abc")
    (folder / "parts" / ".hidden").write_bytes(b"")
    (folder / "linked").symlink_to(tmp_path)
    added = [problem.partition(": is not in manifest.json")[0] for problem in differences(folder)]
    assert added == ["7/linked", "7/model.safetensors"]
    with pytest.raises(ConfigError, match="is not in manifest.json"):
        manifests.check_digests(folder)


def test_a_pipe_in_place_of_a_file_is_missing_and_hangs_nobody(tmp_path: Path) -> None:
    folder = whole(tmp_path)
    (folder / "model.bin").unlink()
    os.mkfifo(folder / "model.bin")
    assert "missing" in differences(folder)[0]


def test_one_changed_bit_is_found(tmp_path: Path) -> None:
    folder = whole(tmp_path)
    (folder / "parts" / "a").write_bytes(b"abb")
    assert differences(folder) == []
    with pytest.raises(ConfigError) as caught:
        manifests.check_digests(folder)
    [problem] = caught.value.problems
    assert problem.startswith("7/parts/a: differs from what was committed: sha256 ")
    assert ABC in problem


def test_a_manifest_that_has_gone_is_no_permission(tmp_path: Path) -> None:
    folder = whole(tmp_path)
    (folder / manifests.NAME).unlink()
    with pytest.raises(ConfigError, match="is gone"):
        manifests.check_digests(folder)


@pytest.mark.parametrize("outcome", ["missed", "refused", "disturbed", "interrupted"])
def test_an_outcome_that_is_not_kept_is_told(outcome: str) -> None:
    assert manifests.unkept({"slo": "p99 < 20ms", "outcome": outcome}) == outcome


@pytest.mark.parametrize("evidence", [{}, {"outcome": "kept"}, {"outcome": "met"}])
def test_an_slo_is_enforced_unless_the_evidence_speaks_against_it(evidence: dict) -> None:
    assert manifests.unkept(evidence) == ""


def test_the_slo_of_the_evidence_is_of_the_one_grammar() -> None:
    assert manifests.promised({}) is None
    promised = manifests.promised({"slo": "p99 < 20ms at 5/s", "other": 1})
    assert promised is not None and promised.latency_s == 0.02


@pytest.mark.parametrize("text", ["", "p98 < 5ms", 20, None, ["p99 < 5ms"]])
def test_an_slo_that_is_none_is_a_problem_with_its_path(text: object) -> None:
    with pytest.raises(ConfigError) as caught:
        manifests.promised({"slo": text})
    assert all(problem.startswith("evidence.slo: ") for problem in caught.value.problems)
