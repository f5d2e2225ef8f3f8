"""What an exit status says."""

import pytest

from penstock.processes.endings import describe_status


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0, "exited with status 0"),
        (7, "exited with status 7"),
        (-9, "was killed by SIGKILL"),
        (-11, "was killed by SIGSEGV"),
        (-63, "was killed by signal 63"),
    ],
)
def test_a_status_is_described(status: int, text: str) -> None:
    assert describe_status(status) == text
