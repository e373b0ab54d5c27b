"""Questions over data bases: generated ones, a file's, and their rewards."""

import json
import pickle
import sqlite3
from random import Random

import pytest

from jaxrl_post.config.data import DataConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.envs import Message, WorkerPool, make
from jaxrl_post.envs.tasks.sql import Text2SQL
from jaxrl_post.envs.tasks.sql.questions import ask
from jaxrl_post.envs.tasks.sql.shipped import DOMAINS, VARIANTS, content
from jaxrl_post.examples.environment import make_environment

pytestmark = pytest.mark.processes

SCHEMA = """
CREATE TABLE city (id INTEGER PRIMARY KEY, name TEXT, people REAL);
INSERT INTO city VALUES (1, 'Oslo', 0.7), (2, 'Bergen', 0.3), (3, 'Voss', NULL);
"""
GOOD = {
    "question": "Which cities have more than half a million people?",
    "schema": SCHEMA,
    "query": "SELECT name FROM city WHERE people > 0.5",
}


@pytest.fixture
def file(tmp_path):
    def write(*rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def judged(environment, task, query, fenced=True):
    text = f"So:\n```sql\n{query}\n```\n" if fenced else query
    step = environment.step(task, (*task.messages, Message("assistant", text)))
    assert step.done
    return step


def one(file, row=GOOD, **options):
    path = file(row)
    environment = Text2SQL(path, path, **options)
    environment.prepare()
    (task,) = environment.tasks("eval")
    return pickle.loads(pickle.dumps(environment)), task


def test_the_prompt_shows_tables_and_rows(file):
    _, task = one(file, rows=2)
    assert task.messages == (
        Message(
            "user",
            "CREATE TABLE city (id INTEGER PRIMARY KEY, name TEXT, people REAL);\n"
            "-- First rows of city:\n-- 1 | 'Oslo' | 0.7\n-- 2 | 'Bergen' | 0.3\n\n"
            "Question: Which cities have more than half a million people?\n\n"
            "Write one SQLite query that answers the question. Put it into one fenced "
            "block.",
        ),
    )
    _, task = one(file, rows=0, instruction="")
    assert task.messages[0].content == (
        "CREATE TABLE city (id INTEGER PRIMARY KEY, name TEXT, people REAL);\n\n"
        "Question: Which cities have more than half a million people?"
    )


# (query, reward, the metrics that are not 0)
JUDGED = [
    ("SELECT name FROM city WHERE people > 0.5", 1.0, {"solved", "executed"}),
    ("SELECT c.name AS n FROM city c WHERE id = 1;", 1.0, {"solved", "executed"}),
    ("SELECT name FROM city", 0.0, {"executed"}),
    ("SELECT name, people FROM city WHERE id = 1", 0.0, {"executed"}),
    ("SELECT name FROM city WHERE 0", 0.0, {"executed"}),
    ("SELECT nam FROM city", 0.0, {"error/invalid"}),
    ("DELETE FROM city", 0.0, {"error/refused"}),
    ("SELECT name FROM city; SELECT 1", 0.0, {"error/refused"}),
    ("SELECT hex(zeroblob(9999999))", 0.0, {"error/size"}),
]


@pytest.mark.parametrize(("query", "reward", "metrics"), JUDGED)
def test_a_query_is_judged_by_its_rows(file, query, reward, metrics):
    environment, task = one(file)
    for fenced in (True, False):
        step = judged(environment, task, query, fenced)
        assert step.reward == reward
        assert {name for name, value in step.metrics.items() if value} == metrics
    assert set(step.metrics) == {
        "solved", "executed", "error/refused", "error/time", "error/size",
        "error/invalid",
    }  # fmt: skip


def test_a_query_that_does_not_end_costs_its_time_alone(file):
    environment, task = one(file, seconds=1.0)
    endless = (
        "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) "
        "SELECT max(n) FROM c"
    )
    assert judged(environment, task, endless).metrics["error/time"] == 1.0
    assert judged(environment, task, GOOD["query"]).reward == 1.0


def test_a_query_is_judged_in_a_worker(file):
    environment, task = one(file)
    turn = (*task.messages, Message("assistant", GOOD["query"]))
    with WorkerPool(environment) as pool:
        assert pool.submit(task, turn).result(timeout=60).step.reward == 1.0


def test_order_matters_where_the_right_query_orders(file):
    ordered = GOOD | {"query": "SELECT name FROM city ORDER BY id DESC"}
    environment, task = one(file, ordered)
    assert judged(environment, task, "SELECT name FROM city").reward == 0.0
    right = "SELECT c.name FROM city AS c ORDER BY -id"
    assert judged(environment, task, right).reward == 1.0
    environment, task = one(file, GOOD | {"query": "SELECT name FROM city"})
    assert judged(environment, task, right).reward == 1.0


def test_a_query_that_runs_may_earn_a_little(file):
    environment, task = one(file, executed_reward=0.1)
    assert judged(environment, task, "SELECT 1").reward == 0.1
    assert judged(environment, task, "SELECT").reward == 0.0
    assert judged(environment, task, GOOD["query"]).reward == 1.0


def test_data_bases_lie_beside_the_rows(file, tmp_path):
    (tmp_path / "data").mkdir()
    database = sqlite3.connect(tmp_path / "data" / "city.sqlite")
    database.executescript(SCHEMA)
    database.close()
    row = {name: GOOD[name] for name in ("question", "query")}
    environment, task = one(file, row | {"database": "data/city.sqlite"})
    assert "CREATE TABLE city" in task.messages[0].content
    shown = environment.demonstration(task)
    assert judged(environment, task, shown, fenced=False).reward == 1.0
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        "city.sqlite"
    ]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"question": None}, "field 'question' must be str"),
        ({"question": " "}, "field 'question' is empty"),
        ({"query": 3}, "field 'query' must be str, got int"),
        ({"schema": None}, "exactly one of the fields 'database' and 'schema'"),
        ({"database": "x"}, "exactly one .* got 'database', 'schema'"),
        ({"schema": None, "database": "x.sqlite"}, "'database': there is no file"),
        ({"schema": "CREATE THING"}, "'schema' is no data base: .*syntax error"),
        ({"schema": "SELECT 1;"}, "'schema' is no data base: it has no table"),
        ({"query": "SELECT nam FROM city"}, r"'query' fails \(invalid\): no such col"),
        ({"query": "DROP TABLE city"}, r"'query' fails \(refused\): not authorized"),
        ({"query": "SELECT name FROM city WHERE 0"}, "'query' returns no row"),
        (
            {"query": "SELECT name, date('now') FROM city"},
            r"'query' fails \(refused\): date\(\) of now depends on the clock",
        ),
        (
            {"schema": "CREATE TABLE city AS SELECT random() AS name"},
            r"'schema' is no data base: random\(\) depends on chance",
        ),
    ],
)
def test_a_bad_row_is_named(file, change, told):
    path = file(GOOD, GOOD | change)
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: .*{told}"):
        Text2SQL(path, path).tasks("train")


