"""Names and quantities as Kubernetes accepts them. Pure."""

from __future__ import annotations

import hashlib
import re

from penstock.errors import ConfigError

# A Service's name has at most 63 characters (RFC 1035); -models and -keys fit behind this.
MAX_NAME = 52
NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
# Namespaces are labels of RFC 1123.
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
# Secrets and claims are subdomains of RFC 1123.
MAX_OBJECT = 253
OBJECT = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
# Grammar of the reference library of container images: registry, path, tag and digest.
HOST = r"[a-zA-Z0-9]([-a-zA-Z0-9]*[a-zA-Z0-9])?"
PART = r"[a-z0-9]+(([_.]|__|-+)[a-z0-9]+)*"
TAG, DIGITS = r"\w[\w.-]{0,127}", r"[a-zA-Z][\w+.-]*:[0-9a-fA-F]{32,}"
IMAGE = re.compile(
    rf"(({HOST}(\.{HOST})*|\[[0-9a-fA-F:]+\])(:[0-9]+)?/)?{PART}(/{PART})*(:{TAG})?(@{DIGITS})?",
    re.ASCII,
)
# Resources of nodes and keys of labels: a domain, and a name of at most 63 characters.
WORD = r"[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?"
DOMAIN = OBJECT.pattern
RESOURCE = re.compile(rf"({DOMAIN})/{WORD}", re.ASCII)
LABEL_KEY = re.compile(rf"(({DOMAIN})/)?{WORD}", re.ASCII)
LABEL_VALUE = re.compile(rf"({WORD})?", re.ASCII)
NOT_IN_NAMES = re.compile(r"[^a-z0-9]+")
DIGEST = 6
MEBIBYTE = 1 << 20
SUFFIXES = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
}
QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kMGT]|[KMGT]i|)")


def dns_name(text: str) -> str:
    """Return a name of a resource for this text: lower-case letters, digits and dashes, a letter
    first. Long texts are cut and get a digest, so that different ones stay different."""
    name = NOT_IN_NAMES.sub("-", text.lower()).strip("-")
    if not name or not name[0].isalpha():
        name = f"model-{name}".rstrip("-")
    if len(name) <= MAX_NAME:
        return name
    digest = hashlib.sha256(text.encode()).hexdigest()[:DIGEST]
    return f"{name[: MAX_NAME - DIGEST - 1].rstrip('-')}-{digest}"


def name_problem(name: str) -> str:
    """Return what is wrong with a name that was given; empty if nothing is."""
    if NAME.fullmatch(name) and len(name) <= MAX_NAME:
        return ""
    rule = f"at most {MAX_NAME} lower-case letters, digits and -, with a letter first"
    return f"{name!r} is not a name of Kubernetes ({rule}); use {dns_name(name)!r}"


def namespace_problem(name: str) -> str:
    """Return what is wrong with a namespace; empty if nothing is."""
    if NAMESPACE.fullmatch(name):
        return ""
    rule = "at most 63 lower-case letters, digits and -, with a letter or digit first and last"
    return f"{name!r} is not a name of Kubernetes ({rule})"


def object_problem(name: str) -> str:
    """Return what is wrong with the name of a Secret or claim; empty if nothing is."""
    if OBJECT.fullmatch(name) and len(name) <= MAX_OBJECT:
        return ""
    rule = f"at most {MAX_OBJECT} lower-case letters, digits, - and ., each part between letters or"
    return f"{name!r} is not a name of Kubernetes ({rule} digits)"


def image_problem(image: str) -> str:
    """Return what is wrong with the reference of an image; empty if nothing is."""
    if IMAGE.fullmatch(image):
        return ""
    return f"{image!r} is not an image; expected one like registry.example.com/penstock:0.1.0"


def resource_problem(name: str) -> str:
    """Return what is wrong with the name of a device's resource; empty if nothing is."""
    if RESOURCE.fullmatch(name) and len(name) <= MAX_OBJECT:
        return ""
    return f"{name!r} is not a resource of Kubernetes; expected one like nvidia.com/gpu"


def label_problem(key: str, value: str) -> str:
    """Return what is wrong with a label; empty if nothing is."""
    for text, rule in ((key, LABEL_KEY), (value, LABEL_VALUE)):
        if not rule.fullmatch(text) or len(text) > MAX_OBJECT:
            letters = "letters, digits, -, _ and ., a letter or digit first and last"
            return f"{text!r} is not part of a label of Kubernetes (at most 63 {letters})"
    return ""


def memory_quantity(num_bytes: int) -> str:
    """Return a whole number of mebibytes or gibibytes, rounded up."""
    mebibytes = -(-num_bytes // MEBIBYTE)
    return f"{mebibytes >> 10}Gi" if mebibytes % 1024 == 0 else f"{mebibytes}Mi"


def parse_memory(text: str) -> int:
    """Return the bytes of a quantity such as 512Mi; ConfigError if it is none."""
    found = QUANTITY.fullmatch(text.strip())
    num_bytes = 0 if found is None else round(float(found[1]) * SUFFIXES[found[2]])
    if not num_bytes:
        raise ConfigError(f"{text!r} is not an amount of memory; expected one like 512Mi or 2Gi")
    return num_bytes
