"""The options of samplers in other processes."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.fields import COUNT, POSITIVE

__all__ = ["FleetConfig", "check_address", "expected_samplers"]

_ANY = re.compile(r"any:([1-9][0-9]{0,4})")


@dataclass(frozen=True)
class FleetConfig:
    """Samplers in other processes, of `samplers` any:N.

    Attributes:
        listen: HOST:PORT at which samplers reach this trainer; an address outside this
            machine's loopback needs `key_file`.
        least: samplers that must be ready once the run has begun; with fewer it waits.
            The first sample is drawn when as many are ready as `samplers` names.
        wait_s: most seconds for which it waits; then it ends, and its last checkpoint
            is whole.
        silence_s: seconds without a word from a sampler after which others take its
            samples. A connection that breaks is noticed at once.
        key_file: file with the key that samplers must send; None asks for none.
    """

    listen: str = "127.0.0.1:7777"
    least: Annotated[int, COUNT] = 1
    wait_s: Annotated[float, POSITIVE] = 3600.0
    silence_s: Annotated[float, POSITIVE] = 10.0
    key_file: str | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `listen`.

        Raises:
            ConfigError: it is no HOST:PORT.

        >>> FleetConfig("[::1]:0").address
        ('::1', 0)
        """
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(
                "--fleet.listen: must be HOST:PORT, such as 127.0.0.1:7777; got "
                f"{self.listen!r}"
            )
        return host.strip("[]"), int(port)

    @property
    def key(self) -> str | None:
        """The key that samplers must send; None for none.

        Raises:
            ConfigError: the file is missing or empty.
        """
        return None if self.key_file is None else _read_key(self.key_file)


def expected_samplers(given: int | str) -> int:
    """Returns how many samplers in other processes `--samplers` names.

    Raises:
        ConfigError: the option is neither a number nor any:N.

    >>> expected_samplers(2), expected_samplers("any:3")
    (0, 3)
    """
    if isinstance(given, int):
        if given < 0:
            raise ConfigError(f"--samplers: must be at least 0; got {given}")
        return 0
    found = _ANY.fullmatch(given)
    if found is None:
        raise ConfigError(
            "--samplers: must be a number of samplers on devices of this process, or "
            f"any:N for samplers in N other processes, such as any:2; got {given!r}"
        )
    return int(found[1])


def check_address(config: FleetConfig) -> None:
    """Refuses an address that others could reach without a key.

    Raises:
        ConfigError: names the option.
    """
    host, _ = config.address
    if config.key is None and host not in ("127.0.0.1", "localhost", "::1"):
        raise ConfigError(
            f"--fleet.listen: {host} can be reached from other machines, where anybody "
            "could read the parameters and send samples; give --fleet.key-file, or "
            "listen on 127.0.0.1"
        )


def _read_key(file: str) -> str:
    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--fleet.key-file: cannot read {file}: {error}") from error
    if not key:
        raise ConfigError(f"--fleet.key-file: {file} is empty")
    return key
