"""Cores that processes have for themselves."""

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.ray.core_claims import CoreClaim

HOLD = (
    "import sys; from pathlib import Path; from penstock.ray.core_claims import CoreClaim; "
    "claim = CoreClaim(2, range(4), Path(sys.argv[1])); print(sorted(claim.cores), flush=True); "
    "sys.stdin.read()"
)


def test_claims_do_not_overlap_and_end_with_their_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    with other:
        assert other.stdout.readline() == "[0, 1]\n"
        mine = CoreClaim(3, range(4), tmp_path)
        assert mine.cores == {2, 3}
        other.kill()
    again = CoreClaim(3, range(4), tmp_path)
    assert again.cores == {0, 1}
    mine.release()
    assert mine.cores == frozenset()
    third = CoreClaim(4, range(4), tmp_path)
    assert third.cores == {2, 3}
    again.release()
    third.release()


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    """A link in it could name any file of this user."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (shared / "core-0").symlink_to(tmp_path / "made")
    (tmp_path / "link").symlink_to(tmp_path)
    for folder in (shared, tmp_path / "link"):
        with pytest.raises(ConfigError, match="remove it"):
            CoreClaim(1, [0], folder)
    shared.chmod(0o700)
    with pytest.raises(OSError, match="core-0"):
        CoreClaim(1, [0], shared)
    assert not (tmp_path / "made").exists()
