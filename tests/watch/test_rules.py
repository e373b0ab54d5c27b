"""Rules as data: the default rules, and rules of a file."""

import json
import re

import pytest

from jaxrl_post.config.checks import check_options
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import WatchConfig
from jaxrl_post.programs.watching.guard import open_watch
from jaxrl_post.watch.bounds import RuleError
from jaxrl_post.watch.rule import default_rules, read_rules
from launch.names import PROGRAMS, options_of, program_of


def file(tmp_path, text, name="rules.toml"):
    place = tmp_path / name
    place.write_text(text)
    return str(place)


@pytest.mark.parametrize("rule", default_rules(), ids=lambda rule: rule.name)
def test_a_default_rule_only_warns_and_has_a_runbook(rule):
    assert rule.action in ("warn", "keep")
    assert rule.means.endswith(".")
    assert rule.causes.endswith(".")
    assert rule.look.endswith(".")


def test_the_default_rules_are_of_documented_metrics_and_options(tmp_path):
    # A file of rules, though empty, has all metrics checked.
    config = RLConfig(watch=WatchConfig(rules=file(tmp_path, "")))
    assert len(open_watch(config).rules) == len(default_rules())


def test_the_options_in_the_runbooks_exist():
    text = " ".join(f"{rule.causes} {rule.look}" for rule in default_rules())
    named = set(re.findall(r"--([a-z][\w.-]*[\w])", text))
    known = {
        option[2:]
        for program in PROGRAMS
        for option in options_of(program_of(program).default([]))
    }
    sections = {option.rpartition(".")[0] for option in known}
    assert named - known - sections == set()


def test_a_file_changes_and_adds_rules(tmp_path):
    text = """
[reward-collapse]
action = "stop"
[clipping]
below = 0.1
[slower]
below = 100
[mine]
metric = "reward/mean"
per = "time/step"
above = 2
steps = 1
means = "Too good."
also = [{metric = "env/<metric>", share = 0.5}]
"""
    before = {rule.name: rule for rule in default_rules()}
    found = {rule.name: rule for rule in read_rules(file(tmp_path, text))}
    assert found["reward-collapse"].action == "stop"
    same = before["reward-collapse"]
    assert found["reward-collapse"].conditions == same.conditions
    assert found["clipping"].conditions[0].kind == "below"
    # The bound against the past had `after`, which stays, and no bound has `past` left.
    assert found["slower"].conditions[0].kind == "below"
    assert found["slower"].conditions[0].after == 5
    assert found["clipping"].means == before["clipping"].means
    assert [each.kind for each in found["mine"].conditions] == ["above", "share"]
    assert [*found] == [*before, "mine"]


def test_rules_may_be_json_and_may_be_off(tmp_path):
    rule = {"metric": "reward/mean", "above": 1, "means": "High."}
    place = file(tmp_path, json.dumps({"mine": rule}), "a.json")
    names = [rule.name for rule in read_rules(place, ("no-spread",))]
    assert "mine" in names
    assert "no-spread" not in names
    assert read_rules(place, ("all",)) == ()


