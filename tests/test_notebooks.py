"""Every notebook runs from scratch, and the outputs that it is kept with are those of its source.

`python tests/test_notebooks.py` runs them all and keeps the new outputs; names of notebooks after it, those alone.
"""

import copy
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest

if not os.environ.get("CI"):
    for needed in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(needed, reason=f"notebooks need {needed}: pip install jaxenc[test]")

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
LARGEST_DIFFERENCE = 1e-5
LARGEST_FILE = 600_000
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}

# a notebook has to set these itself
UNSET = {"XLA_FLAGS", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "MPLBACKEND"}
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:tmp|home|root|Users|work|var|private|opt|usr|mnt)/|[A-Z]:\\\\|site-packages")


def execute(notebook, folder):
    """A copy of the notebook with new outputs, run in `folder` by the Python that runs this."""
    spec = folder / "kernels" / "this-python" / "kernel.json"
    spec.parent.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec.write_text(json.dumps({"argv": argv, "display_name": "This Python", "language": "python"}))
    specs = KernelSpecManager(kernel_dirs=[str(folder / "kernels")])
    environment = {name: value for name, value in os.environ.items() if name not in UNSET}
    environment |= {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder / "ipython")}
    fresh = copy.deepcopy(notebook)
    for cell in code_cells(fresh):
        cell.outputs, cell.execution_count = [], None
    NotebookClient(
        fresh,
        km=AsyncKernelManager(kernel_name="this-python", kernel_spec_manager=specs),
        timeout=300,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    ).execute(env=environment)
    return fresh


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(cell):
    """What a cell shows, as (kind, text): pictures without their bytes, numbers with a point as #."""
    streams, shown = {}, []
    for output in cell.outputs:
        if output.output_type == "stream":  # how they are cut, and which comes first, is a matter of timing
            streams[output.name] = streams.get(output.name, "") + output.text
        elif output.output_type == "error":
            shown.append(("error", f"{output.ename}: {output.evalue}"))
        else:
            shown += [(kind, "" if kind.startswith("image/") else text) for kind, text in sorted(output.data.items())]
    return [(kind, re.sub(r"\d+\.\d+(e[+-]?\d+)?", "#", text)) for kind, text in [*sorted(streams.items()), *shown]]


def printed_differences(notebook):
    printed = "".join(output.text for cell in code_cells(notebook) for output in cell.outputs if "text" in output)
    return [float(number) for number in re.findall(r"largest difference[^:\n]*: (\S+)", printed)]


def read(name):
    return nbformat.read(NOTEBOOKS[name], as_version=4)


def shown(notebook):
    return {cell.id: dict(texts(cell)) for cell in code_cells(notebook)}


def test_the_notebooks_are_found():
    assert {"quickstart", "plans"} <= NOTEBOOKS.keys()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_runs_from_scratch_and_shows_what_is_kept(name, tmp_path):
    kept = read(name)
    fresh = execute(kept, tmp_path)
    for ours, theirs in zip(code_cells(fresh), code_cells(kept), strict=True):
        assert texts(ours) == texts(theirs), (
            f"cell {ours.id!r} shows something else than is kept: python tests/test_notebooks.py keeps the new outputs"
        )
    differences = printed_differences(fresh)
    assert len(differences) == (3 if name == "quickstart" else 0)
    assert max(differences, default=0) < LARGEST_DIFFERENCE


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_kept_cell_was_run_in_order_without_an_error(name):
    kept = read(name)
    nbformat.validate(kept)
    cells = code_cells(kept)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    assert max(printed_differences(kept), default=0) < LARGEST_DIFFERENCE


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_kept_file_is_small_and_names_no_machine(name):
    kept = read(name)
    assert NOTEBOOKS[name].stat().st_size < LARGEST_FILE
    found = [(cell.id, text) for cell in code_cells(kept) for _, text in texts(cell) if MACHINE_PATH.search(text)]
    assert not found
    assert kept.metadata == METADATA


def test_quickstart_holds_the_plan_and_the_plots():
    cells = shown(read("quickstart"))
    assert "20 heads do not divide over 8 devices" in cells["plan"]["text/html"]
    assert "<table" in cells["plan"]["text/html"]
    assert [name for name, kinds in cells.items() if "image/png" in kinds] == ["photograph", "speech", "capture"]


def test_plans_holds_a_picture_of_each_plan():
    cells = shown(read("plans"))
    pictures = {name: kinds["text/html"].count("<title>") for name, kinds in cells.items() if "text/html" in kinds}
    assert pictures == {
        "eight": 8, "padding": 8, "three": 3, "three-more": 3, "sixty-four": 1 + 64, "sixty-four-audio": 1 + 64
    }  # fmt: skip
    assert "In outline: zeros appended." in cells["padding"]["text/html"]
    assert "1/3 of 1 item" in cells["three"]["text/html"]
    assert "7 is prime" in cells["impossible"]["stdout"]
    assert all("->" in cells[name]["stdout"] for name in ("padding-diff", "diff"))


if __name__ == "__main__":
    for name in sys.argv[1:] or NOTEBOOKS:
        with tempfile.TemporaryDirectory() as scratch:
            made = execute(read(name), Path(scratch))
        made.metadata = METADATA
        nbformat.write(made, NOTEBOOKS[name])
