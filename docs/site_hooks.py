"""Pages of the site that live outside docs/, and links to and from them."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Name on the site -> file in the repository.
OUTSIDE = {"benchmarks.md": "benchmarks/README.md", "changelog.md": "CHANGELOG.md"}


def on_files(files: Files, config: Any) -> Files:
    for name, path in OUTSIDE.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    for name, path in OUTSIDE.items():
        markdown = markdown.replace(f"](../{path}", f"]({name}")
    if page.file.src_uri in OUTSIDE:
        markdown = re.sub(r"\]\((?:\.\./)?docs/", "](", markdown)
    return markdown


def without_cdn(output: str) -> str:
    """Load the stand-in for workers from the site itself instead of from a CDN."""
    return output.replace("https://unpkg.com/iframe-worker/shim", "javascripts/file_worker.js")


def on_post_page(output: str, page: Any, config: Any) -> str:
    return without_cdn(output)


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    return without_cdn(output_content)
