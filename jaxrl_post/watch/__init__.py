"""Rules that watch a run, and adversarial answers that test a reward before it.

`default_rules` and `read_rules` give `Rule`s, against which a `RunWatch` holds the
metrics of each step; it returns `Alarm`s. `earned` measures what the answers of
`ATTACKS` earn.
"""

from jaxrl_post.watch.alarms import Alarm, RunWatch
from jaxrl_post.watch.attacks import ATTACKS, Attack, Known
from jaxrl_post.watch.bounds import Condition, RuleError
from jaxrl_post.watch.redteam import Earned, EpisodeReward, earned, known_tasks
from jaxrl_post.watch.rule import Rule, default_rules, read_rules

__all__ = [
    "ATTACKS",
    "Alarm",
    "Attack",
    "Condition",
    "Earned",
    "EpisodeReward",
    "Known",
    "Rule",
    "RuleError",
    "RunWatch",
    "default_rules",
    "earned",
    "known_tasks",
    "read_rules",
]
