"""Faults of environments behind other people's protocols."""

from tests.mutations.fault import Fault

__all__ = ["PROTOCOLS"]

NEMO_GYM = "envs/protocols/test_nemo_gym.py"
OPENENV = "envs/protocols/test_openenv.py"
BFCL = "envs/bfcl/test_sessions.py"
VERIFIERS = "envs/protocols/test_verifiers.py"
ACTIONS = "envs/protocols/test_actions.py"

PROTOCOLS = [
    Fault(
        "a new session of NeMo Gym gets no earlier calls",
        "envs/protocols/nemo_gym.py",
        "            self._journal.replay(again, slow=slow)\n",
        '            Journal("").replay(again, slow=slow)\n',
        NEMO_GYM,
    ),
    Fault(
        "a judgement of NeMo Gym that is NaN is a reward",
        "envs/protocols/nemo_gym.py",
        "not abs(reward) < 1e300",
        "abs(reward) > 1e300",
        NEMO_GYM,
    ),
    Fault(
        "a NeMo Gym server that was started again unnoticed is asked on",
        "envs/protocols/nemo_gym.py",
        "if self._watch is not None and not self._watch.open:",
        "if False:",
        NEMO_GYM,
    ),
    Fault(
        "a session of NeMo Gym goes on after its connection broke",
        "envs/protocols/nemo_gym.py",
        "                self.close()\n                raise\n",
        "                raise\n",
        NEMO_GYM,
    ),
    Fault(
        "NeMo Gym judges without the conversation",
        "envs/protocols/nemo_gym.py",
        "        said = conversation[len(task.messages) :]\n",
        "        said = conversation[-1:]\n",
        NEMO_GYM,
    ),
    Fault(
        "a connection of OpenEnv is made again without the actions before",
        "envs/protocols/openenv.py",
        "                    self._journal.replay(\n",
        '                    Journal("").replay(\n',
        OPENENV,
    ),
    Fault(
        "an episode of OpenEnv goes on from another beginning",
        "envs/protocols/openenv.py",
        "if first != before:",
        "if False:",
        OPENENV,
    ),
    Fault(
        "the seeds of OpenEnv that are held out are trained on",
        "envs/protocols/openenv.py",
        '2 * index + (split == "eval")',
        "index",
        OPENENV,
    ),
    Fault(
        "an OpenEnv server that is full fails an episode at once",
        "envs/protocols/openenv_client.py",
        "            if code == _CAPACITY:\n                raise UnreachableError(\n",
        "            if code == _CAPACITY:\n                raise ServerError(\n",
        OPENENV,
    ),
    Fault(
        "what a policy thinks of is its action",
        "envs/protocols/actions.py",
        "said = text.rpartition(_THOUGHT_END)[2].strip()",
        "said = text.strip()",
        ACTIONS,
    ),
    Fault(
        "the first object of an answer is the action",
        "envs/protocols/actions.py",
        "            found = value\n",
        "            found = found or value\n",
        ACTIONS,
    ),
    Fault(
        "a wrong turn of BFCL is forgiven",
        "envs/tasks/bfcl.py",
        'if not right or self._turn == len(row["question"]):',
        'if self._turn == len(row["question"]):',
        BFCL,
    ),
    Fault(
        "BFCL compares states alone",
        "envs/tasks/bfcl.py",
        'bool(state["valid"] and results["valid"])',
        'bool(state["valid"])',
        BFCL,
    ),
    Fault(
        "BFCL compares results alone",
        "envs/tasks/bfcl.py",
        'bool(state["valid"] and results["valid"])',
        'bool(results["valid"])',
        BFCL,
    ),
    Fault(
        "every method of an API of BFCL can be called",
        "envs/tasks/bfcl.py",
        "dict.fromkeys(names, self)",
        'dict.fromkeys([*names, "reset", "_load_scenario"], self)',
        BFCL,
    ),
    Fault(
        "a function of BFCL that is missing is offered at first",
        "envs/tasks/bfcl.py",
        "return [tool for tool in offered if tool.name not in later]",
        "return offered",
        BFCL,
    ),
    Fault(
        "a function of BFCL that was missing is never described",
        "envs/tasks/bfcl.py",
        "    if added:\n",
        "    if False:\n",
        BFCL,
    ),
    Fault(
        "an error of an agent of verifiers is a reward of zero",
        "envs/protocols/verifiers_inside.py",
        "    if errors:\n",
        "    if False:\n",
        VERIFIERS,
    ),
    Fault(
        "a process of verifiers that ended is asked again",
        "envs/protocols/verifiers.py",
        "            _player.cache_clear()\n",
        "",
        VERIFIERS,
    ),
]
