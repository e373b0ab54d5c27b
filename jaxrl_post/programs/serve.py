"""Serves a model over HTTP, for `launch.serve`."""

import asyncio
import contextlib
import dataclasses
import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from rich.console import Console

from jaxrl_post.config.data import DataConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.serve import ServeConfig, check_server, read_key
from jaxrl_post.data.generation import not_done, read_generation_defaults
from jaxrl_post.data.lengths import Lengths
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.data.tools import expresses_tools, form_of
from jaxrl_post.examples.environment import make_environment
from jaxrl_post.examples.texts import environment_tokenizer
from jaxrl_post.extras import install
from jaxrl_post.learner.model import Model, check_context, context_of
from jaxrl_post.programs.build.engine import bound_engine
from jaxrl_post.programs.build.model import open_named
from jaxrl_post.programs.hub import fetch
from jaxrl_post.programs.template import template_line, with_run
from jaxrl_post.sampler import EngineConfig, Request, SamplingParams
from jaxrl_post.sampler.sizes import PAGE, pages_for
from jaxrl_post.sharding import split_size

try:
    import uvicorn
    from starlette.applications import Starlette

    from jaxrl_post.programs.apart.follow import follow
    from jaxrl_post.serve.app import Access, make_app
    from jaxrl_post.serve.calls import Served
    from jaxrl_post.serve.episodes import Episodes
    from jaxrl_post.serve.grammars.compiler import COMPILE_S, Grammars
    from jaxrl_post.serve.responses import Responses
    from jaxrl_post.serve.service import Service
    from jaxrl_post.serve.threads import BACKLOG, listen
except ModuleNotFoundError as error:
    raise ConfigError(
        f"launch.serve needs the extra serve ({error}); install it with "
        f"{install('serve')}"
    ) from error

__all__ = ["open_service", "run_server", "served_model"]

# Stop tokens that a request may name in addition to the model's own, by ids (8) or
# as stop strings (16).
REQUEST_STOP_IDS = 24
# Most tokens of a completion whose request does not say how many, by default.
MOST_TOKENS = 1024
# Most tokens of the cache for each slot, by default.
SLOT_TOKENS = 2048
# A prompt and a completion may leave a page each partly filled.
PARTLY = 2
# Seconds for what the device is computing when the server ends.
LAST_BURST_S = 60.0
# Seconds between two looks at whether the sampler still runs.
WATCH_S = 0.5


def run_server(config: ServeConfig, *, console: Console, command: str = "") -> None:
    """Opens a model and serves it until SIGTERM or Ctrl-C.

    Args:
        config: the options.
        console: for messages to the user.
        command: not used.

    Raises:
        ConfigError: an option makes no sense, or the address is taken.
    """
    del command
    check_server(config)
    if config.follow is not None:
        follow(config, console=console)
        return
    template = with_run(config.template, config.model)
    with _listening(config) as listener:
        fetched = fetch(config, console=console).config

        def make_tokenizer(vocab_size: int) -> Tokenizer:
            environment = make_environment(fetched.env, DataConfig())
            return environment_tokenizer(environment, vocab_size)

        model = open_named(fetched, make_tokenizer=make_tokenizer, template=template)
        if line := template_line(template, model.tokenizer):
            console.print(line, markup=False, highlight=False)
        check_context(model.config, config.max_model_len, "--max-model-len")
        rules = model.rules.with_context_as_batch()
        split = split_size("batch", model.mesh, rules) if model.mesh else 1
        config = _sized(config, context_of(model.config), split)
        console.print(f"compiling the sampler of {config.model}", markup=False)
        service = open_service(config, model)
        try:
            served = served_model(config, model, service)
            _tell_unsupported(config, model.source, console)
            episodes = Episodes(config.max_episodes, config.episode_deadline_s)
            most_bytes = int(config.max_responses_mib * 2**20)
            responses = Responses(config.max_responses, most_bytes)
            app = make_app(served, _access(config), episodes, responses)
            server = _Server(app, service, config.grace_s)
            host, port = listener.getsockname()[:2]
            at = f"[{host}]" if ":" in host else host
            console.print(
                f"serving {served.name} at http://{at}:{port}/v1; Ctrl-C ends it",
                markup=False,
                highlight=False,
            )
            asyncio.run(server.serve_on(listener))
        finally:
            ended = service.close(LAST_BURST_S)
        if service.error is not None:
            raise service.error
        console.print("ended" if ended else "ended; the device still computes")


