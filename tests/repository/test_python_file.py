"""What a Python model's file says about itself."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.repository.python_file import local_imports, read_signature


def test_modules_beside_a_file_are_those_that_it_imports_directly_or_not(tmp_path: Path) -> None:
    for name, text in {
        "model.py": "import os, near\nfrom . import dotted\nfrom pack.inner import x\n",
        "near.py": "def late():\n    import further\n",
        "further.py": "import model",
        "dotted.py": "this is no Python",
        "unrelated.py": "",
        "pack/__init__.py": "",
        "pack/inner.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = [path.relative_to(tmp_path).as_posix() for path in local_imports(tmp_path / "model.py")]
    assert found == ["dotted.py", "further.py", "near.py", "pack/__init__.py", "pack/inner.py"]


def test_code_that_ends_the_process_is_told_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(ConfigError, match=r"line 2: .*sys\.exit\(3\)"):
        read_signature(tmp_path / "model.py")
    assert "Traceback" not in capfd.readouterr().err


READ_AS_NOBODY = """
import os, sys
from pathlib import Path
from penstock.backends import python_reader
from penstock.errors import ConfigError

for user in (0, 65534):  # The first reading imports everything.
    os.setuid(user)
    try:
        python_reader.read(Path(sys.argv[1]))
    except ConfigError as error:
        print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_a_file_that_may_not_be_read_is_told_in_one_line() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "model.py"
        path.write_text("")
        path.chmod(0o600)
        command = [sys.executable, "-c", READ_AS_NOBODY, str(path)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        told = ended.stdout.splitlines()
        assert "defines no model" in told[0] and "Permission denied" in told[1] and len(told) == 2
        assert (ended.returncode, ended.stderr) == (0, "")


def test_an_error_of_the_code_keeps_its_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text("open('nothing')\n")
    with pytest.raises(ConfigError, match="line 1: .*nothing"):
        read_signature(tmp_path / "model.py")
    assert "Traceback" in capfd.readouterr().err
