"""Signature of a .pt2 file (`torch.export.save`), read without torch: it is a zip of JSON and raw
weights.

Everything that torch would unpickle when loading such a file is refused, except the sample inputs,
which every file has and which `backends/pytorch` checks. So is every member that
`torch.export.save` does not write.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.errors import ConfigError
from penstock.repository.signature import Signature
from penstock.types import TensorSpec

SCHEMA = 8
# Datatypes by torch's scalar type numbers.
SCALARS = dict(enumerate(["UINT8", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64"], 1))
SCALARS |= {12: "BOOL", 13: "BF16", 28: "UINT16", 34: "UINT32", 35: "UINT64"}
MODEL = "models/model.json"
PAYLOADS = {
    "weights": "data/weights/model_weights_config.json",
    "constants": "data/constants/model_constants_config.json",
}
# Folder of machine code for this architecture, with its weights.
COMPILED = "data/aotinductor/"
SAMPLE_INPUTS = "data/sample_inputs/model.pt"
NEEDED = {MODEL, *PAYLOADS.values(), SAMPLE_INPUTS}
OTHERS = re.compile(
    r"data/weights/weight_[0-9]+|data/constants/tensor_[0-9]+|extra/.+"
    r"|archive_format|archive_version|byteorder|\.data/version|\.data/serialization_id"
)
SEQUENCES = ("builtins.tuple", "builtins.list", "collections.namedtuple")
EXPECTED = "expected a file written by torch.export.save"
PICKLE = (
    "a pickle, which can run any code and is not read; "
    'export the model with torch.export.save as model.pt2 and set backend: "pytorch"'
)
BROKEN = (OSError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error)
MAX_NAMES = 5


@dataclass(frozen=True, slots=True)
class Program:
    signature: Signature
    # The first inputs are positional, the others are named.
    num_positional: int
    # False when it returns a tensor or a tuple; the names are then OUTPUT__0, OUTPUT__1, ...
    has_output_names: bool


def read_signature(path: Path) -> Signature:
    return read_program(path).signature


def read_program(path: Path) -> Program:
    """Read a program; ConfigError, in one line, unless it can be served."""
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(archive)
    except BROKEN as error:
        raise ConfigError(f"cannot be read as .pt2: {error}; {EXPECTED}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"cannot be read as .pt2: {error}") from None


class _Size(msgspec.Struct):
    as_int: int | None = None
    as_expr: dict[str, object] | None = None


class _Meta(msgspec.Struct):
    dtype: int
    sizes: list[_Size]


class _Name(msgspec.Struct):
    name: str


class _Argument(msgspec.Struct):
    as_tensor: _Name | None = None


class _Value(msgspec.Struct):
    arg: _Argument


class _InputSpec(msgspec.Struct):
    user_input: _Value | None = None
    constant_input: _Name | None = None


class _OutputSpec(msgspec.Struct):
    user_output: _Value | None = None


class _Tensors(msgspec.Struct):
    input_specs: list[_InputSpec]
    output_specs: list[_OutputSpec]


class _CallSignature(msgspec.Struct):
    in_spec: str
    out_spec: str


class _Call(msgspec.Struct):
    fqn: str
    signature: _CallSignature | None = None


class _ExportedGraph(msgspec.Struct):
    tensor_values: dict[str, _Meta]


class _GraphModule(msgspec.Struct):
    graph: _ExportedGraph
    signature: _Tensors
    module_call_graph: list[_Call]


class _Versioned(msgspec.Struct):
    schema_version: dict[str, int]


class _Exported(msgspec.Struct):
    graph_module: _GraphModule
    range_constraints: dict[str, dict[str, int | None]]


class _Payload(msgspec.Struct):
    path_name: str
    use_pickle: bool = False


class _Payloads(msgspec.Struct):
    config: dict[str, _Payload]


class _Tree(msgspec.Struct):
    """How torch flattens arguments and results; a leaf has no type."""

    type: str | None = None
    context: str | None = None
    children_spec: list[_Tree] = []


def _read(archive: zipfile.ZipFile) -> Program:
    names = archive.namelist()
    root = f"{names[0].partition('/')[0]}/" if names else "/"
    # Python's zipfile changes some names, which torch reads as written.
    strays = [
        member.orig_filename
        for member in archive.infolist()
        if member.filename != member.orig_filename or not member.filename.startswith(root)
    ]
    if strays:
        raise ConfigError(
            f"cannot be read as .pt2: {strays[0]!r} is not a file in {root}; {EXPECTED}"
        )
    check_members(
        [name.removeprefix(root) for name in names], lambda name: archive.read(root + name)
    )
    text = archive.read(root + MODEL)
    schema = msgspec.json.decode(text, type=_Versioned).schema_version.get("major")
    if schema != SCHEMA:
        raise ConfigError(f"its schema has version {schema}, and only version {SCHEMA} is known")
    return _program(msgspec.json.decode(text, type=_Exported))


def is_compiled(path: Path) -> bool:
    """Whether it is an AOTInductor package (`torch._inductor.aoti_compile_and_package`): no pickle,
    but machine code, which needs the same trust as `module.py`."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.partition("/")[2].startswith(COMPILED) for name in archive.namelist())
    except BROKEN:
        return False


