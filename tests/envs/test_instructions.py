"""Verifiable instructions: every kind, rows in IFEval's form, generated prompts."""

import json
import pickle
import time

import pytest

from jaxrl_post.envs import Message, make
from jaxrl_post.envs.rubric import Criterion, Rubric
from jaxrl_post.envs.tasks.arithmetic import Arithmetic
from jaxrl_post.envs.tasks.instructions import Constraint, Instructions
from jaxrl_post.envs.tasks.instructions.checks import KINDS, UNSUPPORTED

AT_LEAST_3 = {"relation": "at least"}
TWO_PARAGRAPHS = {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"}

# (kind, parameters, texts that fulfil it, texts that do not)
CASES = [
    ("keywords:existence", {"keywords": ["red", "C++"]},
     ["Red c++"], ["red", "c++", "C+ red"]),
    ("keywords:frequency", {"keyword": "art", "frequency": 2, "relation": "at least"},
     ["Art is art", "a party of artists"], ["art"]),
    ("keywords:frequency", {"keyword": "art", "frequency": 2, "relation": "less than"},
     ["art", "none"], ["art, art"]),
    ("keywords:forbidden_words", {"forbidden_words": ["red", "a b"]},
     ["reds", "a  b"], ["so Red.", "x a b y"]),
    ("keywords:letter_frequency",
     {"letter": "E", "let_frequency": 3, "let_relation": "at least"},
     ["eEe"], ["ee"]),
    ("length_constraints:number_sentences", {"num_sentences": 3} | AT_LEAST_3,
     ["One. Two! Three?", "One.\nTwo.\nThree", 'He said "no." Why? Well...'],
     ["One. Two.", "Dr. A. B. Smith has 3.5 e.g. apples. Yes.", "... ! ?"]),
    ("length_constraints:number_sentences",
     {"num_sentences": 3, "relation": "less than"},
     ["One. Two."], ["One. Two. Three."]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2},
     ["a\n***\nb", "***\na\n***\nb\n***"], ["a", "a\n\nb", "a***b***c", "a******b"]),
    ("length_constraints:number_words", {"num_words": 3} | AT_LEAST_3,
     ["one two three", "it's two"], ["one two"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"},
     ["one, two!"], ["one two three"]),
    ("length_constraints:nth_paragraph_first_word", TWO_PARAGRAPHS,
     ["First.\n\nThen, so.", "First.\n\n\n\n'then' so"],
     ["First.\n\nSo then.", "a\n\nThen\n\nc", "Then"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2},
     ["[a] and [b c]", "[a][b][c]"], ["[a]", "[a\nb] [c]"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"},
     ["Well.\np. p. s. So.", "P.P.S: x"], ["P.S. x"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2},
     ["* a\n* b", "So:\n  - a\n- b\nend"], ["* a", "- a\n- b\n- c", "**a**\n**b**"]),
    ("detectable_format:constrained_response", {},
     ["Well: My answer is no."], ["My answer is perhaps.", "no"]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2},
     ["*a* and *b c*", "**a** *b*"], ["*a*", "**a**", "****", "* a\n* b"]),
    ("detectable_format:multiple_sections",
     {"section_spliter": "Section", "num_sections": 2},
     ["Section 1\na\nSection 2\nb"], ["Section 1\na", "Section a Section b"]),
    ("detectable_format:json_format", {},
     ['{"a": [1]}', '```json\n{"a": 1}\n```', "[]"], ["{a: 1}", "So: {}", "NaN"]),
    ("detectable_format:title", {},
     ["<<A title>>\nb", "a\n<<b>>", "<< >> <<b>>"],
     ["<a>", "<< >>", "<<a\nb>>", ">>a<<", "<<>", "<<>>"]),
    ("combination:two_responses", {},
     ["a\n******\nb"], ["a", "a\n******\na", "a******b******c"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say A. "},
     ["say a. A!"], ["A! Say A."]),
    ("startend:end_checker", {"end_phrase": "That is all."},
     ["So. that is all. ", '"That is all."'], ["That is all. So."]),
    ("startend:quotation", {},
     ['"a"', ' "a" b "\n'], ["'a'", '"', '"a']),
    ("change_case:capital_word_frequency",
     {"capital_frequency": 2, "capital_relation": "at least"},
     ["A B", "WELL-KNOWN and NEW"], ["One TWO", "two"]),
    ("change_case:capital_word_frequency",
     {"capital_frequency": 2, "capital_relation": "less than"},
     ["One TWO"], ["ONE TWO"]),
    ("change_case:english_capital", {}, ["A 1!"], ["Aa", "1"]),
    ("change_case:english_lowercase", {}, ["a 1!"], ["Aa", "1"]),
    ("punctuation:no_comma", {}, ["a; b."], ["a, b"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "parameters", "good", "bad"), CASES)
def test_every_kind(kind, parameters, good, bad):
    constraint = Constraint(kind, parameters)
    assert [text for text in good if not constraint.holds(text)] == []
    assert [text for text in bad if constraint.holds(text)] == []
    assert not constraint.holds(" \n")


def test_every_kind_of_ifeval_has_a_case():
    assert {case[0] for case in CASES} == set(KINDS)
    assert len(KINDS) + len(UNSUPPORTED) == 25


WORDS = {"num_words": 3, "relation": "less than"}
ROWS = [
    {
        "key": 1000,
        "prompt": "Say A.",
        "instruction_id_list": [
            "punctuation:no_comma",
            "length_constraints:number_words",
            "length_constraints:number_words",
        ],
        # As in Parquet, where every row has every field.
        "kwargs": [
            {"num_words": None, "relation": None},
            WORDS,
            {"num_words": 2.0, "relation": "at least"},
        ],
    }
]


@pytest.fixture
def file(tmp_path):
    def write(*rows, name="rows.jsonl"):
        path = tmp_path / name
        if path.suffix == ".parquet":
            arrow = pytest.importorskip("pyarrow", reason="needs the extra 'parquet'")
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(arrow.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def judged(environment, task, text):
    step = environment.step(task, (*task.messages, Message("assistant", text)))
    assert step.done
    return step


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_rows_are_those_of_ifeval(file, name):
    path = file(*ROWS, name=name)
    environment = pickle.loads(pickle.dumps(Instructions(path, path)))
    (task,) = pickle.loads(pickle.dumps(environment.tasks("eval")))
    assert task.messages == (Message("user", "Say A."),)
    assert environment.demonstration(task) is None
    step = judged(environment, task, "A a.")
    assert (step.reward, step.metrics["solved"]) == (1.0, 1.0)
    # One word: of the two numbers of words one holds, and there is no comma.
    step = judged(environment, task, "A.")
    assert step.reward == 0.0
    assert step.metrics == {
        "solved": 0.0,
        "followed": pytest.approx(2 / 3),
        "followed/punctuation:no_comma": 1.0,
        "followed/length_constraints:number_words": 0.5,
    }
    shared = Instructions(path, path, reward="share")
    assert judged(shared, task, "A, B, C").reward == pytest.approx(1 / 3)
    assert judged(shared, task, " ").reward == 0.0


def test_texts_of_json_are_lists(file):
    texts = {name: json.dumps(ROWS[0][name]) for name in ("kwargs",)}
    path = file(ROWS[0] | texts)
    assert len(Instructions(path, path).tasks("eval")[0].data["constraints"]) == 3


def test_loose_verification_looks_past_lines_and_asterisks(file):
    row = {
        "prompt": "Say A.",
        "instruction_id_list": ["startend:end_checker"],
        "kwargs": [{"end_phrase": "A."}],
    }
    path = file(row)
    strict, loose = Instructions(path, path), Instructions(path, path, loose=True)
    (task,) = strict.tasks("eval")
    for text, expected in (
        ("So: A.", (1, 1)),
        ("A.\nI hope that helps!", (0, 1)),
        ("Sure!\n**A.**", (0, 1)),
        ("B.\nC.\nA.\nD.\nE.", (0, 0)),
    ):
        found = judged(strict, task, text).reward, judged(loose, task, text).reward
        assert found == expected, text


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"kwargs": None}, "field 'kwargs' must be a list that is not empty"),
        ({"kwargs": "["}, "field 'kwargs' is no JSON"),
        ({"kwargs": [{}]}, "must be equally long, got 3 and 1"),
        ({"kwargs": [{}, WORDS, 3]}, "'kwargs', 3: must be an object or null, got int"),
        ({"kwargs": [{}, WORDS, {}]}, r"instruction 3: length_\w+:number_words takes"),
        ({"kwargs": [WORDS] * 3}, "no_comma takes no parameters, got"),
        ({"kwargs": [{}, WORDS, WORDS | {"num_words": -1}]}, r"integer in \[0, 100000"),
        ({"kwargs": [{}, WORDS, WORDS | {"relation": "over"}]}, "'at least' or 'less"),
        ({"instruction_id_list": ["a"] * 3}, "instruction 1: there is no kind"),
        (
            {"instruction_id_list": ["punctuation:no_commas"] * 3},
            "did you mean 'punctuation:no_comma'",
        ),
        (
            {"instruction_id_list": ["language:response_language"] * 3},
            "is not supported: the language of a text is not detected",
        ),
        ({"prompt": " "}, "the prompt is empty"),
    ],
)
def test_a_bad_row_is_named(file, change, told):
    path = file(*ROWS, ROWS[0] | change)
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: .*{told}"):
        Instructions(path, path).tasks("train")
    assert len(Instructions(path, path, on_bad_row="skip").tasks("train")) == 1


