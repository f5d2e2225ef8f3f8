"""A real Prometheus of Debian that scrapes servers of this machine, and its promtool."""

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

# The servers of the end-to-end tests, and Debian's packages.
sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from debian import unpack

CONFIG = """
global:
  scrape_interval: 1s
  scrape_timeout: 1s
  evaluation_interval: 1s
rule_files: {rules}
scrape_configs:
  - job_name: {job}
{authorization}    static_configs:
      - targets: {targets}
        labels: {labels}
"""
AUTHORIZATION = """    authorization:
      type: Bearer
      credentials: {key}
"""


@dataclass(frozen=True)
class ScrapeJob:
    """What the operator of Prometheus makes of a ServiceMonitor: its labels, and its key."""

    name: str = "penstock"
    namespace: str = ""
    key: str = ""

    def configure(self, targets: Sequence[str], rules: Sequence[Path]) -> str:
        return CONFIG.format(
            rules=json.dumps([str(each) for each in rules]),
            job=self.name,
            authorization=AUTHORIZATION.format(key=self.key) if self.key else "",
            targets=json.dumps(list(targets)),
            labels=json.dumps({"namespace": self.namespace} if self.namespace else {}),
        )


def find(program: str) -> str:
    """Return the path of a program of Debian's package. Fails where there is none: these tests are
    worth nothing without it."""
    if found := shutil.which(program):
        return found
    try:
        return str(unpack("prometheus") / "usr" / "bin" / program)
    except pytest.skip.Exception as reason:
        pytest.fail(f"{program} is required: apt-get install prometheus ({reason})")


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [find("promtool"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, **parameters: str) -> Mapping[str, object]:
        """Return the `data` of an answer; AssertionError with Prometheus's reason if it is none."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                told = json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{parameters}: {error.read().decode()}") from None
        assert told["status"] == "success", told
        assert not told.get("warnings"), told
        return told["data"]

    def query(self, expression: str) -> list[dict]:
        return self.ask("query", query=expression)["result"]

    def read_value(self, expression: str) -> float:
        """Return the one value of a query, as KEDA's scaler reads it; 0 without one."""
        found = self.query(expression)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else 0.0

    def count_up(self) -> int:
        """Count targets that answer scrapes."""
        return sum(each["health"] == "up" for each in self.ask("targets")["activeTargets"])


@contextlib.contextmanager
def running(
    targets: Sequence[str], *rules: Path, job: ScrapeJob | None = None
) -> Iterator[Prometheus]:
    """Yield a Prometheus once all its targets answer."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, log = folder / "prometheus.yaml", folder / "log"
        config.write_text((job or ScrapeJob()).configure(targets, rules))
        command = [find("prometheus"), f"--config.file={config}"]
        command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"]
        with log.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file)
        found = Prometheus(f"http://127.0.0.1:{port}")
        try:
            ends = time.monotonic() + 60
            while not _scrapes_all(found, len(targets)):
                assert process.poll() is None and time.monotonic() < ends, log.read_text()
                time.sleep(0.1)
            yield found
        finally:
            process.terminate()
            process.wait(30)


def _scrapes_all(found: Prometheus, num_targets: int) -> bool:
    with contextlib.suppress(OSError, AssertionError):
        return found.count_up() == num_targets
    return False
