"""Faults of judges and of mixtures of environments."""

from tests.mutations.fault import Fault

__all__ = ["JUDGES"]

JUDGE = "envs/judges/test_judges.py"
MIXTURE = "envs/test_mixture.py"

JUDGES = [
    Fault(
        "a comparison is asked in one order",
        "envs/judges/judge.py::Judge.compare",
        "('A', 'B')",
        "('A', 'A')",
        JUDGE,
    ),
    Fault(
        "a win of the other answer counts as ours",
        "envs/judges/judge.py::Judge.compare",
        "float(better == ours)",
        'float(better == "A")',
        JUDGE,
    ),
    Fault(
        "an answer closes its own tag",
        "envs/judges/judge.py::_quoted",
        'return _SPECIAL.sub(r"\\g<0> ", _TAG.sub("&lt;", text))',
        'return _SPECIAL.sub(r"\\g<0> ", text)',
        JUDGE,
    ),
    Fault(
        "nonsense of a judge is a reward of 0",
        "envs/judges/judge.py::Judge._verdict",
        "for attempt in range(self.tries):\n    __",
        "for attempt in range(self.tries):\n"
        "    __\n"
        "return (allowed[0], {'judge/asked': 3.0, 'judge/unreadable': 3.0})",
        JUDGE,
    ),
    Fault(
        "the lowest grade earns something",
        "envs/judges/judge.py::Judge.grade",
        "(grade - 1) / (self.best - 1)",
        "grade / self.best",
        JUDGE,
    ),
    Fault(
        "the same nonsense is asked for again",
        "envs/judges/endpoint.py::ChatEndpoint.ask",
        "key = __",
        'body["seed"] = 0\nkey = __',
        JUDGE,
    ),
    Fault(
        "a judge that starts is not waited for",
        "envs/judges/endpoint.py::ChatEndpoint._ask.attempt",
        "reply.status in _BUSY",
        "False",
        JUDGE,
    ),
    Fault(
        "an environment's share does not follow its weight",
        "envs/tasks/mixture.py::_Mixture._by_weight",
        "part.weight / whole",
        "1 / len(self.parts)",
        MIXTURE,
    ),
    Fault(
        "a mixture shows the first tasks of a large environment alone",
        "envs/tasks/mixture.py::_Mixture._by_weight.make",
        "each[place * len(each) // count if few else place % len(each)]",
        "each[place % len(each)]",
        MIXTURE,
    ),
    Fault(
        "a task of a mixture is judged by the first environment",
        "envs/tasks/mixture.py::_Mixture._inner",
        'return self.parts[task.data["part"]], task.data["task"]',
        'return self.parts[0], task.data["task"]',
        MIXTURE,
    ),
    Fault(
        "a sum with a reward model's value says what is solved",
        "programs/experience.py::Experience.evaluate",
        "solving = groups if alone else None",
        "solving = None",
        "programs/test_judge.py",
    ),
    Fault(
        "a reward model pads with the token that ends answers",
        "pretrained/directory.py::_pad",
        "pad is not None and pad in ends",
        "False",
        "pretrained/test_heads.py",
    ),
]
