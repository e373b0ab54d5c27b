"""The tool that finds passages: BM25, a text for every question, errors that help."""

import json
import math
import pickle
import random

import pytest

from jaxrl_post.envs import Answer, Message, Task, ToolCall
from jaxrl_post.envs.tasks.prompt_answers import PromptAnswers
from jaxrl_post.envs.tools import Search, ToolEnvironment, ToolError, make_toolset

TASK = Task(0, (), "")
PASSAGES = [
    {"id": 7, "title": "Paris", "text": "Paris is the capital of France."},
    {"title": "Rome", "text": "Rome is the capital of Italy."},
    {"text": "The Eiffel tower stands in Paris, on the Seine."},
    {"title": "Café", "text": "Where the French drink coffee, wherever they are."},
]


@pytest.fixture
def corpus(tmp_path):
    def write(rows, name="passages.jsonl"):
        path = tmp_path / name
        if path.suffix == ".parquet":
            arrow = pytest.importorskip("pyarrow", reason="needs the extra 'parquet'")
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(arrow.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def search(path, query, limit=None, **options):
    arguments = {"query": query} | ({} if limit is None else {"limit": limit})
    toolset = pickle.loads(pickle.dumps(Search(path, **options)))
    toolset.prepare()
    return toolset.open(TASK).call("search", arguments)


@pytest.mark.parametrize("name", ["passages.jsonl", "passages.parquet"])
def test_results_are_numbered_passages(corpus, name):
    path = corpus(PASSAGES, name)
    assert search(path, "Eiffel, Paris?") == (
        "[1] The Eiffel tower stands in Paris, on the Seine.\n\n"
        "[2] Paris\nParis is the capital of France."
    )
    assert search(path, "cafe") == (
        "[1] Café\nWhere the French drink coffee, wherever they are."
    )
    # Words of one stem are equal, and a title is searched as the text is.
    assert search(path, "towers", limit=1).startswith("[1] The Eiffel tower")
    assert search(path, "ROME", limit="1").startswith("[1] Rome\nRome is")


def bm25(query, documents):
    """The formula of Robertson and Zaragoza, with the constants of FTS5."""
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        score = 0.0
        for word in query:
            having = sum(word in each for each in documents)
            idf = math.log((len(documents) - having + 0.5) / (having + 0.5))
            count = document.count(word)
            length = 1 - 0.75 + 0.75 * len(document) / mean
            score += max(idf, 0) * count * 2.2 / (count + 1.2 * length)
        scores.append(score)
    return scores


def test_the_order_is_that_of_bm25(corpus):
    rng = random.Random(3)
    words = [f"w{i}" for i in range(20)]
    weights = [1 / (i + 1) for i in range(20)]
    documents = [rng.choices(words, weights, k=rng.randint(3, 12)) for _ in range(60)]
    path = corpus([{"text": " ".join(each)} for each in documents])
    for _ in range(20):
        query = rng.sample(words, 3)
        scores = bm25(query, documents)
        fit = [i for i, score in enumerate(scores) if score > 0]
        expected = sorted(fit, key=lambda i: (-round(scores[i], 9), i))[:10]
        found = search(path, " ".join(query), limit=10).split("\n\n")
        assert [each.partition("] ")[2] for each in found] == [
            " ".join(documents[i]) for i in expected
        ]


def test_passages_that_fit_equally_stand_in_the_order_of_the_file(corpus):
    rows = [{"title": str(i), "text": "equal words"} for i in range(9)]
    path = corpus([*rows, *({"text": f"other {i}"} for i in range(20))])
    found = search(path, "equal", limit=9)
    assert [line for line in found.splitlines() if line.startswith("[")] == [
        f"[{i + 1}] {i}" for i in range(9)
    ]


def test_words_of_most_passages_alone_find_something(corpus):
    path = corpus(PASSAGES)
    # "the" stands in all four, and is left out next to a rarer word.
    assert search(path, "the Seine", limit=4).count("[") == 1
    assert search(path, "the", limit=4).count("[") == 4


@pytest.mark.parametrize("word", ["live", "lives", "Living"])
def test_a_word_of_most_passages_is_known_by_its_stem(corpus, word):
    names = "Ada", "Bo", "Cleo"
    path = corpus([{"text": f"{name} lives in Rome."} for name in names])
    assert search(path, f"Ada {word}", limit=3) == "[1] Ada lives in Rome."
    assert search(path, word, limit=3).count("[") == 3
    # A word that all passages have is not reported as found in none.
    told = f"any of these words: xyz. Most have: {word.lower()}. Try others."
    assert search(path, f"Xyz {word}", limit=3) == f"No passage has {told}"


def test_a_single_passage_is_found_by_any_of_its_words(corpus):
    path = corpus([{"text": "Ada lives in Rome."}])
    assert search(path, "French lives, in Rome") == "[1] Ada lives in Rome."


def test_long_passages_are_cut_at_a_word(corpus):
    path = corpus([{"text": "one two three " * 50}, {"text": "x" * 50}, {"text": "y"}])
    assert search(path, "two", max_chars=12) == "[1] one two [...]"
    assert search(path, "x" * 50, max_chars=5) == "[1] xxxxx [...]"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "query must be a text"),
        ({"query": ["a"]}, "query must be a text"),
        ({"query": "   "}, "query has no word to look for, got '   '"),
        ({"query": '?! "" * _ -'}, "query has no word"),
        ({"query": "a", "limit": 0}, "limit must be an integer from 1 to 10, got 0"),
        ({"query": "a", "limit": 11}, "limit must be an integer from 1 to 10, got 11"),
        ({"query": "a", "limit": True}, "limit must be an integer"),
        ({"query": "a", "limit": "many"}, "limit must be an integer .* got 'many'"),
        ({"query": "a", "k": 3}, "search takes query and limit, got 'k'"),
    ],
)
def test_what_is_wrong_with_a_call_is_told(corpus, arguments, told):
    with pytest.raises(ToolError, match=told):
        Search(corpus(PASSAGES)).call("search", arguments)


