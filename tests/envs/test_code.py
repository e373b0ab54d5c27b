"""Programs under hidden tests: what is right earns, and nothing else does."""

import json

import pytest

from jaxrl_post.envs import Message, Task, make
from jaxrl_post.envs.tasks.blocks import last_block
from jaxrl_post.envs.tasks.programs import Code
from tests.envs.sandbox import available

pytestmark = pytest.mark.processes

ADDED = [
    {"input": "2 3\n", "output": "5\n"},
    {"input": "-1 1\n", "output": "0"},
    {"input": "10 20\n", "output": " 30 \n\n"},
]
CALLED = [
    {"arguments": [[3, 1, 2]], "result": [1, 2, 3]},
    {"arguments": {"xs": []}, "result": []},
    {"arguments": [[1.5, 0.5]], "result": [0.5, 1.5]},
]


def problem(tests, entry=None) -> Task:
    data = {"tests": tests, "entry_point": entry, "solution": None}
    return Task(0, (Message("user", "?"),), "", data)


@pytest.fixture(scope="module", params=["bubblewrap", "landlock"])
def options(request):
    return {"path": "none", "sandbox": available.require(request.param)}


def judged(options, program, tests, entry=None, **more):
    environment = Code(**options, **more)
    environment.prepare()
    answer = Message("assistant", f"So:\n```python\n{program}\n```\n")
    step = environment.step(problem(tests, entry), (Message("user", "?"), answer))
    assert step.done
    return step


def test_programs_that_print(options):
    right = "a, b = map(int, input().split())\nprint(a + b)"
    assert judged(options, right, ADDED).reward == 1.0
    wrong = "a, b = map(int, input().split())\nprint(abs(a) + abs(b))"
    step = judged(options, wrong, ADDED, reward="share")
    assert step.reward == pytest.approx(2 / 3)
    assert step.metrics["passed"] == step.reward
    assert step.metrics["solved"] == 0
    assert judged(options, wrong, ADDED).reward == 0.0
    # A test's leftovers are not there in the next one.
    leaves = (
        "import os\nprint(5 if not os.path.exists('f') else 7)\nopen('f', 'w').close()"
    )
    assert judged(options, leaves, ADDED[:1] * 3).reward == 1.0


def test_long_output_is_compared_whole(options):
    count = 150_000
    lines = "".join(f"{i}\n" for i in range(count))
    assert len(lines) > 900_000
    tests = [{"input": f"{count}\n", "output": lines}]
    right = "for i in range(int(input())): print(i)"
    assert judged(options, right, tests).reward == 1.0
    wrong = right.replace("print(i)", "print(i + (i == 149_999))")
    assert judged(options, wrong, tests).reward == 0.0
    calls = [{"arguments": [count], "result": list(range(count))}]
    returns = "def count(n):\n    return list(range(n))"
    assert judged(options, returns, calls, "count").reward == 1.0


def test_programs_may_wait_for_several_things_at_once(options):
    right = (
        "import asyncio\n"
        "async def read(x):\n    await asyncio.sleep(0.001)\n    return int(x)\n"
        "async def main():\n"
        "    print(sum(await asyncio.gather(*map(read, input().split()))))\n"
        "asyncio.run(main())"
    )
    assert judged(options, right, ADDED).reward == 1.0


def test_functions_that_return(options):
    right = "def order(xs):\n    print('noise')\n    return sorted(xs)"
    assert judged(options, right, CALLED, "order").reward == 1.0
    once = "def order(xs):\n    return [1, 2, 3]"
    step = judged(options, once, CALLED, "order", reward="share")
    assert step.reward == pytest.approx(1 / 3)
    assert judged(options, "def other(): pass", CALLED, "order").reward == 0.0
    assert judged(options, "def order(:", CALLED, "order").reward == 0.0
    near = [{"arguments": [], "result": 0.3}]
    assert judged(options, "def f(): return 0.1 + 0.2", near, "f").reward == 1.0
    assert judged(options, "def f(): return 0.31", near, "f").reward == 0.0
    truth = [{"arguments": [], "result": True}]
    assert judged(options, "def f(): return 1", truth, "f").reward == 0.0


