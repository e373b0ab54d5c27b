"""Queries of a model can read a data base, and nothing else, for a bounded time."""

import contextlib
import hashlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from jaxrl_post.envs.tasks.sql.execution import Database, Executor, SqlError

pytestmark = pytest.mark.processes

FILL = """
CREATE TABLE city (id INTEGER PRIMARY KEY, name TEXT, people REAL, flag BLOB);
INSERT INTO city VALUES (1, 'Oslo', 0.7, x'00ff'), (2, 'Bergen', NULL, NULL);
CREATE TABLE big (n INTEGER);
INSERT INTO big WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c
    LIMIT 2000) SELECT n FROM c;
CREATE VIEW north AS SELECT name FROM city;
"""


@pytest.fixture(scope="module")
def executor():
    found = Executor(seconds=1.0, most_rows=2000)
    yield found
    found.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "a city?.sqlite"
    database = sqlite3.connect(path)
    database.executescript(FILL)
    database.close()
    return path


def state(path):
    """The files of a directory, and what the data base holds."""
    return sorted(os.listdir(path.parent)), hashlib.sha256(path.read_bytes()).digest()


@pytest.mark.parametrize(
    ("query", "rows"),
    [
        ("SELECT name, people, flag FROM city", (("Oslo", 0.7, b"\x00\xff"),
                                                 ("Bergen", None, None))),
        ("select count(*), 1e999, 'ü' from big;", ((2000, float("inf"), "ü"),)),
        ("-- why\nWITH c AS (SELECT name FROM north) SELECT * FROM c LIMIT 1 /* so */",
         (("Oslo",),)),
        ("SELECT name FROM city WHERE id = 3", ()),
        ("WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < 4) "
         "SELECT sum(n) FROM c", ((10,),)),
        ("SELECT substr(upper(name), 1, 2), round(people, 1), rank() OVER (ORDER BY id)"
         " FROM city WHERE name LIKE 'o%'", (("OS", 0.7, 1),)),
        ("SELECT strftime('%Y', '2020-05-01'), json_extract('{\"a\": 3}', '$.a')",
         (("2020", 3),)),
        ("VALUES (1, 2)", ((1, 2),)),
    ],
)  # fmt: skip
def test_queries_return_rows(executor, file, query, rows):
    for database in (Database(path=str(file)), Database(schema=FILL)):
        assert executor.run(database, query).rows == rows


# Times in a view, a column and an index are as in a query.
TIMES = """
CREATE TABLE t (day TEXT, year AS (strftime('%Y', day)), at DEFAULT CURRENT_TIMESTAMP);
CREATE INDEX i ON t (date(day, '+1 day'));
INSERT INTO t (day, at) VALUES ('2020-12-31', 1), ('2021-05-05', 2);
CREATE TABLE word (text);
INSERT INTO word VALUES ('now');
CREATE VIEW latest AS SELECT max(date(day)) AS day FROM t;
CREATE VIEW today AS SELECT date('now') AS day;
CREATE VIEW dice AS SELECT random() AS number;
"""


@pytest.mark.parametrize(
    ("query", "row"),
    [
        ("SELECT day FROM latest", ("2021-05-05",)),
        ("SELECT year FROM t WHERE date(day, '+1 day') = '2021-01-01'", ("2020",)),
        ("SELECT date(NULL), date('no'), time('12:30'), unixepoch('1970-01-02'), "
         "strftime('%d', 0, 'unixepoch'), round(julianday('2000-01-01'), 1)",
         (None, None, "12:30:00", 86400, "01", 2451544.5)),
        ("SELECT datetime('2020-07-01', 'localtime')", ("2020-07-01 00:00:00",)),
    ],
)  # fmt: skip
def test_times_that_are_given_are_the_same_everywhere(monkeypatch, query, row):
    monkeypatch.setenv("TZ", "America/New_York")
    executor = Executor()
    assert executor.run(Database(schema=TIMES), query).rows == (row,)
    executor.close()


