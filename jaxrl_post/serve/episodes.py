"""Episodes of agents: each has a base URL of its own, under which all is recorded.

POST /episodes                            opens one: {"id", "base_url"}
POST /episodes/ID/v1/chat/completions     the agent's calls, by any client
POST /episodes/ID/reward                  a reward, of a turn or of the episode
POST /episodes/ID/players/NAME/v1/...     the calls of one of several players
POST /episodes/ID/players/NAME/reward     a reward of that player's last turn, or of one
POST /episodes/ID/end                     ends it
GET /episodes/ID                          what was served, as token ids
DELETE /episodes/ID                       forgets it
"""

import dataclasses
import re
import time
import uuid
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jaxrl_post.envs.env import require_player
from jaxrl_post.serve import chat
from jaxrl_post.serve.calls import ApiError, Served
from jaxrl_post.serve.fields import (
    ChatFields,
    EndFields,
    EpisodeFields,
    RewardFields,
)
from jaxrl_post.serve.recordings import EndedError, Recording

__all__ = ["Episodes"]

ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass
class _Kept:
    recording: Recording
    deadline_s: float
    ends: float


class Episodes:
    """The episodes that are recorded.

    Args:
        most: most episodes that are kept, open or ended; > 0.
        deadline_s: seconds after which an episode ends by itself, unless it asks for
            fewer.
    """

    def __init__(self, most: int = 4096, deadline_s: float = 3600.0) -> None:
        self._most, self._deadline_s = most, deadline_s
        self._kept: dict[str, _Kept] = {}

    def open(self, fields: EpisodeFields) -> Recording:
        """Opens an episode.

        Raises:
            ApiError: the id is taken or has other characters than a path may have, or
                too many episodes are kept.
        """
        name = fields.id or uuid.uuid4().hex
        if not ID.fullmatch(name):
            raise ApiError(
                400,
                "id: 1 to 128 letters, digits, dots, dashes and underscores; got "
                f"{name!r:.80}",
                param="id",
            )
        if name in self._kept:
            raise ApiError(
                409,
                f"id: there is an episode {name}; choose another, or delete it first",
                param="id",
            )
        if len(self._kept) >= self._most:
            raise ApiError(
                429,
                f"{self._most} episodes are kept, and no more may be "
                "(--max-episodes); DELETE those that are done",
                code="busy",
                retry_after_s=1,
            )
        deadline = min(fields.deadline_s or self._deadline_s, self._deadline_s)
        recording = Recording(name, fields.seed)
        self._kept[name] = _Kept(recording, deadline, time.monotonic() + deadline)
        return recording

    def keep(self, recording: Recording, deadline_s: float) -> None:
        """Keeps an episode that was made elsewhere."""
        self._kept[recording.id] = _Kept(
            recording, deadline_s, time.monotonic() + deadline_s
        )

    def take(self, name: str, why: str) -> Recording:
        """Ends an episode, and keeps it no longer.

        Raises:
            KeyError: there is none.
        """
        recording = self._kept.pop(name).recording
        recording.end(why)
        return recording

    def find(self, http: HttpRequest) -> _Kept:
        """The episode that a path names, which may have ended by its deadline.

        Raises:
            ApiError: there is none.
        """
        name = http.path_params["id"]
        kept = self._kept.get(name)
        if kept is None:
            raise ApiError(
                404,
                f"there is no episode {name!r:.80}; POST /episodes opens one",
                code="episode_not_found",
            )
        if time.monotonic() >= kept.ends:
            kept.recording.end(f"its deadline of {kept.deadline_s:g} s has passed")
        return kept

    async def opened(
        self, http: HttpRequest, served: Served, fields: EpisodeFields
    ) -> Response:
        """`POST /episodes`."""
        recording = self.open(fields)
        served.metrics.episodes.set(len(self._kept))
        base_url = str(http.base_url).rstrip("/") + f"/episodes/{recording.id}/v1"
        body = {"id": recording.id, "base_url": base_url}
        return JSONResponse(body, status_code=201)

    async def answer(
        self, http: HttpRequest, served: Served, fields: ChatFields
    ) -> Response:
        """A call of an agent, or of one of its players."""
        kept, player = self.find(http), _player(http)
        left = max(kept.ends - time.monotonic(), 0.0)
        served = dataclasses.replace(served, timeout_s=min(served.timeout_s, left))
        return await chat.answer(http, served, fields, kept.recording, player)

    async def rewarded(
        self, http: HttpRequest, served: Served, fields: RewardFields
    ) -> Response:
        """`POST /episodes/ID/reward`, also of a player."""
        del served
        recording, player = self.find(http).recording, _player(http)
        try:
            recording.credit(fields.reward, fields.turn, player)
        except EndedError as error:
            raise ApiError(409, str(error), code="episode_ended") from error
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        return JSONResponse({"id": recording.id})

    async def ended(
        self, http: HttpRequest, served: Served, fields: EndFields
    ) -> Response:
        """`POST /episodes/ID/end`; the answer is that of GET."""
        del served
        recording = self.find(http).recording
        if recording.ended:
            raise ApiError(
                409,
                f"episode {recording.id} has ended: {recording.ended}",
                code="episode_ended",
            )
        if fields.reward is not None:
            recording.credit(fields.reward)
        recording.end(fields.reason)
        return JSONResponse(recording.to_json())

    async def shown(self, http: HttpRequest) -> Response:
        """`GET /episodes/ID`."""
        return JSONResponse(self.find(http).recording.to_json())

    async def forgotten(self, http: HttpRequest) -> Response:
        """`DELETE /episodes/ID`."""
        kept = self.find(http)
        # A call under way finds it ended.
        kept.recording.end("deleted")
        del self._kept[kept.recording.id]
        return JSONResponse({"id": kept.recording.id, "deleted": True})


def _player(http: HttpRequest) -> str:
    """The player that a path names; "" for none.

    Raises:
        ApiError: no player may have this name.
    """
    name = http.path_params.get("player")
    if name is None:
        return ""
    try:
        require_player(name)
    except ValueError as error:
        raise ApiError(400, str(error)) from error
    return name
