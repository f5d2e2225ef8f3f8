"""Names and quantities that Kubernetes accepts."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.export.names import (
    MAX_NAME,
    dns_name,
    image_problem,
    label_problem,
    memory_quantity,
    name_problem,
    namespace_problem,
    object_problem,
    parse_memory,
    resource_problem,
)

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@given(st.text(max_size=80))
def test_every_text_has_a_valid_name(text: str) -> None:
    name = dns_name(text)
    assert DNS_1035.fullmatch(name) and len(name) <= MAX_NAME
    assert name_problem(name) == ""
    assert dns_name(name) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("digits", "digits"),
        ("ResNet_50.v1", "resnet-50-v1"),
        ("7b-chat", "model-7b-chat"),
        ("--", "model"),
        ("", "model"),
        ("Größe", "gr-e"),
    ],
)
def test_names(text: str, name: str) -> None:
    assert dns_name(text) == name


def test_long_names_stay_different() -> None:
    one, other = dns_name("x" * 70 + "a"), dns_name("x" * 70 + "b")
    assert one != other and len(one) == len(other) == MAX_NAME


def test_a_wrong_name_comes_with_a_right_one() -> None:
    assert name_problem("My_Model").endswith("use 'my-model'")


@pytest.mark.parametrize("name", ["default", "1team", "0", "n" * 63])
def test_namespaces(name: str) -> None:
    assert namespace_problem(name) == ""


@pytest.mark.parametrize("name", ["", "Team", "-a", "a-", "a_b", "n" * 64])
def test_other_namespaces_are_refused(name: str) -> None:
    assert namespace_problem(name).startswith(f"{name!r} is not a name of Kubernetes (at most 63 ")


@pytest.mark.parametrize("name", ["a", "0", "team.keys-1", "n" * 253])
def test_names_of_secrets_and_claims(name: str) -> None:
    assert object_problem(name) == ""


@pytest.mark.parametrize("name", ["", "A", "a b", "a/b", "x/../y", "a..b", "-a", "a-.b", "n" * 254])
def test_other_names_of_secrets_and_claims_are_refused(name: str) -> None:
    assert object_problem(name).startswith(f"{name!r} is not a name of Kubernetes (at most 253 ")


@pytest.mark.parametrize(
    "image",
    [
        "i:1",
        "amazon/aws-cli",
        "registry.example.com/penstock:0.1.0",
        "Registry:5000/a.b/c__d/e---f:V_1.0-x",
        "[::1]:5000/a",
        "a@sha256:" + 64 * "0",
        "a:1@sha256:" + 64 * "0",
    ],
)
def test_images(image: str) -> None:
    assert image_problem(image) == ""


@pytest.mark.parametrize(
    "image",
    [
        " a",
        "a b",
        "a;b",
        "a\n",
        "A",
        "a//b",
        "/a",
        "a:",
        "a:b:c",
        "a:é",
        "a@sha256:1",
        "http://a/b",
    ],
)
def test_what_is_no_image_is_refused(image: str) -> None:
    assert image_problem(image).startswith(f"{image!r} is not an image; expected one like")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(1, "1Mi"), (64 << 20, "64Mi"), (1 << 30, "1Gi"), (1536 << 20, "1536Mi"), (5 << 30, "5Gi")],
)
def test_memory_is_written_as_a_quantity(num_bytes: int, text: str) -> None:
    assert memory_quantity(num_bytes) == text
    assert parse_memory(text) >= num_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1000", 1000), ("2Gi", 2 << 30), ("1.5G", 1_500_000_000), ("512Ki", 512 << 10)],
)
def test_quantities_are_read(text: str, num_bytes: int) -> None:
    assert parse_memory(text) == num_bytes


@pytest.mark.parametrize("text", ["", "0", "2GB", "-1Gi", "1e3", "lots", "512ki", "0.1"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an amount of memory; expected one like 512Mi"):
        parse_memory(text)


@pytest.mark.parametrize("name", ["nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "amd.com/gpu"])
def test_resources(name: str) -> None:
    assert resource_problem(name) == ""


@pytest.mark.parametrize(
    "name", ["", "gpu", "nvidia.com/", "/gpu", "nvidia.com/g pu", "a/b/c", "A.com/gpu", "a/-b"]
)
def test_other_resources_are_refused(name: str) -> None:
    told = f"{name!r} is not a resource of Kubernetes; expected one like nvidia.com/gpu"
    assert resource_problem(name) == told


@pytest.mark.parametrize(
    ("key", "value"),
    [("gpu", "h100"), ("node.kubernetes.io/instance-type", "p5.48xlarge"), ("a/B_c", "")],
)
def test_labels(key: str, value: str) -> None:
    assert label_problem(key, value) == ""


@pytest.mark.parametrize(
    ("key", "value", "wrong"),
    [("-a", "b", "-a"), ("a/b/c", "d", "a/b/c"), ("a", "b-", "b-"), ("a", "x" * 64, "x" * 64)],
)
def test_other_labels_are_refused(key: str, value: str, wrong: str) -> None:
    assert label_problem(key, value).startswith(f"{wrong!r} is not part of a label of Kubernetes")
