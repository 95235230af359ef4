"""Builds the site from pages that also read well in the repository.

Pages outside of `docs/` become pages of the site, and links between files of the repository become links between pages.
Fences that the tests understand (`python no-run`, a first line `# app.py`) become fences that MkDocs understands.
The site of one version is a folder in `build/site`; `versions.json` lists the folders for the version menu.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[1]
OUTSIDE: Final = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "CODE_OF_CONDUCT.md": "project/code-of-conduct.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "RELEASING.md": "project/releasing.md",
    "SECURITY.md": "project/security.md",
    "README.md": "index.md",
    "bench/RESULTS.md": "project/measurements.md",
    "examples/README.md": "examples.md",
    **{f"examples/{file.name}": f"examples/{file.stem}.md" for file in sorted((ROOT / "examples").glob("*.py"))},
}
"""Files of the repository that are pages of the site. The README has a page that stands for it."""
ASSETS: Final = {
    "images/killick.svg": ROOT / "src/killick/web/static/mark.svg",
    "assets/mermaid.min.js": ROOT / "build/mermaid.min.js",
}

_FENCE: Final = re.compile(r"^( *)(`{3,})(\w+)([^\n`]*)\n(?:(?:#|---) ([\w./-]+\.\w+)\n)?", re.MULTILINE)
_CELL: Final = re.compile(r"`[^`\n]*\\\|[^`\n]*`")
_LINK: Final = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.site_dir = str(Path(config.site_dir) / _version())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for target, path in ASSETS.items():
        files.append(File.generated(config, target, abs_src_path=str(path)))
    for source, target in OUTSIDE.items():
        if source == "README.md":
            continue
        text = (ROOT / source).read_text(encoding="utf-8")
        if source.endswith(".py"):
            text = f"# {Path(source).name}\n\n````python\n{text}\n````\n"
        page = File.generated(config, target, content=text)
        if source.endswith(".py"):
            page.inclusion = page.inclusion.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    origin = next((source for source, target in OUTSIDE.items() if target == page.file.src_uri), None)
    source = origin if origin and origin != "README.md" else f"docs/{page.file.src_uri}"

    def linked(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, _, anchor = target.partition("#")
        found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        place = OUTSIDE.get(found, found.removeprefix("docs/") if found.startswith("docs/") else None)
        if place is None or files.get_file_from_path(place) is None:
            return match[0] if found.startswith("docs/") else text  # a source file: the site does not have it
        way = posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or ".")
        return f"{mark}[{text}]({way}{'#' + anchor if anchor else ''})"

    return "".join(
        _FENCE.sub(_fence, part) if is_code else _CELL.sub(_cell, _LINK.sub(linked, part))
        for part, is_code in _parts(markdown)
    )


def on_post_build(config: MkDocsConfig) -> None:
    """List every version that was built, newest first, and open the newest at the root of the site."""
    site = Path(config.site_dir).parent
    found = sorted((folder.name for folder in site.iterdir() if (folder / "index.html").exists()), reverse=True)
    listed: list[dict[str, Any]] = [{"version": name, "title": name, "aliases": []} for name in found]
    listed[0]["aliases"] = ["latest"]
    (site / "versions.json").write_text(json.dumps(listed))
    (site / "index.html").write_text(f'<meta http-equiv="refresh" content="0; url={found[0]}/index.html">\n')


def _version() -> str:
    text = (ROOT / "src/killick/version.py").read_text(encoding="utf-8")
    return re.findall(r"\d+\.\d+[\w.]*", text)[-1]


def _parts(markdown: str) -> list[tuple[str, bool]]:
    """The text in and between fenced blocks, in order; True marks a block."""
    parts: list[tuple[str, bool]] = []
    at = 0
    while opened := _FENCE.search(markdown, at):
        closed = re.compile(rf"^ *{opened[2]}`* *$\n?", re.MULTILINE).search(markdown, opened.end())
        end = closed.end() if closed else len(markdown)
        parts += [(markdown[at : opened.start()], False), (markdown[opened.start() : end], True)]
        at = end
    return [*parts, (markdown[at:], False)]


def _cell(match: re.Match[str]) -> str:
    """Code in a table: GitHub wants its bars escaped, MkDocs does not."""
    return match[0].replace("\\|", "|")


def _fence(match: re.Match[str]) -> str:
    indent, ticks, language, words, name = match.groups()
    if name and language == "diff":
        return f'{indent}{ticks}{language} title="changes in {name}"\n'
    if name and language in ("python", "toml"):
        return f'{indent}{ticks}{language} title="{name}"\n'
    rest = match[0].split("\n", 1)[1]
    return f"{indent}{ticks}{language}{words.replace(' no-run', '')}\n{rest}"
