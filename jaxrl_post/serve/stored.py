"""Responses that are kept, so that later requests can continue them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_post.serve.calls import ApiError

__all__ = ["Stored", "StoredResponse"]


@dataclass(frozen=True)
class StoredResponse:
    """A response, and what is its own in the conversation, as JSON.

    Attributes:
        body: the response.
        items: the items of its request's input.
        before: the id of the response that it continues; None for none.
    """

    body: bytes
    items: bytes
    before: str | None

    def __len__(self) -> int:
        return len(self.body) + len(self.items)

    def said(self) -> list[dict[str, Any]]:
        """The items of its input, and those of its output."""
        return [*json.loads(self.items), *json.loads(self.body)["output"]]


class Stored:
    """Responses in memory; the least recently used ones give way to new ones.

    Args:
        most: most responses; > 0.
        most_bytes: most bytes of all of them; > 0.
    """

    def __init__(self, most: int = 2**14, most_bytes: int = 2**28) -> None:
        self._most, self._most_bytes = most, most_bytes
        # The least recently used first.
        self._kept: dict[str, StoredResponse] = {}
        self._bytes = 0

    def add(
        self, response: Mapping[str, Any], items: Sequence[Mapping[str, Any]]
    ) -> None:
        """Keeps a whole response, and the items of its request's input."""
        kept = StoredResponse(
            json.dumps(response, ensure_ascii=False).encode(),
            json.dumps(items, ensure_ascii=False).encode(),
            response["previous_response_id"],
        )
        self._kept[response["id"]] = kept
        self._bytes += len(kept)
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            self.remove(next(iter(self._kept)))

    def find(self, name: str, param: str | None = None) -> StoredResponse:
        """A response, which is the most recently used one now.

        Args:
            name: its id.
            param: the field of a request that names it; None for a path.

        Raises:
            ApiError: there is none.
        """
        kept = self._kept.pop(name, None)
        if kept is None:
            raise ApiError(
                404,
                f"{f'{param}: ' if param else ''}there is no response {name!r:.80} "
                "here: it was never stored (store: false), was deleted, or gave way "
                "to others (--max-responses, --max-responses-mib); send the "
                "conversation as input",
                param=param,
                code=f"{'previous_' if param else ''}response_not_found",
            )
        self._kept[name] = kept
        return kept

    def conversation(self, name: str | None) -> list[StoredResponse]:
        """A response and those that it continues, the first one first.

        All of them are used, the first one last, so none gives way before those that
        continue it.

        Raises:
            ApiError: one of them is not here.
        """
        found: list[StoredResponse] = []
        while name is not None:
            found.append(self.find(name, "previous_response_id"))
            name = found[-1].before
        return found[::-1]

    def remove(self, name: str) -> None:
        """Forgets a response.

        Raises:
            ApiError: there is none.
        """
        self._bytes -= len(self.find(name))
        del self._kept[name]
