"""Wishes from a file and from flags, with every problem at once."""

import json
from pathlib import Path

import pytest
from made_recordings import digits, write_recording

from penstock import slo
from penstock.errors import CommandLineError, ConfigError
from penstock.optimizer import plan_file
from penstock.optimizer.budget import Budget


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "digits.onnx"
    path.write_bytes(b"")
    return path


def wishes(model: Path, **more: object) -> dict[str, object]:
    return {"model": str(model), "slo": "p99 < 20ms at 200/s", "out": "models", **more}


def test_flags_become_a_plan(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.npz"
    data.write_bytes(b"")
    plan = plan_file.make_plan(
        wishes(
            model,
            data=str(data),
            accuracy="top1 drop <= 0.5 %",
            budget="10m",
            duration="5s",
            price=2,
            exhaustive=True,
            seed=3,
        )
    )
    assert plan.slo == slo.parse("p99 < 20ms at 200/s")
    assert plan.accuracy == Budget("top1", 0.005)
    assert (plan.budget_s, plan.duration_s, plan.price_per_hour) == (600.0, 5.0, 2.0)
    assert plan.is_exhaustive
    assert plan.seed == 3
    assert plan.name == "digits"


def test_a_device_is_one_that_there_could_be(model: Path) -> None:
    assert plan_file.make_plan(wishes(model)).device == "auto"
    for device in ("auto", "cpu", "cuda", "cuda:3"):
        assert plan_file.make_plan(wishes(model, device=device)).device == device
    with pytest.raises(ConfigError) as error:
        plan_file.make_plan(wishes(model, device="gpu"))
    assert error.value.problems == (
        "--device: 'gpu' is no device; expected auto, cpu, cuda or cuda:N",
    )


def test_paths_of_a_file_are_beside_it(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('model = "digits.onnx"\nslo = "p99 < 1s"\nout = "models"\n')
    plan = plan_file.make_plan({}, plan_file.read(file))
    assert plan.model == str(model)
    assert plan.out == str(tmp_path / "models")


def test_a_factory_is_no_path(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('model = "package.net:factory"\nslo = "p99 < 1s"\nout = "models"\n')
    plan = plan_file.make_plan({}, plan_file.read(file))
    assert plan.model == "package.net:factory"
    assert plan.name == "net"


def test_every_problem_is_told(model: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_file.make_plan(
            {
                "model": str(model),
                "slo": "p98 < 20ms",
                "accuracy": "much",
                "budget": "soon",
                "price": -1,
                "seed": 1.5,
                "exhaustive": "yes",
                "eval": "no function",
                "postprocess": "code.py",
                "colour": "blue",
            }
        )
    named = {problem.replace(" ", ":").partition(":")[0] for problem in caught.value.problems}
    assert named == {
        "--colour",
        "--slo",
        "--accuracy",
        "--budget",
        "--price",
        "--seed",
        "--exhaustive",
        "--eval",
        "--postprocess",
        "--out",
    }
    assert isinstance(caught.value, CommandLineError)


def test_problems_of_a_file_name_it_and_its_keys(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('model = "away.onnx"\nslo = "p98 < 20ms"\nout = "models"\ncolour = "blue"\n')
    with pytest.raises(ConfigError) as caught:
        plan_file.make_plan({}, plan_file.read(file))
    labels = [problem.partition(": ")[::2] for problem in caught.value.problems]
    assert [file for file, _ in labels] == ["plan.toml"] * 3
    assert [text.partition(": ")[0] for _, text in labels] == ["colour", "slo", "model"]
    assert not isinstance(caught.value, CommandLineError)


def test_a_key_that_a_file_lacks_is_asked_for_as_a_key_or_a_flag(model: Path) -> None:
    file = plan_file.PlanFile("plan.toml", {"model": str(model), "out": "models"})
    with pytest.raises(CommandLineError) as caught:
        plan_file.make_plan({}, file)
    assert list(caught.value.problems) == [
        'plan.toml has no slo; add slo = "p99 < 20 ms at 200/s", or give --slo'
    ]


def test_live_data_is_the_recording_of_the_model(model: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_recording(tmp_path / "rec", digits(2), name=name)
    base = {"model": str(model), "slo": "p99 < 20 ms", "out": str(tmp_path / "out"), "name": "b"}
    made = plan_file.make_plan({**base, "from_live": str(tmp_path / "rec")})
    assert made.data == str(tmp_path / "rec" / "b") and made.from_live
    made = plan_file.make_plan({**base, "from_live": str(tmp_path / "rec" / "a")})
    assert made.data == str(tmp_path / "rec" / "a")
    (tmp_path / "x.npz").write_bytes(b"")
    with pytest.raises(ConfigError, match="--from-live: contradicts --data"):
        plan_file.make_plan(
            {**base, "from_live": str(tmp_path / "rec"), "data": str(tmp_path / "x.npz")}
        )
    with pytest.raises(ConfigError, match="no recording of penstock serve --record"):
        plan_file.make_plan({**base, "from_live": str(tmp_path)})
    with pytest.raises(ConfigError, match="--from-live: .*nothing: no such file or folder"):
        plan_file.make_plan({**base, "from_live": str(tmp_path / "nothing")})


def test_what_is_not_there(model: Path, tmp_path: Path) -> None:
    away = str(tmp_path / "away")
    with pytest.raises(ConfigError) as caught:
        plan_file.make_plan(wishes(Path(away), calibration=away))
    text = "\n".join(caught.value.problems)
    assert f"MODEL: {away}: no such file or folder" in text
    assert f"--calibration: {away}: no such file or folder" in text


def test_what_needs_data(model: Path) -> None:
    with pytest.raises(CommandLineError) as caught:
        plan_file.make_plan(wishes(model, labels="y", accuracy="top1 drop <= 1 %"))
    assert list(caught.value.problems) == [
        "--labels: needs --data, which is not given",
        "--accuracy: needs --data, which is not given",
    ]


def test_what_is_not_there_is_told_beside_what_is_wrong(tmp_path: Path) -> None:
    away = str(tmp_path / "away.onnx")
    with pytest.raises(ConfigError) as caught:
        plan_file.make_plan({"model": away, "slo": "soon", "out": "models"})
    text = "\n".join(caught.value.problems)
    assert "--slo: 'soon'" in text
    assert f"MODEL: {away}: no such file or folder" in text


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "x" * 300])
def test_a_name_that_is_none(model: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be the name of a model's folder"):
        plan_file.make_plan(wishes(model, name=name))


def test_an_slo_on_cost_needs_a_price(model: Path) -> None:
    with pytest.raises(ConfigError, match="needs --price, the machine's price per hour"):
        plan_file.make_plan(wishes(model, slo="cost <= 1 per million"))


def test_an_slo_on_streams_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="expected terms on latency"):
        plan_file.make_plan(wishes(model, slo="p99 ttft < 100ms"))


@pytest.mark.parametrize(
    "text", ["", "model", 'model = "a"\nmodel = "b"', "\xff", "[[", "slo = 'p99 < 1s'\n\x00"]
)
def test_a_file_that_is_no_plan(tmp_path: Path, text: str) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError):
        plan_file.make_plan({}, plan_file.read(file))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plan.toml: cannot be read"):
        plan_file.read(tmp_path / "plan.toml")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("2 min", 120), ("500ms", 0.5)]
)
def test_times(text: str, seconds: float) -> None:
    assert plan_file.parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "m", "-1m", "0m", "ten minutes"])
