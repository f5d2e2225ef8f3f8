"""Compile the blocks that a network repeats, each kind once (`penstock.compile`: "regional").

A transformer with 24 equal layers is compiled in the time of one. What lies between the blocks runs
as it is, and nothing is fused across their borders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from penstock.errors import ConfigError

# So many blocks of one class must be in a network.
MIN_BLOCKS = 2


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the largest submodules of which several are alike: of one class, with parameters of
    the same names and shapes. None of them lies in another."""
    kinds: dict[object, list[nn.Module]] = {}
    owners = {id(child): parent for parent in module.modules() for child in parent.children()}
    for each in module.modules():
        if each is not module and next(each.children(), None) is not None:
            kinds.setdefault(_kind(each), []).append(each)
    chosen = {id(one): one for alike in kinds.values() if len(alike) >= MIN_BLOCKS for one in alike}
    return [one for one in chosen.values() if not _lies_in(one, owners, chosen)]


def _kind(module: nn.Module) -> object:
    shapes = tuple((name, tuple(each.shape)) for name, each in module.named_parameters())
    return type(module), shapes, str(module)


def _lies_in(
    module: nn.Module, owners: Mapping[int, nn.Module], chosen: Mapping[int, nn.Module]
) -> bool:
    parent = owners.get(id(module))
    while parent is not None:
        if id(parent) in chosen:
            return True
        parent = owners.get(id(parent))
    return False


def compile_regions(module: nn.Module, compile_one: Callable[[nn.Module], None]) -> int:
    """Compile each repeated block in place; return how many. ConfigError if there is none."""
    blocks = repeated_blocks(module)
    if not blocks:
        raise ConfigError(
            "parameters.penstock.compile: regional: the module has no repeated blocks with "
            "submodules; default compiles all of it"
        )
    for each in blocks:
        compile_one(each)
    return len(blocks)
