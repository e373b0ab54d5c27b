"""The calls of an episode, to be made again where their effects were lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_post.envs.servers import ServerError
from jaxrl_post.envs.tools.toolset import ToolError

__all__ = ["Journal"]

type _Call = Callable[[str, Mapping[str, Any]], str]


class Journal:
    """Keeps the calls that one server has answered, with their outcomes.

    A server that is started again knows nothing of an episode. As a session that is
    lost has its turns taken again (docs/decisions/0006), it gets the earlier calls
    again, and must answer them as it did. A call that was too slow is made again as
    well, but what comes of it is not compared: the policy was told that no answer came
    in time, which stays true.

    Args:
        where: names the server in errors.

    >>> journal = Journal("http://tools")
    >>> journal.make("add", {"a": 1}, lambda name, arguments: "2")
    '2'
    >>> journal.replay(lambda name, arguments: "3")
    Traceback (most recent call last):
    jaxrl_post.envs.servers.ServerError: http://tools: the server was lost, and then
    answered call 1 of the episode, add, otherwise than before: '3' after '2'
    """

    def __init__(self, where: str) -> None:
        self._where = where
        # The outcome is None of a call that was too slow.
        self._made: list[tuple[str, Mapping[str, Any], str | None]] = []

    def make(self, name: str, arguments: Mapping[str, Any], call: _Call) -> str:
        """Makes a call, and records its outcome.

        Raises:
            ToolError: as `call`; this is an outcome too.
        """
        try:
            result = call(name, arguments)
        except ToolError as error:
            outcome = None if error.kind == "slow" else _failed(error)
            self._made.append((name, arguments, outcome))
            raise
        self._made.append((name, arguments, result))
        return result

    def replay(
        self,
        call: _Call,
        *,
        slow: Callable[[str, Mapping[str, Any]], object] | None = None,
    ) -> None:
        """Makes the calls again.

        Args:
            call: makes a call.
            slow: makes a call that was too slow, and does not mind if it is again;
                None where a call that is too slow fails the episode.

        Raises:
            ServerError: an outcome is not what it was.
        """
        for number, (name, arguments, before) in enumerate(self._made, 1):
            if before is None:
                (slow or call)(name, arguments)
                continue
            try:
                outcome = call(name, arguments)
            except ToolError as error:
                outcome = _failed(error)
            if outcome != before:
                raise ServerError(
                    f"{self._where}: the server was lost, and then answered call "
                    f"{number} of the episode, {name}, otherwise than before: "
                    f"{outcome!r:.80} after {before!r:.80}"
                )


def _failed(error: ToolError) -> str:
    return f"error: {error}"
