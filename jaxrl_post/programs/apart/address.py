"""The addresses of a trainer and its samplers, as other machines see them."""

import ipaddress
import socket
from pathlib import Path
from urllib.parse import urlsplit

from jaxrl_post.records.directory import RunDirectory

__all__ = ["reachable", "trainer_url"]


def trainer_url(follow: str) -> str:
    """Returns the URL of a trainer.

    Args:
        follow: the URL itself, or the directory of the trainer's run.

    Raises:
        ConnectionError: no trainer has written its URL into the directory.

    >>> trainer_url("http://10.0.0.1:7777/")
    'http://10.0.0.1:7777'
    """
    if "://" in follow:
        return follow.rstrip("/")
    place = RunDirectory(Path(follow)).address
    try:
        return place.read_text(encoding="utf-8").strip()
    except OSError as error:
        why = "" if isinstance(error, FileNotFoundError) else f": {error}"
        raise ConnectionError(f"no trainer has written {place}{why}") from error


def reachable(url: str, other: str | None) -> str:
    """Returns a URL whose host is an address of this machine that others can use.

    Args:
        url: of a server that may listen on all addresses.
        other: HOST:PORT of a process that must reach it; None for this machine's own
            name. Nothing is sent there.

    >>> reachable("http://127.0.0.1:80", "10.0.0.1:7777")
    'http://127.0.0.1:80'
    """
    parts = urlsplit(url)
    if not ipaddress.ip_address(parts.hostname or "").is_unspecified:
        return url
    there = urlsplit(f"//{other or f'{socket.gethostname()}:80'}")
    found = socket.getaddrinfo(there.hostname, there.port or 80, type=socket.SOCK_DGRAM)
    family, kind, _, _, address = found[0]
    with socket.socket(family, kind) as route:
        # The system chooses the address from which it would send.
        route.connect(address)
        own = route.getsockname()[0]
    return (
        f"http://[{own}]:{parts.port}" if ":" in own else f"http://{own}:{parts.port}"
    )