def test_a_query_that_finds_nothing_is_answered(corpus):
    found = search(corpus(PASSAGES), "quantum chromodynamics")
    assert found == (
        "No passage has any of these words: quantum, chromodynamics. Try others."
    )


@pytest.mark.parametrize(
    "query",
    [
        'paris" OR text:*',
        "NEAR(paris rome, 5)",
        "title : paris",
        "'; DROP TABLE passages; --",
        "paris AND NOT rome",
        "\x00\ud800 paris",
        "paris " * 10_000,
    ],
)
def test_queries_are_words_and_no_language(corpus, query):
    path = corpus(PASSAGES)
    assert "Paris is the capital" in search(path, query + " paris", limit=4)
    assert "Paris is the capital" in search(path, "paris", limit=4)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"title": "Paris"}, r"no field 'text' \(fields: 'title'\)"),
        ({"text": " "}, "field 'text' is empty"),
        ({"text": 3}, "field 'text' must be str, got int"),
        ({"text": "a", "title": 3}, "field 'title' must be str, got int"),
    ],
)
def test_a_bad_row_is_named(corpus, row, reason):
    path = corpus([*PASSAGES, row])
    with pytest.raises(ValueError, match=rf"passages\.jsonl:5: {reason}"):
        Search(path).prepare()
    assert "[1] Rome" in search(path, "rome", on_bad_row="skip")


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("passages=0", r"passages must be an integer in \[1, 10\], got 0"),
        ("passages=11", r"passages must be an integer in \[1, 10\], got 11"),
        ("max_passages=99", r"max_passages must be an integer in \[1, 50\], got 99"),
        ("max_chars=0", "max_chars must be an integer"),
        ("on_bad_row=no", "on_bad_row must be 'fail' or 'skip', got 'no'"),
        ("index=x", "has no option 'index'; it has corpus, on_bad_row, passages"),
    ],
)
def test_options_are_checked(option, told):
    with pytest.raises(ValueError, match=told):
        make_toolset(f"search?corpus=passages.jsonl&{option}")


def test_passages_of_the_program_itself(corpus):
    passages = (("Rome", "Capital of Italy."), ("", "Paris, on the Seine."))
    rows = [{"title": title, "text": text} for title, text in passages]
    for query in ("Italy", "seine", "capital Paris"):
        assert search(passages, query) == search(corpus(rows), query)
    for bad in ((), "", 3):
        with pytest.raises(ValueError, match="corpus must be a path, or a tuple of p"):
            Search(bad)


def test_questions_with_a_search(corpus):
    questions = corpus(
        [{"prompt": "What is the capital of Italy?", "answer": ["Rome", "Roma"]}],
        "questions.jsonl",
    )
    environment = ToolEnvironment(
        PromptAnswers(questions, questions, grader="f1"),
        (make_toolset(f"search?corpus={corpus(PASSAGES)}&passages=1"),),
    )
    environment.prepare()
    (task,) = environment.tasks("eval")
    session = environment.open(task)
    call = ToolCall("search", '{"query": "capital of Italy"}', "0")
    step = session.step(Answer("assistant", "", tool_calls=(call,)))
    assert step.messages == (
        Message(
            "tool",
            "[1] Rome\nRome is the capital of Italy.",
            tool_call_id="0",
            name="search",
        ),
    )
    assert session.step(Answer("assistant", "It is Rome.")).reward == 0.5
