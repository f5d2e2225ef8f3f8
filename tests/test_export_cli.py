"""`penstock export` as it is typed."""

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from penstock.cli import main
from penstock.system.exit_codes import ExitCode

EXAMPLES = Path(__file__).parents[1] / "examples" / "repository"


def typed(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


@pytest.mark.parametrize(
    ("form", "flags"), [("kubernetes", []), ("helm", []), ("kserve", ["--storage-uri", "s3://b"])]
)
def test_files_figures_and_next_commands_are_told(
    form: str, flags: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = typed("export", form, EXAMPLES, "--image", "i:1", "--out", out, *flags)
    assert done.exit_code == 0, done.output
    files = [path for path in out.rglob("*") if path.is_file()]
    assert all(str(path) in done.stdout for path in files) and files
    assert "memory: the server 256 MiB" in done.stdout
    assert "kubectl create secret generic" in done.stdout


def test_stdout_has_the_documents_and_nothing_else() -> None:
    done = typed("export", "kubernetes", EXAMPLES, "--image", "i:1", "--out", "-")
    documents = list(yaml.safe_load_all(done.stdout))
    assert len(documents) == 6 and all(each["kind"] for each in documents)
    assert "kubectl apply --filename -" in done.stderr


def test_a_repeated_export_tells_what_it_removed(tmp_path: Path) -> None:
    typed("export", "kubernetes", EXAMPLES, "--image", "i:1", "--out", tmp_path)
    flags = ("--image", "i:1", "--autoscaler", "none", "--out", tmp_path)
    done = typed("export", "kubernetes", EXAMPLES, *flags)
    assert f"removed {tmp_path}/scaledobject.yaml, of an earlier export" in done.stdout


def test_wrong_flags_are_a_usage_error() -> None:
    done = typed("export", "kubernetes", EXAMPLES)
    assert done.exit_code == ExitCode.USAGE
    assert "error: --image is required" in done.stderr


def test_an_unknown_form_names_those_there_are() -> None:
    done = typed("export", "nomad", EXAMPLES)
    assert done.exit_code != 0
    assert "expected one of kubernetes, helm, kserve" in done.stderr
