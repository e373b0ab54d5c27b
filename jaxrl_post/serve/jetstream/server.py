"""JetStream's orchestrator and gRPC server, in which no request can end the process."""

import functools
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxrl_post.serve.jetstream import library
from jaxrl_post.serve.jetstream.engine import JetStreamEngine
from jaxrl_post.serve.jetstream.tokens import TextStream

__all__ = ["jetstream_server"]


@contextmanager
def jetstream_server(
    engine: JetStreamEngine,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    threads: int = 64,
    credentials: Any = None,
) -> Iterator[int]:
    """Runs JetStream's gRPC server with an engine, and stops it at the end.

    A request that does not fit ends its call with an error; in a server of
    `jetstream.core.server_lib.run` it ends the process.

    Args:
        engine: of `jetstream_engine`; its smallest programs are compiled first.
        host: address to listen on; only this machine reaches the default.
        port: port to listen on; 0 for a free one.
        threads: of the server.
        credentials: of gRPC; None for no encryption and no authentication.

    Yields:
        The port.

    Raises:
        OSError: the port is taken, or this machine does not have the address.
    """
    jetstream = library.load()
    server_lib, orchestrator = jetstream.server_lib, jetstream.orchestrator
    port = _free_port(host, port)
    engine.compile()
    driver = _driver()(
        prefill_engines=[engine],
        generate_engines=[engine],
        prefill_params=[engine.load_params()],
        generate_params=[engine.load_params()],
        interleaved_mode=True,
        jax_padding=False,
    )
    try:
        with (
            # It listens on every address unless its constant says otherwise.
            _replaced(server_lib, "_HOST", f"[{host}]" if ":" in host else host),
            _replaced(orchestrator, "LLMOrchestrator", _servicer()),
        ):
            server = server_lib.JetStreamServer(
                driver,
                threads,
                port,
                credentials or jetstream.grpc.insecure_server_credentials(),
            )
    except BaseException:
        driver.stop()
        raise
    server.start()
    try:
        yield port
    finally:
        server.stop()
        # JetStream leaves these open.
        server._executor.shutdown()
        server._loop.close()


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _free_port(host: str, port: int) -> int:
    """Checks that a port is free: gRPC would share it with another server."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            raise OSError(
                error.errno,
                f"jetstream_server: cannot listen on {host}, port {port} "
                f"({error.strerror}); choose another, or port 0 for a free one",
            ) from error
        return trial.getsockname()[1]


class _RefusedError(ValueError):
    """A request that does not fit; the message is for its client."""


@functools.cache
def _servicer() -> type:
    orchestrator, status = library.load().orchestrator, library.load().grpc.StatusCode

    class Orchestrator(orchestrator.LLMOrchestrator):
        """JetStream's, which tells clients why a request is refused."""

        async def Decode(self, request: Any, context: Any = None) -> Any:  # noqa: N802
            """Streams what is sampled."""
            try:
                if request.WhichOneof("content") is None:
                    raise _RefusedError(
                        "a request must have text_content or token_content; got neither"
                    )
                async for response in super().Decode(request, context):
                    yield response
            except _RefusedError as error:
                if context is None:
                    raise
                await context.abort(status.INVALID_ARGUMENT, str(error))

    return Orchestrator


@functools.cache
def _driver() -> type:
    orchestrator = library.load().orchestrator

    class Driver(orchestrator.Driver):
        """JetStream's driver; its threads see no request that would make them fail."""

        def place_request_on_prefill_queue(self, request: Any) -> None:
            """Queues a request, or refuses one that the engine cannot serve."""
            (engine,) = self._prefill_engines
            try:
                _prepare(request, engine)
            except ValueError as error:
                raise _RefusedError(str(error)) from error
            super().place_request_on_prefill_queue(request)

        def _generate_thread(self, idx: int) -> None:
            ended = False
            while self.live and not ended:
                try:
                    super()._generate_thread(idx)
                    ended = True
                except AssertionError:
                    # It asserts that a slot is in use before a step. That fails if
                    # the last stream ends between its look at the requests and the
                    # assertion. All slots are free then, so it may begin again.
                    engine = self._generate_engines[idx]
                    free = self._generate_slots[idx].qsize()
                    if free < engine.max_concurrent_decodes:
                        raise

    return Driver


def _prepare(request: Any, engine: JetStreamEngine) -> None:
    """Makes token ids of an `ActiveRequest`'s text, and checks them.

    Raises:
        ValueError: the engine cannot serve it.
    """
    if request.history_path:
        raise ValueError(
            "session_cache must be empty, there are no sessions; got "
            f"{request.history_path!r}. Send the whole prompt"
        )
    if isinstance(request.prefill_content, str):
        ids = engine.tokenizer.encode(request.prefill_content, special=True)
        request.prefill_content = list(ids)
        request.return_channel = TextStream(request.return_channel, engine.tokenizer)
    engine.check(request.prefill_content, request.max_tokens)
