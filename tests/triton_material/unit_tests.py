"""Runs the unit tests of a file, and writes one line of JSON for each: name, and what went wrong.

    python unit_tests.py REPORT LIMIT_S FILE [CLASS | CLASS::TEST | -CLASS::TEST]...

Without names all are run but those with a dash. QA's classes do not run under pytest; classes for
pytest are run as if they were of unittest. The working directory is that of the file.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType


class Reporter(unittest.TestResult):
    """Writes each outcome at once; a test that takes too long fails."""

    def __init__(self, report: Path, limit_s: int) -> None:
        super().__init__()
        self._report = report
        self._limit_s = limit_s
        self._fault = ""
        self._is_skipped = False

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._fault, self._is_skipped = "", False
        signal.alarm(self._limit_s)

    def stopTest(self, test: unittest.TestCase) -> None:
        signal.alarm(0)
        super().stopTest(test)
        if not self._is_skipped:
            self._write(test.id(), self._fault)

    def addError(self, test: unittest.TestCase, err: object) -> None:
        super().addError(test, err)
        self._keep(test, err[1], self.errors[-1][1])

    def addFailure(self, test: unittest.TestCase, err: object) -> None:
        super().addFailure(test, err)
        self._keep(test, err[1], self.failures[-1][1])

    def addSubTest(self, test: unittest.TestCase, subtest: object, err: object) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._keep(test, err[1], str(err[1]))

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._is_skipped = True

    def _keep(self, test: unittest.TestCase, error: BaseException, text: str) -> None:
        print(text, flush=True)
        lines = str(error).strip().splitlines()
        self._fault = f"{type(error).__name__}: {lines[0] if lines else ''}"
        if not isinstance(test, unittest.TestCase):  # A module or class that cannot be set up.
            self._write(str(test), self._fault)

    def _write(self, name: str, fault: str) -> None:
        with self._report.open("a") as file:
            file.write(json.dumps({"name": ".".join(name.split(".")[-2:]), "fault": fault}) + "\n")


def expire(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("the test takes too long")


def adopt(module: ModuleType) -> None:
    """Make classes for pytest classes of unittest."""
    for name, found in list(vars(module).items()):
        is_plain = isinstance(found, type) and found.__bases__ == (object,)
        if is_plain and name.startswith("Test") and found.__module__ == module.__name__:
            setattr(module, name, type(name, (found, unittest.TestCase), {}))


def cases(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from cases(each)
        else:
            yield each


def main(arguments: list[str]) -> None:
    report, limit_s, file, *names = arguments
    without = {name.removeprefix("-") for name in names if name.startswith("-")}
    only = [name for name in names if not name.startswith("-")]
    sys.path.insert(0, str(Path(file).parent))
    signal.signal(signal.SIGALRM, expire)
    module = importlib.import_module(Path(file).stem)
    adopt(module)
    loader = unittest.TestLoader()
    found = loader.loadTestsFromModule(module)
    if only:
        dotted = [name.replace("::", ".") for name in only]
        found = loader.loadTestsFromNames(dotted, module)
    chosen = [each for each in cases(found) if "::".join(each.id().split(".")[-2:]) not in without]
    unittest.TestSuite(chosen).run(Reporter(Path(report), int(limit_s)))


if __name__ == "__main__":
    main(sys.argv[1:])
