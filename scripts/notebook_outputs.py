"""Run the cells of a notebook, and write their outputs into it: python scripts/notebook_outputs.py [NOTEBOOK]

Needs no Jupyter. An output is what a cell prints, the value of its last line, and its plots.
"""

import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
DEFAULT = ROOT / "examples" / "notebooks" / "first_steps.ipynb"


def run(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Run a cell. Returns its outputs in the format of notebooks."""
    tree, printed, value = ast.parse(source), io.StringIO(), None
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(True)})
    for number in plt.get_fignums():
        data = io.BytesIO()
        plt.figure(number).savefig(data, dpi=80)
        image = {"image/png": base64.b64encode(data.getvalue()).decode()}
        outputs.append({"data": image, "metadata": {}, "output_type": "display_data"})
    plt.close("all")
    if value is not None and not source.rstrip().endswith(";"):
        data = {"text/plain": repr(value).splitlines(True)}
        outputs.append({"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"})
    return outputs


def main(path: Path) -> None:
    book = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.environ["COLUMNS"] = "100"
        for count, cell in enumerate((cell for cell in book["cells"] if cell["cell_type"] == "code"), 1):
            cell["execution_count"], cell["outputs"] = count, run("".join(cell["source"]), names, count)
    path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # installed or not
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else DEFAULT)
