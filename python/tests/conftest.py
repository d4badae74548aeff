"""Tests of PyTorch are skipped where it is not installed, unless FOX_PYTHON_TORCH=1 says that it must be."""

import importlib.util
import os

import pytest

REQUIRED = os.environ.get("FOX_PYTHON_TORCH") == "1"


def need(module):
    """Imports a module, or skips the tests of this file."""
    if REQUIRED or importlib.util.find_spec(module) is not None:
        return importlib.import_module(module)
    return pytest.skip(f"{module} is not installed", allow_module_level=True)


@pytest.fixture(scope="session")
def ranks():
    """Processes that form gloo groups of 1 to 4 ranks."""
    from ranks import Ranks

    made = Ranks()
    yield made
    made.close()