def test_right_queries_need_not_be_tried_at_first(file):
    environment, task = one(file, GOOD | {"query": "SELECT nam"}, check=False)
    assert judged(environment, task, "SELECT nam").reward == 0.0
    with pytest.raises(RuntimeError, match=r"the right query fails \(invalid: no such"):
        judged(environment, task, "SELECT 1")


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("level=5", r"level must be an integer in \[1, 4\], got 5"),
        ("rows=-1", r"rows must be an integer in \[0, 20\]"),
        ("tables=all", "tables must be 'create' or 'columns', got 'all'"),
        ("slips=2", r"slips must be a share in \[0, 1\], got 2"),
        ("seconds=0", "seconds must be positive"),
        ("executed_reward=1", r"executed_reward must be in \[0, 1\), got 1"),
        ("check=3", "check must be true or false, got 3"),
        ("on_bad_row=no", "on_bad_row must be 'fail' or 'skip'"),
        ("eval_path=x.jsonl", "eval_path needs path"),
        ("path=x.jsonl&level=1", "level is of generated tasks: drop it"),
        ("path=x.jsonl&seed=1", "seed is of generated tasks: drop it"),
        ("path=x.jsonl&slips=0.5", "slips is of generated tasks: drop it"),
    ],
)
def test_options_are_checked(option, told):
    with pytest.raises(ValueError, match=told):
        make(f"text2sql?{option}")


def test_tables_may_be_a_line_each(file):
    _, task = one(file, tables="columns", rows=1, instruction="")
    assert task.messages[0].content == (
        "city(id, name, people)\n-- First rows of city:\n-- 1 | 'Oslo' | 0.7\n\n"
        "Question: Which cities have more than half a million people?"
    )
    # Quoted names, and a view with its own columns.
    schema = '''CREATE TABLE "two words" ("a ""b""" INT, c TEXT);
        CREATE VIEW v AS SELECT c AS d, 1 AS e FROM "two words";
        INSERT INTO "two words" VALUES (1, 'x')'''
    row = {"question": "How many?", "query": "SELECT count(*) FROM v", "schema": schema}
    _, task = one(file, row, tables="columns", rows=0)
    told = task.messages[0].content.partition("\n\n")[0]
    assert told == '"two words"("a ""b""", c)\nv(d, e)'


