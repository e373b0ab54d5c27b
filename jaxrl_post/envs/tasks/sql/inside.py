"""The process that runs the queries a model wrote: it may read a data base, no more.

It is started as a plain file (`execution.py`), so it imports only the standard library.
Each line of standard input is a request, each line of standard output its answer, both
JSON. The end of the input ends the process.

A query cannot write: the data base is opened read-only, and the authorizer refuses all
but reading. Its processor time is limited twice: by a handler that SQLite calls while a
query runs, and by the system, which also ends what SQLite does in one step.

A query has the same rows on any day and on any machine: what depends on chance or on
the clock is refused, in the statements that fill a data base as well, and local time is
UTC.
"""

import contextlib
import functools
import json
import math
import os
import signal
import sqlite3
import sys
import time
import urllib.parse
from collections import OrderedDict

# Heap of SQLite, and address space of this process, in bytes.
HEAP = 256 << 20
ADDRESS_SPACE = 1 << 30
# Bytes of one value, of a query and of an answer, and characters of a LIKE pattern.
LENGTHS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 1_000_000,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1_000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
QUERY_BYTES = 20_000
ANSWER_BYTES = 4_000_000
# Steps of SQLite's machine between two looks at the clock: microseconds.
STEPS = 1_000
# Data bases that stay open.
KEPT = 16

ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
# These functions load code.
DENIED = {"load_extension", "fts3_tokenizer"}
CHANCE = {"random", "randomblob"}
CLOCK = {"current_date", "current_time", "current_timestamp"}
# Functions of times, and at which places they take one: without it they take now.
TIMES = {
    **dict.fromkeys(("date", "time", "datetime", "julianday", "unixepoch"), (0,)),
    "strftime": (1,),
    "timediff": (0, 1),
}
NOW = {"now", "subsec", "subsecond"}
KINDS = {
    "SQLITE_AUTH": "refused",
    "SQLITE_INTERRUPT": "time",
    "SQLITE_NOMEM": "size",
    "SQLITE_TOOBIG": "size",
    "SQLITE_FULL": "size",
}


class RefusedError(Exception):
    """A query is not run: kind and message."""


def authorize(action, first, second, *_):
    """Whether SQLite may compile a part of a query."""
    allowed = action in ALLOWED and not (
        action == sqlite3.SQLITE_FUNCTION and str(second).lower() in DENIED
    )
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


class Steady:
    """Functions in the place of SQLite's that have another value each time.

    `reason` is why the last one raised, kind and message: SQLite does not tell.
    """

    def __init__(self):
        self.reason = None
        # Here SQLite's own functions are found.
        self._plain = sqlite3.connect(":memory:", isolation_level=None)

    def install(self, database):
        """Replaces the functions of a data base."""
        for name in CHANCE:
            database.create_function(name, -1, functools.partial(self._chance, name))
        for name in CLOCK:
            database.create_function(name, -1, functools.partial(self._clock, name))
        for name in TIMES:
            # Otherwise SQLite would refuse it in an index and in a column.
            database.create_function(
                name, -1, functools.partial(self._time, name), deterministic=True
            )

    def _chance(self, name, *_):
        raise self._refused(f"{name}() depends on chance, and so would the rows")

    def _clock(self, name, *_):
        raise self._refused(
            f"{name} depends on the clock, and so would the rows: write the time that "
            "is meant"
        )

    def _time(self, name, *arguments):
        for place in TIMES[name]:
            if place >= len(arguments):
                self._clock(f"{name}() without a time")
            if is_now(arguments[place]):
                self._clock(f"{name}() of now")
        places = ", ".join("?" * len(arguments))
        try:
            (row,) = self._plain.execute(f"SELECT {name}({places})", arguments)
        except sqlite3.Error as error:
            self.reason = "invalid", str(error)
            raise
        return row[0]

    def _refused(self, message):
        self.reason = "refused", message
        return RefusedError(*self.reason)


STEADY = Steady()


def is_now(value):
    """Whether SQLite takes a value for the present time."""
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    # For SQLite a time ends with the first zero.
    return isinstance(value, str) and value.partition("\0")[0].lower() in NOW


