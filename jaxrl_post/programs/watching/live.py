"""Serves a page that follows a run, for `launch.watch` and `--watch.listen`."""

import contextlib
import importlib
import ipaddress
import json
import logging
import math
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.evaluate import LiveConfig
from jaxrl_post.extras import install
from jaxrl_post.records.directory import RunDirectory
from jaxrl_post.records.live.run import LiveRun
from jaxrl_post.records.live.samples import Order, Query
from jaxrl_post.records.report.templates import packaged, script_policy, template

__all__ = ["guards", "live_routes", "run_live"]

_LOGGER = logging.getLogger(__name__)

# Where the page is if no address was given and the port is free.
USUAL = ("127.0.0.1", 8070)
# Seconds between two looks at the files.
LOOK_S = 0.5
# Seconds until the files are read again after an error, and for the last look to end.
PAUSE_S, END_S = 10.0, 5.0
MOST_FIGURES = 24
# Seconds for which a thread may keep the interpreter while others wait.
SWITCH_S = 0.0005
# Seconds between two looks whether a request is still being answered.
GIVE_WAY_S = 0.005
SCRIPTS = ("plotly-basic.min.js", "paint.js", "live.js")
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def run_live(config: LiveConfig, *, console: Console, command: str = "") -> None:
    """Serves the page of a run until Ctrl-C.

    Args:
        config: the options.
        console: for the address.
        command: not used.

    Raises:
        ConfigError: it is no directory, the address is taken, or the extra
            serve is not installed.
    """
    del command
    try:
        from starlette.applications import Starlette
    except ImportError as error:
        raise ConfigError(
            f"launch.watch needs the extra serve ({error}); install it with "
            f"{install('serve')}; python -m launch.report {config.run_dir} needs none"
        ) from error

    directory = RunDirectory(Path(config.run_dir))
    if directory.path.exists() and not directory.path.is_dir():
        raise ConfigError(
            f"run_dir: {config.run_dir} is no directory; give the --run-dir of a run"
        )
    if not directory.path.exists():
        told = f"there is no {config.run_dir} yet; the page waits for the run to begin"
        console.print(told, markup=False, style="yellow")
    address = config.address
    # The first chart would wait for this import.
    importlib.import_module("plotly.graph_objects")
    with contextlib.ExitStack() as stack:
        routes = stack.enter_context(live_routes(directory, at_once=True))
        app = Starlette(routes=routes, middleware=guards((address or USUAL)[0]))
        url = _served(stack, app, address)
        console.print(f"page: {url}", markup=False, highlight=False)
        console.print("Ctrl-C ends it", style="dim")
        if config.open:
            webbrowser.open(url)
        # The thread that reads gives way to requests at once.
        sys.setswitchinterval(SWITCH_S)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


def _served(
    stack: contextlib.ExitStack, app: Any, address: tuple[str, int] | None
) -> str:
    """Serves at an address, or at the usual one if it is free, else at another."""
    from jaxrl_post.serve.threads import serving

    host, port = address or USUAL
    try:
        return stack.enter_context(serving(app, host, port, name="page"))[0]
    except OSError as error:
        if address is not None:
            raise ConfigError(
                f"--listen: cannot listen on {host}:{port}: {error}; choose another "
                "address; port 0 takes a free one"
            ) from error
        return stack.enter_context(serving(app, host, 0, name="page"))[0]


def guards(host: str) -> list[Any]:
    """Middleware that answers only requests under a name of this machine.

    Otherwise a page elsewhere could have a browser read from here, under a name of its
    own that it resolves to the loopback address.

    Args:
        host: that is listened on; one that is not loopback answers to all names.
    """
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback:
        return []
    names = ["localhost", "127.0.0.1", "[::1]", host]
    return [Middleware(TrustedHostMiddleware, allowed_hosts=names)]


@contextlib.contextmanager
def live_routes(
    directory: RunDirectory, *, at_once: bool = False
) -> Iterator[list[Any]]:
    """Follows a run in a thread until the block ends.

    Args:
        directory: of the run; its files may come later.
        at_once: whether to read before a page asks.

    Yields:
        Routes of starlette: the page at /, and what its script asks for.
    """
    run, asked, ended = LiveRun(directory), threading.Event(), threading.Event()
    requests: set[object] = set()
    if at_once:
        asked.set()

    def follow() -> None:
        asked.wait()
        while not ended.is_set():
            try:
                more = run.advance()
            except Exception as error:
                # The page stays, and says so.
                _LOGGER.exception("the page of the run cannot read on")
                run.tell("reading", f"a piece of the logs could not be read: {error!r}")
                ended.wait(PAUSE_S)
                continue
            # Requests come first: the page waits for them.
            ended.wait(0 if more else LOOK_S)
            while requests and not ended.wait(GIVE_WAY_S):
                pass

    thread = threading.Thread(target=follow, name="follow", daemon=True)
    thread.start()
    try:
        yield _routes(run, asked, requests)
    finally:
        ended.set()
        asked.set()
        thread.join(END_S)


