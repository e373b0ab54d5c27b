"""Faults of judges and of mixtures of environments."""

from tests.mutations.fault import Fault

__all__ = ["JUDGES"]

JUDGE = "envs/judges/test_judges.py"
MIXTURE = "envs/test_mixture.py"

JUDGES = [
    Fault(
        "a comparison is asked in one order",
        "envs/judges/judge.py",
        'for ours in ("A", "B"):',
        'for ours in ("A", "A"):',
        JUDGE,
    ),
    Fault(
        "a win of the other answer counts as ours",
        "envs/judges/judge.py",
        "float(better == ours)",
        'float(better == "A")',
        JUDGE,
    ),
    Fault(
        "an answer closes its own tag",
        "envs/judges/judge.py",
        'return _SPECIAL.sub(r"\\g<0> ", _TAG.sub("&lt;", text))\n',
        'return _SPECIAL.sub(r"\\g<0> ", text)\n',
        JUDGE,
    ),
    Fault(
        "nonsense of a judge is a reward of 0",
        "envs/judges/judge.py",
        "        raise JudgeError(\n",
        '        return allowed[0], {"judge/asked": 3.0, "judge/unreadable": 3.0}\n'
        "        raise JudgeError(\n",
        JUDGE,
    ),
    Fault(
        "the lowest grade earns something",
        "envs/judges/judge.py",
        "(grade - 1) / (self.best - 1)",
        "grade / self.best",
        JUDGE,
    ),
    Fault(
        "the same nonsense is asked for again",
        "envs/judges/endpoint.py",
        '            "seed": attempt,\n',
        '            "seed": 0,\n',
        JUDGE,
    ),
    Fault(
        "a judge that starts is not waited for",
        "envs/judges/endpoint.py",
        "if reply.status in _BUSY:",
        "if False:",
        JUDGE,
    ),
    Fault(
        "an environment's share does not follow its weight",
        "envs/tasks/mixture.py",
        "part.weight / whole for part in self.parts",
        "1 / len(self.parts) for part in self.parts",
        MIXTURE,
    ),
    Fault(
        "a mixture shows the first tasks of a large environment alone",
        "envs/tasks/mixture.py",
        "each[place * len(each) // count if few else place % len(each)]",
        "each[place % len(each)]",
        MIXTURE,
    ),
    Fault(
        "a task of a mixture is judged by the first environment",
        "envs/tasks/mixture.py",
        'return self.parts[task.data["part"]], task.data["task"]',
        'return self.parts[0], task.data["task"]',
        MIXTURE,
    ),
    Fault(
        "a sum with a reward model's value says what is solved",
        "programs/experience.py",
        "solving = groups if alone else None",
        "solving = None",
        "programs/test_judge.py",
    ),
    Fault(
        "a reward model pads with the token that ends answers",
        "pretrained/directory.py",
        "if pad is not None and pad in ends:",
        "if False:",
        "pretrained/test_heads.py",
    ),
]
