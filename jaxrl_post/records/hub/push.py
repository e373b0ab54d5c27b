"""Uploads a saved model to the Hugging Face hub.

`check_push` runs before anything trains: it makes the repository, so that a name, a
token or a permission that does not do ends the program at once. `push` uploads the
model at the end. The token and the address are huggingface_hub's (`hf auth login`,
HF_TOKEN, HF_ENDPOINT).
"""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.run import RunConfig
from jaxrl_post.extras import install
from jaxrl_post.files import replace_file
from jaxrl_post.jsonl import json_file
from jaxrl_post.sharding import processes

__all__ = ["Push", "PushError", "check_push", "push", "push_of"]

OPTION = "--push-to-hub"
# Names of the repositories that a run has made or pushed to, in its directory.
RECORD = "pushed.json"
# A new repository of the hub may have these.
OF_NEW = {".gitattributes", "README.md"}
# The client by itself waits for ever for an answer.
ANSWER_SECONDS = 300.0
# The other processes wait for the upload of process 0.
UPLOAD_SECONDS = 24 * 3600.0


class PushError(Exception):
    """A model is saved, but was not uploaded; the message says how to do that."""


@dataclass(frozen=True)
class Push:
    """A repository to which a model is uploaded.

    Attributes:
        repository: ORG/NAME.
        public: whether everyone can read it.
        record: a run's directory, which notes that the repository is the run's; None
            outside of a run.
    """

    repository: str
    public: bool
    record: Path | None = None


def push_of(config: RunConfig, directory: Path) -> Push | None:
    """The repository of a run's model; None if it is not uploaded."""
    if config.push_to_hub is None:
        return None
    return Push(config.push_to_hub, config.push_public, directory)


def check_push(target: Push, console: Console) -> None:
    """Checks that a model can be uploaded, and makes its repository if there is none.

    All processes of a run call it, and process 0 asks the hub.

    Args:
        target: the repository.
        console: for a line about it.

    Raises:
        ConfigError: huggingface_hub is not installed or is offline, there is no token,
            the hub refuses the name, or the repository holds files that this run did
            not push or has the other visibility.
    """
    problem = None
    if not processes.index():
        try:
            problem = _problem(target)
        # The client raises errors of its own, of its HTTP library, and of the system.
        except Exception as error:
            problem = _told(error, target.repository)
    problem = processes.agree("push to the hub", problem)
    if problem is not None:
        raise ConfigError(f"{OPTION} {target.repository}: {problem}")
    kind = "public" if target.public else "private"
    console.print(
        f"{target.repository}: {kind} on the hub; the model is uploaded at the end",
        markup=False,
        highlight=False,
    )


def push(target: Push, folder: Path, message: str, console: Console) -> None:
    """Uploads a saved model as one commit, if the hub takes it as one.

    All processes of a run call it, process 0 uploads, and the others wait.

    Args:
        target: as for `check_push`, which must have been called.
        folder: the model's directory; it stays as it is.
        message: of the commit.
        console: for a line with the address.

    Raises:
        PushError: the upload failed; the message has the command that repeats it.
    """
    problem = None
    if not processes.index():
        try:
            _note(target)
            _api().upload_folder(
                repo_id=target.repository,
                folder_path=str(folder),
                commit_message=message,
            )
        except Exception as error:
            problem = _told(error, target.repository)
    waited = {"deadline_s": UPLOAD_SECONDS}
    problem = processes.agree("the model is on the hub", problem, **waited)
    if problem is not None:
        raise PushError(
            f"{OPTION} {target.repository}: {problem}. The model is saved in {folder}, "
            f"and `{_command(target, folder)}` uploads it again"
        )
    console.print(
        f"hub:    {_address(target.repository)}", markup=False, highlight=False
    )


def _problem(target: Push) -> str | None:
    """Makes the repository if there is none; says why the model cannot go there."""
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors
        from huggingface_hub.utils import validate_repo_id
    except ModuleNotFoundError:
        return f"huggingface_hub is needed to upload the model: {install('hub')}"
    try:
        validate_repo_id(target.repository)
    except errors.HFValidationError as error:
        return f"the hub allows no such name: {error}"
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it"
    if huggingface_hub.get_token() is None:
        return "there is no token; run `hf auth login`, or set HF_TOKEN"
    api = _api()
    try:
        api.create_repo(target.repository, private=not target.public)
    except errors.HfHubHTTPError as error:
        if error.response.status_code != 409:
            raise
        return _taken(target, api)
    _note(target)
    return None


def _taken(target: Push, api: Any) -> str | None:
    """Says why a repository that is there cannot be written; None if it can."""
    found = api.model_info(target.repository)
    files = {each.rfilename for each in found.siblings or ()} - OF_NEW
    if files and target.repository not in _noted(target):
        return (
            f"the name is taken: {_address(target.repository)} holds {len(files)} "
            "files that this run did not upload; choose another name, or remove the "
            "repository"
        )
    if found.private is not None and bool(found.private) == target.public:
        now, remedy = ("private", "drop --push-public")
        if target.public is False:
            now, remedy = ("public", "give --push-public")
        return (
            f"the repository is there already and is {now}; {remedy}, or change it in "
            "its settings on the hub"
        )
    api.auth_check(target.repository, write=True)
    return None


def _api() -> Any:
    """The client, which waits for no answer longer than `ANSWER_SECONDS`."""
    import huggingface_hub

    huggingface_hub.get_session().timeout = ANSWER_SECONDS
    return huggingface_hub.HfApi()


def _noted(target: Push) -> list[str]:
    if target.record is None:
        return []
    try:
        found = json_file(target.record / RECORD)
    except (OSError, ValueError):
        return []
    return [*found] if isinstance(found, list) else []


def _note(target: Push) -> None:
    """Notes that the repository is the run's, before anything is uploaded."""
    names = _noted(target)
    if target.record is not None and target.repository not in names:
        text = json.dumps([*names, target.repository]) + "\n"
        replace_file(target.record / RECORD, text)


def _address(repository: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repository}"


def _command(target: Push, folder: Path) -> str:
    kind = "--no-private" if target.public else "--private"
    return shlex.join(["hf", "upload", target.repository, str(folder), ".", kind])


def _told(error: Exception, repository: str) -> str:
    """The message for a request that failed, with a remedy."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    organisation = repository.partition("/")[0]
    if status == 401:
        return "the hub does not accept the token; run `hf auth login`, or set HF_TOKEN"
    if status == 403:
        return (
            f"the token may not write there (403); it needs the role write, and its "
            f"user must be allowed to write in {organisation}"
        )
    if status == 404:
        return (
            f"the hub does not find it (404); there must be an account {organisation} "
            "in which the token may write"
        )
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    cause = error.__cause__ or error.__context__
    reason = re.sub(r"\s*\(Request ID: [^)]*\)", "", lines[0]) if lines else ""
    reason = reason or type(error).__name__
    if cause is not None and str(cause) and str(cause) not in reason:
        reason += f" ({str(cause).splitlines()[0]})"
    return f"the hub did not take it: {reason}"
