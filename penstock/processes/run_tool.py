"""`python -m penstock.processes.run_tool PARENT MODULE ARGUMENTS` runs MODULE as `python -m` does,
in a process that dies with its parent. `tool` is the parent's side."""

from __future__ import annotations

import os
import runpy
import sys

from penstock.processes.endings import die_with_parent


def main() -> None:
    parent, module = int(sys.argv[1]), sys.argv[2]
    die_with_parent()
    if os.getppid() != parent:
        return
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
