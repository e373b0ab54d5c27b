"""Tells the options of a run to everyone: without paths, hosts and secrets.

A path is told by its last part, unless it is a name on the hub.
"""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_post.config.paths import FILES, MODELS
from jaxrl_post.config.run import flattened
from jaxrl_post.records.directory import RunDescription

__all__ = ["Public", "is_of_the_machine"]

# Options that say where a run was, and not how the model was made.
OF_THE_MACHINE = (
    "run_dir", "resume", "processes", "log", "log_project", "callbacks", "profile",
    "push_to_hub", "push_public", "log_rollouts", "rollout.judges", "rollout.serve",
    "compile_cache",
)  # fmt: skip
HUB = "https://huggingface.co"
SECRET = re.compile(r"(?i)(\b\w*(?:api_?key|\btoken|secret|password))=[^&\s]+")
# Where a path begins in a text: at the root, at home, or on a drive.
ROOTED = re.compile(r"(?<![\w<:/.\\])(?:~?/|[A-Za-z]:\\)(?:[^\s'\",;&/\\\]]+[/\\])+")
# A whole value that is a path; "/no_think", with one part, is none.
PATH = re.compile(r"/[^/]+/|(~|\.{1,2})[/\\]|[A-Za-z]:[/\\]|\\\\")
ADDRESS = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\",\]]+")


def is_of_the_machine(name: str) -> bool:
    """Whether an option says where a run was, and not how the model was made."""
    return any(name == each or name.startswith(f"{each}.") for each in OF_THE_MACHINE)


class Public:
    """The names in a run's options that are the hub's, and so may be told.

    Args:
        description: of the run.
    """

    def __init__(self, description: RunDescription) -> None:
        names = {name.partition("@")[0] for name in description.hub}
        self._models = {n for n in names if not n.startswith("datasets/")}
        self._flat = flattened(description.config)
        self._roots = sorted(
            {str(Path.home()), str(Path.cwd())} - {"/"}, key=len, reverse=True
        )

    def model(self, name: str) -> str | None:
        """The repository of a model's name; None for one that is not on the hub."""
        repository = name.partition("@")[0]
        return repository if repository in self._models else None

    def base(self) -> str | None:
        """The repository of a local adapter's base."""
        options = (self._flat.get(name) for name in MODELS if name != "base")
        others = {str(value).partition("@")[0] for value in options if value}
        under = sorted(self._models - others)
        return under[0] if len(under) == 1 else None

    def datasets(self, config: Mapping[str, Any]) -> list[str]:
        """The repositories of the data files."""
        flat = flattened(config)
        paths = [str(flat.get(each)) for each in FILES]
        found = [re.match(r"hf://datasets/([^/@]+/[^/@]+)", path) for path in paths]
        return list(dict.fromkeys(each[1] for each in found if each))

    def told(self, value: str, *, is_path: bool = False) -> str:
        """A value without what tells of the machine.

        Args:
            value: of an option.
            is_path: whether it is a path if it is no name on the hub.
        """
        if self.model(value) or value.startswith("hf://"):
            return value
        if is_path or _is_path(value):
            return _last(value)
        name, mark, query = value.partition("?")
        pairs = [pair.partition("=") for pair in query.split("&")]
        query = "&".join(
            key + equals + (_last(text) if _is_path(text) else text)
            for key, equals, text in pairs
        )
        name = _last(name) if mark and _is_path(name) else name
        text = SECRET.sub(r"\1=...", name + mark + query)
        for root in self._roots:
            text = text.replace(root + "/", "")
        text = ADDRESS.sub(_address, text)
        return ROOTED.sub("", text)

    def command(self, command: str) -> str:
        """The command line without what tells of the machine."""
        try:
            words = shlex.split(command)
        except ValueError:
            words = command.split()
        kept, left_out, name = list[str](), False, ""
        for word in words:
            if word.startswith("--"):
                option, equals, value = word.partition("=")
                name = option.removeprefix("--").removeprefix("no-").replace("-", "_")
                left_out = is_of_the_machine(name)
                word = option
                if equals:
                    word += equals + self._word(name, value)
            elif name:
                word = self._word(name, word)
            if not left_out:
                kept.append(word)
        return shlex.join(kept)

    def _word(self, name: str, value: str) -> str:
        is_path = name in (*MODELS, *FILES, "config")
        return self.told(value, is_path=is_path)


def _address(found: re.Match[str]) -> str:
    address = found[0]
    is_public = address.startswith(("hf://", f"{HUB}/"))
    return address if is_public else address.partition("://")[0] + "://..."


def _is_path(text: str) -> bool:
    """Whether a text is a path of several parts, by its beginning or as it is here."""
    if PATH.match(text):
        return True
    try:
        return ("/" in text or "\\" in text) and Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def _last(path: str) -> str:
    return re.split(r"[/\\]+", path.rstrip("/\\"))[-1] or path
