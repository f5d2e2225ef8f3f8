"""`penstock.load`: tensors and texts through a model in this process, one by one or a whole data
set."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import text_server
from child_processes import children_running

import penstock
from penstock.api.loaded import LoadedModel
from penstock.errors import ConfigError, InvalidRequest, NotReady, PromptsFailed, Unsupported

RAGGED = """
backend: "null"
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
"""


@pytest.fixture(scope="module")
def digits(examples: Path):
    with penstock.load(examples / "digits") as model:
        yield model


def images(count: int) -> np.ndarray:
    return np.random.default_rng(0).random((count, 1, 8, 8), dtype=np.float32)


def test_a_file_is_loaded(digits: LoadedModel) -> None:
    file = digits.config.artifact
    with penstock.load(file) as model:
        assert np.array_equal(model.infer(images(2))["logits"], digits.infer(images(2))["logits"])


def test_an_event_loop_waits_without_blocking(digits: LoadedModel) -> None:
    async def both() -> list[dict[str, np.ndarray]]:
        return await asyncio.gather(*(digits.infer_async(images(1)) for _ in range(2)))

    first, second = asyncio.run(both())
    assert np.array_equal(first["logits"], second["logits"])


def test_a_data_set_is_predicted_in_order(digits: LoadedModel, tmp_path: Path) -> None:
    rows = images(150)
    expected = np.concatenate([digits.infer(rows[i : i + 1])["logits"] for i in range(150)])
    np.savez(tmp_path / "d.npz", image=rows, label=np.zeros(150))
    for dataset in (rows, {"image": rows}, tmp_path / "d.npz"):
        found = digits.predict(dataset, progress=False)
        assert found.keys() == {"logits"}
        np.testing.assert_allclose(found["logits"], expected, rtol=1e-4, atol=1e-5)
    found = digits.predict(rows, batch_size=7, progress=False)
    np.testing.assert_allclose(found["logits"], expected, rtol=1e-4, atol=1e-5)


def test_the_progress_bar_is_on_stderr(
    digits: LoadedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    digits.predict(images(3))
    assert capsys.readouterr().out == ""


def test_rows_of_different_shapes_are_predicted_one_by_one(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(RAGGED)
    (tmp_path / "d.jsonl").write_text('{"x": [1.0]}\n{"x": [1.0, 2.0]}\n')
    with penstock.load(folder) as model:
        found = model.predict(tmp_path / "d.jsonl", progress=False)
    assert [row.shape for row in found["y"]] == [(1,), (2,)]


def test_what_does_not_fit_is_told(digits: LoadedModel) -> None:
    with pytest.raises(InvalidRequest, match="batch_size 1000: the model takes at most 64"):
        digits.predict(images(2), batch_size=1000, progress=False)
    with pytest.raises(ConfigError, match="dataset"):
        digits.predict(np.zeros((2, 3)), progress=False)
    with pytest.raises(Unsupported, match="not a language model: use infer"):
        digits.generate("a")


def test_it_says_what_it_is_until_it_is_closed(examples: Path) -> None:
    model = penstock.load(examples / "digits")
    assert (model.name, model.version, repr(model)) == ("digits", "1", "<LoadedModel digits/1>")
    model.infer(images(1))
    assert model.statistics()["inference_count"] == 1
    model.close()
    model.close()
    with pytest.raises(NotReady, match="closed"):
        model.infer(images(1))


def test_a_language_model_generates_chats_streams_and_predicts(tmp_path: Path) -> None:
    folder = text_server.write_model(tmp_path)
    with penstock.load(folder) as model:
        options = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        text = model.generate("a b c", **options)
        assert text and text == "".join(model.stream("a b c", **options))
        assert asyncio.run(model.generate_async("a b c", **options)) == text
        assert model.generate([{"role": "user", "content": "a"}], **options)
        found = model.predict(["a b c", "a"], progress=False, **options)
        assert found["text"].tolist() == [text, model.generate("a", **options)]
        (tmp_path / "p.txt").write_text("a b c\na\n")
        again = model.predict(tmp_path / "p.txt", progress=False, **options)
        assert again["text"].tolist() == found["text"].tolist()
        with pytest.raises(InvalidRequest, match="temperature"):
            model.generate("a", temperature=-1)
        with pytest.raises(InvalidRequest, match="n is 2"):
            model.generate("a", n=2)
        with pytest.raises(Unsupported, match="language model: use generate"):
            model.infer("a")
    with pytest.raises(NotReady, match="closed"):
        model.generate("a")


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    """Few sequences run at a time, so most of many prompts wait for others."""
    limits = {"penstock.max_num_seqs": "3", "penstock.max_waiting": "4"}
    folder = text_server.write_model(tmp_path_factory.mktemp("texts"), limits)
    with penstock.load(folder) as model:
        yield model


OPTIONS: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
PROMPTS: list[Any] = ["a b c", [{"role": "user", "content": "a"}], "c", "b a"] * 8


def test_many_prompts_get_their_answers_in_order(text_model: LoadedModel) -> None:
    """As each alone; texts and chats, more than the engine takes at a time."""
    alone = [text_model.generate(prompt, **OPTIONS) for prompt in PROMPTS[:4]]
    assert len(set(alone)) > 1
    assert text_model.generate(PROMPTS, progress=False, **OPTIONS) == alone * 8
    found = asyncio.run(text_model.generate_async(PROMPTS, progress=False, **OPTIONS))
    assert found == alone * 8
    pieces = [""] * len(PROMPTS)
    for number, piece in text_model.stream(PROMPTS, **OPTIONS):
        pieces[number] += piece
    assert pieces == alone * 8
    assert text_model.generate([], **OPTIONS) == []


def test_a_bar_of_many_prompts_is_for_terminals_only(
    text_model: LoadedModel, capfd: pytest.CaptureFixture[str]
) -> None:
    text_model.generate(PROMPTS[:3], **OPTIONS)
    out, shown = capfd.readouterr()
    assert not out and "\x1b" not in shown and "generate" not in shown


def test_what_no_prompt_can_be_is_refused_before_any_is_begun(text_model: LoadedModel) -> None:
    before = text_model.statistics()["inference_count"]
    for prompts, message in (
        (["a", 7, "b"], r"prompts\[1\]: a prompt is of type int; expected a text or a list"),
        (["a", "b", [{"role": "robot", "content": "a"}]], r"prompts\[2\]: .*role"),
        ([["a"], "b"], r"prompts\[0\]: a prompt is of type list"),
        (7, "a prompt is of type int"),
        (b"abc", "a prompt is of type bytes"),
        ({"role": "user", "content": "a"}, "a prompt is of type dict"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            text_model.generate(prompts, progress=False, **OPTIONS)  # type: ignore[call-overload]
    with pytest.raises(InvalidRequest, match="n is 2"):
        text_model.generate(["a", "b"], progress=False, n=2)
    assert text_model.statistics()["inference_count"] == before


def test_what_has_no_json_is_refused_by_name(text_model: LoadedModel) -> None:
    asked: list[tuple[Any, dict[str, Any], str, str]] = [
        (["a", "\ud800"], {}, r"prompts\[1\]: prompt: .*lone surrogate", "prompt"),
        (["a", [{"role": "user", "content": "\ud800"}]], {}, r"prompts\[1\]: .*lone", "messages"),
        (["a", [{"role": "user", "content": object()}]], {}, r"prompts\[1\]: .*object", "messages"),
        (["a", "b"], {"stop": ["\ud800"]}, "stop: .*lone surrogate", "stop"),
        ("a", {"seed": object()}, "seed: a value of type object", "seed"),
        ("a", {"max_tokens": np.float32(1.5)}, "max_tokens: Expected `int", "max_tokens"),
    ]
    for prompts, options, message, field in asked:
        with pytest.raises(InvalidRequest, match=message) as caught:
            text_model.generate(prompts, progress=False, **options)
        assert caught.value.field == field


def test_texts_and_numbers_of_numpy_are_those_of_python(text_model: LoadedModel) -> None:
    texts = ["a b c", "c"]
    wanted = text_model.generate(texts, progress=False, **OPTIONS, seed=3, stop=["x"])
    options: dict[str, Any] = {
        "max_tokens": np.int64(6), "temperature": np.float32(0), "ignore_eos": np.bool_(True),
        "seed": np.int64(3), "stop": np.array(["x"]),
    }  # fmt: skip
    array: Any = np.array(texts)
    assert text_model.generate(array, progress=False, **options) == wanted
    assert text_model.predict(array, progress=False, **options)["text"].tolist() == wanted
    assert text_model.generate(np.str_("c"), **options) == wanted[1]
    message: Any = [{"role": "user", "content": np.str_("a")}]
    chat = [{"role": "user", "content": "a"}]
    assert text_model.generate(message, **options) == text_model.generate(chat, **OPTIONS)
    with pytest.raises(InvalidRequest, match="of type ndarray"):
        text_model.generate(np.array("a"))  # type: ignore[call-overload]


def test_an_unknown_parameter_is_a_type_error(text_model: LoadedModel) -> None:
    with pytest.raises(TypeError, match="unknown option max_token; did you mean max_tokens?"):
        text_model.generate("a", max_token=3)
    for name in ("model", "messages", "prompts", "stream"):
        with pytest.raises(TypeError, match=f"unknown option {name}; "):
            text_model.generate(["a", "b"], progress=False, **{name: True})
        with pytest.raises(TypeError, match=f"unknown option {name}; "):
            text_model.stream("a", **{name: True})
        with pytest.raises(TypeError, match=f"unknown option {name}; "):
            asyncio.run(text_model.generate_async("a", **{name: True}))
    with pytest.raises(InvalidRequest, match="best_of is not supported"):
        text_model.generate("a", best_of=2)
    assert text_model.generate("a", user="me", **OPTIONS)


def test_prompts_that_fail_lose_no_other_answer(text_model: LoadedModel) -> None:
    prompts = ["a b", "a " * 400, "c", "b " * 300, "b a"]
    wanted = [text_model.generate(prompt, **OPTIONS) for prompt in prompts[::2]]
    with pytest.raises(PromptsFailed, match=r"2 of 5 prompts failed; prompts\[1\]: ") as caught:
        text_model.generate(prompts, progress=False, **OPTIONS)
    assert caught.value.texts == [wanted[0], None, wanted[1], None, wanted[2]]
    assert caught.value.errors.keys() == {1, 3}
    assert all(isinstance(error, InvalidRequest) for error in caught.value.errors.values())
    with pytest.raises(PromptsFailed):
        asyncio.run(text_model.generate_async(prompts, progress=False, **OPTIONS))
    found = {number: "" for number in range(5)}
    with pytest.raises(PromptsFailed):
        for number, piece in text_model.stream(prompts, **OPTIONS):
            found[number] += piece
    assert [found[number] for number in (0, 2, 4)] == wanted


def test_leaving_early_cancels_the_other_prompts(text_model: LoadedModel) -> None:
    options = {**OPTIONS, "max_tokens": 200}
    for _ in text_model.stream(PROMPTS, **options):
        break

    async def cancelled() -> None:
        task = asyncio.create_task(text_model.generate_async(PROMPTS, progress=False, **options))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    # The engine has nothing else to do: this takes no longer than alone.
    began = time.perf_counter()
    text_model.generate("a", **OPTIONS)
    assert time.perf_counter() - began < 5


def test_two_callers_of_many_prompts_share_the_queue(text_model: LoadedModel) -> None:
    """Together they have more open than may wait: those that are refused come again."""
    with ThreadPoolExecutor(3) as threads:
        runs = [
            threads.submit(text_model.generate, PROMPTS, progress=False, **OPTIONS)
            for _ in range(3)
        ]
    found = [run.result() for run in runs]
    assert found[0] == found[1] == found[2] and all(found[0])


def test_a_model_that_is_closed_ends_a_run(tmp_path: Path) -> None:
    model = penstock.load(text_server.write_model(tmp_path))
    with ThreadPoolExecutor(1) as threads:
        options = {**OPTIONS, "max_tokens": 200}
        run = threads.submit(model.generate, PROMPTS * 20, progress=False, **options)
        while not model.statistics()["inference_count"]:
            time.sleep(0.01)
        model.close()
        with pytest.raises(PromptsFailed) as caught:
            run.result(30)
    assert any(caught.value.texts) and None in caught.value.texts


def kill_engine(model: LoadedModel) -> None:
    """Kill the engine of the model that was loaded last, while prompts run."""
    while not model.statistics()["inference_count"]:
        time.sleep(0.01)
    engines = children_running("penstock.llm.engine_main")
    max(engines, key=lambda each: each.create_time()).kill()


FEW = {"penstock.max_num_seqs": "3", "penstock.max_waiting": "4"}
LONGER = {**OPTIONS, "max_tokens": 30}


def test_prompts_that_have_not_begun_wait_for_a_new_engine(tmp_path: Path) -> None:
    folder = text_server.write_model(tmp_path, FEW)
    with penstock.load(folder) as model, ThreadPoolExecutor(1) as threads:
        run = threads.submit(model.generate, PROMPTS * 20, progress=False, **LONGER)
        kill_engine(model)
        with pytest.raises(PromptsFailed) as caught:
            run.result(120)
    # Those that the engine had.
    assert 1 <= len(caught.value.errors) <= 4
    assert all("is lost" in str(error) for error in caught.value.errors.values())
    assert all(text for n, text in enumerate(caught.value.texts) if n not in caught.value.errors)


def test_prompts_wait_for_a_new_engine_for_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.api.local_text.ENGINE_WAIT_S", 0.0)
    folder = text_server.write_model(tmp_path, FEW)
    with penstock.load(folder) as model, ThreadPoolExecutor(1) as threads:
        run = threads.submit(model.generate, PROMPTS * 20, progress=False, **LONGER)
        kill_engine(model)
        with pytest.raises(PromptsFailed, match="failed") as caught:
            run.result(60)
    assert len(caught.value.errors) > 4
    assert "is not ready" in str(caught.value.errors[len(PROMPTS) * 20 - 1])


def test_a_model_that_is_closed_ends_prompts_that_wait_for_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # They are not due again before the model is closed.
    monkeypatch.setattr("penstock.api.local_text._LocalRun._delay_s", lambda *_: 600.0)
    model = penstock.load(text_server.write_model(tmp_path, FEW))
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(model.generate, PROMPTS * 20, progress=False, **LONGER)
        kill_engine(model)
        model.close()
        with pytest.raises(PromptsFailed, match="failed"):
            run.result(30)


def test_a_data_set_without_rows_is_refused(digits: LoadedModel) -> None:
    with pytest.raises(InvalidRequest, match="the data set has no rows"):
        digits.predict(images(0), progress=False)


def test_an_ensemble_runs_in_a_server_only(tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(
        """platform: "ensemble" ensemble_scheduling { step { model_name: "m" model_version: -1
        input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }
        input { name: "x" data_type: TYPE_FP32 dims: 1 }
        output { name: "y" data_type: TYPE_FP32 dims: 1 }"""
    )
    with pytest.raises(Unsupported, match="'whole'.*its steps are other models"):
        penstock.load(folder)
