"""Faults of environments behind other people's protocols."""

from tests.mutations.fault import Fault

__all__ = ["PROTOCOLS"]

NEMO_GYM = "envs/protocols/test_nemo_gym.py"

PROTOCOLS = [
    Fault(
        "a new session of NeMo Gym gets no earlier calls",
        "envs/protocols/nemo_gym.py",
        "        self._journal.replay(\n",
        '        Journal("").replay(\n',
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
        "an error of NeMo Gym that comes from a lost session is told",
        "envs/protocols/nemo_gym.py",
        "reply.status >= 400 and not fresh",
        "reply.status >= 600 and not fresh",
        NEMO_GYM,
    ),
    Fault(
        "a session of NeMo Gym goes on after its connection broke",
        "envs/protocols/nemo_gym.py",
        "            self.close()\n            raise\n",
        "            raise\n",
        NEMO_GYM,
    ),
    Fault(
        "NeMo Gym judges without the conversation",
        "envs/protocols/nemo_gym.py",
        "        said = conversation[len(task.messages) :]\n",
        "        said = conversation[-1:]\n",
        NEMO_GYM,
    ),
]
