import json
import pickle
import time
from dataclasses import replace
from pathlib import Path

import pytest

from jaxrl_post.envs import Message, WorkerPool
from jaxrl_post.envs.tasks.gsm8k import GSM8K, INSTRUCTION
from jaxrl_post.envs.tasks.mathematics.answers import final_answer

ROWS = [
    ("How many?", "48/2 = <<48/2=24>>24 clips.\n#### 72", "72"),
    ("How much?", "12 * 90 = $<<12*90=1080>>1,080.\n#### 1,080", "1080"),
    ("Which change?", "So it fell.\n#### -3", "-3"),
    ("Dollars?", "Ten halves.\n#### $5.50", "5.50"),
]
DATA = Path(__file__).parents[2] / ".." / "shared" / "data" / "gsm8k"


def write(path: Path, rows) -> str:
    lines = (json.dumps({"question": q, "answer": a}) + "\n" for q, a, *_ in rows)
    path.write_text("".join(lines))
    return str(path)


def grade(environment, task, text: str):
    return environment.step(task, (*task.messages, Message("assistant", text)))


@pytest.fixture
def both(tmp_path) -> GSM8K:
    """Four rows to train on and one to evaluate."""
    path = write(tmp_path / "train.jsonl", ROWS)
    return GSM8K(path, eval_path=write(tmp_path / "test.jsonl", ROWS[:1]))


def test_tasks_are_the_rows_in_order(both):
    tasks = both.tasks("train")
    assert [task.id for task in tasks] == [0, 1, 2, 3]
    assert [task.reference for task in tasks] == ["72", "1080", "-3", "5.50"]
    assert tasks[0].messages == (Message("user", f"How many?\n\n{INSTRUCTION}"),)
    assert both.demonstration(tasks[0]) == "48/2 = 24 clips.\n#### 72"
    assert len(both.tasks("eval")) == 1
    assert pickle.loads(pickle.dumps((both, tasks))) == (both, tasks)
    bare = replace(both, instruction="")
    assert bare.tasks("train")[0].messages[0].content == "How many?"


def test_one_file_is_split_by_the_text_of_the_question(tmp_path):
    rows = [(f"Question {i}?", f"#### {i}") for i in range(1000)]
    environment = GSM8K(write(tmp_path / "all.jsonl", rows + rows[:50]))
    shuffled = GSM8K(write(tmp_path / "reversed.jsonl", rows[::-1]))

    def questions(environment, split) -> set[str]:
        return {task.messages[0].content for task in environment.tasks(split)}

    train, held_out = (questions(environment, split) for split in ("train", "eval"))
    assert not train & held_out
    assert len(train) + len(held_out) == 1000
    # Binomial(1000, 0.1): standard deviation 9.5.
    assert abs(len(held_out) - 100) < 4 * 9.5
    assert held_out == questions(shuffled, "eval")


def test_a_file_too_small_for_a_split_says_so(tmp_path):
    environment = GSM8K(write(tmp_path / "one.jsonl", ROWS[:1]))
    assert len(environment.tasks("train")) == 1
    with pytest.raises(ValueError, match=r"one\.jsonl: no prompt falls into 'eval'"):
        environment.tasks("eval")


def test_the_data_sets_own_parquet_is_read(tmp_path, both):
    arrow = pytest.importorskip("pyarrow", reason="needs the extra 'parquet'")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "train-00000-of-00001.parquet"
    columns = {"question": [q for q, *_ in ROWS], "answer": [a for _, a, _ in ROWS]}
    parquet.write_table(arrow.table(columns), path)
    found = GSM8K(str(path), eval_path=str(path))
    assert found.tasks("train") == both.tasks("train")
    renamed = path.rename(tmp_path / "train.jsonl")
    with pytest.raises(ValueError, match=r"got Parquet\. Rename the file"):
        GSM8K(str(renamed)).tasks("train")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("So 72.", "must end with '#### <number>', got no '####'"),
        ("#### many", "must end with '#### <number>', got 'many'"),
        ("#### 7 or 8", "must end with '#### <number>', got '7 or 8'"),
        ("####", "must end with '#### <number>', got ''"),
        ("#### 72\n#### ", "must end with '#### <number>', got ''"),
    ],
)
def test_a_row_without_a_final_number_is_bad(tmp_path, caplog, answer, reason):
    rows = [("Q?", "#### 1"), ("Q2?", answer)]
    path = write(tmp_path / "train.jsonl", rows)
    with pytest.raises(ValueError, match=rf"train\.jsonl:2: field 'answer' {reason}"):
        GSM8K(path, eval_path=path).tasks("train")
    tasks = GSM8K(path, eval_path=path, on_bad_row="skip").tasks("train")
    assert [task.reference for task in tasks] == ["1"]
    assert "1 rows read, 1 skipped" in caplog.text
    assert f"train.jsonl:2: field 'answer' {reason}" in caplog.text


