"""Runs each notebook in a fresh kernel, and writes it with its outputs.

    .venv/bin/python tools/notebooks.py notebooks/*.ipynb                in place
    .venv/bin/python tools/notebooks.py notebooks/*.ipynb --into FOLDER

A notebook in which a cell fails, warns or takes too long is not written, and the exit
status is 1. The written notebook holds neither times nor names of this machine.
"""

import argparse
import base64
import os
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from PIL import Image

ROOT = Path(__file__).parents[1]

METADATA = {
    "kernelspec": {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    },
    "language_info": {"name": "python"},
}


class NotebookError(Exception):
    """A notebook that does not run as it should."""


def executed(path: Path, *, cell_timeout: int) -> nbformat.NotebookNode:
    """Runs one notebook, in an empty folder, and returns it with fresh outputs.

    Args:
        path: of the notebook.
        cell_timeout: > 0, in seconds, for each cell.

    Returns:
        The notebook.

    Raises:
        NotebookError: a cell fails, writes to stderr (as a warning does) or takes
            longer than `cell_timeout`, or the kernel dies.
    """
    notebook = nbformat.read(path, as_version=4)
    with TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            km=AsyncKernelManager(
                # No folder to search, so that the kernel is this interpreter's.
                kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
                # Use sockets in the folder, so that no port is opened.
                transport="ipc",
                connection_file=str(Path(folder, "kernel.json")),
            ),
            timeout=cell_timeout,
            startup_timeout=60,
            record_timing=False,
            # A cell's output arrives in pieces, cut at random times.
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        # Otherwise matplotlib reports in a cell that it builds its list of fonts.
        subprocess.run(
            [sys.executable, "-c", "import matplotlib.font_manager"],
            env=surroundings(folder), timeout=60, check=True,
        )  # fmt: skip
        try:
            # The manager was made here, so nbclient ends the kernel only on request.
            client.execute(env=surroundings(folder), cleanup_kc=True)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            raise NotebookError(f"{path}: {error}") from error
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                raise NotebookError(
                    f"{path}: cell {cell.id} must not write to stderr (nor warn), "
                    f"got:\n{output.text}"
                )
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = smaller(output.data["image/png"])
    return notebook


def smaller(png: str) -> str:
    """Reduces a base64 PNG to a palette: a third of the bytes in git."""
    image = Image.open(BytesIO(base64.b64decode(png))).convert("RGB")
    buffer = BytesIO()
    image.quantize(128, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def surroundings(folder: str) -> dict[str, str]:
    """Environment variables of a kernel: one CPU device, no settings of the user."""
    theirs = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "XLA_", "MPL", "IPYTHON", "JUPYTER"))
    }
    ours = dict.fromkeys(("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "MPLCONFIGDIR"), folder)
    return {**theirs, **ours, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("notebooks", type=Path, nargs="+", metavar="NOTEBOOK")
    parser.add_argument("--into", type=Path, help="folder to write to; default: theirs")
    parser.add_argument("--cell-timeout", type=int, default=300, help="in seconds")
    options = parser.parse_args()
    for path in options.notebooks:
        try:
            notebook = executed(path, cell_timeout=options.cell_timeout)
        except NotebookError as error:
            sys.stderr.write(f"{error}\n")
            return 1
        nbformat.write(notebook, (options.into or path.parent) / path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
