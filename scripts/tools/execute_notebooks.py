"""Execution of the notebooks: run from top to bottom and written with their outputs.

A notebook's source is its .py file (jupytext's percent format); running it writes an .ipynb file
next to it. One decision: data that differs between runs (times, random cell ids, the interpreter's
version, stderr) is not written, so that running again changes a file only if the results change.

    python scripts/tools/execute_notebooks.py
    python scripts/tools/execute_notebooks.py notebooks/the_cache.py --output-dir /tmp
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
CELL_SECONDS = 1200  # ends a cell that hangs; a busy machine is slow
# Results are from the CPU and plots go into the notebook, whatever the caller's environment.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
}


def execute(source: Path) -> Any:
    """Run a .py notebook in a new kernel of this interpreter; return it with its outputs.

    Raises:
        CellExecutionError: if a cell fails; has the cell and its traceback.
    """
    notebook = jupytext.read(source)
    # Without kernel directories, the only kernel is the default one, which runs sys.executable.
    manager = AsyncKernelManager(
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[]), transport_encryption="auto"
    )
    NotebookClient(
        notebook,
        km=manager,
        timeout=CELL_SECONDS,
        startup_timeout=CELL_SECONDS,
        record_timing=False,
        coalesce_streams=True,
    ).execute(cleanup_kc=True, env={**os.environ, **ENVIRONMENT})
    return remove_volatile(notebook)


def remove_volatile(notebook: Any) -> Any:
    """Remove data that differs between runs; return the notebook."""
    notebook.metadata = {
        "jupytext": notebook.metadata["jupytext"],
        "kernelspec": notebook.metadata["kernelspec"],
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02}"
        cell["metadata"] = {}
        if cell.cell_type == "code":
            cell["outputs"] = [o for o in cell.outputs if o.get("name") != "stderr"]
    return notebook


def main() -> None:
    """Run the given notebooks, or all of them."""
    parser = argparse.ArgumentParser(
        description="Run notebooks from their .py files and write the .ipynb files.",
        epilog="example: python scripts/tools/execute_notebooks.py notebooks/the_cache.py",
    )
    parser.add_argument("sources", nargs="*", type=Path, help="notebooks as .py (default: all)")
    parser.add_argument(
        "--output-dir", type=Path, help="output directory (default: that of the .py file)"
    )
    options = parser.parse_args()
    if missing := [str(source) for source in options.sources if not source.is_file()]:
        parser.error(f"no such file: {', '.join(missing)}")
    for source in options.sources or sorted(NOTEBOOKS.glob("*.py")):
        start = time.perf_counter()
        notebook = execute(source)
        target = (options.output_dir or source.parent) / f"{source.stem}.ipynb"
        target.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
        print(f"{target}: {time.perf_counter() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