# (response, flexible answer, strict answer)
EXTRACTED = [
    ("#### 72", "72", "72"),
    ("####72 clips (48+24)", "72", "72"),
    ("48+24\n####\n 72.", "72", "72"),
    ("#### $1,080.50", "1080.50", "1080.50"),
    ("#### 109,200,000", "109200000", "109200000"),
    ("#### **72**", "72", "72"),
    ("#### -5", "-5", "-5"),
    ("#### -$5", "-5", "-5"),
    ("#### $-5", "-5", "-5"),
    ("#### \u22125", "-5", "-5"),
    ("#### 50%", "50", "50"),
    (r"#### 50\%", "50", "50"),
    ("#### 3/4", "3/4", "3/4"),
    ("#### .5", ".5", ".5"),
    (r"\boxed{72}", "72", "72"),
    (r"$\boxed{\$1{,}080}$", "1080", "1080"),
    (r"\boxed{1\,080}", "1080", "1080"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", r"\frac{1}{2}"),
    (r"\boxed{\boxed{72}}", "72", "72"),
    # The last marked answer counts, with either mark.
    ("#### 5\nWait.\n#### 7", "7", "7"),
    (r"\boxed{5} or \boxed{7}", "7", "7"),
    (r"#### 5 or \boxed{7}", "7", "7"),
    ("\\boxed{7}\n#### 5", "5", "5"),
    # A heading of Markdown, and a box that never closes, mark nothing.
    ("#### Step 3\nso \\boxed{7}", "7", "7"),
    ("#### Conclusion\nIt is 7.", "7", None),
    (r"\boxed{7", "7", None),
    (r"\boxed{5} \boxed{7", "7", None),
    (r"7 \boxed{}", "7", None),
    # Nothing is marked: the last number.
    ("The answer is 72.", "72", None),
    ("A: 72", "72", None),
    ("It is 5, no, 7.", "7", None),
    ("She pays $1,080.", "1080", None),
    ("between 3 and 10-5", "5", None),
    ("x = -5", "-5", None),
    ("(-5)", "-5", None),
    ("9*2", "2", None),
    ("3 of 1,080,000, 12", "12", None),
    ("no idea", None, None),
    ("", None, None),
    ("٣", None, None),
    ("#### " + "9" * 201, None, None),
]


@pytest.mark.parametrize(("text", "flexible", "strict"), EXTRACTED)
def test_final_answer(text, flexible, strict):
    assert final_answer(text, extraction="flexible") == flexible
    assert final_answer(text) == strict


def test_extraction_takes_linear_time():
    # Together less than a second; with backtracking 10**10 steps, which is minutes.
    begin = time.process_time()
    for text in ("\\boxed{" * 3000, "1," * 50_000, "1,111" * 20_000, "-" * 100_000):
        final_answer(text)
    assert time.process_time() - begin < 10


# (reference, response, reward)
GRADED = [
    ("72", "#### 72", 1),
    ("72", "#### 72.00", 1),
    ("72", "#### 072", 1),
    ("72", "#### 73", 0),
    ("72", "#### -72", 0),
    ("72", "#### 72 73", 1),
    ("72", "#### 7 2", 0),
    ("1080", "#### 1,080", 1),
    ("1080", "#### 1.080", 0),
    ("1080", r"\boxed{\$1{,}080}", 1),
    ("5", "It costs $5.", 1),
    ("5", r"\boxed{5.00}", 1),
    ("50", "#### 50%", 1),
    ("50", r"\boxed{50\%}", 1),
    # One value is graded: a percentage is not a hundredth as well.
    ("50", "#### 0.5", 0),
    ("0.5", "#### 50%", 0),
    ("5.50", "#### 5.5", 1),
    ("5.50", r"\boxed{\frac{11}{2}}", 1),
    ("5.50", "#### 11/2", 1),
    ("72", r"\boxed{72\text{ clips}}", 1),
    ("72", r"\boxed{x = 72}", 1),
    ("72", r"\boxed{71, 72}", 0),
    ("72", r"\boxed{71 \text{ or } 72}", 0),
    ("72", r"\boxed{71} \boxed{72} \boxed{73}", 0),
    ("72", r"\boxed{seventy-two}", 0),
    ("72", r"\boxed{\frac{72}{0}}", 0),
    ("72", "72/0", 0),
    ("72", "no idea", 0),
    ("72", "", 0),
]


@pytest.mark.parametrize(("reference", "text", "reward"), GRADED)
def test_grading(both, reference, text, reward):
    pytest.importorskip("math_verify", reason="needs the extra 'math'")
    flexible = replace(both, extraction="flexible")
    task = replace(both.tasks("train")[0], reference=reference)
    step = grade(flexible, task, text)
    assert (step.reward, step.done) == (reward, True)
    answered = final_answer(text, extraction="flexible") is not None
    assert step.metrics == {"correct": reward, "answered": answered}


def test_grading_wants_a_mark_unless_it_is_flexible(both):
    pytest.importorskip("math_verify", reason="needs the extra 'math'")
    flexible = replace(both, extraction="flexible")
    task = both.tasks("train")[0]
    for text in ("The answer is 72.", "72 72 72 72", "71 and 72"):
        assert grade(flexible, task, text).reward == 1.0
        step = grade(both, task, text)
        assert (step.reward, step.metrics["answered"]) == (0.0, 0.0)
    assert grade(both, task, "#### 72").reward == 1.0


def test_without_the_extra_the_error_names_it(both, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    task = both.tasks("train")[0]
    for call in (lambda: grade(both, task, "#### 72"), both.prepare):
        with pytest.raises(ModuleNotFoundError, match=r"pip install -e '.*\[math\]'"):
            call()


@pytest.mark.processes
def test_grading_in_a_worker_outlives_a_hopeless_power(both):
    pytest.importorskip("math_verify", reason="needs the extra 'math'")
    task = both.tasks("train")[0]

    def turn(text):
        return (*task.messages, Message("assistant", text))

    with WorkerPool(both, deadline_s=120.0) as pool:
        hopeless = pool.submit(task, turn(r"\boxed{9^{9^{9^{9}}}}"))
        after = pool.submit(task, turn("#### 72"))
        found = hopeless.result(timeout=240)
        assert found.kind == "raised"
        assert "s of processor time" in str(found.error)
        step = after.result(timeout=240).step
        assert step is not None
        assert step.reward == 1.0


@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data/gsm8k")
def test_the_real_rows_grade_as_correct_against_themselves():
    pytest.importorskip("math_verify", reason="needs the extra 'math'")
    environment = GSM8K(str(DATA / "train.jsonl"), str(DATA / "test.jsonl"))
    train, held_out = environment.tasks("train"), environment.tasks("eval")
    assert (len(train), len(held_out)) == (7473, 1319)
    # Every row whose number has a comma, and a hundred others.
    comma = [t for t in train if "," in t.data["solution"].rpartition("####")[2]]
    assert len(comma) > 70
    for task in [*comma, *train[::75]]:
        demonstration = environment.demonstration(task)
        assert "<<" not in demonstration
        assert grade(environment, task, demonstration).reward == 1.0
        assert grade(environment, task, f"{task.reference}1").reward == 0.0


@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data/gsm8k")
def test_grading_agrees_with_the_published_marks_of_model_solutions():
    pytest.importorskip("math_verify", reason="needs the extra 'math'")
    # The solutions were written before anybody asked for a mark.
    environment = GSM8K(
        str(DATA / "train.jsonl"), str(DATA / "test.jsonl"), extraction="flexible"
    )
    tasks = {
        t.messages[0].content: t
        for t in replace(environment, instruction="").tasks("eval")
    }
    agree = total = 0
    with open(DATA / "example_model_solutions.jsonl", encoding="utf-8") as file:
        for line in list(file)[::13]:
            row = json.loads(line)
            published = row["175b_verification"]
            step = grade(environment, tasks[row["question"]], published["solution"])
            agree += step.reward == published["is_correct"]
            total += 1
    assert (agree, total) == (102, 102)
