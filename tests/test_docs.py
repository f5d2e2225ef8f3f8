"""The documents are true: links resolve, commands parse, code runs, configurations are valid."""

import ast
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from penstock.cli import main

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
    + [ROOT / "benchmarks" / "README.md", ROOT / "examples" / "README.md"]
)
# On the site these pages stand beside those of docs/ (docs/site_hooks.py).
RUN = "<!-- run -->"
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^ *```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    where: str
    language: str
    text: str
    is_run: bool


def blocks(path: Path) -> Iterator[Block]:
    text = path.read_text()
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        is_run = text[: match.start()].rstrip().endswith(RUN)
        yield Block(f"{path.name}:{line}", match["language"], match["text"], is_run)


BLOCKS = [block for path in PAGES for block in blocks(path)]


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def by_place(block: Block) -> str:
    return block.where


# Links


def slugs(path: Path) -> set[str]:
    """Anchors of the headings, as GitHub and as the site make them; they must agree."""
    text = FENCE.sub("", path.read_text())
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading.replace("`", ""))
        kept = re.sub(r"[^\w\s-]", "", plain).strip().lower()
        if kept.replace(" ", "-") == re.sub(r"[-\s]+", "-", kept):
            found.add(kept.replace(" ", "-"))
    return found | set(re.findall(r'id="([^"]+)"', text))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_and_anchors_resolve(path: Path) -> None:
    text = FENCE.sub("", path.read_text())
    for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        page = (path.parent / file).resolve() if file else path
        assert page.exists(), f"{path.name}: {target} does not exist"
        if anchor:
            assert anchor in slugs(page), f"{path.name}: {target} has no such heading"


def test_every_picture_is_small_and_used() -> None:
    text = "\n".join(path.read_text() for path in PAGES)
    for picture in (ROOT / "docs" / "pictures").iterdir():
        assert picture.name in text, f"{picture.name} is on no page"
        assert picture.stat().st_size < 200_000, picture.name


# Commands


def command_lines(text: str) -> Iterator[list[str]]:
    """The arguments of every `penstock` command in a shell block."""
    for line in text.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue  # a line of a longer quotation, such as a here-document
        while words:
            end = next((i for i, word in enumerate(words) if word in ("&&", "|", ";", "&")), None)
            command, words = words[:end], words[end + 1 :] if end is not None else []
            while command and re.fullmatch(r"\w+=.*|\$|time|nohup|sudo", command[0]):
                command = command[1:]
            if command and Path(command[0]).name == "penstock":
                yield [word for word in command[1:] if not re.match(r"\d?>", word)]


COMMANDS = [
    pytest.param(arguments, id=f"{block.where} {' '.join(arguments)[:60]}")
    for block in of("sh", "console")
    for arguments in command_lines(block.text)
]


def check_arguments(arguments: list[str]) -> None:
    """Parse a command line with the real options, without running it or looking at files."""
    group = click.Context(main, info_name="penstock")
    if arguments[0].startswith("-"):
        main.make_parser(group).parse_args(list(arguments))
        return
    command = main.get_command(group, arguments[0])
    assert command, f"there is no command {arguments[0]}"
    context = click.Context(command, group, info_name=arguments[0])
    while isinstance(command, click.Group):
        arguments = arguments[1:]
        command = command.get_command(context, arguments[0])
        assert command, f"there is no command {arguments[0]}"
        context = click.Context(command, context, info_name=arguments[0])
    values, rest, _ = command.make_parser(context).parse_args(list(arguments[1:]))
    assert not rest, f"{rest} is left over"
    for parameter in command.get_params(context):
        value = values.get(parameter.name or "")
        if isinstance(parameter, click.Argument) and parameter.required:
            assert isinstance(value, str | tuple), f"{parameter.name} is missing"
        if isinstance(value, str) and isinstance(parameter.type, click.Choice | click.IntRange):
            parameter.type.convert(value, parameter, context)


@pytest.mark.parametrize("arguments", COMMANDS)
def test_commands_parse(arguments: list[str]) -> None:
    check_arguments(arguments)


@pytest.mark.parametrize(
    "wrong",
    [["serve", "models", "--no-such-flag"], ["bench"], ["inspect", "a", "b"], ["no-such-command"]]
    + [["repo", "promote", "models", "m"], ["repo", "no-such"], ["repo", "list", "--keep", "1"]]
    + [["serve", "models", "--http-port", "many"]],
)
def test_a_wrong_command_is_found(wrong: list[str]) -> None:
    with pytest.raises((click.UsageError, AssertionError)):
        check_arguments(wrong)


def all_options(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner
            yield from all_options(inner)


# Flags of other programs that the pages name.
FOREIGN = re.compile(
    r"pytest|curl|scorecard|benchmarks/|lm_eval|make |vllm|tritonserver|python |batch_size"
)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_flags_in_prose_exist(path: Path) -> None:
    known = {*all_options(main), "--help", "-h"}
    if path.parts[-2] in ("benchmarks", "examples") or path.name == "from-vllm.md":
        return
    text = FENCE.sub("", path.read_text())
    for code in re.findall(r"`(--[^`]+)`", text):
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", code):
            assert flag in known or FOREIGN.search(code), f"{path.name}: {code}"


# Code and configuration


@pytest.mark.parametrize("block", of("python"), ids=by_place)
def test_python_is_valid(block: Block) -> None:
    ast.parse(block.text)


@pytest.mark.parametrize(
    "block",
    [
        # A measurement takes its time.
        pytest.param(each, marks=pytest.mark.slow) if "penstock.bench(" in each.text else each
        for each in of("python")
        if each.is_run
    ],
    ids=by_place,
)
def test_python_runs(block: Block) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", block.text],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", of("toml"), ids=by_place)
def test_toml_is_valid(block: Block) -> None:
    tomllib.loads(block.text)


@pytest.mark.parametrize("block", of("json"), ids=by_place)
def test_json_is_valid(block: Block) -> None:
    json.loads(block.text)


@pytest.mark.parametrize("block", of("pbtxt"), ids=by_place)
def test_pbtxt_is_valid(block: Block) -> None:
    text_format.Parse(block.text, ModelConfig())


def test_blocks_have_a_known_language() -> None:
    known = {"sh", "console", "python", "toml", "json", "pbtxt", "text", "yaml"}
    assert {block.language for block in BLOCKS} <= known


# The site


def test_every_page_has_its_place_on_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    for path in ROOT.glob("docs/*.md"):
        assert re.search(rf"\b{re.escape(path.name)}\b", nav), f"{path.name} is not in mkdocs.yml"


@pytest.mark.slow
def test_the_site_builds_and_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="make docs installs mkdocs-material")
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "start.html").is_file()
    loaded = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>")
    for page in tmp_path.rglob("*.html"):
        assert not loaded.findall(page.read_text()), page.name


def test_docker_and_podman_send_the_same_context_of_the_image() -> None:
    """Docker does not know .containerignore, which podman prefers: keys and models beside the
    Containerfile would be sent, and caches copied."""
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"
    assert not (ROOT / ".containerignore").exists()
