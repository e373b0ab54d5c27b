"""The collector with real worker processes; a step survives every kind of answer."""

import concurrent.futures
import dataclasses
import json
import re
import threading
import time

import numpy as np
import pytest

from jaxrl_post.envs import Message, Task, WorkerPool
from jaxrl_post.envs.workers.pool import Judgement
from jaxrl_post.rollout import Collector, EpisodeLimits, Group
from jaxrl_post.rollout.collector import RolloutTimeoutError
from jaxrl_post.rollout.dialogue import SeveralTurnsError
from jaxrl_post.sampler.requests import Request, SamplingParams
from jaxrl_post.tokens import Tokens
from tests.rollout import scripts
from tests.rollout.scripts import STOP, Characters, ScriptedSampler

pytestmark = pytest.mark.processes

SAMPLING = SamplingParams(max_tokens=50)
LIMITS = EpisodeLimits(max_prompt_tokens=200)


def make_collector(judges: WorkerPool, **options) -> Collector:
    given = {"limits": LIMITS, "deadline_s": 60.0, **options}
    return scripts.collector(Characters(), judges, **given)


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
    with WorkerPool(scripted.Scripted(), 2, deadline_s=3.0) as judges:
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
            judges, limits=EpisodeLimits(max_turns=3, max_prompt_tokens=99)
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
        with pytest.raises(SeveralTurnsError, match=r"continues after its first"):
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
            match=r"rollout: 2 episodes were not finished after 1\.5 s; 2 of them wait "
            r"for a reward\. Raise the rollout deadline",
        ):
            make_collector(judges, deadline_s=1.5).run(sampler, tasks(1), 3, SAMPLING)
        assert time.monotonic() - begin < 50
    finally:
        judges.close(deadline_s=0)


def test_a_deadline_says_that_it_waited_for_the_sampler(scripted):
    with WorkerPool(scripted.Scripted()) as judges:
        collector = make_collector(judges, deadline_s=0.2)
        with pytest.raises(
            RolloutTimeoutError, match=r"4 episodes .* 0 of them wait for a reward"
        ):
            collector.run(ScriptedSampler(str, burst=0), tasks(2), 2, SAMPLING)


# Unfinished episodes.


class Patient:
    """Judges that answer when they are told to."""

    def __init__(self, environment) -> None:
        self.environment = environment
        self.asked: list[tuple[concurrent.futures.Future, Task, tuple]] = []
        self.ended: list[tuple[int, int]] = []

    def submit(self, task, conversation, session):
        future = concurrent.futures.Future()
        self.asked.append((future, task, conversation))
        return future

    def end(self, session) -> None:
        self.ended.append(session)

    def answer(self, *, but: int | None = None) -> None:
        """Answers all questions, or all but those about one task."""
        waiting, self.asked = self.asked, []
        for future, task, conversation in waiting:
            if task.id == but:
                self.asked.append((future, task, conversation))
                continue
            step = self.environment.step(task, conversation)
            future.set_result(Judgement(step, None, "ok", 0.0))


class Prompt(Patient):
    """Judges that answer at once."""

    def submit(self, task, conversation, session):
        future = super().submit(task, conversation, session)
        self.answer()
        return future


TURNS = EpisodeLimits(max_turns=2, max_prompt_tokens=99)


def say(request: Request, index: int) -> str:
    return f"sample {index} of {request.prompt_id}"


def played(sampler, environment) -> list[Group]:
    collector = scripts.collector(Characters(), Prompt(environment), TURNS)
    numbered = [(7 + i, environment.tasks("train")[i]) for i in range(4)]
    return collector.run(sampler, numbered, 3, SAMPLING)


def without_versions(group: Group) -> Group:
    def plain(tokens: Tokens) -> Tokens:
        versions = np.where(tokens.sampled, 0, -1)
        return dataclasses.replace(tokens, versions=versions)

    episodes = tuple(
        dataclasses.replace(
            episode,
            turns=tuple(
                dataclasses.replace(turn, sampled=plain(turn.sampled))
                for turn in episode.turns
            ),
        )
        for episode in group.episodes
    )
    return dataclasses.replace(group, episodes=episodes)