def test_demonstrations_slip_as_often_as_they_should():
    environment = Text2SQL(level=4, slips=0.3)
    slipped = 0
    for task in environment.tasks("train")[:200]:
        query = environment.demonstration(task).splitlines()[1]
        assert environment.demonstration(task) == f"```sql\n{query}\n```"
        if query != task.reference:
            assert query.startswith("SELECT * FROM ")
            assert judged(environment, task, query).reward == 0.0
            slipped += 1
    # 60 are expected, with a standard deviation of 6.5.
    assert 35 <= slipped <= 85
    plain = Text2SQL(level=4)
    for task in plain.tasks("train")[:20]:
        assert task.reference in plain.demonstration(task)


def test_the_command_line_gives_a_file_or_none(file):
    assert make_environment("text2sql?level=2", DataConfig()) == Text2SQL(level=2)
    path = file(GOOD)
    found = make_environment("text2sql", DataConfig(path=path, on_bad_row="skip"))
    assert found == Text2SQL(path, on_bad_row="skip")
    with pytest.raises(ConfigError, match=r"--data.path: text2sql needs training"):
        make_environment("text2sql", DataConfig(eval_path=path))


def question(task):
    return task.messages[0].content.partition("Question: ")[2].partition("\n")[0]


def test_generated_questions_are_held_out():
    environment = make("text2sql?rows=0")
    train = {question(task) for task in environment.tasks("train")[:1500]}
    held_out = {question(task) for task in environment.tasks("eval")}
    assert len(train) > 400
    assert len(held_out) > 40
    assert not train & held_out
    again = Text2SQL(rows=0).tasks("train")
    assert again[7] == environment.tasks("train")[7]
    assert Text2SQL(rows=0, seed=1).tasks("train")[7] != again[7]


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_generated_queries_are_right_and_return_something(level):
    environment = Text2SQL(level=level)
    for task in environment.tasks("train")[:150]:
        database = sqlite3.connect(":memory:")
        database.executescript(task.data["schema"])
        found = database.execute(task.reference).fetchall()
        database.close()
        assert found, task.reference
        assert found != [(None,)], task.reference
        step = judged(environment, task, task.reference)
        assert step.reward == 1.0, task.reference


def test_generated_questions_have_one_answer():
    """A question's answer, computed from the rows without SQL."""
    for domain in range(len(DOMAINS)):
        for variant in range(VARIANTS):
            about = content(0, domain, variant)
            for table in (about.one, about.many, about.events):
                # No two are the largest, and names name one row.
                numbers = [row[-1] for row in table]
                assert len(set(numbers)) == len(numbers)
            for table in (about.one, about.many):
                assert len({row[1] for row in table}) == len(table)
            owned = {row[2] for row in about.many}
            assert owned < {row[0] for row in about.one}
            assert {row[1] for row in about.events} < {row[0] for row in about.many}


def test_the_answers_of_a_generated_data_base_by_hand():
    # The first domain has authors, books and loans.
    about = content(0, 0, 0)
    database = sqlite3.connect(":memory:")
    database.executescript(about.schema)

    def selected(query):
        return database.execute(query).fetchall()

    found = {}
    for number in range(400):
        for level in (2, 3, 4):
            asked = ask(Random(f"{number}"), about, level)
            found[asked.text] = selected(asked.query)
    database.close()
    names = {row[0]: row[1] for row in about.one}
    pages = {row[1]: row[3] for row in about.many}
    most = max(pages, key=pages.__getitem__)
    text = "Which book has the largest number of pages? Give the title."
    assert found[text] == [(most,)]
    mean = sum(pages.values()) / len(pages)
    text = (
        "List the title of every book whose number of pages is greater than the "
        "average number of pages of all books."
    )
    assert {row[0] for row in found[text]} == {t for t, n in pages.items() if n > mean}
    counts = {name: 0 for name in names.values()}
    for row in about.many:
        counts[names[row[2]]] += 1
    text = (
        "How many books does each author have? Give the name and the number, also for "
        "those that have none."
    )
    assert dict(found[text]) == counts
    text = "List the name of every author that has no book."
    assert {row[0] for row in found[text]} == {n for n, c in counts.items() if not c}
    owner = {row[0]: names[row[2]] for row in about.many}
    totals = {}
    for row in about.events:
        totals[owner[row[1]]] = totals.get(owner[row[1]], 0) + row[3]
    text = (
        "What is the total number of days of the loans of each author's books? Give "
        "the name and the total, the largest total first and equal totals by name, and "
        "leave out those without any loan."
    )
    assert found[text] == sorted(totals.items(), key=lambda each: (-each[1], each[0]))