def check_members(names: Sequence[str], read: Callable[[str], bytes]) -> None:
    """Raise ConfigError if torch would unpickle any member but the sample inputs. Zip readers may
    disagree on a file's members, so torch's own reader is checked too before torch loads it."""
    _check_kind(set(names))
    for kind, config in PAYLOADS.items():
        _check_payloads(read(config), kind)
    # torch looks up members case-insensitively.
    counts = Counter(name.casefold() for name in names)
    for name in names:
        if counts[name.casefold()] > 1:
            raise ConfigError(f"{name!r} is in it more than once, in whatever case; {EXPECTED}")
        if name not in NEEDED and not OTHERS.fullmatch(name):
            raise ConfigError(f"{name!r} is in it, which is no part of one model; {EXPECTED}")


def _check_kind(files: set[str]) -> None:
    if any(name.startswith(COMPILED) for name in files):
        raise ConfigError("is an AOTInductor package, which does not tell its tensors; give them")
    if files & {"constants.pkl", "data.pkl"}:
        if "constants.pkl" in files:
            advice = "rename it to model.pt, or export the model with torch.export.save"
            raise ConfigError(f"is TorchScript; {advice}")
        raise ConfigError(f"is a file of torch.save: {PICKLE}")
    if files & {"data/weights/model.pt", "data/constants/model.pt", "serialized_state_dict.pt"}:
        raise ConfigError(
            "its weights are a pickle, as torch wrote them up to 2.8, and are not read; "
            "write it again with torch.export.save of 2.9 or later"
        )
    if missing := sorted(NEEDED - files):
        raise ConfigError(f"cannot be read as .pt2: it has no {missing[0]}; {EXPECTED}")


def _check_payloads(text: bytes, kind: str) -> None:
    payloads = msgspec.json.decode(text, type=_Payloads).config
    pickled = [
        name
        for name, payload in payloads.items()
        if payload.use_pickle or not payload.path_name.startswith(("weight_", "tensor_"))
    ]
    if pickled:
        raise ConfigError(
            f"{kind} {', '.join(pickled[:MAX_NAMES])}: stored as pickles, which can run any code "
            "and are not read; expected plain dense tensors"
        )


