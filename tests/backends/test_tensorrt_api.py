"""Every name of TensorRT that penstock.backends.tensorrt uses exists in the real bindings, with
these arguments. We cannot run TensorRT; its bindings can be read (`tests/tensorrt_listing.py`), and
`tensorrt_api.json` has what they say, for the oldest and the newest versions that we support."""

import ast
import inspect
import json
from pathlib import Path

import fake_tensorrt
import pytest
from tensorrt_listing import FILE, describe

SOURCE = Path(__file__).parents[2] / "penstock" / "backends" / "tensorrt.py"
LISTINGS = json.loads(FILE.read_text())
OTHER_NAMES = {"nvonnxparser::IParserError": "ParserError"}
# Members whose names are common elsewhere.
COMMON = {"__init__", "log", "name", "value", "shape", "dtype", "itemsize", "nbytes", "reset"}
MODULE = "trt"


def annotated(node: ast.expr | None) -> str:
    """The class of TensorRT that an annotation names: `trt.X`, `trt.X | None`; empty for others."""
    if isinstance(node, ast.BinOp):
        return annotated(node.left)
    text = "" if node is None else ast.unparse(node)
    return text.removeprefix(f"{MODULE}.") if text.startswith(f"{MODULE}.") else ""


class Checker:
    """Follows the classes of TensorRT through a module, as far as annotations and results go."""

    def __init__(self, listing: dict, tree: ast.Module) -> None:
        self.listing = listing
        self.problems: list[str] = []
        self.used: set[str] = set()
        # Methods that only objects of TensorRT have.
        self.methods = {
            name
            for members in listing.values()
            if isinstance(members, dict)
            for name in members
            if "_" in name and name not in COMMON
        }
        self.attributes: dict[str, str] = {}
        self.functions: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign) and (kind := annotated(node.annotation)):
                target = node.target
                name = target.attr if isinstance(target, ast.Attribute) else ast.unparse(target)
                self.attributes[name] = kind
            if isinstance(node, ast.FunctionDef) and (kind := annotated(node.returns)):
                self.functions[node.name] = kind
        self.check(tree, {})

    def check(self, node: ast.AST, names: dict[str, str]) -> None:
        if isinstance(node, ast.ClassDef):
            self._check_overrides(node)
        if isinstance(node, ast.FunctionDef):
            names = dict(names)
            for argument in (*node.args.args, *node.args.kwonlyargs):
                if kind := annotated(argument.annotation):
                    names[argument.arg] = kind
        for child in ast.iter_child_nodes(node):
            self.check(child, names)
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)) if annotated(node.annotation):
                names[name] = annotated(node.annotation)
            case ast.Assign(targets=[ast.Name(id=name)]):
                names[name] = self.kind(node.value, names)
            case ast.Attribute():
                self._check_member(node, names)
            case ast.Call():
                self._check_call(node, names)

    def kind(self, node: ast.expr, names: dict[str, str]) -> str:
        """The class of an expression's value; "X()" for the class itself; empty if unknown."""
        match node:
            case ast.Name(id=name):
                return MODULE if name == MODULE else names.get(name, "")
            case ast.BoolOp():
                return self.kind(node.values[0], names)
            case ast.Attribute(value=value, attr=attr):
                owner = self.kind(value, names)
                if owner == MODULE:
                    return f"{attr}()" if isinstance(self.listing.get(attr), dict) else ""
                if owner.endswith("()") and f"{owner[:-2]}.{attr}" in self.listing:
                    return f"{owner[:-2]}.{attr}()"
                member = self._members(owner).get(attr)
                if isinstance(member, str):
                    return member if member in self.listing else ""
                return "" if owner else self.attributes.get(attr, "")
            case ast.Call(func=func):
                return self._result(func, names)
        return ""

    def _result(self, func: ast.expr, names: dict[str, str]) -> str:
        found = self.kind(func, names)
        if found.endswith("()"):
            return found[:-2]
        overloads = self._overloads(func, names)
        if overloads:
            result = overloads[0].partition("-> ")[2]
            return OTHER_NAMES.get(result, result)
        called = func.attr if isinstance(func, ast.Attribute) else ast.unparse(func)
        return self.functions.get(called, "")

    def _members(self, owner: str) -> dict:
        return self.listing.get(owner.removesuffix("()"), {}) if owner else {}

    def _overloads(self, func: ast.expr, names: dict[str, str]) -> list[str]:
        if not isinstance(func, ast.Attribute):
            return []
        owner = self.kind(func.value, names)
        found = self.listing.get(func.attr) if owner == MODULE else self._members(owner)
        found = found.get(func.attr) if owner != MODULE and isinstance(found, dict) else found
        return found if isinstance(found, list) else []

    def _check_member(self, node: ast.Attribute, names: dict[str, str]) -> None:
        owner = self.kind(node.value, names)
        if owner == MODULE:
            if node.attr not in self.listing and node.attr != "__version__":
                self._problem(node, f"{MODULE}.{node.attr} does not exist")
            return
        plain = owner.removesuffix("()")
        if plain in self.listing:
            nested = f"{plain}.{node.attr}"
            if node.attr not in self._members(owner) and nested not in self.listing:
                self._problem(node, f"{nested} does not exist")
            self.used.add(nested)
        elif node.attr in self.methods:
            self._problem(node, f"{ast.unparse(node)}: the class of its owner is not known")

    def _check_call(self, node: ast.Call, names: dict[str, str]) -> None:
        found = self.kind(node.func, names)
        overloads = self._overloads(node.func, names)
        if found.endswith("()"):
            overloads = self._members(found).get("__init__", [])
        elif ast.unparse(node.func).endswith(".__init__"):
            return
        if overloads and not any(fits(each, node) for each in overloads):
            self._problem(node, f"{ast.unparse(node)}: expected {' or '.join(overloads)}")

    def _check_overrides(self, node: ast.ClassDef) -> None:
        for base in map(annotated, node.bases):
            for method in (each for each in node.body if isinstance(each, ast.FunctionDef)):
                wanted = self.listing.get(base, {}).get(method.name)
                given = ", ".join(each.arg for each in method.args.args[1:])
                if wanted and f"{given} -> None".strip() not in wanted:
                    self._problem(method, f"{base}.{method.name}({given}): expected {wanted}")

    def _problem(self, node: ast.AST, text: str) -> None:
        self.problems.append(f"line {node.lineno}: {text}")