def test_no_times(text: str) -> None:
    with pytest.raises(ValueError, match="expected one like 90s, 10m or 1h"):
        plan_file.parse_time(text)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("package.net:factory", "net"),
        ("some/folder", "folder"),
        ("models/digits/3", "digits"),
        ("a folder/with spaces", "with-spaces"),
    ],
)
def test_names(model: str, name: str) -> None:
    assert plan_file.default_name(model) == name


def test_a_file_is_no_repository(model: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_file.make_plan(wishes(model, out=str(model)))
    assert list(caught.value.problems) == [
        f"--out: {model}: is a file; expected a repository's folder"
    ]


def test_what_is_empty_is_told_once(model: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_file.make_plan(wishes(model, slo=""))
    assert list(caught.value.problems) == ["--slo is required, e.g. --slo 'p99 < 20 ms at 200/s'"]


def test_problems_of_the_accuracy_name_it_once(model: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_file.make_plan(wishes(model, data=str(model), accuracy="top1 rise <= 1 %"))
    assert str(caught.value).startswith("--accuracy: 'top1 rise <= 1 %': higher top1 is better")


def test_keys_are_written_as_the_flags_are(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('data-name = "image"\n')
    assert plan_file.read(path).options == {"data_name": "image"}


def test_the_plan_of_the_documentation_can_be_read(model: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/optimize.md").read_text()
    path = tmp_path / "plan.toml"
    path.write_text(page.partition("```toml\n")[2].partition("```")[0])
    for name in ("model.onnx", "data.npz"):
        (tmp_path / name).write_bytes(b"")
    plan = plan_file.make_plan({}, plan_file.read(path))
    assert (plan.name, plan.budget_s) == ("digits", 600)
    assert str(plan.slo) == "p99 < 20ms, memory <= 500MiB at 200/s poisson"


class TestLanguageModels:
    SLO = "ttft p99 < 500 ms, tpot p99 < 100 ms"

    def wishes(self, folder, architecture):
        (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        return {"model": str(folder), "slo": self.SLO, "out": str(folder / "out")}

    def test_may_have_an_slo_on_streams(self, tmp_path):
        plan = plan_file.make_plan(self.wishes(tmp_path, "LlamaForCausalLM"))
        assert str(plan.slo) == "p99 ttft < 500ms, p99 tpot < 100ms"

    def test_others_may_not(self, tmp_path):
        with pytest.raises(ConfigError, match="ttft, tpot and itl apply to language models only"):
            plan_file.make_plan(self.wishes(tmp_path, "BertModel"))

    def test_an_slo_without_numbers_says_what_is_missing(self, tmp_path):
        wishes = self.wishes(tmp_path, "LlamaForCausalLM") | {"slo": "ttft p99, tpot p99 < fast"}
        with pytest.raises(ConfigError) as caught:
            plan_file.make_plan(wishes)
        assert [each for each in caught.value.problems if "slo: 'ttft p99': nothing is" in each]
        assert [each for each in caught.value.problems if "'fast' is not a duration" in each]


def test_outputs_are_a_list_or_one_text_with_commas(model: Path) -> None:
    for listed in (["boxes", "scores"], "boxes, scores"):
        assert plan_file.make_plan(wishes(model, outputs=listed)).outputs == ("boxes", "scores")
    for wrong in (["boxes", "boxes"], "boxes,", 3, [1]):
        with pytest.raises(ConfigError, match="outputs: "):
            plan_file.make_plan(wishes(model, outputs=wrong))


def test_a_fresh_run_is_asked_for(model: Path) -> None:
    assert not plan_file.make_plan(wishes(model)).is_fresh
    assert plan_file.make_plan(wishes(model, fresh=True)).is_fresh
