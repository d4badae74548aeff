"""Modules that parts of the package need and that are installed as extras."""

from __future__ import annotations

import importlib.util


def require(module: str, extra: str, part: str) -> None:
    """An error that names the extra to install, unless `module` can be imported."""
    if importlib.util.find_spec(module) is None:
        raise ImportError(f"{part} needs {module}, which is not installed; pip install 'foxlm[{extra}]'")
