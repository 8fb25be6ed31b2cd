"""What is not Python comes along with the installed package, too: from a clone a forgotten file is not missed."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import cast

from tests.test_import_directions import PACKAGES, ROOT


def packaged() -> set[Path]:
    """As setuptools reads `package-data`: patterns relative to a package, `*` for every package."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        settings = tomllib.load(file)
    patterns = cast("dict[str, list[str]]", settings["tool"]["setuptools"]["package-data"])
    found: set[Path] = set()
    for directory in {path.parent for name in PACKAGES for path in (ROOT / name).rglob("__init__.py")}:
        package = ".".join(directory.relative_to(ROOT).parts)
        for pattern in [*patterns["*"], *patterns.get(package, [])]:
            found.update(directory.glob(pattern))
    return found


def test_every_file_of_the_packages_is_packaged() -> None:
    files = {path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()}
    data = {path for path in files if path.suffix not in (".py", ".pyc")}
    assert len(data) > 20
    assert {str(path.relative_to(ROOT)) for path in data - packaged()} == set()
