"""`penstock export ray` as it is typed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from ray_load import choose, write_pace

from penstock.cli import main
from penstock.system.exit_codes import ExitCode

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "repository"


def typed(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["export", "ray", *map(str, arguments)])


def test_it_writes_the_application_with_all_figures(tmp_path: Path) -> None:
    done = typed(EXAMPLES, "--out", tmp_path / "out", "--max-replicas", 3, "--retries", 1)
    assert done.exit_code == 0, done.output
    assert "serve run serve_config.yaml" in done.output
    assert "digits: num_cpus 1" in done.output
    written = yaml.safe_load((tmp_path / "out" / "serve_config.yaml").read_text())
    (application,) = written["applications"]
    args = application["args"]
    assert args["repository"] == str(EXAMPLES)
    assert args["versions"]["digits"] == ["1"]
    assert (args["max_replicas"], args["retries"]) == (3, 1)
    assert "host" not in args
    names = [each["name"] for each in application["deployments"]]
    assert names == ["penstock_ingress", "digits", "identity", "simple", "text_length"]
    compile((tmp_path / "out" / "app.py").read_text(), "app.py", "exec")


def test_no_replicas_are_a_usage_error(tmp_path: Path) -> None:
    done = typed(EXAMPLES, "--out", tmp_path / "out", "--max-replicas", 0)
    assert done.exit_code == ExitCode.USAGE
    assert "'--max-replicas': 0 is not in the range 1<=x<=10000" in done.stderr


def test_a_promotion_changes_the_file(tmp_path: Path) -> None:
    write_pace(tmp_path / "models", "pace", 0.0, versions=2)

    def written() -> str:
        assert typed(tmp_path / "models", "--out", tmp_path / "out").exit_code == 0
        return (tmp_path / "out" / "serve_config.yaml").read_text()

    first = written()
    assert written() == first
    choose(tmp_path / "models", "pace", 2)
    assert yaml.safe_load(written())["applications"][0]["args"]["versions"] == {"pace": ["2"]}


def test_servers_of_nodes_have_their_own_ports(tmp_path: Path) -> None:
    flags = ["--ingress", "penstock", "--http-port", 9000, "--ingress-replicas", 2]
    assert typed(EXAMPLES, "--out", tmp_path, *flags).exit_code == 0
    written = yaml.safe_load((tmp_path / "serve_config.yaml").read_text())
    args = written["applications"][0]["args"]
    assert (args["ingress"], args["http_port"]) == ("penstock", 9000)
    assert "versions" not in args
    assert written["proxy_location"] == "Disabled"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--host", "0.0.0.0"], "everybody who reaches this address"),
        (["--grpc"], "listen on all interfaces"),
    ],
)
def test_open_ports_need_keys_or_consent(flags: list[str], text: str, tmp_path: Path) -> None:
    refused = typed(EXAMPLES, "--out", tmp_path / "out", *flags)
    assert refused.exit_code == ExitCode.USAGE
    assert text in refused.output
    assert not (tmp_path / "out").exists()
    assert typed(EXAMPLES, "--out", tmp_path / "out", *flags, "--insecure").exit_code == 0


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = typed(EXAMPLES, "--out", tmp_path / "file" / "out")
    assert refused.exit_code == ExitCode.FAILED
    assert "cannot be written" in refused.output


def test_a_program_of_the_user_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("# of the user\n")
    refused = typed(EXAMPLES, "--out", tmp_path)
    assert refused.exit_code == ExitCode.FAILED
    assert "app.py: not written by penstock export" in refused.output
    assert (tmp_path / "app.py").read_text() == "# of the user\n"
