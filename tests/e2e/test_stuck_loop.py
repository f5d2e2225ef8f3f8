"""A real server whose event loop is stuck: it says so, and still ends when it is told to."""

import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from served import Served
from waiting import wait_until

# The path that a client may ask for stops the loop, as a bug of the server might.
STUCK = """
import time
from penstock.serving.management import ManagementApi

async def stuck(self, call):
    while True:
        time.sleep(0.01)

ManagementApi.server_metadata = stuck
from penstock.cli import main
main()
"""


class StuckServed(Served):
    """`penstock serve`, with a path that never returns."""

    def __init__(self, path, *flags):
        real = subprocess.Popen

        def patched(command, **options):
            assert command[1:3] == ["-m", "penstock"]
            return real([sys.executable, "-c", STUCK, *command[3:]], **options)

        subprocess.Popen = patched
        try:
            super().__init__(path, *flags)
        finally:
            subprocess.Popen = real


def get(url):
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except (TimeoutError, urllib.error.URLError):
        # The loop had taken the connection before it was stuck.
        return 0, b""


@pytest.mark.slow
def test_it_is_not_live_and_sigterm_ends_it(tmp_path):
    served = StuckServed(tmp_path, "--drain-s", "3", "--model-control-mode", "explicit")
    url = served.metrics_url.rsplit("/", 1)[0] + "/v2/health/live"
    wait_until(lambda: get(url)[0] == 200)
    asker = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import urllib.request as r; r.urlopen('http://{served.address}/v2')",
        ],
        stderr=subprocess.DEVNULL,
    )
    status, deadline = 200, time.monotonic() + 60
    while status != 503 and time.monotonic() < deadline:
        status, body = get(url)
    assert status == 503 and b"stuck" in body
    served.process.terminate()
    assert served.process.wait(60) == 1
    served.process.stdout.close()
    asker.wait(60)
    served.errors.seek(0)
    log = served.errors.read()
    assert "the event loop is stuck" in log and "in stuck" in log and "grace period" in log
    served.errors.close()