@pytest.mark.parametrize("seed", range(20))
def test_suspended_and_restored_at_any_moment_nothing_is_lost_or_twice(two_turns, seed):
    """Each time by another collector, from JSON, under other parameters."""
    environment = two_turns.TwoTurns()
    expected = played(ScriptedSampler(say, 5, pieces=4), environment)
    tasks = {7 + i: environment.tasks("train")[i] for i in range(4)}
    random = np.random.default_rng(seed)
    collector = scripts.collector(Characters(), Patient(environment), TURNS)
    collector.start(list(tasks.items()), 3, SAMPLING)
    sampler = ScriptedSampler(say, 5, pieces=4, version=0)
    found: list[Group] = []
    requests = sampler.requests
    version = 0
    deadline = time.monotonic() + 60
    while collector.in_flight:
        assert time.monotonic() < deadline, "an episode is lost"
        found += collector.poll(sampler, deadline)
        if random.random() < 0.5:
            collector.episodes.judges.answer()
        if random.random() < 0.3 and collector.in_flight:
            collector.suspend(sampler)
            assert not sampler.busy
            state = json.loads(json.dumps(collector.state()))
            version += 1
            sampler = ScriptedSampler(say, 5, pieces=4, version=version)
            sampler.requests = requests
            collector = scripts.collector(Characters(), Patient(environment), TURNS)
            collector.restore(state, tasks)
            assert json.loads(json.dumps(collector.state())) == state
        if not sampler.busy:
            # Else the next round would wait for a judgement.
            collector.episodes.judges.answer()
    assert version > 0, "the test shows nothing"
    assert any(request.num_sampled for request in requests)
    for request in requests:
        # A continued answer has its limit, earlier tokens included.
        left = request.sampling.max_tokens
        assert left + request.num_sampled == SAMPLING.max_tokens
    found.sort(key=lambda group: group.prompt_id)
    assert list(map(without_versions, found)) == list(map(without_versions, expected))
    for group in found:
        for episode in group.episodes:
            # In the order of time, and in one version or more.
            assert (np.diff(episode.tokens.versions[episode.tokens.sampled]) >= 0).all()


def test_a_burst_of_quick_judgements_is_no_slow_one(two_turns):
    """Each comes within the grace after the one before; together they take longer."""
    environment = two_turns.TwoTurns()

    class InTurn(Patient):
        """One worker, which takes 0.05 s for each."""

        def work(self) -> None:
            while not over.wait(0.05):
                if self.asked:
                    future, task, conversation = self.asked.pop(0)
                    step = self.environment.step(task, conversation)
                    future.set_result(Judgement(step, None, "ok", 0.05))

    judges, over = InTurn(environment), threading.Event()
    worker = threading.Thread(target=judges.work)
    worker.start()
    try:
        collector = scripts.collector(Characters(), judges, TURNS, grace_s=2.0)
        numbered = [(7 + i, environment.tasks("train")[i]) for i in range(4)]
        collector.start(numbered, 12, SAMPLING)
        sampler = ScriptedSampler(say, 48)
        rounds, done = 0, []
        while len(done) < 4:
            done += collector.poll(sampler, time.monotonic() + 60)
            rounds += 1
    finally:
        over.set()
        worker.join()
    # 48 first turns, their judgements of 2.4 s in one round, 48 second turns, theirs.
    assert rounds == 3


def test_every_session_is_ended_once_however_its_episode_ends(two_turns):
    """Done, cut by a limit, or failed: when it is over, and not before."""
    environment = two_turns.TwoTurns()
    numbered = [(7 + i, environment.tasks("train")[i]) for i in range(3)]
    everyone = sorted((7 + i, j) for i in range(3) for j in range(2))
    for limits, ends in (
        (TURNS, {"stop"}),
        (EpisodeLimits(max_turns=2, max_prompt_tokens=9), {"token_limit"}),
    ):
        judges = Prompt(environment)
        groups = scripts.collector(Characters(), judges, limits).run(
            ScriptedSampler(say, 4), numbered, 2, SAMPLING
        )
        assert {e.finish_reason for g in groups for e in g.episodes} == ends
        assert sorted(judges.ended) == everyone
    judges = Patient(environment)
    collector = scripts.collector(Characters(), judges, TURNS)
    collector.start(numbered, 2, SAMPLING)
    sampler = ScriptedSampler(say, 6, pieces=3)
    collector.poll(sampler, time.monotonic() + 60)
    collector.suspend(sampler)
    assert judges.ended == [], "a session outlives a suspension"
    while not judges.asked:
        collector.poll(sampler, time.monotonic() + 60)
    for future, *_ in judges.asked:
        future.set_result(Judgement(None, "it died", "crashed", 0.0))
    assert judges.ended == []
    collector.poll(sampler, time.monotonic() + 60)
    assert sorted(judges.ended) == everyone


