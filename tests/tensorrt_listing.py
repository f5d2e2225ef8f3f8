"""Listing of TensorRT's Python API: names and argument names of the classes that
`penstock.backends.tensorrt` uses, read from NVIDIA's wheels of the bindings.

The wheels have the names, enums and signatures, but need libraries that are not on PyPI. Here each
library is replaced by an empty one, so the bindings can be imported and read, though not used:

    pip download --no-deps --only-binary=:all: --python-version 3.11 tensorrt-cu13-bindings
    python tests/tensorrt_listing.py tensorrt_cu13_bindings-*-cp311-*.whl ...

writes `tests/backends/tensorrt_api.json`, by version. Needs a C compiler and the Python version of
the wheels.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType

FILE = Path(__file__).parent / "backends" / "tensorrt_api.json"
CLASSES = (
    *("Builder", "BuilderFlag", "DataType", "Dims", "EngineInspector"),
    *("ExecutionContextAllocationStrategy", "IBuilderConfig", "ICudaEngine", "IExecutionContext"),
    *("IHostMemory", "ILogger", "ILogger.Severity", "IOptimizationProfile", "ITimingCache"),
    *("LayerInformationFormat", "MemoryPoolType", "NetworkDefinitionCreationFlag", "OnnxParser"),
    *("ParserError", "ProfilingVerbosity", "Runtime", "TensorFormat", "TensorIOMode"),
    *("TensorLocation",),
)
FUNCTIONS = ("init_libnvinfer_plugins",)
# Functions that the bindings import, by library.
IMPORTED = {
    "nvinfer": "createInferBuilder_INTERNAL createInferRefitter_INTERNAL "
    "createInferRuntime_INTERNAL getBuilderPluginRegistry getPluginRegistry getInferLibVersion",
    "nvonnxparser": "createNvOnnxParser_INTERNAL createNvOnnxParserRefitter_INTERNAL "
    "getNvOnnxParserVersion",
    "nvinfer_plugin": "initLibNvInferPlugins",
}
SIGNATURE = r"^(?:\d+\. )?{name}\((.*)\) -> (.+)$"
PACKAGE = re.compile(r"tensorrt(?:_bindings)?\.tensorrt\.")


def describe(trt: ModuleType) -> dict:
    """Return the listing of imported bindings."""
    found = {name: _class(_find(trt, name)) for name in CLASSES}
    return {**found, **{name: _overloads(name, getattr(trt, name).__doc__) for name in FUNCTIONS}}


def _find(trt: ModuleType, path: str) -> object:
    found: object = trt
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _class(found: object) -> dict:
    members = {}
    for name in dir(found):
        if name.startswith("_") and name != "__init__":
            continue
        member = getattr(found, name)
        if isinstance(member, property):
            match = re.search(r"-> (.+)", member.fget.__doc__ or "")
            members[name] = _plain(match[1]) if match else ""
        elif callable(member) and (overloads := _overloads(name, member.__doc__)):
            members[name] = overloads
        elif isinstance(member, found):
            # A member of an enum.
            members[name] = found.__name__
    return members


def _overloads(name: str, text: str | None) -> list[str]:
    """Return the argument names of each overload, with "=" if they may be left out, and the type of
    the result: "name, shape -> bool"."""
    pattern = re.compile(SIGNATURE.format(name=re.escape(name)), re.M)
    return [
        f"{', '.join(_arguments(args))} -> {_plain(returns)}".strip()
        for args, returns in pattern.findall(text or "")
    ]


def _arguments(text: str):
    depth, part, parts = 0, "", []
    for character in text:
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += character
    for each in [*parts, part]:
        name, _, rest = each.strip().partition(":")
        if name and name != "self":
            yield name + ("=" if " = " in rest else "")


def _plain(text: str) -> str:
    return PACKAGE.sub("", text.strip())


def read_wheel(wheel: Path) -> tuple[str, dict]:
    """Return the version and the listing of a wheel."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        zipfile.ZipFile(wheel).extractall(folder)
        module = next(folder.glob("tensorrt*/tensorrt*.so"))
        pattern = rb"lib(nvinfer|nvonnxparser|nvinfer_plugin)(\.so\.\d+)"
        needed = re.findall(pattern, module.read_bytes())
        for library, ending in sorted({(a.decode(), b.decode()) for a, b in needed}):
            file = f"lib{library}{ending}"
            names = IMPORTED[library].split()
            code = "".join(f"void *{each}(void) {{ return 0; }}\n" for each in names)
            command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{file}", "-xc", "-", "-o", file]
            subprocess.run(command, input=code, text=True, cwd=folder, check=True)
        paths = {"LD_LIBRARY_PATH": name, "PYTHONPATH": f"{name}:{Path(__file__).parent}"}
        script = f"import tensorrt_listing as t; t.print_listing({module.parent.name!r})"
        command = [sys.executable, "-c", script]
        found = subprocess.run(
            command, env={**os.environ, **paths}, check=True, capture_output=True
        )
    version, listing = json.loads(found.stdout)
    return version, listing


def print_listing(package: str) -> None:
    trt = importlib.import_module(package)
    print(json.dumps([trt.__version__, describe(trt)]))


if __name__ == "__main__":
    listings = dict(read_wheel(Path(each)) for each in sys.argv[1:])
    FILE.write_text(json.dumps(listings, indent=1, sort_keys=True) + "\n")
    print(f"{FILE}: {', '.join(listings)}")
