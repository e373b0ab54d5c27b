"""Says how an optional dependency is installed, from a clone and from a package."""

import shlex
from pathlib import Path

__all__ = ["install"]


def install(extra: str) -> str:
    """The command that installs the dependencies of an extra, for error messages.

    A clone is installed from its folder; an installed package has its own name.

    >>> "[hub]" in install("hub")
    True
    """
    root = Path(__file__).resolve().parents[1]
    project = root / "pyproject.toml"
    if not project.is_file() or 'name = "jaxrl_post"' not in project.read_text("utf-8"):
        return f"pip install 'jaxrl_post[{extra}]'"
    where = "." if root == Path.cwd().resolve() else str(root)
    return f"pip install -e {shlex.quote(f'{where}[{extra}]')}"
