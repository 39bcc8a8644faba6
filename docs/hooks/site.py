"""What MkDocs does besides reading docs/: adds the pages of families and benchmarks, and writes the reference pages.

A family's page is the README.md in its folder, so that a family is one folder. Links are those of the repository, which
GitHub follows; here they are turned into the site's own. Must not change what a page says.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import reference  # noqa: E402

PICTURES = (".png", ".svg")


def outside_docs() -> dict[str, str]:
    """Files of the repository that are part of the site, with their place in it."""
    found = {"benchmarks/README.md": "benchmarks.md"}
    found |= {
        name: name.lower() for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md") if (ROOT / name).exists()
    }
    for page in sorted((ROOT / "fullshard" / "families").glob("*/README.md")):
        folder = page.parent.relative_to(ROOT).as_posix()
        found[f"{folder}/README.md"] = f"families/{page.parent.name}.md"
        pictures = [file.name for file in sorted(page.parent.iterdir()) if file.suffix in PICTURES]
        found |= {f"{folder}/{name}": f"families/{name}" for name in pictures}
    return found


def on_config(config: Any) -> Any:
    """Lists every family's page under `Families`, and the project's own pages under `Project`."""
    pages = [place for place in outside_docs().values() if place.endswith(".md")]
    for section in config.nav:
        if "Families" in section:
            section["Families"] = [place for place in pages if place.startswith("families/")]
        if "Project" in section:
            section["Project"] += [place for place in pages if "/" not in place and place not in section["Project"]]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are not in docs/."""
    for path, place in outside_docs().items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, "reference/recipe.md", content=reference.recipe_page()))
    files.append(File.generated(config, "reference/commands.md", content=reference.commands_page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links between files of the repository into links between pages of the site."""
    places = outside_docs()
    homes = {place: path for path, place in places.items()}
    here = page.file.src_uri
    source = homes.get(here, f"docs/{here}")

    def turned(found: re.Match[str]) -> str:
        target, mark, anchor = found[2].partition("#")
        if not target or ":" in target:
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        place = places.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if place is None:  # a file that only the repository has
            return found[1][1:-1] if (ROOT / path).exists() else found[0]
        return f"{found[1]}({posixpath.relpath(place, posixpath.dirname(here) or '.')}{mark}{anchor})"

    return re.sub(r"(\[[^\]]*\])\(([^()\s]+)\)", turned, markdown)
