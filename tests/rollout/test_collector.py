"""The collector with real worker processes: whatever an answer does, a step goes on."""

import re
import time

import pytest

from jaxrl_post.envs import Message, Task, WorkerPool
from jaxrl_post.rollout import Collector, Limits
from jaxrl_post.rollout.collector import RolloutTimeoutError, SeveralTurnsError
from jaxrl_post.sampler.requests import SamplingParams
from tests.rollout.scripts import STOP, Characters, ScriptedSampler

SAMPLING = SamplingParams(max_tokens=50)
LIMITS = Limits(max_prompt_tokens=200)


def make_collector(judges: WorkerPool, **options) -> Collector:
    return Collector(codec=Characters(), judges=judges, **{"limits": LIMITS, **options})


def tasks(count: int) -> list[tuple[int, Task]]:
    return [
        (40 + i, Task(i, (Message("user", f"task {i}"),), "")) for i in range(count)
    ]


BAD = {
    "raise": r"^raised: (?s:.*)ZeroDivisionError: at the bottom",
    "nan": "reward must be a finite number",
    "reward text": "reward",
    "none": "Step",
    "hang": "timeout",
    "exit": "crashed",
    "segfault": "crashed",
}


def test_what_is_wrong_with_an_environment_costs_its_rollout_alone(scripted):
    scripts = ["pid", *BAD, "pid"]
    sampler = ScriptedSampler(lambda request, index: scripts[index])
    with WorkerPool(scripted.Scripted(), 2, deadline_s=1.0) as judges:
        collector = make_collector(judges)
        groups = collector.run(sampler, tasks(2), len(scripts), SAMPLING)
    assert [group.prompt_id for group in groups] == [40, 41]
    for group in groups:
        assert [e.sample_index for e in group.episodes] == list(range(len(scripts)))
        assert group.valid.tolist() == [script == "pid" for script in scripts]
        for episode, script in zip(group.episodes, scripts, strict=True):
            assert episode.response_text == script
            if script == "pid":
                assert (episode.reward, episode.error) == (1.0, "")
                assert episode.metrics["pid"] > 0
            else:
                assert episode.reward is None
                assert re.search(BAD[script], episode.error), episode.error
            # Failed or not, the tokens are the sampled ones, in capitals.
            said = [*map(ord, script.upper()), STOP]
            assert episode.tokens.ids[-len(said) :].tolist() == said
    assert collector.seconds["reward"] > 0


def test_a_prompt_is_asked_for_once_and_an_episode_goes_on_for_itself(two_turns):
    sampler = ScriptedSampler(lambda request, index: f"sample {index}")
    environment = two_turns.TwoTurns()
    with WorkerPool(environment) as judges:
        collector = make_collector(
            judges, limits=Limits(max_turns=3, max_prompt_tokens=99)
        )
        numbered = [(7 + i, environment.tasks("train")[i]) for i in range(2)]
        groups = collector.run(sampler, numbered, 3, SAMPLING)
    first = [(r.prompt_id, r.num_samples) for r in sampler.requests[:2]]
    assert first == [(7, 3), (8, 3)]
    later = sampler.requests[2:]
    keys = sorted((r.prompt_id, r.first_sample, r.num_samples) for r in later)
    assert keys == [(p, s, 1) for p in (7, 8) for s in range(3)]
    assert all(request.sampling == SAMPLING for request in sampler.requests)
    for prompt_id, task_id in ((7, 0), (8, 1)):
        for episode in groups[task_id].episodes:
            turn = f"SAMPLE {episode.sample_index}\0"
            text = f"task {task_id}={turn} again {task_id}={turn}"
            ids = episode.tokens.ids.tolist()
            assert ids == [*map(ord, text)]
            # 0.25 for the first turn, and the messages of the conversation: 4.
            assert episode.reward == 4.25
            assert [turn.reward for turn in episode.turns] == [0.25, 4.0]
            assert episode.metrics == {"first": 1.0, "second": 2.0}
            # The tokens that the sampler saw are those that are trained on.
            (request,) = [
                r
                for r in later
                if (r.prompt_id, r.first_sample) == (prompt_id, episode.sample_index)
            ]
            assert tuple(ids[: len(request.prompt)]) == request.prompt


def test_an_environment_of_several_turns_is_refused_where_one_is_allowed(two_turns):
    environment = two_turns.TwoTurns()
    sampler = ScriptedSampler(lambda request, index: "said")
    numbered = [(7, environment.tasks("train")[0])]
    with WorkerPool(environment) as judges:
        collector = make_collector(judges)
        with pytest.raises(SeveralTurnsError, match=r"task 0 goes on after its first"):
            collector.run(sampler, numbered, 1, SAMPLING)


def test_the_environment_sees_how_an_answer_ended(two_turns):
    """By what it was cut, and how many tokens it has."""
    sampler = ScriptedSampler(lambda request, index: "said")
    with WorkerPool(two_turns.Ended()) as judges:
        [group] = make_collector(judges).run(sampler, tasks(1), 1, SAMPLING)
    [episode] = group.episodes
    assert episode.finish_reason == "stop"
    # Four characters and the token that stops.
    assert episode.metrics == {"truncated": 0.0, "tokens": 5.0}


def test_no_tasks_are_no_groups(scripted):
    with WorkerPool(scripted.Scripted()) as judges:
        assert make_collector(judges).run(ScriptedSampler(str), [], 4, SAMPLING) == []


def test_a_deadline_says_that_it_waited_for_a_reward(scripted):
    scripts = ["hang", "hang", "pid"]
    sampler = ScriptedSampler(lambda request, index: scripts[index])
    judges = WorkerPool(scripted.Scripted(), 1, deadline_s=60)
    begin = time.monotonic()
    try:
        with pytest.raises(
            RolloutTimeoutError,
            match=r"rollout: 2 episodes were not finished after 1\.5 s, 2 of them "
            r"waiting for a reward; raise the rollout deadline or lower max_tokens",
        ):
            make_collector(judges, deadline_s=1.5).run(sampler, tasks(1), 3, SAMPLING)
        assert time.monotonic() - begin < 10
    finally:
        judges.close(deadline_s=0)


def test_a_deadline_says_that_it_waited_for_the_sampler(scripted):
    with WorkerPool(scripted.Scripted()) as judges:
        collector = make_collector(judges, deadline_s=0.2)
        with pytest.raises(
            RolloutTimeoutError, match=r"4 episodes .* 0 of them waiting"
        ):
            collector.run(ScriptedSampler(str, burst=0), tasks(2), 2, SAMPLING)