@pytest.mark.parametrize(
    ("schema", "query", "told"),
    [
        (TIMES, "SELECT day FROM today", r"date\(\) of now depends on the clock"),
        (TIMES, "SELECT date(text) FROM word", r"date\(\) of now depends on the clock"),
        (TIMES, "SELECT number FROM dice", r"random\(\) depends on chance"),
        (f"{TIMES} INSERT INTO t (day) VALUES ('2020-01-01')", "SELECT 1",
         "current_timestamp depends on the clock"),
        ("CREATE TABLE t AS SELECT random() AS a", "SELECT 1",
     r"random\(\) depends on chance"),
    ],
)  # fmt: skip
def test_what_another_day_would_change_is_refused(executor, schema, query, told):
    with pytest.raises(SqlError, match=f"^{told}, and so would the rows") as caught:
        executor.run(Database(schema=schema), query)
    assert caught.value.kind == "refused"


def test_a_result_without_rows_has_columns(executor):
    found = executor.run(Database(schema=FILL), "SELECT 1 AS a, 2 AS b WHERE 0")
    assert (found.rows, found.columns) == ((), ("a", "b"))


CROSSED = "big a, big b, big c, big d"
DOUBLED = "WITH a0 AS (SELECT 1 AS x)" + "".join(
    f", a{i} AS (SELECT l.x FROM a{i - 1} l, a{i - 1} r)" for i in range(1, 24)
)
# (query, kind of the error)
HOSTILE = [
    # Writes.
    ("DROP TABLE city", "refused"),
    ("DELETE FROM city", "refused"),
    ("INSERT INTO city (name) VALUES ('x')", "refused"),
    ("UPDATE city SET name = 'x'", "refused"),
    ("INSERT INTO city (name) VALUES ('x') RETURNING name", "refused"),
    ("REPLACE INTO city VALUES (1, 'x', 1, 1)", "refused"),
    ("WITH c AS (SELECT 1) DELETE FROM city WHERE id IN (SELECT * FROM c)", "refused"),
    ("CREATE TABLE t (a)", "refused"),
    ("CREATE TEMP TABLE t AS SELECT * FROM city", "refused"),
    ("CREATE TEMP VIEW v AS SELECT 1", "refused"),
    ("CREATE VIRTUAL TABLE t USING fts5(a)", "refused"),
    ("CREATE TRIGGER t AFTER INSERT ON city BEGIN DELETE FROM city; END", "refused"),
    ("CREATE INDEX i ON city (name)", "refused"),
    ("ALTER TABLE city RENAME TO town", "refused"),
    ("ANALYZE", "refused"),
    ("REINDEX", "refused"),
    ("VACUUM", "refused"),
    ("VACUUM INTO '{folder}/copy.sqlite'", "refused"),
    # Other files and code.
    ("ATTACH '{folder}/other.sqlite' AS other", "refused"),
    ("ATTACH ':memory:' AS other", "refused"),
    ("DETACH main", "refused"),
    ("SELECT load_extension('{folder}/code')", "refused"),
    ("SELECT LOAD_EXTENSION('libc.so.6', 'system')", "refused"),
    ("SELECT writefile('{folder}/out', 'x')", "invalid"),
    ("SELECT readfile('/etc/hosts')", "invalid"),
    ("SELECT edit('x', 'sh')", "invalid"),
    ("SELECT fts3_tokenizer('simple', x'00')", "refused"),
    ("SELECT * FROM csv('/etc/hosts')", "invalid"),
    # Settings and transactions.
    ("PRAGMA writable_schema = ON", "refused"),
    ("PRAGMA query_only = OFF", "refused"),
    ("PRAGMA table_info(city)", "refused"),
    ("PRAGMA hard_heap_limit", "refused"),
    ("BEGIN EXCLUSIVE", "refused"),
    ("SAVEPOINT s", "refused"),
    ("COMMIT", "refused"),
    # Several statements, or none.
    ("SELECT 1; DROP TABLE city", "refused"),
    ("SELECT 1; SELECT 2", "refused"),
    ("/* SELECT */ DROP /* x */ TABLE /* y */ city -- z", "refused"),
    ("SELECT 1 -- \n; DELETE FROM city", "refused"),
    ("", "refused"),
    ("-- nothing", "refused"),
    ("I think that the answer is 5.", "invalid"),
    ("SELECT nothing FROM city", "invalid"),
    ("SELECT '\x00'", "refused"),
    ("SELECT '\ud800'", "invalid"),
    ("SELECT ?", "refused"),
    # Chance and the clock: the same query must have the same rows.
    ("SELECT random()", "refused"),
    ("SELECT name FROM city ORDER BY random() LIMIT 1", "refused"),
    ("SELECT name FROM city WHERE date('now') > '2020-01-01'", "refused"),
    ("SELECT strftime('%Y', 'n' || 'OW', 'localtime')", "refused"),
    ("SELECT date(x'6e6f77'), date('now' || char(0) || '.')", "refused"),
    ("SELECT datetime()", "refused"),
    ("SELECT strftime('%Y')", "refused"),
    ("SELECT julianday('2020-01-01') - julianday('subsec')", "refused"),
    ("SELECT timediff('2020-01-01', 'now')", "refused"),
    ("SELECT CURRENT_DATE", "refused"),
    ("SELECT current_timestamp", "refused"),
    ("SELECT time(1, 2, 3" + ", 4" * 200 + ")", "invalid"),
    # Time.
    ("WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) "
     "SELECT count(*) FROM c", "time"),
    (f"SELECT count(*) FROM {CROSSED} WHERE a.n + b.n + c.n + d.n < 0", "time"),
    (f"SELECT a.n FROM {CROSSED} ORDER BY a.n * b.n * c.n LIMIT 1", "time size"),
    ("SELECT trim(hex(zeroblob(400000)), "
     "replace(hex(zeroblob(35000)), '0', '1') || '0')", "time"),
    (f"{DOUBLED} SELECT count(*) FROM a23", "time size invalid"),
    # Size.
    (f"SELECT * FROM {CROSSED}", "size"),
    ("SELECT zeroblob(1000000000)", "size"),
    ("SELECT length(zeroblob(1000000000))", "size"),
    ("SELECT randomblob(1000000000)", "refused"),
    ("SELECT replace(hex(zeroblob(400000)), '0', '0000000000')", "size"),
    ("SELECT zeroblob(999000), n FROM big", "size"),
    ("SELECT hex(zeroblob(400000)), n FROM big", "size"),
    ("SELECT group_concat(hex(zeroblob(1000))) FROM big", "size"),
    ("SELECT json_group_array(hex(zeroblob(1000))) FROM big", "size"),
    ("WITH RECURSIVE c(x, n) AS (SELECT hex(zeroblob(400000)), 1 UNION "
     "SELECT x, n + 1 FROM c) SELECT count(x) FROM c", "size time"),
    ("SELECT 1" + " + 1" * 4500, "invalid"),
    ("SELECT " + "1," * 20000 + "1", "size"),
    ("SELECT " + "(" * 5000 + "1" + ")" * 5000, "invalid"),
]  # fmt: skip


