"""Processes that this one has started, found by what they run."""

import contextlib

import psutil


def children_running(text: str, parent: psutil.Process | None = None) -> list[psutil.Process]:
    """Descendants whose command line has this text. One that has ended has no command line."""
    found = []
    for process in (parent or psutil.Process()).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if text in " ".join(process.cmdline()):
                found.append(process)
    return found