def _program(exported: _Exported) -> Program:
    tensors = exported.graph_module.signature
    constants = [spec.constant_input.name for spec in tensors.input_specs if spec.constant_input]
    if constants:
        raise ConfigError(f"input '{constants[0]}' is no tensor; export the model without it")
    inputs = [spec.user_input.arg for spec in tensors.input_specs if spec.user_input]
    outputs = [spec.user_output.arg for spec in tensors.output_specs if spec.user_output]
    if not inputs or not outputs:
        raise ConfigError("it has no inputs or no outputs")
    calls = [call.signature for call in exported.graph_module.module_call_graph if not call.fqn]
    if not calls or calls[0] is None:
        raise ConfigError(f"it does not say how it is called; {EXPECTED}")
    names, num_positional = _input_names(_tree(calls[0].in_spec), inputs)
    output_names = _output_names(_tree(calls[0].out_spec))
    values = exported.graph_module.graph.tensor_values
    given = output_names or [f"OUTPUT__{index}" for index in range(len(outputs))]
    if len(given) != len(outputs):
        raise ConfigError(f"it has {len(outputs)} outputs and names {len(given)}")
    signature = Signature(
        tuple(_spec(*pair, values) for pair in zip(names, inputs, strict=True)),
        tuple(_spec(*pair, values) for pair in zip(given, outputs, strict=True)),
        _max_batch([_meta(arg, values) for arg in (*inputs, *outputs)], exported.range_constraints),
    )
    return Program(signature, num_positional, bool(output_names))


def _tree(text: str) -> _Tree:
    return msgspec.json.decode(text, type=tuple[int, _Tree])[1]


def _input_names(tree: _Tree, inputs: Sequence[_Argument]) -> tuple[list[str], int]:
    """Return the names of the inputs, and how many of them are positional."""
    if len(tree.children_spec) != 2:
        raise ConfigError(f"it does not say how it is called; {EXPECTED}")
    args, kwargs = tree.children_spec
    leaves = [*args.children_spec, *kwargs.children_spec]
    if len(leaves) != len(inputs) or any(leaf.type is not None for leaf in leaves):
        raise ConfigError("an input is no plain tensor; each must be one of its own")
    num_positional = len(args.children_spec)
    by_position = [arg.as_tensor.name if arg.as_tensor else "" for arg in inputs[:num_positional]]
    return [*by_position, *_keys(kwargs)], num_positional


def _output_names(tree: _Tree) -> list[str]:
    """Return the names of the outputs; empty if they have none."""
    if any(child.type is not None for child in tree.children_spec):
        raise ConfigError(
            "the outputs are nested; expected a tensor, or a tuple or dict of tensors"
        )
    return [] if tree.type is None or tree.type in SEQUENCES else _keys(tree)


def _keys(tree: _Tree) -> list[str]:
    """Return the keys of a dict, or of a class that is flattened like one."""
    keys = msgspec.json.decode(tree.context or "null", type=list[str] | None)
    if keys is None or len(keys) != len(tree.children_spec):
        raise ConfigError(f"{tree.type} has no names for its tensors; expected a tuple or a dict")
    return keys


def _spec(name: str, arg: _Argument, values: dict[str, _Meta]) -> TensorSpec:
    if arg.as_tensor is None:
        raise ConfigError(f"'{name}' is no tensor")
    meta = _meta(arg, values)
    if meta.dtype not in SCALARS:
        raise ConfigError(f"'{name}': not a tensor of a datatype that the protocol has")
    shape = tuple(-1 if size.as_int is None else size.as_int for size in meta.sizes)
    return TensorSpec(name, SCALARS[meta.dtype], shape)


def _meta(arg: _Argument, values: dict[str, _Meta]) -> _Meta:
    name = arg.as_tensor.name if arg.as_tensor else ""
    if name not in values:
        raise ConfigError(f"'{name}' is not among its tensors")
    return values[name]


def _max_batch(metas: Sequence[_Meta], ranges: dict[str, dict[str, int | None]]) -> int | None:
    """Return the largest batch; None if unbounded, 0 unless all tensors start with one symbol."""
    expressions = [meta.sizes[0].as_expr if meta.sizes else None for meta in metas]
    # The first dimensions; empty if fixed or missing.
    firsts = {str(each.get("expr_str", "")) if each else "" for each in expressions}
    symbol = re.match(r"Symbol\('(\w+)'[^()]*\)$", firsts.pop()) if len(firsts) == 1 else None
    return 0 if symbol is None else ranges.get(symbol[1], {}).get("max_val")
