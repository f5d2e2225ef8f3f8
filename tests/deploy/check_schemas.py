"""Compares documents of Kubernetes with what their APIs define; runs in an environment of its own.

    python check_schemas.py FILE...    # exit code 1, and a line for each problem

Core kinds: the OpenAPI schemas of Kubernetes (kubernetes-validate). KEDA and ServiceMonitor: models
made from their CRDs (cloudcoil). KServe: the types of its own SDK. Unknown fields are problems.
"""

import importlib
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import kubernetes.client
import kubernetes_validate
import pydantic
import yaml
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import ServiceMonitor

VERSION = "1.37"
# Keyed by API version and kind.
FROM_CRDS = {
    ("keda.sh/v1alpha1", "ScaledObject"): ScaledObject,
    ("monitoring.coreos.com/v1", "ServiceMonitor"): ServiceMonitor,
}
FROM_KSERVE = {
    ("serving.kserve.io/v1beta1", "InferenceService"): "V1beta1InferenceService",
    ("serving.kserve.io/v1alpha1", "ServingRuntime"): "V1alpha1ServingRuntime",
}
PLAIN = {
    "str": str,
    "int": int,
    "float": (int, float),
    "bool": bool,
    "object": object,
    # The SDK has no class for it.
    "V1beta1MetricQuantity": (str, int),
}
GENERIC = re.compile(r"(list\[|dict\(str, |dict\[str, )(.+)[\])]")


def problems_of(document: dict) -> Iterator[str]:
    kind = (document.get("apiVersion"), document.get("kind"))
    if kind in FROM_CRDS:
        yield from problems_of_model(FROM_CRDS[kind], document)
    elif kind in FROM_KSERVE:
        yield from problems_of_type(FROM_KSERVE[kind], document, kind[1])
    else:
        try:
            kubernetes_validate.validate(document, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{kind[1]}: {error.path}: {error.message}"
        except Exception as error:  # A kind or version that Kubernetes does not have.
            yield f"{kind[1]}: {type(error).__name__}: {error}"


def problems_of_model(model: type, document: dict) -> Iterator[str]:
    """A field that the model does not have is not there any more when it is written again."""
    try:
        made = model.model_validate(document)
    except pydantic.ValidationError as error:
        yield from (f"{model.__name__}.{e['loc']}: {e['msg']}" for e in error.errors())
        return
    written = made.model_dump(mode="json", by_alias=True, exclude_unset=True)
    yield from (f"{model.__name__}{path}: no such field" for path in lost(document, written, ""))


def lost(one: object, other: object, path: str) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key, value in one.items():
            if key not in other:
                yield f"{path}.{key}"
            else:
                yield from lost(value, other[key], f"{path}.{key}")
    elif isinstance(one, list) and isinstance(other, list):
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from lost(a, b, f"{path}[{index}]")


def kserve_type(name: str) -> type:
    """A class of KServe's SDK, or one of the Kubernetes client that it uses. The SDK itself is not
    imported: it needs a web server."""
    if "kserve" not in sys.modules:
        package = types.ModuleType("kserve")
        package.__path__ = [str(Path(pydantic.__file__).parents[1] / "kserve")]
        sys.modules["kserve"] = package
    name = re.sub(r"^K8sIoApi[A-Z][a-z]+(?=V\d)", "", name)
    if hasattr(kubernetes.client, name):
        return getattr(kubernetes.client, name)
    module = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
    return getattr(importlib.import_module(f"kserve.models.{module}"), name)


def problems_of_type(name: str, value: object, path: str) -> Iterator[str]:
    """Follow the types that the SDK gives for each field."""
    if generic := GENERIC.fullmatch(name):
        expected = list if generic[1] == "list[" else dict
        if not isinstance(value, expected):
            yield f"{path}: {value!r} is not a {expected.__name__}"
            return
        pairs = enumerate(value) if expected is list else value.items()
        for key, each in pairs:
            yield from problems_of_type(generic[2], each, f"{path}[{key}]")
        return
    if name in PLAIN:
        if not isinstance(value, PLAIN[name]) or (name == "int" and isinstance(value, bool)):
            yield f"{path}: {value!r} is not of the type {name}"
        return
    found = kserve_type(name)
    if not isinstance(value, dict):
        # Quantities and resource names are texts or numbers.
        if found.openapi_types:
            yield f"{path}: {value!r} is not a {name}"
        return
    fields = {there: found.openapi_types[own] for own, there in found.attribute_map.items()}
    for key, each in value.items():
        if key not in fields:
            yield f"{path}.{key}: {name} has no such field"
        else:
            yield from problems_of_type(fields[key], each, f"{path}.{key}")


def main() -> None:
    num_documents, problems = 0, []
    for name in sys.argv[1:]:
        for document in yaml.safe_load_all(Path(name).read_text()):
            num_documents += 1
            problems += [f"{Path(name).name}: {problem}" for problem in problems_of(document)]
    print(f"{num_documents} documents")
    print("\n".join(problems))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
