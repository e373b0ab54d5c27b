"""A sampler's requests to the trainer, and to other samplers for weights."""

import collections
import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx2

from jaxrl_post.fleet import wire
from jaxrl_post.fleet.chunks import ChunkError, digest_of
from jaxrl_post.fleet.leases import UnknownSamplerError
from jaxrl_post.fleet.manifest import Manifest, from_json
from jaxrl_post.fleet.orders import News, Order

__all__ = ["AwayError", "NotAdmittedError", "Reply", "TrainerClient"]

# Seconds for connecting, and for a message or a piece of the weights.
CONNECT_S, ANSWER_S = 5.0, 60.0
# Seconds between two requests for a payload that other samplers are still fetching.
AGAIN_S = 0.02
# Seconds after which a sampler that should have a payload, or get it, is passed over.
HOLDER_S = 20.0


class AwayError(ConnectionError):
    """The trainer does not answer; it may come back."""


class NotAdmittedError(RuntimeError):
    """The trainer does not take this sampler."""


class Reply(NamedTuple):
    """The answer to a request for orders.

    Attributes:
        orders: with their numbers.
        policies: (version, digest) of the versions that may be needed, the oldest
            first.
        known: number of this list of policies.
        ended: why the run has ended; "" before.
    """

    orders: list[tuple[int, Order]]
    policies: list[tuple[int, str]]
    known: int
    ended: str


class TrainerClient:
    """The trainer, as a sampler sees it; each thread has one of its own.

    Args:
        url: of the trainer's hub.
        key: the bearer token; None for none.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url, self._key = url.rstrip("/"), key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        timeout = httpx2.Timeout(ANSWER_S, connect=CONNECT_S)
        # Proxies of the environment do not reach machines next to this one.
        self._http = httpx2.Client(headers=headers, timeout=timeout, trust_env=False)
        # Payloads that this sampler has and has not told of.
        self._held = collections.deque[str]()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def welcome(self) -> dict[str, Any]:
        """Returns what a sampler needs to know before it joins."""
        return wire.unpack(self._asked("GET", "/fleet/welcome"))

    def join(self, facts: Mapping[str, Any]) -> int:
        """Joins; returns the epoch."""
        return int(self._sent("/fleet/join", facts)["epoch"])

    def leave(self, name: str, epoch: int, why: str) -> None:
        """Says that this sampler ends."""
        self._sent("/fleet/leave", {"name": name, "epoch": epoch, "why": why})

    def news(self, name: str, epoch: int, news: News) -> None:
        """Tells news."""
        told = {"name": name, "epoch": epoch, "news": wire.write_news(news)}
        self._sent("/fleet/news", told)

    def orders(self, name: str, epoch: int, acknowledged: int, known: int) -> Reply:
        """Waits for orders, about a second at most."""
        asked = {
            "name": name,
            "epoch": epoch,
            "acknowledged": acknowledged,
            "known": known,
        }
        found = self._sent("/fleet/orders", asked)
        policies = [
            (int(version), str(digest)) for version, digest in found["policies"]
        ]
        orders = wire.read_orders(found["orders"])
        return Reply(orders, policies, int(found["known"]), str(found["ended"]))

    def manifest(self, digest: str) -> Manifest:
        """Fetches the manifest of a policy.

        Raises:
            ChunkError: it is gone, or is not whole.
        """
        try:
            data = self._asked("GET", f"/weights/{digest}/manifest")
            found = from_json(data)
        except (LookupError, ValueError) as error:
            raise ChunkError(f"manifest {digest}: {error}") from error
        if found.digest != digest:
            raise ChunkError(f"manifest {digest}: the trainer sent {found.digest}")
        return found

    def payload(self, member: str, key: str, size: int) -> bytes:
        """Fetches a payload from the trainer, or from a sampler that has it.

        Args:
            member: this sampler, as `member_of` has it.
            key: digest of the payload.
            size: its bytes.

        Raises:
            ChunkError: no process has it any more.
        """
        failed, path = set[str](), f"/weights/payloads/{key}"
        end = time.monotonic() + HOLDER_S
        while True:
            query = {
                "member": member,
                "has": ",".join(self._untold()),
                "failed": ",".join(sorted(failed)),
            }
            try:
                answer = self._answer("GET", path, params=query)
            except LookupError as error:
                raise ChunkError(f"payload {key}: {error}") from error
            if answer.status_code != 303:
                self._held.append(key)
                return answer.content
            told = json.loads(answer.content)
            for holder, url in told["ask"].items():
                data = self._passed_on(f"{url}{path}")
                if data is not None and len(data) == size and digest_of(data) == key:
                    self._held.append(key)
                    return data
                failed.add(holder)
            if time.monotonic() > end:
                if failed.issuperset(told.get("wait", ())):
                    raise ChunkError(f"payload {key}: nothing has sent it")
                failed |= set(told["wait"])
                end += HOLDER_S
            time.sleep(AGAIN_S)

    def flush(self, member: str) -> None:
        """Tells which payloads this sampler has, if it has not yet."""
        if held := self._untold():
            self._sent("/weights/held", {"member": member, "keys": held})

    def _untold(self) -> list[str]:
        found = list[str]()
        with contextlib.suppress(IndexError):
            while True:
                found.append(self._held.popleft())
        return found

    def _passed_on(self, url: str) -> bytes | None:
        with contextlib.suppress(httpx2.HTTPError, httpx2.InvalidURL):
            answer = self._http.get(url, timeout=HOLDER_S)
            return answer.content if answer.status_code == 200 else None
        return None

    def _sent(self, path: str, value: Any) -> Any:
        try:
            return wire.unpack(self._asked("POST", path, wire.pack(value)))
        except wire.MessageError as error:
            raise AwayError(f"{self.url}{path}: {error}") from error

    def _asked(self, method: str, path: str, content: bytes | None = None) -> bytes:
        return self._answer(method, path, content).content

    def _answer(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        params: Mapping[str, str] | None = None,
    ) -> httpx2.Response:
        """Returns an answer that is no error.

        Raises:
            AwayError: there is none, or the trainer cannot answer now.
            UnknownSamplerError: this sampler must join again.
            LookupError: the version or payload is gone.
            NotAdmittedError: the trainer takes no such request.
        """
        try:
            answer = self._http.request(
                method, f"{self.url}{path}", content=content, params=params
            )
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise AwayError(
                f"{self.url} does not answer: {type(error).__name__}: {error}"
            ) from error
        if answer.status_code in (200, 303):
            return answer
        try:
            told = json.loads(answer.content)
            why, code = str(told["error"]), str(told["code"])
        except (ValueError, KeyError, TypeError):
            why, code = answer.text[:200], ""
        if code == "rejoin":
            raise UnknownSamplerError(why)
        if code == "gone":
            raise LookupError(why)
        if answer.status_code >= 500:
            raise AwayError(f"{self.url}{path}: {answer.status_code}: {why}")
        raise NotAdmittedError(f"{self.url}{path}: {answer.status_code}: {why}")