@pytest.mark.parametrize("form", ["file", "schema"])
@pytest.mark.parametrize(("query", "kinds"), HOSTILE)
def test_hostile_queries_have_no_effect(executor, file, form, query, kinds):
    query = query.replace("{folder}", str(file.parent))
    database = Database(path=str(file)) if form == "file" else Database(schema=FILL)
    before, began = state(file), time.monotonic()
    with pytest.raises(SqlError) as caught:
        executor.run(database, query)
    assert caught.value.kind in kinds.split(), caught.value
    assert time.monotonic() - began < 60.0
    assert state(file) == before
    # And none that a later query sees.
    told = executor.run(database, "SELECT (SELECT count(*) FROM city), name FROM north")
    assert told.rows == ((2, "Oslo"), (2, "Bergen"))


def peak_bytes(pid):
    with open(f"/proc/{pid}/status") as file:
        (line,) = (line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def test_memory_is_bounded():
    if not os.path.exists("/proc/self/status"):
        pytest.skip("needs /proc")
    # It takes a second, or several of them on a busy machine.
    executor = Executor(seconds=60.0)
    # More rows than fit, in a set that has to remember them.
    query = (
        "WITH RECURSIVE c(x, n) AS (SELECT hex(zeroblob(100000)), 1 UNION "
        "SELECT x, n + 1 FROM c) SELECT count(x) FROM c"
    )
    with pytest.raises(SqlError) as caught:
        executor.run(Database(schema=FILL), query)
    assert caught.value.kind == "size"
    executor.run(Database(schema=FILL), "SELECT 1")
    assert peak_bytes(executor._process.pid) < 350 << 20
    executor.close()


def test_a_process_that_ended_is_started_again(executor):
    database = Database(schema=FILL)
    executor.run(database, "SELECT 1")
    executor._process.send_signal(signal.SIGINT)
    assert executor.run(database, "SELECT 1").rows == ((1,),)
    process = executor._process
    assert process.poll() is None
    process.kill()
    process.wait()
    assert executor.run(database, "SELECT 1").rows == ((1,),)
    assert executor._process is not process


def test_a_process_that_uses_no_time_is_not_waited_for_and_judges_nothing():
    # As on a machine without memory; the limit of processor time does not help here.
    database = Database(schema=FILL)
    executor = Executor(clock_seconds=1.0)
    executor.run(database, "SELECT 1")
    executor._process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer after 1 s on the clock"):
        executor.run(database, "SELECT 1")
    assert time.monotonic() - began < 60.0
    assert executor.run(database, "SELECT 1").rows == ((1,),)
    executor.close()


def test_a_query_on_a_busy_machine_has_its_rows():
    database = Database(schema=FILL)
    executor = Executor(seconds=0.5)
    executor.run(database, "SELECT 1")
    process = executor._process
    process.send_signal(signal.SIGSTOP)
    # Longer than the query may compute.
    timer = threading.Timer(2.0, process.send_signal, [signal.SIGCONT])
    timer.start()
    assert executor.run(database, "SELECT count(*) FROM city").rows == ((2,),)
    timer.join()
    executor.close()


PARENT = """
import os, signal
from jaxrl_post.envs.tasks.sql.execution import Database, Executor
executor = Executor()
executor.run(Database(schema=""), "SELECT 1")
print(executor._process.pid, flush=True)
if {killed}:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("killed", [False, True])
def test_the_process_ends_with_its_parent(killed):
    parent = subprocess.run(
        (sys.executable, "-c", PARENT.format(killed=killed)),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert parent.returncode == (-signal.SIGKILL if killed else 0), parent.stderr
    until = time.monotonic() + 60
    while alive(int(parent.stdout)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not alive(int(parent.stdout))


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # Where these tests run no process may wait for it: a zombie has ended, too.
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
    return True


def test_a_data_base_that_is_none_is_told(executor, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("no data base " * 100)
    with pytest.raises(SqlError, match="file is not a database") as caught:
        executor.run(Database(path=str(path)), "SELECT * FROM sqlite_master")
    assert caught.value.kind == "invalid"
    with pytest.raises(SqlError, match="unable to open"):
        executor.run(Database(path=str(tmp_path / "absent.sqlite")), "SELECT 1")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(SqlError, match="syntax error"):
        executor.run(Database(schema="CREATE THING"), "SELECT 1")


def test_many_data_bases_are_open_in_turn(executor):
    for _ in range(2):
        for number in range(20):
            schema = f"CREATE TABLE t (a); INSERT INTO t VALUES ({number});"
            found = executor.run(Database(schema=schema), "SELECT a FROM t")
            assert found.rows == ((number,),)