def opened(path, schema, seconds):
    """A data base: of a file, or one in memory that a text creates and fills."""
    if path is not None:
        # Immutable: no lock is taken, and no further file is made.
        name = f"file:{urllib.parse.quote(path)}?mode=ro&immutable=1"
        database = sqlite3.connect(name, uri=True, isolation_level=None)
    else:
        database = sqlite3.connect(":memory:", isolation_level=None)
    database.text_factory = lambda raw: raw.decode("utf-8", "replace")
    # Nothing is written to temporary files, and this process has little memory.
    database.execute("PRAGMA temp_store = MEMORY")
    # A view may use what a query may: the authorizer sees both. SQLite would refuse it
    # the functions of `Steady`.
    database.execute("PRAGMA trusted_schema = ON")
    STEADY.install(database)
    if schema is not None:
        with limited(database, seconds):
            database.executescript(schema)
    for limit, value in LENGTHS.items():
        database.setlimit(limit, value)
    database.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, QUERY_BYTES)
    database.execute("PRAGMA query_only = ON")
    database.set_authorizer(authorize)
    return database


@contextlib.contextmanager
def limited(database, seconds):
    """Interrupts what takes more processor time."""
    until = time.process_time() + seconds
    database.set_progress_handler(lambda: time.process_time() > until, STEPS)
    try:
        yield
    finally:
        database.set_progress_handler(None, STEPS)


def rows_of(database, query, seconds, most):
    """The rows of a query, as lists, and the names of its columns."""
    rows, size = [], 0
    with limited(database, seconds), contextlib.closing(database.cursor()) as cursor:
        cursor.execute(query)
        if cursor.description is None:
            raise RefusedError("refused", "it is not a query: nothing is selected")
        for row in cursor:
            size += sum(map(size_of, row))
            if size > ANSWER_BYTES:
                raise RefusedError("size", "it returns too much text")
            rows.append([plain(value) for value in row])
            if len(rows) > most:
                raise RefusedError("size", f"it returns more than {most} rows")
        return rows, [name for name, *_ in cursor.description]


def size_of(value):
    """Characters of a value as JSON has it, about."""
    if isinstance(value, bytes):
        return 2 * len(value)
    return len(value) if isinstance(value, str) else 8


def plain(value):
    """A value as JSON has it."""
    return {"bytes": value.hex()} if isinstance(value, bytes) else value


def answer(databases, request):
    """Carries out a request."""
    key = (request["path"], request["schema"])
    STEADY.reason = None
    try:
        if key not in databases:
            databases[key] = opened(*key, request["seconds"])
            while len(databases) > KEPT:
                databases.popitem(last=False)[1].close()
        databases.move_to_end(key)
        rows, columns = rows_of(
            databases[key], request["query"], request["seconds"], request["rows"]
        )
        return {"rows": rows, "columns": columns}
    except RefusedError as error:
        return failure(*error.args)
    except MemoryError:
        return failure("size", "it needs too much memory")
    except sqlite3.ProgrammingError as error:
        return failure("refused", str(error))
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        return failure(*(STEADY.reason or (kind_of(error), str(error))))


def kind_of(error):
    """Names the kind of SQLite's error."""
    # A function that is not allowed, and a long query, have no code of their own.
    if str(error).startswith("not authorized"):
        return "refused"
    if isinstance(error, sqlite3.DataError):
        return "size"
    return KINDS.get(getattr(error, "sqlite_errorname", ""), "invalid")


def failure(kind, message):
    """The answer that says why there are no rows."""
    return {"kind": kind, "message": message[:500]}


def limit_process():
    """Limits the memory and the files of this process."""
    database = sqlite3.connect(":memory:")
    database.execute(f"PRAGMA hard_heap_limit = {HEAP}")
    database.close()
    try:
        import resource
    except ImportError:  # Not on Windows.
        return
    for kind, value in (
        (resource.RLIMIT_AS, ADDRESS_SPACE),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        lower = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # Some systems refuse to limit the address space.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (lower, lower))


def limit_time(seconds):
    """Ends this process after so much more processor time."""
    try:
        import resource
    except ImportError:
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    end = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (end, hard))


def main():
    """Answers requests until there are no more."""
    limit_process()
    # Ctrl-C is for the run, which may still need answers before it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TZ"] = "UTC"
    if hasattr(time, "tzset"):  # Not on Windows.
        time.tzset()
    databases = OrderedDict()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        limit_time(request["seconds"])
        reply = json.dumps(answer(databases, request)).encode("ascii")
        sys.stdout.buffer.write(reply + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
