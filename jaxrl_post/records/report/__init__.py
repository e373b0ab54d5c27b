"""The report of a run: one HTML page with configuration, charts and samples.

The page needs no network, so it can be mailed or kept with the weights. It is made
from the files of the run directory alone, of a finished or a running run.
"""

from pathlib import Path

from jaxrl_post.files import replace_file
from jaxrl_post.records.directory import RunDirectory
from jaxrl_post.records.report.history import read_history
from jaxrl_post.records.report.page import page

__all__ = ["write_report"]


def write_report(
    run_directory: RunDirectory, path: Path | None = None, *, title: str | None = None
) -> Path:
    """Writes a page from the logs and config.json.

    Only metrics.jsonl must exist. A metric that was never measured has no chart; one
    that the page does not know gets a chart under "Other metrics".

    Args:
        run_directory: of a finished or a running run.
        path: of the page; report.html in the directory if None.
        title: heading of the page; the directory's name if None.

    Returns:
        The path of the page.

    Raises:
        FileNotFoundError: there is no metrics.jsonl.
        ValueError: metrics.jsonl holds no step yet, or a file was damaged.
        OSError: the disk is full; an earlier report stays as it was.

    >>> import tempfile
    >>> from jaxrl_post.records.sinks import MetricsLog
    >>> directory = RunDirectory(Path(tempfile.mkdtemp()))
    >>> with MetricsLog(directory) as log:
    ...     log.write(1, {"reward/mean": 0.25})
    >>> write_report(directory).name
    'report.html'
    """
    title = run_directory.path.resolve().name if title is None else title
    path = run_directory.report if path is None else path
    replace_file(path, page(title, read_history(run_directory)))
    return path
