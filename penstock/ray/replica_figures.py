"""Figures of all replicas of a model as one: statistics are added up, metrics get the replica as a
label. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# The name of a sample and its labels, if it has any.
_SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?(?P<value> .*)")
# Statistics that are no counts: the latest of all is kept.
LATEST = ("last_inference",)
# Members of a list of statistics are the same if these are.
KEYS = ("batch_size", "name", "version")


def add_statistics(found: Sequence[object]) -> object:
    """Return the sum of v2's statistics of several replicas, entry by entry."""
    first = found[0]
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for each in found if isinstance(each, Mapping) for key in each)
        return {
            key: _add_field(
                key, [each[key] for each in found if isinstance(each, Mapping) and key in each]
            )
            for key in keys
        }
    if isinstance(first, list):
        groups: dict[tuple[object, ...], list[object]] = {}
        for items in found:
            for item in items if isinstance(items, list) else ():
                groups.setdefault(_identity(item), []).append(item)
        return [add_statistics(group) for group in groups.values()]
    if isinstance(first, int | float) and not isinstance(first, bool):
        return sum(each for each in found if isinstance(each, int | float))
    return first


def _add_field(key: str, values: Sequence[object]) -> object:
    if key in KEYS:
        return values[0]
    if key in LATEST:
        return max(each for each in values if isinstance(each, int | float))
    return add_statistics(values)


def _identity(item: object) -> tuple[object, ...]:
    return tuple(item.get(key) for key in KEYS) if isinstance(item, Mapping) else (item,)


def join_metrics(texts: Mapping[str, str]) -> str:
    """Return the Prometheus text of several replicas as one: each sample gets a label `replica`,
    and each metric is described once."""
    comments: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                parts = line.split(" ", 3)
                family = parts[2] if len(parts) > 2 else family
                told = comments.setdefault(family, [])
                if line not in told:
                    told.append(line)
            elif (match := _SAMPLE.fullmatch(line)) is not None:
                labels = ",".join(filter(None, (match["labels"], f'replica="{replica}"')))
                sample = f"{match['name']}{{{labels}}}{match['value']}"
                samples.setdefault(family or match["name"], []).append(sample)
    families = dict.fromkeys([*comments, *samples])
    lines = [line for name in families for line in comments.get(name, []) + samples.get(name, [])]
    return "\n".join(lines) + "\n" if lines else ""