def test_a_slow_judge_holds_up_its_own_group_alone(two_turns):
    environment = two_turns.TwoTurns()
    judges = Patient(environment)
    collector = scripts.collector(Characters(), judges, TURNS, grace_s=0.05)
    numbered = [(7 + i, environment.tasks("train")[i]) for i in range(4)]
    sampler = ScriptedSampler(say, 4, pieces=3)
    collector.start(numbered, 3, SAMPLING)
    done: list[Group] = []
    begin = time.monotonic()
    while len(done) < 3:
        done += collector.poll(sampler, begin + 60)
        judges.answer(but=2)
    assert sorted(group.prompt_id for group in done) == [7, 8, 10]
    assert (collector.in_flight, collector.prompt_ids) == (1, (9,))
    # Three episodes were late in their first turn; each is waited for once.
    assert time.monotonic() - begin < 50
    # A late answer is credited to the episode that asked, and to no other.
    judges.answer()
    while collector.in_flight:
        done += collector.poll(sampler, begin + 60)
        judges.answer()
    assert done[-1].prompt_id == 9
    plain = played(ScriptedSampler(say), environment)
    assert without_versions(done[-1]) == without_versions(plain[2])


def test_an_answer_to_what_was_given_up_is_dropped(two_turns):
    """A judgement that the restored collector asks for again comes twice."""
    environment = two_turns.TwoTurns()
    task = environment.tasks("train")[0]
    judges = Patient(environment)
    collector = scripts.collector(Characters(), judges, TURNS)
    collector.start([(7, task)], 1, SAMPLING)
    sampler = ScriptedSampler(say)
    collector.poll(sampler, time.monotonic() + 60)
    collector.suspend(sampler)
    collector.restore(collector.state(), {7: task})
    assert len(judges.asked) == 2
    judges.answer()
    done: list[Group] = []
    while collector.in_flight:
        done += collector.poll(sampler, time.monotonic() + 60)
        judges.answer()
    [episode] = done[0].episodes
    assert [turn.reward for turn in episode.turns] == [0.25, 4.0]


def test_within_its_grace_it_does_not_matter_how_fast_a_judge_is(two_turns):
    """The requests, their order, and what was sampled when, are the same."""
    environment = two_turns.TwoTurns()

    class Delayed(Patient):
        def submit(self, task, conversation, session):
            future = super().submit(task, conversation, session)
            [(_, *asked)] = self.asked
            self.asked = []
            delay = 0.03 * (len(conversation) + task.id) % 0.05

            def later() -> None:
                step = self.environment.step(*asked)
                future.set_result(Judgement(step, None, "ok", delay))

            threading.Timer(delay, later).start()
            return future

    histories = []
    for judges in (Prompt(environment), Delayed(environment)):
        collector = scripts.collector(Characters(), judges, TURNS, grace_s=30.0)
        sampler = ScriptedSampler(say, 2, pieces=2)
        numbered = [(7 + i, environment.tasks("train")[i]) for i in range(4)]
        collector.start(numbered, 3, SAMPLING)
        history = []
        for version in range(40):
            sampler.version = version
            history.append(collector.poll(sampler, time.monotonic() + 60))
        assert collector.in_flight == 0
        histories.append((history, sampler.requests))
    assert histories[0] == histories[1]


def test_a_prompt_id_that_is_under_way_is_refused(two_turns):
    environment = two_turns.TwoTurns()
    collector = scripts.collector(Characters(), Patient(environment), TURNS)
    task = environment.tasks("train")[0]
    collector.start([(7, task)], 1, SAMPLING)
    with pytest.raises(ValueError, match=r"a group has the prompt id 7 already"):
        collector.start([(7, task)], 1, SAMPLING)
