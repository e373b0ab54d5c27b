"""JAX's coordination service, in a process of its own next to process 0.

If the service ran in process 0, that process's death would break the connections of all
others, and JAX ends a process without its service from C++ code, before it can say why.
So the service outlives process 0 by `LINGER_S`, in which the others end by themselves.
"""

import queue
import socket
import subprocess
import sys
import threading
import time

__all__ = ["Coordination"]

LINGER_S = 15.0
TRIES = 8
DONE = b"done\n"


class Coordination:
    """The service's process.

    Args:
        host: address at which the service listens, such as "127.0.0.1" or "[::]".
        count: number of processes that it serves.
        deadline_s: seconds to wait until it listens.

    Attributes:
        port: at which it listens.

    Raises:
        OSError: it does not start.
    """

    def __init__(self, host: str, count: int, *, deadline_s: float = 60.0) -> None:
        # As a file, not as a module of the package: so it does not import jax.
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, host, str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Ctrl-C in the terminal is for the programs, which still need the service.
            start_new_session=True,
        )
        lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        reader = self._process.stdout
        assert reader is not None, "it was asked for"
        threading.Thread(
            target=lambda: lines.put(reader.readline()), daemon=True
        ).start()
        try:
            self.port = int(lines.get(timeout=deadline_s))
        except (queue.Empty, ValueError) as error:
            self.close()
            raise OSError(
                f"JAX's coordination service did not start on {host} within "
                f"{deadline_s:g} s; are ports free there, and can a process be started?"
            ) from error

    def close(self) -> None:
        """Ends the service, once no process needs it any more."""
        assert self._process.stdin is not None, "it was asked for"
        try:
            self._process.communicate(DONE, timeout=5.0)
        except (subprocess.TimeoutExpired, OSError):
            self._process.kill()
            self._process.wait(timeout=5.0)


def _serve(host: str, count: int) -> None:
    """Runs the service, writes its port to standard output, ends after its input."""
    # The public function of JAX starts the service only inside of process 0.
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

    for tried in range(TRIES):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host.strip("[]"), 0), family=family) as free:
            port = free.getsockname()[1]
        try:
            service = _jax.get_distributed_runtime_service(f"{host}:{port}", count)
            break
        # Another program took the port in between.
        except RuntimeError:
            if tried == TRIES - 1:
                raise
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    if sys.stdin.buffer.read() != DONE:
        time.sleep(LINGER_S)
    service.shutdown()


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