def _sized(config: ServeConfig, context: int, split: int) -> ServeConfig:
    """The options, with sizes that fit the model and each other.

    Args:
        config: the options.
        context: tokens of the model's longest sequence.
        split: parts of the mesh, each with a cache of its own.

    Raises:
        ConfigError: a part of the cache does not hold two tokens.
    """
    longest, cache = config.max_model_len, config.cache_tokens
    if not cache:
        each = min(longest or context, SLOT_TOKENS) + PARTLY * PAGE
        cache = config.num_slots * each
        if longest:
            cache = max(cache, split * PAGE * (pages_for(longest) + PARTLY))
    if not longest:
        longest = min(context, PAGE * (pages_for(cache) // split - PARTLY))
        if longest < 2:
            raise ConfigError(
                f"--cache-tokens: must be at least {split * PAGE * (PARTLY + 1)}, for "
                f"a sample in each of {split} parts; got {cache}"
            )
    sampled = config.max_tokens or max(1, min(longest // 2, MOST_TOKENS))
    return dataclasses.replace(
        config, max_model_len=longest, cache_tokens=cache, max_tokens=sampled
    )


def open_service(config: ServeConfig, model: Model) -> Service:
    """Starts the sampler of a model, and compiles its smallest programs.

    Args:
        config: the sampler's sizes.
        model: on its mesh.

    Raises:
        ValueError: the sizes do not fit the model.
    """
    # A prompt leaves room for a token, and a completion follows one.
    most = config.max_model_len - 1
    sizes = EngineConfig(
        num_slots=config.num_slots,
        max_prompt_tokens=most,
        max_tokens=most,
        context_tokens=config.max_model_len,
        cache_tokens=config.cache_tokens,
        max_stop_ids=len(model.tokenizer.stop_ids) + REQUEST_STOP_IDS,
        few_shapes=True,
    )
    sampler = bound_engine(model, sizes, seed=config.seed)
    first = Request(0, model.tokenizer.stop_ids[:1], sampling=SamplingParams(0.0))
    first = dataclasses.replace(
        first, sampling=dataclasses.replace(first.sampling, max_tokens=1)
    )
    sampler.engine.generate(sampler.params, [first])
    service = Service(sampler, max_samples=config.max_samples)
    service.start()
    return service


def _tell_unsupported(
    config: ServeConfig, source: Path | None, console: Console
) -> None:
    """Prints the model's own defaults that the sampler does not support."""
    if config.sampling_defaults != "model" or source is None:
        return
    if told := not_done(read_generation_defaults(source).unsupported):
        console.print(told, markup=False, style="yellow")


def served_model(config: ServeConfig, model: Model, service: Service) -> Served:
    """The model as the handlers of requests see it.

    Args:
        config: the options.
        model: its tokenizer and sizes.
        service: of `open_service`.

    Raises:
        ConfigError: `sampling_defaults` "model" for a preset.
        TokenizerError: as `read_generation_defaults`.
    """
    defaults = SamplingParams()
    if config.sampling_defaults == "model":
        if model.source is None:
            raise ConfigError(
                f"--sampling-defaults: {model.name} is a preset, without a "
                'generation_config.json; take "neutral"'
            )
        read = read_generation_defaults(model.source)
        named = ("temperature", "top_k", "top_p", "min_p", "stop_strings")
        given = {name: getattr(read, name) for name in named}
        defaults = dataclasses.replace(
            defaults, **{n: v for n, v in given.items() if v is not None}
        )
    tokenizer = model.tokenizer
    return Served(
        service=service,
        tokenizer=tokenizer,
        # A grammar that takes too long is refused, before the request's time is over.
        grammars=Grammars(
            tokenizer,
            model.config.vocab_size,
            seconds=min(COMPILE_S, config.timeout_s / 2),
        ),
        form=form_of(tokenizer),
        name=config.name or _name(config.model),
        max_model_len=config.max_model_len,
        max_tokens=config.max_tokens,
        defaults=defaults,
        timeout_s=config.timeout_s,
        tools=expresses_tools(tokenizer),
        lengths=Lengths.of(tokenizer),
    )


def _name(model: str) -> str:
    """The model's name for clients: the directory's name, or the name on the hub."""
    return Path(model).resolve().name if Path(model).exists() else model


class _Server(uvicorn.Server):
    """A server that ends its answers before it stops."""

    def __init__(self, app: Starlette, service: Service, grace_s: float) -> None:
        self._service, self._grace_s = service, grace_s
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                lifespan="off",
                backlog=BACKLOG,
                # Running requests are stopped after `grace_s`; their answers say so.
                timeout_graceful_shutdown=int(grace_s) + 5,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Takes SIGTERM and Ctrl-C; unlike uvicorn's own, does not raise them again."""
        names = signal.SIGTERM, signal.SIGINT
        before = [signal.signal(name, self.handle_exit) for name in names]
        try:
            yield
        finally:
            for name, handler in zip(names, before, strict=True):
                signal.signal(name, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes no more requests; a second signal stops the running ones."""
        if self.should_exit:
            self._service.cancel_all()
        self._service.drain()
        super().handle_exit(signal.SIGTERM, frame)
        del sig

    async def serve_on(self, listener: socket.socket) -> None:
        """Serves until a signal comes, or the sampler ends."""
        watch = asyncio.ensure_future(self._watch())
        try:
            await self.serve(sockets=[listener])
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        while self._service.alive:
            await asyncio.sleep(WATCH_S)
        self.should_exit = True
        await asyncio.sleep(self._grace_s)
        self._service.cancel_all()


@contextlib.contextmanager
def _listening(config: ServeConfig) -> Iterator[socket.socket]:
    """Opens the socket, before anything that takes long."""
    try:
        listener = listen(config.host, config.port)
    except OSError as error:
        raise ConfigError(
            f"--port: cannot listen on {config.host}:{config.port}: {error}; choose "
            "another, or 0 for a free one"
        ) from error
    # A connection is an open file; the usual soft limit is about a thousand.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    with listener:
        yield listener


def _access(config: ServeConfig) -> Access:
    return Access(read_key(config), int(config.max_body_mib * 2**20))
