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
        "envs/protocols/nemo_gym.py::_Episode._seeded",
        "self._journal.replay(again, slow=slow)",
        'Journal("").replay(again, slow=slow)',
        NEMO_GYM,
    ),
    Fault(
        "a judgement of NeMo Gym that is NaN is a reward",
        "envs/protocols/nemo_gym.py::_reward",
        "not abs(reward) < 1e300",
        "abs(reward) > 1e300",
        NEMO_GYM,
    ),
    Fault(
        "a NeMo Gym server that was started again unnoticed is asked on",
        "envs/protocols/nemo_gym.py::_Episode._request.attempt",
        "self._watch is not None and (not self._watch.open)",
        "False",
        NEMO_GYM,
    ),
    Fault(
        "a session of NeMo Gym goes on after its connection broke",
        "envs/protocols/nemo_gym.py::_Episode._request.attempt",
        "self.close()\nraise",
        "raise",
        NEMO_GYM,
    ),
    Fault(
        "NeMo Gym judges without the conversation",
        "envs/protocols/nemo_gym.py::_Episode.judge",
        "said = conversation[len(task.messages) :]",
        "said = conversation[-1:]",
        NEMO_GYM,
    ),
    Fault(
        "a connection of OpenEnv is made again without the actions before",
        "envs/protocols/openenv.py::_Episode._made.attempt",
        "self._journal.replay(lambda _, before: self._sent(client, before, until))",
        "Journal('').replay(lambda _, before: self._sent(client, before, until))",
        OPENENV,
    ),
    Fault(
        "an episode of OpenEnv goes on from another beginning",
        "envs/protocols/openenv.py::OpenEnvSession._begin",
        "first != before",
        "False",
        OPENENV,
    ),
    Fault(
        "the seeds of OpenEnv that are held out are trained on",
        "envs/protocols/openenv.py::OpenEnv.tasks",
        '2 * index + (split == "eval")',
        "index",
        OPENENV,
    ),
    Fault(
        "an OpenEnv server that is full fails an episode at once",
        "envs/protocols/openenv_client.py::OpenEnvClient._read",
        "UnreachableError",
        "ServerError",
        OPENENV,
    ),
    Fault(
        "what a policy thinks of is its action",
        "envs/protocols/actions.py::action_of",
        "said = after_thoughts(text).strip()",
        "said = text.strip()",
        ACTIONS,
    ),
    Fault(
        "the first object of an answer is the action",
        "envs/protocols/actions.py::_last_object",
        "found = value",
        "found = found or value",
        ACTIONS,
    ),
    Fault(
        "a wrong turn of BFCL is forgiven",
        "envs/tasks/bfcl.py::BfclSession._ended_turn",
        "not right or self._turn == len(row['question'])",
        "self._turn == len(row['question'])",
        BFCL,
    ),
    Fault(
        "BFCL compares states alone",
        "envs/tasks/bfcl.py::BfclSession._right",
        'bool(state["valid"] and results["valid"])',
        'bool(state["valid"])',
        BFCL,
    ),
    Fault(
        "BFCL compares results alone",
        "envs/tasks/bfcl.py::BfclSession._right",
        'bool(state["valid"] and results["valid"])',
        'bool(results["valid"])',
        BFCL,
    ),
    Fault(
        "every method of an API of BFCL can be called",
        "envs/tasks/bfcl.py::BfclSession.__init__",
        "dict.fromkeys(names, self)",
        'dict.fromkeys([*names, "reset", "_load_scenario"], self)',
        BFCL,
    ),
    Fault(
        "a function of BFCL that is missing is offered at first",
        "envs/tasks/bfcl.py::_at_first",
        "return [tool for tool in offered if tool.name not in later]",
        "return offered",
        BFCL,
    ),
    Fault(
        "a function of BFCL that was missing is never described",
        "envs/tasks/bfcl.py::_turn",
        "if added:\n    __",
        "if False:\n    __",
        BFCL,
    ),
    Fault(
        "an error of an agent of verifiers is a reward of zero",
        "envs/protocols/verifiers_inside.py::played",
        "if errors:\n    __",
        "if False:\n    __",
        VERIFIERS,
    ),
    Fault(
        "a process of verifiers that ended is asked again",
        "envs/protocols/verifiers.py::Verifiers.run",
        "_player.cache_clear()",
        "pass",
        VERIFIERS,
    ),
]
