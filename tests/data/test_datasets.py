"""`open_source`: from what a user asks for to samples, for every format and kind of target."""

import base64
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from penstock.data import InputSpec, Lengths, RequestForm, Source, open_source
from penstock.data.files import digest
from penstock.errors import ConfigError
from penstock.types import TensorSpec

DIGITS = RequestForm("tensors", (TensorSpec("x", "FP32", (4,)),), has_batch=True)
CHAT = RequestForm("messages")


def opened(path: Path, form: RequestForm = DIGITS, **spec: object) -> Source:
    return open_source(InputSpec(str(path), **spec), form, 0, 1)  # type: ignore[arg-type]


def problems(path: Path, form: RequestForm = DIGITS, **spec: object) -> str:
    with pytest.raises(ConfigError) as caught:
        opened(path, form, **spec)
    return "\n".join(caught.value.problems)


def save(folder: Path, suffix: str) -> Path:
    """The same three examples in every format."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    path = folder / f"data{suffix}"
    rows = [{"x": row.tolist()} for row in values]
    match suffix:
        case ".npy":
            np.save(path, values)
        case ".npz":
            np.savez(path, x=values)
        case ".jsonl":
            path.write_text("\n".join(map(json.dumps, rows)))
        case ".json":
            path.write_text(json.dumps({"data": rows}))
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".jsonl", ".json", ".parquet"])
def test_every_format_gives_the_same_examples(tmp_path: Path, suffix: str) -> None:
    path = save(tmp_path, suffix)
    source = opened(path)
    found = {i: s.tensors["x"].tolist() for i, s in (source.next() for _ in range(3))}
    assert found == {0: [[0, 1, 2, 3]], 1: [[4, 5, 6, 7]], 2: [[8, 9, 10, 11]]}
    assert source.origin.text == f"3 examples of {path.name}, shuffled anew each time round"
    assert not source.origin.is_random
    assert source.origin.num_examples == 3
    assert source.origin.digest == digest([path])


def test_processes_share_the_examples(tmp_path: Path) -> None:
    path = tmp_path / "data.npy"
    np.save(path, np.zeros((100, 4)))
    sources = [open_source(InputSpec(str(path)), DIGITS, index, 4) for index in range(4)]
    seen = [source.next()[0] for source in sources for _ in range(25)]
    assert sorted(index for index in seen if index is not None) == list(range(100))


def test_requests_of_several_rows(tmp_path: Path) -> None:
    source = opened(save(tmp_path, ".npz"), batch_size=3)
    assert source.next()[1].tensors["x"].shape == (3, 4)
    assert source.origin.text.endswith("shuffled anew each time round, 3 a request")


def test_a_folder_of_images(tmp_path: Path) -> None:
    for name in "abc":
        Image.new("RGB", (9, 9), (255, 255, 255)).save(tmp_path / f"{name}.png")
    form = RequestForm("tensors", (TensorSpec("image", "FP32", (3, 4, 4)),), has_batch=True)
    source = opened(tmp_path, form)
    assert source.next()[1].tensors["image"].tolist() == np.ones((1, 3, 4, 4)).tolist()
    assert source.origin.text == (
        f"3 examples of {tmp_path.name}, shuffled anew each time round; "
        "resized to 4 x 4, RGB, scaled to 0..1"
    )
    assert source.origin.digest == digest(sorted(tmp_path.glob("*.png")))


def test_a_file_without_names_must_say_which_input_it_is_for(tmp_path: Path) -> None:
    form = RequestForm(
        "tensors", (TensorSpec("a", "FP32", (4,)), TensorSpec("b", "FP32", (4,), is_optional=True))
    )
    path = save(tmp_path, ".npy")
    assert list(opened(path, form).next()[1].tensors) == ["a"]
    assert problems(path, form, name="c") == "unknown input 'c'; the target takes 'a', 'b'"
    assert problems(path, form, name="b").endswith("'b' (FP32 [4], optional); add 'a'")
    two = RequestForm("tensors", (TensorSpec("a", "FP32", (4,)), TensorSpec("b", "FP32", (4,))))
    assert "say which input it is for; the target takes 'a', 'b'" in problems(path, two)


def test_values_that_are_not_finite_are_in_the_report(tmp_path: Path) -> None:
    path = tmp_path / "data.npy"
    values = np.zeros((3000, 4), np.float32)
    values[1717, 2] = np.nan
    np.save(path, values)
    assert opened(path).origin.warnings == (
        "data.npy: input 'x' row 1717 has NaN; the model may answer such rows with NaN.",
    )


@pytest.mark.parametrize("suffix", [".npz", ".jsonl", ".parquet"])
def test_a_name_that_matches_no_input_is_an_error_in_every_format(
    tmp_path: Path, suffix: str
) -> None:
    form = RequestForm("tensors", (TensorSpec("X", "FP32", (4,)),), has_batch=True)
    word = "has 'x'; the model's input is 'X' (FP32 [-1, 4]); rename 'x' to 'X'"
    assert problems(save(tmp_path, suffix), form) == f"data{suffix} {word}"


def test_labels_are_listed_beside_names_that_match_no_input(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, features=np.zeros((3, 4)), label=np.arange(3))
    assert problems(path).startswith("data.npz has 'features' and 'label'; the model's input is")


def test_columns_that_are_not_sent_are_in_the_report(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, x=np.zeros((3, 4), np.float32), id=np.arange(3))
    assert opened(path).next()[1].tensors.keys() == {"x"}
    assert opened(path).origin.text.endswith("; ignored: 'id'")


@pytest.mark.parametrize("name", ["label", "labels", "y"])
def test_labels_of_arrays_are_left_out(tmp_path: Path, name: str) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, **{"x": np.ones((3, 4), np.float32), name: np.arange(3)})
    assert opened(path).next()[1].tensors.keys() == {"x"}


def test_labels_of_rows_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"x": [1, 2, 3, 4], "label": 7}\n{"x": [1, 2, 3, 4], "label": 8}')
    assert opened(path).next()[1].tensors.keys() == {"x"}


def test_what_the_model_takes_is_no_label(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, y=np.ones((3, 4), np.float32))
    form = RequestForm("tensors", (TensorSpec("y", "FP32", (4,)),), True)
    assert opened(path, form).next()[1].tensors.keys() == {"y"}


def test_wrong_shapes_end_with_words(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, x=np.zeros((3, 5)), z=np.zeros(3))
    assert problems(path) == "data.npz: input 'x': shape [5] does not fit [4]"


@pytest.mark.parametrize("name", ["absent.npz", "absent", "data.log"])
def test_paths_that_are_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "data.log").write_text("1 2 3")
    assert ("expected a file that ends in" if "log" in name else "there is no such file") in (
        problems(tmp_path / name)
    )


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hello", "max_tokens": 9}\n{"conversations": []}\n')
    source = opened(path, RequestForm("prompt"))
    index, sample = source.next()
    assert (index, sample.fields, sample.max_tokens) == (0, {"prompt": "Hello"}, 9)
    assert "1 of 2 are used" in source.origin.text


def test_prompts_of_a_file_with_answers_of_given_lengths(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["Hello", "Bye"]}), path)
    source = opened(path, CHAT, output_lengths=Lengths("fixed", (77,)))
    index, sample = source.next()
    assert (index, sample.max_tokens) == (None, 77)
    assert source.origin.text.endswith("answer tokens (at most): 77")


def test_prompts_are_not_read_from_arrays(tmp_path: Path) -> None:
    assert "prompts are read from files that end in" in problems(save(tmp_path, ".npz"), CHAT)


def test_fields_of_a_template(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a", "top_k": 5, "other": 1}\n')
    source = opened(path, RequestForm("fields", fields=("text", "top_k")))
    assert source.next()[1].fields == {"text": "a", "top_k": 5}


def test_a_limit_that_a_template_names_comes_from_the_row_or_from_the_lengths(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows.jsonl"
    form = RequestForm("fields", fields=("text", "max_tokens"))
    path.write_text('{"text": "a", "max_tokens": 5}\n')
    assert opened(path, form).next()[1].fields == {"text": "a", "max_tokens": 5}
    path.write_text('{"text": "a"}\n')
    assert "'max_tokens' missing, which the body names" in problems(path, form)
    source = opened(path, form, output_lengths=Lengths("fixed", (7,)))
    assert source.next()[1].fields == {"text": "a", "max_tokens": 7}


def test_a_template_without_a_limit_does_not_mind_the_answers_of_a_trace(
    tmp_path: Path, trace: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n')
    form = RequestForm("fields", fields=("text",))
    index, sample = opened(path, form, trace_path=str(trace)).next()
    assert (index, sample.fields, sample.max_tokens) == (0, {"text": "a"}, None)


def test_arrays_and_images_as_fields(tmp_path: Path) -> None:
    path = save(tmp_path, ".npz")
    source = opened(path, RequestForm("fields", fields=("x",)))
    assert sorted(source.next()[1].fields["x"] for _ in range(3))[0] == [0, 1, 2, 3]  # type: ignore[type-var]
    folder = tmp_path / "images"
    folder.mkdir()
    Image.new("L", (2, 2)).save(folder / "a.png")
    source = opened(folder, RequestForm("fields", fields=("image",)))
    content = base64.b64decode(str(source.next()[1].fields["image"]))
    assert content == (folder / "a.png").read_bytes()


def test_a_body_without_fields_is_always_the_same() -> None:
    source = open_source(InputSpec(), RequestForm("fields"), 0, 1)
    assert [source.next()[0] for _ in range(3)] == [0, 0, 0]
    assert source.next()[1].fields == {}
    assert source.origin.text == "the same body for every request"


def test_a_body_with_a_prompt_can_be_made_up() -> None:
    form = RequestForm("fields", fields=("prompt", "max_tokens"))
    spec = InputSpec(lengths=Lengths("fixed", (7,)), output_lengths=Lengths("fixed", (9,)))
    fields = open_source(spec, form, 0, 1).next()[1].fields
    assert fields["max_tokens"] == 9
    assert len(str(fields["prompt"]).split()) == 7


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "conv.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,10,44\n"
        "2023-11-16 18:15:50.9951690,20,109\n"
        "2023-11-16 18:15:51.2224670,30,55\n"
    )
    return path


@pytest.mark.parametrize("num_processes", [1, 2])
def test_requests_are_as_long_as_those_of_a_trace(trace: Path, num_processes: int) -> None:
    spec = InputSpec(trace_path=str(trace))
    sources = [open_source(spec, CHAT, i, num_processes) for i in range(num_processes)]
    found = []
    for k in range(6):
        _, sample = sources[k % num_processes].next()
        (message,) = sample.fields["messages"]  # type: ignore[misc]
        found.append((len(message["content"].split()), sample.max_tokens))
    assert found == [(10, 44), (20, 109), (30, 55)] * 2
    assert sources[0].origin.is_random
    assert "as recorded in conv.csv" in sources[0].origin.text
    assert sources[0].origin.digest == digest([trace])


def test_tensors_are_as_long_as_a_trace_says(trace: Path) -> None:
    form = RequestForm("tensors", (TensorSpec("ids", "INT64", (-1,)),), has_batch=True)
    source = open_source(InputSpec(trace_path=str(trace)), form, 0, 1)
    assert [source.next()[1].tensors["ids"].shape for _ in range(3)] == [(1, 10), (1, 20), (1, 30)]


def test_lengths_that_were_asked_for_go_before_those_of_a_trace(trace: Path) -> None:
    spec = InputSpec(trace_path=str(trace), output_lengths=Lengths("fixed", (5,)))
    sample = open_source(spec, CHAT, 0, 1).next()[1]
    assert sample.max_tokens == 5


@pytest.mark.parametrize(
    ("spec", "form", "problem"),
    [
        (InputSpec(seed=-1), DIGITS, "seed: expected a whole number from 0, got -1"),
        (InputSpec(batch_size=0), DIGITS, "batch_size: expected a whole number from 1, got 0"),
        (InputSpec(batch_size=2), CHAT, "batch_size 2: the target takes one example a request"),
        (
            InputSpec(batch_size=2),
            RequestForm("tensors", DIGITS.inputs, has_batch=False),
            "batch_size 2: the target takes one example a request",
        ),
        (
            InputSpec(path="a.npz", lengths=Lengths("fixed", (3,))),
            DIGITS,
            "lengths: the examples of a.npz have their own",
        ),
        (
            InputSpec(output_lengths=Lengths("fixed", (3,))),
            DIGITS,
            "output lengths: the target takes no 'max_tokens'",
        ),
        (
            InputSpec(lengths=Lengths("fixed", (3,))),
            RequestForm("fields"),
            "lengths: the body names no {prompt}",
        ),
        (
            InputSpec(),
            RequestForm("fields", fields=("prompt", "image", "max_tokens")),
            "the body names {image}, {max_tokens}: expected a data file with these fields",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(
    spec: InputSpec, form: RequestForm, problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        open_source(spec, form, 0, 1)
    assert caught.value.problems == (problem,)