def test_parameters_have_types():
    for kind, parameters, told in (
        ("keywords:existence", {"keywords": []}, "keywords must be a list of texts"),
        ("keywords:existence", {"keywords": ["a", ""]}, "must be a list of texts"),
        ("startend:end_checker", {"end_phrase": 3}, "end_phrase must be a text, got 3"),
        (
            "length_constraints:nth_paragraph_first_word",
            TWO_PARAGRAPHS | {"nth_paragraph": 3},
            "nth_paragraph must be from 1 to num_paragraphs, 2, got 3",
        ),
        (
            "length_constraints:nth_paragraph_first_word",
            TWO_PARAGRAPHS | {"nth_paragraph": 0},
            "nth_paragraph must be from 1 to num_paragraphs, 2, got 0",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            Constraint(kind, parameters)


@pytest.mark.parametrize("most", [1, 3, 8])
def test_generated_prompts_can_be_answered(most):
    environment = make(f"instructions?constraints={most}")
    seen = set()
    for task in environment.tasks("train")[:400]:
        found = environment.demonstration(task)
        assert judged(environment, task, found).reward == 1.0, task.messages
        seen |= {each.kind for each in task.data["constraints"]}
        assert len(task.data["constraints"]) <= most
    assert len(seen) == 17


def test_slips_are_instructions_that_a_demonstration_forgets():
    environment = make("instructions?constraints=3&slips=0.6")
    kept = total = 0
    for task in environment.tasks("train")[:2000]:
        # Kinds that a text fulfils only if it wants to.
        step = judged(environment, task, environment.demonstration(task))
        for name in ("detectable_format:title", "startend:quotation"):
            if f"followed/{name}" in step.metrics:
                total += 1
                kept += step.metrics[f"followed/{name}"]
    assert 0.35 < kept / total < 0.45
    forgetful = make("instructions?constraints=3&slips=1")
    for task in forgetful.tasks("train")[:40]:
        said = forgetful.demonstration(task)
        assert said == f"Let me tell you about {task.data['topic']}."


def test_generated_prompts_are_held_out():
    environment = Instructions()
    prompts = {
        split: {task.messages for task in environment.tasks(split)[:800]}
        for split in ("train", "eval")
    }
    assert not prompts["train"] & prompts["eval"]
    assert len(prompts["eval"]) > 150
    assert Instructions().tasks("train")[5] == environment.tasks("train")[5]
    assert Instructions(seed=1).tasks("train")[5] != environment.tasks("train")[5]


def test_an_instruction_is_a_criterion():
    no_comma = Criterion(Constraint("punctuation:no_comma"), weight=0.5)
    environment = Rubric(Arithmetic(), {"no_comma": no_comma})
    task = environment.tasks("train")[0]
    assert judged(environment, task, task.reference).reward == 1.5
    assert judged(environment, task, f"{task.reference},").reward == 0.0


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("reward=some", "reward must be 'all' or 'share', got 'some'"),
        ("loose=1", "loose must be true or false, got 1"),
        ("constraints=9", r"constraints must be an integer in \[1, 8\], got 9"),
        ("slips=-1", r"slips must be a share in \[0, 1\], got -1"),
        ("path=x.jsonl&slips=0.5", "slips is of generated tasks: drop it, or drop"),
        ("on_bad_row=no", "on_bad_row must be 'fail' or 'skip'"),
        ("eval_path=x.jsonl", "eval_path needs path"),
        ("path=x.jsonl&seed=3", "seed is of generated tasks: drop it, or drop path"),
    ],
)
def test_options_are_checked(option, told):
    with pytest.raises(ValueError, match=told):
        make(f"instructions?{option}")


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}),
        ("detectable_content:number_placeholders", {"num_placeholders": 2}),
        ("detectable_format:title", {}),
    ],
)
@pytest.mark.parametrize("repeated", ["\n", "[", " ", "*", "- ", "[]", "<<"])
def test_a_repeated_letter_takes_no_time(kind, parameters, repeated):
    # It took 20 seconds where the time grew with the square of the length.
    began = time.process_time()
    Constraint(kind, parameters).holds(repeated * 64_000)
    assert time.process_time() - began < 8.0
