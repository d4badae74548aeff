"""The notebook runs from its first cell to its last, and its model learns."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from conftest import need

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "forget_gates.ipynb"


def test_notebook_trains_and_plots(tmp_path):
    for module in ("torch", "transformers", "matplotlib"):
        need(module)
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    # Fewer steps than a reader takes; the figures are drawn to a file.
    code = re.sub(r"^STEPS, BATCH, LENGTH = .*$", "STEPS, BATCH, LENGTH = 25, 4, 96", code, flags=re.MULTILINE)
    code += f"\nfor n in plt.get_fignums():\n    plt.figure(n).savefig(r'{tmp_path}/' + str(n) + '.png')\n"
    env = os.environ | {"MPLBACKEND": "Agg", "MPLCONFIGDIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr[-2000:]
    first, last = map(float, re.search(r"loss ([0-9.]+) at first, ([0-9.]+) nats", run.stdout).groups())
    assert first > 5 and last < first - 1.5
    engine, pytorch = re.search(r"([0-9.]+) by the engine, ([0-9.]+) in PyTorch", run.stdout).groups()
    assert abs(float(engine) - float(pytorch)) < 1e-3
    assert len(list(tmp_path.glob("*.png"))) == 3