def fits(overload: str, node: ast.Call) -> bool:
    """Whether the arguments of a call can be bound to those of an overload."""
    listed = overload.partition("->")[0].strip()
    arguments = [each.strip() for each in listed.split(",")] if listed else []
    names = [each.removesuffix("=") for each in arguments]
    given = {*names[: len(node.args)], *(each.arg for each in node.keywords)}
    needed = {each for each in arguments if not each.endswith("=")}
    return len(node.args) <= len(names) and given <= set(names) and needed <= given


def problems(code: str, version: str = "11.4.0.106") -> list[str]:
    return Checker(LISTINGS[version], ast.parse(code)).problems


@pytest.mark.parametrize("version", LISTINGS)
def test_every_use_is_in_the_bindings(version: str) -> None:
    checker = Checker(LISTINGS[version], ast.parse(SOURCE.read_text()))
    assert checker.problems == []
    # What the backend could not do without was really looked at.
    assert checker.used >= {
        "IExecutionContext.execute_async_v3",
        "IExecutionContext.set_tensor_address",
        "IExecutionContext.set_optimization_profile_async",
        "ICudaEngine.device_memory_size_v2",
        "ICudaEngine.create_execution_context",
        "ICudaEngine.get_tensor_profile_shape",
        "EngineInspector.get_engine_information",
        "IBuilderConfig.set_memory_pool_limit",
        "IBuilderConfig.profiling_verbosity",
        "IOptimizationProfile.set_shape",
        "ITimingCache.serialize",
        "ParserError.desc",
        "DataType.BF16",
        "ILogger.Severity.ERROR",
    }
    assert len(checker.used) >= 50


def test_versions_10_and_11_are_listed() -> None:
    assert {version.split(".")[0] for version in LISTINGS} == {"10", "11"}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("trt.BuilderFlag.FP16", "BuilderFlag.FP16 does not exist"),
        ("trt.NoSuchClass", "trt.NoSuchClass does not exist"),
        ("trt.Runtime()", "trt.Runtime(): expected logger -> None"),
        ("trt.Runtime(log=1)", "trt.Runtime(log=1): expected logger -> None"),
        ("b = trt.Builder(1)\nb.max_batch_size", "Builder.max_batch_size does not exist"),
        (
            "def f(c: trt.IExecutionContext):\n    c.execute_async_v3()",
            "c.execute_async_v3(): expected stream_handle -> bool",
        ),
        (
            "def f(c: trt.IExecutionContext | None):\n    c.execute_async_v2(1, 2)",
            "IExecutionContext.execute_async_v2 does not exist",
        ),
        (
            "e = trt.Runtime(1).deserialize_cuda_engine(b'')\ne.create_execution_context(size=1)",
            "e.create_execution_context(size=1): expected strategy= -> IExecutionContext or "
            "runtime_config= -> IExecutionContext",
        ),
        ("x.set_tensor_address(1, 2)", "x.set_tensor_address: the class of its owner is not known"),
        (
            "class L(trt.ILogger):\n    def log(self, level, text): ...",
            "ILogger.log(level, text): expected ['severity, msg -> None']",
        ),
    ],
)
def test_wrong_uses_are_found(code: str, expected: str) -> None:
    assert [each.partition(": ")[2] for each in problems(code)] == [expected]


def test_the_stand_in_has_only_names_of_the_bindings() -> None:
    listing = LISTINGS[fake_tensorrt.__version__]
    for name, members in listing.items():
        fake = getattr(fake_tensorrt, name, None)
        if not inspect.isclass(fake) or not isinstance(members, dict):
            continue
        for member, value in vars(fake).items():
            if member.startswith("_") or member in ("Severity", "NOT_USED"):
                continue
            assert member in members, f"{name}.{member}"
            if inspect.isfunction(value):
                arguments = list(inspect.signature(value).parameters)[1:]
                allowed = [
                    [each.strip(" =") for each in overload.partition("->")[0].split(",")]
                    for overload in members[member]
                ]
                assert (arguments or [""]) in allowed, f"{name}.{member}{arguments}"


def test_listing_is_that_of_the_installed_bindings() -> None:
    trt = pytest.importorskip(
        "tensorrt", exc_type=ImportError, reason="TensorRT is not installed here"
    )
    if trt.__version__ not in LISTINGS:
        pytest.skip(f"{FILE.name} has no version {trt.__version__}, which is installed")
    assert describe(trt) == LISTINGS[trt.__version__]
