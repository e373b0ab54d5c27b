"""Episodes of agents: each has a base URL of its own, under which all is recorded.

POST /episodes                            opens one: {"id", "base_url"}
POST /episodes/ID/v1/chat/completions     the agent's calls, by any client
POST /episodes/ID/v1/responses            the same, as OpenAI's newer API has them
POST /episodes/ID/v1/completions          the same, of token ids
POST /episodes/ID/inference/v1/generate   the same, token ids in and out
POST /episodes/ID/reward                  a reward, of a turn or of the episode
POST /episodes/ID/players/NAME/v1/...     the calls of one of several players
POST /episodes/ID/players/NAME/reward     a reward of that player's last turn, or of one
POST /episodes/ID/end                     ends it
GET /episodes/ID                          what was served, as token ids
DELETE /episodes/ID                       forgets it

POST /inference/v1/generate with the header X-Session-ID: ID is a call of that episode.
"""

import dataclasses
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jaxrl_post.envs.env import require_player
from jaxrl_post.serve.calls import ApiError, Served
from jaxrl_post.serve.fields import EndFields, EpisodeFields, RewardFields
from jaxrl_post.serve.recorded import Recorder
from jaxrl_post.serve.recordings import EndedError, Recording

__all__ = ["Episodes"]

ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# The library verifiers sends the id of its episode in it.
SESSION = "X-Session-ID"

# A handler of a route that samples.
type Sampled = Callable[
    [HttpRequest, Served, Any, Recorder | None], Awaitable[Response]
]
type Handler = Callable[[HttpRequest, Served, Any], Awaitable[Response]]


@dataclass
class _Kept:
    recording: Recording
    deadline_s: float
    ends: float

    def late(self) -> str:
        """Ends the episode, whose deadline has passed; why it has ended."""
        self.recording.end(f"its deadline of {self.deadline_s:g} s has passed")
        return f"episode {self.recording.id} has ended: {self.recording.ended}"


class Episodes:
    """The episodes that are recorded.

    Args:
        most: most episodes that are kept, open or ended; > 0. If they are so many, a
            new one takes the place of the oldest that has ended.
        deadline_s: seconds after which an episode ends by itself, unless it asks for
            fewer.
    """

    def __init__(self, most: int = 4096, deadline_s: float = 3600.0) -> None:
        self._most, self._deadline_s = most, deadline_s
        self._kept: dict[str, _Kept] = {}
        # Whether there ever was an episode.
        self._used = False

    def __len__(self) -> int:
        return len(self._kept)

    def open(self, fields: EpisodeFields) -> Recording:
        """Opens an episode.

        Raises:
            ApiError: the id is taken or has other characters than a path may have, or
                so many episodes are open.
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
        if len(self._kept) >= self._most and not self._evict():
            raise ApiError(
                429,
                f"{self._most} episodes are open, and no more may be "
                "(--max-episodes); end those that are done",
                code="busy",
                retry_after_s=1,
            )
        deadline = min(fields.deadline_s or self._deadline_s, self._deadline_s)
        recording = Recording(name, fields.seed)
        self.keep(recording, deadline)
        return recording

    def keep(self, recording: Recording, deadline_s: float) -> None:
        """Keeps an episode that was made elsewhere."""
        self._used = True
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

    def _evict(self) -> bool:
        """Forgets the oldest episode that has ended; False if none has."""
        for name in self._kept:
            kept = self._look(name)
            if kept is not None and kept.recording.ended:
                del self._kept[name]
                return True
        return False

    def find(self, http: HttpRequest) -> _Kept:
        """The episode that a path names, which may have ended by its deadline.

        Raises:
            ApiError: there is none.
        """
        name = http.path_params["id"]
        kept = self._look(name)
        if kept is None:
            raise ApiError(
                404,
                f"there is no episode {name!r:.80}; POST /episodes opens one, and one "
                "that has ended is forgotten when there are --max-episodes",
                code="episode_not_found",
            )
        return kept

    def _look(self, name: str) -> _Kept | None:
        kept = self._kept.get(name)
        if kept is not None and time.monotonic() >= kept.ends:
            kept.late()
        return kept

    def _session(self, http: HttpRequest) -> _Kept | None:
        """The episode that a header names; None for a call that belongs to none.

        A server that never had an episode serves clients that send the header for
        other reasons, such as a router's. Once it had one, an unknown id is most likely
        an episode's that is misspelt or over, and its call would be lost.

        Raises:
            ApiError: the server has had episodes, and this one is not among them.
        """
        name = http.headers.get(SESSION)
        if not name:
            return None
        kept = self._look(name)
        if kept is None and self._used:
            raise ApiError(
                404,
                f"{SESSION}: there is no episode {name!r:.80}, so the call would be "
                "recorded nowhere; POST /episodes opens one with this id. Leave the "
                "header out for a call that belongs to none",
                code="episode_not_found",
            )
        return kept

    def recorded(self, sampled: Sampled) -> Handler:
        """The calls of an agent, or of one of its players, to a route that samples."""

        async def answer(http: HttpRequest, served: Served, fields: Any) -> Response:
            return await _call(sampled, http, served, fields, self.find(http))

        return answer

    def in_session(self, sampled: Sampled) -> Handler:
        """Calls to a route that samples, of the episode in the header, if any."""

        async def answer(http: HttpRequest, served: Served, fields: Any) -> Response:
            return await _call(sampled, http, served, fields, self._session(http))

        return answer

    async def opened(
        self, http: HttpRequest, served: Served, fields: EpisodeFields
    ) -> Response:
        """`POST /episodes`."""
        del served
        recording = self.open(fields)
        base_url = str(http.base_url).rstrip("/") + f"/episodes/{recording.id}/v1"
        body = {"id": recording.id, "base_url": base_url}
        return JSONResponse(body, status_code=201)

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
        """`POST /episodes/ID/end`; answers as GET does."""
        recording = self.find(http).recording
        if recording.ended:
            raise ApiError(
                409,
                f"episode {recording.id} has ended: {recording.ended}",
                code="episode_ended",
            )
        if fields.reward is not None:
            try:
                recording.credit(fields.reward)
            except ValueError as error:
                raise ApiError(400, str(error), param="reward") from error
        recording.end(fields.reason)
        return JSONResponse(recording.to_json(served.vocabulary))

    async def shown(self, served: Served, http: HttpRequest) -> Response:
        """`GET /episodes/ID`."""
        return JSONResponse(self.find(http).recording.to_json(served.vocabulary))

    async def forgotten(self, http: HttpRequest) -> Response:
        """`DELETE /episodes/ID`."""
        kept = self.find(http)
        # A running call finds it ended.
        kept.recording.end("deleted")
        del self._kept[kept.recording.id]
        return JSONResponse({"id": kept.recording.id, "deleted": True})


async def _call(
    sampled: Sampled, http: HttpRequest, served: Served, fields: Any, kept: _Kept | None
) -> Response:
    """Answers a call, within what is left of its episode's time."""
    if kept is None:
        return await sampled(http, served, fields, None)
    left = max(kept.ends - time.monotonic(), 0.0)
    if left < served.timeout_s:

        def late(seconds: float) -> ApiError:
            del seconds
            return ApiError(409, kept.late(), code="episode_ended")

        served = dataclasses.replace(served, timeout_s=left, late=late)
    recorder = Recorder(kept.recording, _player(http))
    return await sampled(http, served, fields, recorder)


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
