"""The direction of imports, read from the source, and what really gets loaded, asked of a fresh interpreter.

gateway ──► retrieval
   └──────► engine.{protocol, client, errors, settings, logging_setup} ◄── engine
                                    engine ──► kernels.{dispatch, metadata, upload} ──► torch, triton
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("gateway", "engine", "kernels", "retrieval")
HEAVY = frozenset({"torch", "transformers", "triton"})

# What a package may import of the others; a name covers the modules below it.
ALLOWED = {
    "kernels": ("kernels",),
    "engine": ("engine", "kernels.dispatch", "kernels.metadata", "kernels.upload"),
    "gateway": (
        "gateway",
        "retrieval",
        "engine.protocol",
        "engine.client",
        "engine.errors",
        "engine.settings",
        "engine.logging_setup",
    ),
    "retrieval": ("retrieval",),
}
KERNELS_MAY_IMPORT = frozenset({"torch", "triton", "kernels"}) | sys.stdlib_module_names
# Bookkeeping and wire: without tensors, so that they are tested and reasoned about without a model.
LIGHT_MODULES = (
    "engine.batch",
    "engine.block_pool",
    "engine.client",
    "engine.errors",
    "engine.kv_cache_manager",
    "engine.prefix_index",
    "engine.protocol",
    "engine.request",
    "engine.scheduler",
    "engine.server",
    "engine.settings",
    "gateway.app",
    "gateway.cli",
    "gateway.server",
    "gateway.supervisor",
    "retrieval.documents",
)


def source_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported_names(path: Path) -> Iterator[str]:
    """Every module that a file names in an import, inside functions and `if TYPE_CHECKING` too."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{path}: a relative import hides its direction"
            assert node.level == 0, f"{path}: a relative import hides its direction"
            yield node.module
            # `from kernels import reference` imports a module as well.
            if node.module in PACKAGES:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def covers(allowed: str, name: str) -> bool:
    return name == allowed or name.startswith(f"{allowed}.")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_downwards(package: str) -> None:
    """One import upwards, and engine and gateway can no longer be run, tested or replaced apart."""
    files = source_files(package)
    assert files, "there is something to check"
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in imported_names(path)
        if name.split(".")[0] in PACKAGES
        and name not in PACKAGES
        and not any(covers(allowed, name) for allowed in ALLOWED[package])
    ]
    assert wrong == []


def test_kernels_import_tensors_and_nothing_else() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in source_files("kernels")
        for name in imported_names(path)
        if name.split(".")[0] not in KERNELS_MAY_IMPORT
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ["gateway", "retrieval"])
def test_no_tensor_library_is_named_at_the_edge(package: str) -> None:
    """An import inside a function loads torch as well, only later and unseen."""
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in source_files(package)
        for name in imported_names(path)
        if name.split(".")[0] in HEAVY
    ]
    assert wrong == []


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_module_loads_without_tensors(module: str) -> None:
    """Through three imports torch is as loaded as through one: 2 s and 300 MB for each gateway worker."""
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & {set(HEAVY)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_check_sees_every_kind_of_import(tmp_path: Path) -> None:
    """A checker that overlooks a form of import guards nothing."""
    path = tmp_path / "sample.py"
    path.write_text(
        "import engine.server\nfrom gateway import app\nif 1:\n    from engine.scheduler import Scheduler\n"
        "def f():\n    import torch\n"
    )
    assert list(imported_names(path)) == ["engine.server", "gateway", "gateway.app", "engine.scheduler", "torch"]