def _routes(run: LiveRun, asked: threading.Event, requests: set[object]) -> list[Any]:
    """Makes the routes; each request is in `requests` while it is answered."""
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, Response
    from starlette.routing import Route

    page = _page()

    def shell(_: Request) -> Response:
        return HTMLResponse(page, headers=HEADERS)

    def state(request: Request) -> Response:
        asked.set()
        return answer(run.state(_number(request.query_params, "since", int)))

    def figures(request: Request) -> Response:
        given = request.query_params
        first, last = (_number(given, name, float) for name in ("first", "last"))
        span = None
        if first is not None and last is not None:
            if not (math.isfinite(first) and math.isfinite(last) and first <= last):
                raise HTTPException(400, "first and last must be steps, in this order")
            span = (math.floor(first), math.ceil(last))
        names = dict.fromkeys(given.getlist("id"))
        if len(names) > MOST_FIGURES:
            raise HTTPException(400, f"at most {MOST_FIGURES} figures at a time")
        drawn = {each: run.figure(each, span) for each in names}
        return answer({name: figure for name, figure in drawn.items() if figure})

    def samples(request: Request) -> Response:
        given = request.query_params
        try:
            query = _query(given)
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        return answer(run.find(query, _number(given, "after", int)))

    def sample(request: Request) -> Response:
        given = request.query_params
        offset, generation = (_number(given, n, int) for n in ("offset", "generation"))
        found = None if offset is None else run.sample(offset, generation or 0)
        if found is None:
            raise HTTPException(404, "samples.jsonl has no such row any more")
        return HTMLResponse(found, headers=HEADERS)

    def compared(request: Request) -> Response:
        given = request.query_params
        before, after = (_number(given, name, int) for name in ("before", "after"))
        if before is None or after is None:
            raise HTTPException(400, "before and after must be steps")
        return answer(run.compared(before, after, given.get("changed", "")))

    def answer(content: Any) -> Response:
        # In ASCII, which lone surrogates can be written in.
        text = json.dumps(content, allow_nan=False)
        return Response(text, media_type="application/json", headers=HEADERS)

    def counted(endpoint: Callable[[Request], Response]) -> Any:
        def answered(request: Request) -> Response:
            requests.add(request)
            try:
                return endpoint(request)
            finally:
                requests.discard(request)

        return answered

    pages = {
        "/": shell,
        "/state": state,
        "/figures": figures,
        "/samples": samples,
        "/sample": sample,
        "/compare": compared,
    }
    return [Route(path, counted(endpoint)) for path, endpoint in pages.items()]


def _page() -> str:
    scripts = [packaged(name) for name in SCRIPTS]
    return template("live.html.jinja").render(
        scripts=scripts, policy=script_policy(*scripts)
    )


def _number[Number: (int, float)](
    given: Any, name: str, kind: type[Number]
) -> Number | None:
    """A number of the query; None if it is absent or empty."""
    from starlette.exceptions import HTTPException

    text = given.get(name, "")
    try:
        return kind(text) if text else None
    except ValueError as error:
        raise HTTPException(400, f"{name} must be a number, got {text!r}") from error


def _query(given: Any) -> Query:
    """Reads what the page's form asks for.

    Raises:
        ValueError: there is no such order or split.
    """

    def between(name: str) -> tuple[float | None, float | None]:
        low, high = (_number(given, f"{name}_{end}", float) for end in ("low", "high"))
        return low, high

    order = given.get("order", "newest")
    if order not in get_args(Order.__value__):
        raise ValueError(f"order: there is no {order!r}")
    split = given.get("split", "")
    if split not in ("", "train", "eval"):
        raise ValueError(f"split: there is no {split!r}")
    return Query(
        split=split,
        steps=between("step"),
        rewards=between("reward"),
        tokens=between("tokens"),
        ended=given.get("ended", ""),
        failed=given.get("failed", "") == "1",
        text=given.get("text", ""),
        task=given.get("task", ""),
        order=order,
    )
