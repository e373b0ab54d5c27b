"""The address by which other machines reach a server of this process."""

import ipaddress
import socket
from urllib.parse import urlsplit

__all__ = ["reachable"]


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
