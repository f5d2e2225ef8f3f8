"""Triton's own examples and tests against Penstock, as shipped, with 1 and 2 shards.

    TRITON_CLIENT=... TRITON_SERVER=... TRITON_PYTHON_BACKEND=... python tests/triton_examples.py
    ... --group clients      # one group; --list prints them
    ... --only simple_http   # items of scenes with this in their title

The three variables name checkouts of Triton's repositories; without them it says how to get them,
and fails. Exit code 1 if an item fails that tests/triton_material/reasons.py does not list, or if
one passes that it lists. Servers use Triton's ports; as root, in a network of their own.
Logs are in `.bench/triton-examples/`.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from triton_material import client_examples, python_models, qa_protocol, qa_python, reasons
from triton_material.checkouts import Checkouts, MissingCheckoutError, find_checkouts
from triton_material.scenes import Scene, file_name, play
from triton_material.server import busy_ports, isolate_ports
from triton_material.table import Table

LOGS = Path(__file__).resolve().parents[1] / ".bench" / "triton-examples"
SHARDS = (1, 2)

GROUPS: Mapping[str, tuple[str, Callable[[Checkouts], list[Scene]]]] = {
    "clients": ("Example repository and clients", client_examples.scenes),
    "models": ("QA's Python models", python_models.model_scenes),
    "generated": ("Models of QA's generators", python_models.generated_scenes),
    "backend": ("Examples of the Python backend", python_models.example_scenes),
    "python": ("QA's tests of Python models", qa_python.scenes),
    "protocol": ("QA's tests of HTTP and gRPC", qa_protocol.scenes),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--group", choices=GROUPS, action="append", help="only this group")
    parser.add_argument("--only", default="", help="only checks with this in their title")
    parser.add_argument("--shards", type=int, action="append", help="1 and 2 by default")
    parser.add_argument("--list", action="store_true", help="print groups and scenes, and end")
    given = parser.parse_args()
    try:
        checkouts = find_checkouts()
    except MissingCheckoutError as error:
        print(error, file=sys.stderr)
        return 1
    if given.list:
        for name, (title, scenes_of) in GROUPS.items():
            print(f"{name}: {title}")
            print("".join(f"    {scene.title}\n" for scene in scenes_of(checkouts)), end="")
        return 0
    if not isolate_ports() and busy_ports():
        ports = ", ".join(map(str, busy_ports()))
        print(f"Triton's examples need port {ports}: stop what listens there", file=sys.stderr)
        return 1
    # Servers end with this program.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    shards = tuple(given.shards or SHARDS)
    tables = [
        play_group(name, pick_scenes(name, GROUPS[name][1](checkouts), given.only), shards)
        for name in given.group or GROUPS
    ]
    print("\n".join(["", *(table.summary() for table in tables)]))
    num_faults = sum(table.num_faults() for table in tables)
    took_min = (time.monotonic() - began) / 60
    print(f"{num_faults} items differ from what is listed; {took_min:.1f} min")
    return 1 if num_faults or not any(table.rows() for table in tables) else 0


def pick_scenes(group: str, scenes: list[Scene], only: str) -> list[Scene]:
    """Keep scenes with this in their title, and checks with it in theirs."""
    if not only:
        return [each for each in scenes if each.title not in reasons.UNJUDGED.get(group, ())]
    picked = []
    for scene in scenes:
        checks = tuple(check for check in scene.checks if only in check.title)
        if only in scene.title:
            picked.append(scene)
        elif checks:
            picked.append(replace(scene, checks=checks, loads=""))
    return picked


def play_group(name: str, scenes: list[Scene], shards: tuple[int, ...]) -> Table:
    table = Table(GROUPS[name][0], shards, reasons.failing(), reasons.not_run(name))
    for scene in scenes:
        for number in shards:
            folder = LOGS / f"{file_name(scene.title)}-{number}"
            results = play(scene, number, folder)
            passed = sum(each.has_passed for each in results.values())
            told = f"{scene.title}, {number} shard{'s'[: number > 1]}"
            print(f"{told}: {passed} of {len(results)} pass", file=sys.stderr, flush=True)
            table.add(number, results)
    print("\n".join(table.lines()), flush=True)
    return table


if __name__ == "__main__":
    sys.exit(main())
