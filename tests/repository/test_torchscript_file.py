"""TorchScript archives are told from pickles by their members, and tensors by Triton's names."""

import zipfile
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.repository import torchscript_file

SCRIPT = ("m/data.pkl", "m/constants.pkl", "m/code/__torch__.py", "m/version")


def archive(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name in names:
            file.writestr(name, b"")
    return path


def test_archive_of_torch_jit_is_recognised(tmp_path: Path):
    path = archive(tmp_path / "model.pt", *SCRIPT)
    torchscript_file.check(path)
    assert torchscript_file.is_script(path)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("m/data.pkl", "m/version"), "is a file of torch.save, a pickle"),
        (("m/data.pkl", "m/constants.pkl"), "is a file of torch.save, a pickle"),
        (("models/model.json",), "is no TorchScript archive"),
        ((), "is no TorchScript archive"),
    ],
)
def test_other_archives_are_refused(tmp_path: Path, names: tuple[str, ...], words: str):
    path = archive(tmp_path / "model.pt", *names)
    assert not torchscript_file.is_script(path)
    with pytest.raises(ConfigError, match=words):
        torchscript_file.check(path)


@pytest.mark.parametrize("content", [b"", b"\x80\x04.", b"PK\x03\x04 cut off"])
def test_bytes_that_are_no_archive_are_refused(tmp_path: Path, content: bytes):
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(ConfigError, match="no TorchScript archive, but perhaps a pickle"):
        torchscript_file.check(tmp_path / "model.pt")


def test_missing_file_is_no_archive(tmp_path: Path):
    assert not torchscript_file.is_script(tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["INPUT__0", "INPUT__1"], [0, 1]),
        (["INPUT__1", "INPUT__0"], [1, 0]),
        (["in__put__12"], [12]),
        (["INPUT__0", "mask"], [0, 1]),
        (["b", "a"], [0, 1]),
        ([], []),
    ],
)
def test_position_is_that_of_the_names_if_all_tell_one(names: list[str], expected: list[int]):
    assert torchscript_file.positions(names) == expected


def test_one_position_for_two_names_is_refused():
    with pytest.raises(ConfigError, match="a__0, b__0: two names end in the same position"):
        torchscript_file.positions(["a__0", "b__0"])
