"""Skips all of these tests, visibly, where their compiler is missing."""

from __future__ import annotations

import shutil

import pytest

MISSING = [t for t in ("clang++-19", "addr2line") if shutil.which(t) is None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--foreign", help="folder of public repositories with kernels")
    parser.addoption("--full", action="store_true", help="larger slices in test_contraction.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if MISSING:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(MISSING)}"))
