"""`kernels` is also the import name of a Hugging Face package that transformers looks for by that name.

transformers asks whether a package `kernels` can be imported and which version its distribution has. With that
distribution installed beside ours, or with a version on our package, it would take our modules for theirs, call
into them for layers from the hub, and fail or replace the attention that we put in.
"""

from __future__ import annotations

import ast
from importlib import metadata
from pathlib import Path

import pytest
from transformers.utils.import_utils import is_kernels_available

import kernels


def test_the_package_holds_a_docstring_and_nothing_else() -> None:
    assert kernels.__file__ is not None
    body = ast.parse(Path(kernels.__file__).read_text(encoding="utf-8")).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)
    assert kernels.__doc__
    assert not hasattr(kernels, "__version__")


def test_the_hugging_face_package_is_not_installed() -> None:
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("kernels")


def test_transformers_does_not_take_our_package_for_the_other() -> None:
    assert not is_kernels_available()
