"""The JSON of a load: parameters and files in base64."""

import base64
import json

import msgspec
import pytest

from penstock.errors import InvalidRequest
from penstock.protocols.load_bodies import LoadParameters, read_load
from penstock.wire.documented import LoadBody


def read(text: str) -> LoadParameters:
    body = text.encode()
    return read_load(body, msgspec.json.decode(body, type=LoadBody).parameters or {})


def test_files_are_decoded_and_other_parameters_are_plain():
    encoded = base64.b64encode(bytes(range(256))).decode()
    sent = {"config": "{}", "file:1/model.onnx": encoded, "other": 2}
    found = read(json.dumps({"parameters": sent}))
    assert found.parameters == {"config": "{}", "other": 2}
    assert found.files == {"file:1/model.onnx": bytes(range(256))}


@pytest.mark.parametrize("text", ["{}", '{"parameters": {}}', '{"parameters": null}'])
def test_a_load_may_have_no_parameters(text):
    assert read(text) == LoadParameters()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"parameters": {"file:1/x": "a?b="}}', "parameter 'file:1/x': not base64"),
        ('{"parameters": {"file:1/x": "YWJ"}}', "parameter 'file:1/x': not base64"),
        ('{"parameters": {"file:1/x": "YW\\u00e4="}}', "parameter 'file:1/x': not base64"),
        ('{"parameters": {"file:1/x": 5}}', "parameter 'file:1/x': expected the file's bytes"),
        ('{"parameters": {"config": {}}}', "parameter 'config' is an object"),
        ('{"parameters": {"config": null}}', "parameter 'config' is null"),
        ('{"parameters": {"file:1/x": "", "f\\u0069le:1/x": ""}}', "'file:1/x' is given 2 times"),
        ('{"parameters": {"config": "a", "config": "b"}}', "'config' is given 2 times"),
    ],
)
def test_what_cannot_be_read_is_refused(text, why):
    with pytest.raises(InvalidRequest) as refused:
        read(text)
    assert why in str(refused.value)
