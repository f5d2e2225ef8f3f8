"""Each example is a valid request: a server answers it, from a shell and from Python."""

import base64
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from page_server import KEYS, SECRETS, PageServer, null_config, page_server
from PIL import Image

from penstock.config import IMAGE, LLM, ModelConfig, Preprocess
from penstock.dashboard.example_calls import (
    KEY,
    PHOTO,
    PIXEL,
    TEXT,
    URL,
    curl_line,
    example_call,
)
from penstock.protocols.gate import Gate
from penstock.types import DATATYPES, TensorSpec

CONFIGS = [
    null_config("strings", {"text": ("BYTES", (1,))}),
    null_config("unbatched strings", {"text": ("BYTES", (-1,))}, max_batch_size=0),
    null_config('it\'s <b>"odd"</b> {url} $HOME/é', {"x'y {url}": ("INT32", (2,))}),
    null_config("large", {"image": ("FP32", (3, -1, -1)), "size": ("INT64", (2,))}),
    null_config("two versions", {"x": ("INT32", (1,))}, version="1"),
    null_config("two versions", {"x": ("INT32", (1,))}, version="2"),
    *(null_config(name, {"x": (name, (2, -1))}) for name in DATATYPES),
]


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    with page_server(CONFIGS) as running:
        yield running


def shell(line: str, **environment: str) -> tuple[int, bytes]:
    """The status and the answer of a curl command."""
    told = " | ".join(
        [*line.split(" | ")[:-1], f"{line.split(' | ')[-1]} -s -w '\\n%{{http_code}}'"]
    )
    run = ["bash", "-c", told.replace("--output answer.bin", "")]
    done = subprocess.run(run, capture_output=True, check=True, env=os.environ | environment)
    answer, _, status = done.stdout.rpartition(b"\n")
    return int(status), answer


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.name}/{config.version}")
def test_the_curl_line_and_the_python_lines_are_answered(
    server: PageServer, config: ModelConfig
) -> None:
    is_latest = (config.name, config.version) != ("two versions", "1")
    call = example_call(config, is_latest=is_latest)
    status, answer = shell(curl_line(call, server.url))
    assert status == 200, answer
    head, _ = json.JSONDecoder().raw_decode(answer.decode("latin-1"))
    assert head["model_version"] == config.version
    script = call.python.replace(URL, server.url, 1)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "model_name" in done.stdout


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.name}/{config.version}")
def test_the_address_is_the_first_of_its_marks(config: ModelConfig) -> None:
    call = example_call(config)
    assert call.curl.replace(URL, "http://a:1", 1) == curl_line(call, "http://a:1")


def test_a_single_text_has_a_text_box_and_everything_else_json() -> None:
    text, _, odd, large = (example_call(config) for config in CONFIGS[:4])
    assert (text.form, text.input) == ("text", "text")
    assert json.loads(text.body)["inputs"][0]["data"] == [TEXT]
    assert odd.form == large.form == "tensors"


def test_images_come_from_a_file_and_at_start_from_the_line_itself(
    server: PageServer, tmp_path: Path
) -> None:
    config = CONFIGS[0]
    call = example_call(replace(config, preprocess=Preprocess(IMAGE, config.inputs)))
    assert (call.form, call.input) == ("image", "text")
    # The model repeats what it is sent.
    (tmp_path / PHOTO).write_bytes(b"any bytes \xff" * 100)
    sent = base64.b64encode(b"any bytes \xff" * 100).decode()
    status, answer = shell(f"cd {tmp_path}; {call.curl.replace(URL, server.url)}")
    assert (status, json.loads(answer)["outputs"][0]["data"]) == (200, [sent])
    script = [sys.executable, "-c", call.python.replace(URL, server.url, 1)]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert sent in done.stdout
    status, answer = shell(curl_line(call, server.url))
    assert (status, json.loads(answer)["outputs"][0]["data"]) == (200, [PIXEL])
    with Image.open(io.BytesIO(base64.b64decode(PIXEL))) as image:
        assert image.size == (1, 1)


def test_large_inputs_are_sent_as_bytes_and_small_ones_as_json() -> None:
    call = example_call(CONFIGS[3])
    image, size = json.loads(call.body)["inputs"]
    assert image["shape"] == [1, 3, 224, 224]
    assert image["parameters"] == {"binary_data_size": call.num_zeros}
    assert call.num_zeros == 4 * 3 * 224 * 224
    assert size["data"] == [0, 0]
    assert "head -c 602112 /dev/zero" in call.curl


def test_masks_are_ones_and_optional_inputs_are_left_out() -> None:
    inputs = (
        TensorSpec("input_ids", "INT64", (-1,)),
        TensorSpec("attention_mask", "INT64", (-1,)),
        TensorSpec("extra", "INT64", (1,), is_optional=True),
    )
    call = example_call(replace(CONFIGS[0], inputs=inputs))
    told = {each["name"]: each["data"] for each in json.loads(call.body)["inputs"]}
    assert told == {"input_ids": [0], "attention_mask": [1]}


def test_keys_come_from_the_environment() -> None:
    with page_server(CONFIGS[:1], Gate(KEYS)) as running:
        call = example_call(CONFIGS[0], needs_key=True)
        line = call.curl.replace(URL, running.url)
        assert shell(line, **{KEY: SECRETS["infer"]})[0] == 200
        assert shell(line, **{KEY: "no key that is known"})[0] == 401
        script = call.python.replace(URL, running.url)
        environment = os.environ | {KEY: SECRETS["infer"]}
        subprocess.run([sys.executable, "-c", script], check=True, env=environment)


@pytest.mark.parametrize(("has_chat", "path"), [(True, "chat/completions"), (False, "completions")])
def test_language_models_are_asked_in_openais_form(has_chat: bool, path: str) -> None:
    config = replace(CONFIGS[0], name="a/b", backend=LLM)
    call = example_call(config, has_chat)
    assert call.path == f"v1/{path}"
    body = json.loads(call.body)
    assert body["model"] == "a/b"
    assert ("messages" in body) == has_chat == (call.form == "chat")
    assert f'base_url="{URL}/v1"' in call.python