@pytest.mark.parametrize(
    "program",
    [
        # Ends well without an answer.
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        # Says what a grader might look for.
        "print('passed'); print('ok'); print('1 passed')",
        # Takes over what the test uses.
        "import json\njson.dumps = lambda value: 'true'\ndef f(): return 0",
        "import builtins\nbuiltins.print = lambda *a: None\ndef f(): return 0",
        # A value that is equal to everything.
        "class A:\n  def __eq__(self, o): return True\ndef f(): return A()",
        # Looks for the expected value in its process.
        "import gc, sys\ndef f():\n  return [o for o in gc.get_objects() "
        "if isinstance(o, dict) and 'result' in o][0]['result']",
        # Prints an answer of its own after the mark.
        "import atexit\natexit.register(print, 41)\ndef f(): return 0",
        "import sys\nclass O:\n  def write(self, t): sys.__stdout__.write(t[:17] "
        "+ '42')\n  def flush(self): pass\nsys.stdout = O()\ndef f(): return 0",
    ],
)
def test_no_program_declares_itself_right(options, program):
    # The last one prints 42 behind the mark: it is wrong unless 42 is right.
    tests = [{"arguments": [], "result": 43}, {"arguments": [], "result": 44}]
    step = judged(options, program, tests, "f", reward="share")
    assert step.reward == 0.0
    printed = judged(options, program, ADDED[:1], reward="share")
    assert printed.reward == 0.0


def test_what_does_not_end_costs_its_processor_time_alone(options):
    step = judged(
        options, "while True: pass", ADDED, seconds=0.5, total_seconds=1.2,
        clock_seconds=120.0, reward="share",
    )  # fmt: skip
    assert step.reward == 0.0
    assert step.metrics["out_of_time"] == 1.0
    slow = "def f(n):\n    while n: pass\n    return n"
    tests = [{"arguments": [n], "result": n} for n in (0, 1, 0)]
    step = judged(
        options, slow, tests, "f", seconds=1.0, total_seconds=60.0,
        clock_seconds=120.0, reward="share",
    )  # fmt: skip
    assert step.reward == pytest.approx(2 / 3)


def test_a_program_that_only_waits_has_used_none_of_its_time(options):
    # As on a machine that is busy with others.
    program = "import time\ntime.sleep(1.5)\ndef f(): time.sleep(1.5); return 42"
    tests = [{"arguments": [], "result": 42}]
    step = judged(options, program, tests, "f", seconds=1.0, clock_seconds=120.0)
    assert step.reward == 1.0
    printing = "import time\ntime.sleep(1.5)\nprint(42)"
    tests = [{"input": "", "output": "42"}]
    step = judged(options, printing, tests, seconds=1.0, clock_seconds=120.0)
    assert step.reward == 1.0


def test_a_clock_that_runs_out_is_a_failed_judgement_and_no_0(options):
    for entry in ("f", None):
        test = {"arguments": [], "result": 1} if entry else {"input": "", "output": "1"}
        program = "import time\ntime.sleep(1000)"
        with pytest.raises(
            TimeoutError, match=r"not over in time on the clock \(clock_seconds\)"
        ):
            judged(options, program, [test], entry, clock_seconds=1.0)


def test_the_program_is_the_last_block():
    assert last_block("print(1)") == "print(1)"
    assert last_block("```\na\n```\nor\n```py\nb\n```\nwell") == "b\n"


def rows(tmp_path, *found):
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return str(path)


def test_problems_come_from_a_file(tmp_path):
    row = {
        "prompt": "Sort.",
        "tests": json.dumps(CALLED),
        "entry_point": "order",
        "solution": "order = sorted\n",
    }
    path = rows(tmp_path, row)
    environment = make(f"code?path={path}&eval_path={path}")
    (task,) = environment.tasks("eval")
    assert task.messages[0].content.startswith("Sort.\n\nWrite a Python program.")
    assert task.data["tests"] == CALLED
    assert environment.demonstration(task) == "```python\norder = sorted\n```"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tests": []}, "at least one test"),
        ({"tests": "x"}, "is no JSON"),
        ({"tests": [3]}, "test 1 must be an object, got int"),
        ({"tests": [{"input": "1"}]}, "needs 'input' and 'output', or"),
        ({"tests": [{"input": 1, "output": "1"}]}, "'input' must be str"),
        ({"tests": CALLED, "entry_point": None}, "name it in 'entry_point'"),
        ({"entry_point": "a b"}, "must name a function"),
        ({"solution": 3}, "'solution' must be str"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"tests": [{"input": "", "output": "a" * (1 << 22)}]}, "expects 4,194,304 by"),
        ({"tests": [{"arguments": [], "result": "a" * (1 << 22)}]}, "test 1 expects"),
    ],
)
def test_rows_that_make_no_problem_are_named(tmp_path, change, told):
    row = {"prompt": "Sort.", "tests": CALLED, "entry_point": "order"} | change
    path = rows(tmp_path, row)
    with pytest.raises(ValueError, match=told):
        make(f"code?path={path}&eval_path={path}").tasks("eval")


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("reward=some", "reward must be 'all' or 'share'"),
        ("seconds=0", "seconds must be positive"),
        ('seconds="1"', "seconds must be a number"),
        ("on_bad_row=no", "on_bad_row must be"),
        ("sandbox=require:chroot", "sandbox must be auto, require:bubblewrap"),
    ],
)
def test_options_that_make_no_sense(option, told):
    with pytest.raises(ValueError, match=told):
        make(f"code?path=x.jsonl&{option}")
