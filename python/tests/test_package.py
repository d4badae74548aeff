"""What is installed: metadata, licences, and messages about modules that are missing."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]


def field(path, name):
    return re.search(rf'^{name} = "(.*)"$', path.read_text(), re.MULTILINE).group(1)


def test_names_the_url_of_the_repository():
    root = HERE.parent / "Cargo.toml"
    if not root.exists():
        pytest.skip("the repository is not there")
    for name in ("version", "rust-version"):
        assert field(HERE / "Cargo.toml", name) == field(root, name), name
    assert field(HERE / "pyproject.toml", "Repository") == field(root, "repository")


def test_installed_files_have_licences_and_urls():
    try:
        package = importlib.metadata.distribution("foxlm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("foxlm is imported from its sources")
    metadata = package.metadata
    assert metadata["License-Expression"] == "MIT OR Apache-2.0"
    assert sorted(metadata.get_all("License-File")) == ["LICENSE-APACHE", "LICENSE-MIT"]
    licences = [file for file in package.files if "LICENSE" in file.name]
    assert len(licences) == 2 and all("ermi" in file.read_text() for file in licences)
    assert any(field(HERE / "pyproject.toml", "Repository") in url for url in metadata.get_all("Project-URL"))
    assert any(file.name == "py.typed" for file in package.files)


# Modules that are named in the environment cannot be imported.
HIDE = """
import sys
from importlib.abc import MetaPathFinder
class Hidden(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in {hidden}:
            raise ModuleNotFoundError(f"No module named {{name}}", name=name)
sys.meta_path.insert(0, Hidden())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {hidden} else find(name, package)
"""


@pytest.mark.parametrize(
    "hidden, code, sentence",
    [
        (["torch"], "import numpy, foxlm; x = numpy.ones((1, 4, 2, 8), 'f'); foxlm.chunk_gla(x, x, x, x)",
         "this op needs torch, which is not installed; pip install 'foxlm[torch]'"),
        (["transformers"], "import foxlm.hf",
         "foxlm.hf needs transformers, which is not installed; pip install 'foxlm[transformers]'"),
        (["lm_eval"], "import foxlm.lm_eval; foxlm.lm_eval.main()",
         "foxlm.lm_eval needs lm_eval, which is not installed; pip install 'foxlm[lm-eval]'"),
    ],
)  # fmt: skip
def test_missing_modules_name_their_extra(hidden, code, sentence):
    run = subprocess.run([sys.executable, "-c", HIDE.format(hidden=hidden) + code], capture_output=True, text=True)
    assert run.returncode != 0 and sentence in run.stderr, run.stderr[-1000:]