MINE = '[mine]\nmetric = "reward/mean"\nmeans = "a"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[mine", "cannot read .*rules.toml: Expected"),
        ("mine = 3", "mine must be a table of a rule's keys; got 3"),
        (MINE, "rule mine: needs one bound among above.*; got none"),
        (MINE + "above = 1\nbelow = 2", "needs one bound .*; got above and below"),
        (MINE + "abov = 1", "rule mine: unknown key 'abov'; did you mean above"),
        (MINE + "above = nan", "above must be finite; got nan"),
        (MINE + "above = true", "above must be a number; got True"),
        (MINE + 'times = "mismatch.warn"', "times must be a number; got 'mismatch"),
        (MINE + "times = 1", "times must be greater than 1; got 1"),
        (MINE + "share = 1.5", r"share must be in \(0, 1\); got 1.5"),
        (MINE + "rises = -1", "rises must be greater than 0; got -1"),
        (MINE + "above = 1\npast = 9", "past is read by times, .*, not by above; drop"),
        (MINE + "climbs = 3\nknown = 9", "known is read by .*, not by climbs; drop it"),
        (MINE + "gains = 0", "gains must be greater than 0; got 0"),
        (MINE + "times = 2\npast = 10000000", "past must be at most 100,000"),
        (MINE + "times = 2\npast = 5\nknown = 9", "known must be at most past, 5"),
        (MINE + "above = 1" + "0" * 400, "above must be at most 1e.300 in size"),
        (MINE + 'above = 1\nper = "time/<x>"', "per must name one metric"),
        (
            MINE + 'above = 1\noptions = {"rollout.ahed" = 0}',
            "no option 'rollout.ahed'",
        ),
        (MINE.replace("reward/mean", "a<b") + "above = 1", "metric may have <word>"),
        (
            MINE.replace("[mine]", '["../mine"]') + "above = 1",
            "a rule's name has letters",
        ),
        (MINE + "climbs = 3\npast = 2", "past must be at least 4; got 2"),
        (MINE + "times = 2\npast = 0", "past must be at least 1; got 0"),
        (MINE + "times = 2\nleast = -1", "least must be at least 0; got -1"),
        (MINE + "above = 1\nsteps = 0", "steps must be at least 1; got 0"),
        (MINE + "above = 1\nsteps = 1.5", "steps must be int; got 1.5"),
        (MINE + 'above = 1\naction = "halt"', "action must be one of warn, .*'halt'"),
        (MINE + "above = 1\nalso = 3", "also must be a list of tables; got 3"),
        (MINE + "above = 1\nalso = [{}]", "also: needs one bound"),
        (MINE + "above = 1\noptions = 3", "options must be a table; got 3"),
        ('[mine]\nmetric = "reward/mean"\nabove = 1', "means must say .*; got none"),
        ('[mine]\nmeans = "a"\nabove = 1', "needs a metric, such as reward/mean"),
        (MINE.replace("reward/mean", "reward/men") + "above = 1", None),
        (MINE.replace("reward/mean", "no/such") + "above = 1", "there is no metric"),
        (MINE + 'above = 1\nper = "no/such"', "there is no metric 'no/such'"),
        (MINE + 'above = "steps"', None),
        (
            MINE + 'above = "model"',
            "name of an option .*; got 'model', which is 'demo'",
        ),
        (MINE + 'above = "no.such"', "there is no option 'no.such'"),
        (MINE + 'above = 1\nfunction = "no_module:f"', "rule mine: function: .*no_mod"),
        (MINE + 'above = 1\nfunction = "os:getcwd"', "rule mine: function: "),
    ],
)
def test_a_rule_that_cannot_be_used_is_refused(tmp_path, text, message):
    config = RLConfig(watch=WatchConfig(rules=file(tmp_path, text)))
    if message is None:
        # `reward/<part>` stands for what an environment names.
        open_watch(config)
        return
    with pytest.raises(ConfigError, match=f"--watch.rules: .*{message}"):
        open_watch(config)


def test_a_file_that_is_not_there_is_named_before_anything_runs(tmp_path):
    config = RLConfig(watch=WatchConfig(rules=str(tmp_path / "no.toml")))
    with pytest.raises(ConfigError, match=r"--watch.rules: cannot read .*no.toml"):
        check_options(config)


def test_off_names_rules():
    with pytest.raises(RuleError, match="no rule 'reward-colapse'; did you mean rew"):
        read_rules(None, ("reward-colapse",))
    config = RLConfig(watch=WatchConfig(off=("nonsense",)))
    with pytest.raises(ConfigError, match=r"--watch.off: there is no rule 'nonsense'"):
        check_options(config)


def test_a_rule_may_ask_for_options():
    names = [rule.name for rule in open_watch(RLConfig()).rules]
    assert "unexpected-staleness" in names
    ahead = RLConfig()
    object.__setattr__(ahead.rollout, "ahead", 1)
    names = [rule.name for rule in open_watch(ahead).rules]
    assert "unexpected-staleness" not in names
