"""What a Python model's file says about itself."""

from pathlib import Path

from penstock.python_file import local_imports


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
