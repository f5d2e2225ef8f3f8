"""Triton's checksum agent: files of a model whose digest differs block the load."""

import hashlib
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.repository import checksums, pbtxt

CONTENT = b"weights"
DIGEST = hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()


def agent(parameters: str, name: str = "checksum") -> str:
    return f'model_repository_agents {{ agents {{ name: "{name}" {parameters} }} }}'


def entry(key: str, value: str = DIGEST) -> str:
    return f'parameters {{ key: "{key}" value: "{value}" }}'


def read(text: str, folder: Path) -> tuple[checksums.Checksums, list[str]]:
    problems: list[str] = []
    message = pbtxt.parse(text).model_repository_agents
    found = checksums.read(message, folder, lambda path, why: problems.append(f"{path}: {why}"))
    return found, problems


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.onnx").write_bytes(CONTENT)
    return tmp_path


@pytest.mark.parametrize("digest", [DIGEST, DIGEST.upper()])
def test_file_with_its_digest_is_fine(folder: Path, digest: str):
    found, problems = read(agent(entry("MD5:1/model.onnx", digest)), folder)
    assert problems == []
    assert found == ((str(folder / "1" / "model.onnx"), DIGEST),)
    checksums.check(found)


def test_changed_and_missing_files_are_all_named(folder: Path):
    text = agent(entry("MD5:1/model.onnx") + entry("MD5:1/model.bin") + entry("MD5:l.txt"))
    (folder / "1" / "model.onnx").write_bytes(b"other")
    (folder / "l.txt").write_bytes(CONTENT)
    found, _ = read(text, folder)
    with pytest.raises(ConfigError) as caught:
        checksums.check(found)
    missing, changed = caught.value.problems
    assert missing.startswith("1/model.bin: cannot be read for its checksum: No such file")
    assert changed.startswith("1/model.onnx: its MD5 is ")
    assert changed.endswith(f", model_repository_agents says {DIGEST}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (agent("", "decrypt"), "agents[0].name: 'decrypt' is not supported; expected checksum"),
        (agent(entry("SHA256:1/a")), "agents[0].parameters.SHA256:1/a: expected MD5:FILE"),
        (agent(entry("MD5:")), "agents[0].parameters.MD5:: expected MD5:FILE"),
        (agent(entry("MD5:1/a", "12")), "agents[0].parameters.MD5:1/a: '12' is no MD5 digest"),
        (agent(entry("MD5:../../b")), "agents[0].parameters.MD5:../../b: '../../b' leaves"),
        (agent(entry("MD5:/etc/passwd")), "agents[0].parameters.MD5:/etc/passwd: '/etc/passwd' le"),
    ],
)
def test_what_is_not_understood_is_refused(folder: Path, text: str, problem: str):
    found, [got] = read(text, folder)
    assert got.startswith(f"model_repository_agents.{problem}")
    assert found == ()
