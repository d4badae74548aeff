"""Reference dumps of the repository: configuration, weights, inputs, outputs and gradients of small models."""

import json
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2] / "fixtures"
TYPES = {"F64": np.float64, "F32": np.float32, "I32": np.int32, "I64": np.int64}


def folder(name, kind="models"):
    """The folder of a dump, or a skipped test where the repository's fixtures are not at hand."""
    path = ROOT / kind / name
    if not path.is_dir():
        pytest.skip(f"{path} is not there: the reference dumps are part of the repository, not of the package")
    return path


def tensors(path):
    """All tensors of a safetensors file."""
    data = Path(path).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        first, end = (8 + size + offset for offset in entry["data_offsets"])
        found[name] = np.frombuffer(data[first:end], TYPES[entry["dtype"]]).reshape(entry["shape"]).copy()
    return found


def error(got, want):
    """Relative, by norm."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)
