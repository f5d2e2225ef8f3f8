"""Signatures of .pt2 files, read without torch; torch only makes the files."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from example_counts import at_most
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.repository import pt2_file
from penstock.repository.pt2_file import read_program, read_signature

torch = pytest.importorskip("torch")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, image, mask=None):
        self.count += 1
        logits = self.linear(image)
        return logits if mask is None else {"logits": logits, "kept": mask}


BATCH = torch.export.Dim("batch", min=1, max=48)
IMAGE, MASK = torch.zeros(2, 3), torch.zeros(2, 5, dtype=torch.int64)


def export(path: Path, arguments, keywords=None, dynamic_shapes=None, module=None) -> Path:
    module = (module or Model()).eval()
    program = torch.export.export(module, arguments, keywords, dynamic_shapes=dynamic_shapes)
    torch.export.save(program, path)
    return path


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pt2") / "model.pt2"
    shapes = {"image": {0: BATCH}, "mask": {0: BATCH, 1: torch.export.Dim("length")}}
    return export(path, (IMAGE,), {"mask": MASK}, shapes)


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_program(path)
    [problem] = caught.value.problems
    assert len(problem.splitlines()) == 1
    return problem


def test_names_datatypes_and_shapes_are_those_of_the_program(good: Path) -> None:
    program = read_program(good)
    signature = program.signature
    assert [(s.name, s.datatype, s.shape) for s in signature.inputs] == [
        ("image", "FP32", (-1, 3)),
        ("mask", "INT64", (-1, -1)),
    ]
    assert [(s.name, s.datatype, s.shape) for s in signature.outputs] == [
        ("logits", "FP32", (-1, 2)),
        ("kept", "INT64", (-1, -1)),
    ]
    assert program.num_positional == 1
    assert program.has_output_names
    assert signature.has_batch
    assert signature.max_batch == 48


def test_outputs_without_names_are_numbered_as_in_triton(tmp_path: Path) -> None:
    program = read_program(export(tmp_path / "model.pt2", (IMAGE,)))
    assert [spec.name for spec in program.signature.outputs] == ["OUTPUT__0"]
    assert not program.has_output_names


def test_fixed_first_dimension_is_no_batch(tmp_path: Path) -> None:
    signature = read_signature(export(tmp_path / "model.pt2", (IMAGE,)))
    assert signature.inputs[0].shape == (2, 3)
    assert not signature.has_batch


def test_first_dimensions_that_may_differ_are_no_batch(tmp_path: Path) -> None:
    shapes = {"image": {0: BATCH}, "mask": {0: torch.export.Dim("other")}}
    signature = read_signature(
        export(tmp_path / "model.pt2", (IMAGE, torch.zeros(4, 5)), dynamic_shapes=shapes)
    )
    assert {spec.shape[0] for spec in signature.inputs} == {-1}
    assert not signature.has_batch


def test_open_batch_dimension_has_no_limit(tmp_path: Path) -> None:
    shapes = {"image": {0: torch.export.Dim.DYNAMIC}}
    signature = read_signature(export(tmp_path / "model.pt2", (IMAGE,), dynamic_shapes=shapes))
    assert signature.has_batch
    assert signature.max_batch is None


class Nested(torch.nn.Module):
    def forward(self, pair):
        return pair[0], (pair[1],)


class Count(torch.nn.Module):
    def forward(self, x, times):
        return x * times


@pytest.mark.parametrize(
    ("module", "arguments", "text"),
    [
        (Nested(), ((IMAGE, IMAGE),), "an input is no plain tensor"),
        (Count(), (IMAGE, 3), "input 'times' is no tensor"),
    ],
)
def test_what_the_protocol_cannot_send_is_refused(
    tmp_path: Path, module: torch.nn.Module, arguments: tuple[object, ...], text: str
) -> None:
    assert text in refused(export(tmp_path / "model.pt2", arguments, module=module))


def test_nested_outputs_are_refused(tmp_path: Path) -> None:
    class NestedOutput(torch.nn.Module):
        def forward(self, x):
            return x, (x + 1,)

    problem = refused(export(tmp_path / "model.pt2", (IMAGE,), module=NestedOutput()))
    assert problem.startswith("the outputs are nested")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (
            ["data.pkl", "constants.pkl", "code/__torch__.py"],
            "is TorchScript; rename it to model.pt",
        ),
        (["data.pkl", "data/0"], "is a file of torch.save: a pickle"),
        (["data/aotinductor/model/x.so"], "is an AOTInductor package"),
        (["models/model.json", "data/weights/model.pt"], "its weights are a pickle"),
        (["models/model.json"], "cannot be read as .pt2: it has no data/"),
        ([], "cannot be read as .pt2"),
    ],
)
def test_other_archives_are_told_apart(tmp_path: Path, names: list[str], text: str) -> None:
    path = tmp_path / "model.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(f"model/{name}", b"{}")
    assert refused(path).startswith(text)


def test_machine_code_is_known_by_what_is_in_the_archive(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    for name, is_compiled in (("data/aotinductor/model/x.so", True), ("models/model.json", False)):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"model/{name}", b"{}")
        assert pt2_file.is_compiled(path) is is_compiled
    path.write_text("no archive")
    assert not pt2_file.is_compiled(path)
    assert not pt2_file.is_compiled(tmp_path / "none.pt2")


def with_members(good: Path, path: Path, *names: str) -> Path:
    """A good file with more members, beside the others."""
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(path, "w") as new:
        root = old.namelist()[0].partition("/")[0]
        for name in names:
            new.writestr(name.replace("ROOT", root), b"")
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return path


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    "name", ["data/sample_inputs/model.pt", "data/sample_inputs/MODEL.pt", "Extra/a.txt"]
)
def test_members_that_torch_cannot_tell_apart_are_refused(
    good: Path, tmp_path: Path, name: str
) -> None:
    names = [f"ROOT/{name}", "ROOT/extra/a.txt"]
    problem = refused(with_members(good, tmp_path / "model.pt2", *names))
    assert problem.startswith(f"{name!r} is in it more than once")


@pytest.mark.parametrize(
    "name",
    [
        "models/other.json",
        "data/sample_inputs/other.pt",
        "data/weights/other_weights_config.json",
        "data/weights/weight_0.pt",
        "data/constants/custom_obj_0",
        "data/constants/tensor_0/../opaque_obj_0",
        "data/executorch/model.pte",
        "serialized_exported_program.json",
    ],
)
def test_members_that_no_export_of_one_model_writes_are_refused(
    good: Path, tmp_path: Path, name: str
) -> None:
    problem = refused(with_members(good, tmp_path / "model.pt2", f"ROOT/{name}"))
    assert problem.startswith(f"{name!r} is in it, which is no part of one model")


def test_members_beside_the_folder_of_the_model_are_refused(good: Path, tmp_path: Path) -> None:
    names = ["ROOT/extra/a.txt", "other/models/model.json"]
    problem = refused(with_members(good, tmp_path / "model.pt2", *names))
    assert problem.startswith("cannot be read as .pt2: 'other/models/model.json' is not a file in ")


def test_members_whose_names_python_changes_are_refused(good: Path, tmp_path: Path) -> None:
    path = with_members(good, tmp_path / "model.pt2", "ROOT/extra/a.txt")
    path.write_bytes(path.read_bytes().replace(b"extra/a.txt", b"extra/a\0txt"))
    assert "extra/a\\x00txt' is not a file in " in refused(path)


def test_extra_files_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    program = torch.export.export(Model().eval(), (IMAGE,))
    torch.export.save(program, path, extra_files={"notes/a.txt": "hello"})
    assert len(read_signature(path).inputs) == 1


def test_other_version_of_the_schema_is_refused(good: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            data = old.read(name).replace(
                b'"schema_version": {"major": 8', b'"schema_version": {"major": 9'
            )
            new.writestr(name, data)
    assert refused(path) == "its schema has version 9, and only version 8 is known"


@settings(max_examples=at_most(200))
@given(data=st.data())
def test_damaged_program_is_read_or_refused(
    good: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever bytes of the JSON change, there is a signature or our error."""
    path = tmp_path_factory.mktemp("damaged") / "model.pt2"
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith(".json"):
                start = data.draw(st.integers(0, len(content)))
                size = data.draw(st.integers(0, 40))
                patch = data.draw(
                    st.sampled_from([b"", b"null", b"[]", b"{}", b'""', b"-1", b"[" * 2000])
                )
                content = content[:start] + patch + content[start + size :]
            new.writestr(name, content)
    try:
        read_program(path)
    except ConfigError as error:
        assert error.problems


def test_torch_is_not_imported(good: Path) -> None:
    script = (
        "import sys; from pathlib import Path; "
        "from penstock.repository.pt2_file import read_signature; "
        f"read_signature(Path({str(good)!r})); print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", script]
    output = subprocess.run(command, capture_output=True, text=True, check=True)
    assert output.stdout == "False\n"
