"""Agents that call the model over HTTP: what they were served is what is trained on."""

import contextlib
import dataclasses
import socket
import time

import httpx
import numpy as np
import pytest

from jaxrl_post.config.algorithm import AlgorithmConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.envs import WorkerPool
from jaxrl_post.envs.tasks.arithmetic import Arithmetic
from jaxrl_post.envs.tasks.nim import Nim
from jaxrl_post.programs.build.agents import check_agents
from jaxrl_post.programs.build.collector import open_collector
from jaxrl_post.programs.rl import _samples
from jaxrl_post.records.rows.conversations import conversation
from jaxrl_post.rollout.batch import is_trained
from jaxrl_post.rollout.collector import Collector, EpisodeSource, RolloutTimeoutError
from jaxrl_post.rollout.episode import Episode
from jaxrl_post.serve.agents import Agents
from jaxrl_post.serve.episodes import Episodes
from jaxrl_post.serve.recordings import Recording
from tests.programs import trainers
from tests.programs.agent_framework import Conversing
from tests.programs.agent_letters import Choosing, Letters, Numbers, Responding
from tests.tiers import daily

pytestmark = pytest.mark.processes

CONFIG = trainers.changed("rollout", max_turns=3, prompts_per_step=2)


@contextlib.contextmanager
def training(environment, config=CONFIG):
    """A trainer whose episodes agents carry out."""
    with WorkerPool(environment, 2, deadline_s=60.0) as judges:
        trainer = trainers.make_trainer(environment, judges, config)
        with open_collector(
            config, trainer.updater.model, environment, judges, trainer.weights.unbound
        ) as collector:
            trainer.experience.collector = collector
            yield trainer


def published(trainer, version):
    model = trainer.updater.model
    weights = trainer.weights
    return weights.layout.publish(weights.engine, model, model.params, version)


def fed(trainer, sampler, number):
    """The groups of a step, without an update, and their metrics."""
    metrics = trainer.experience.feed(trainer.buffer, sampler, number)
    return trainer.buffer.take(), metrics


def collected(trainer, number=1):
    """The groups of a step, without an update."""
    groups, metrics = fed(trainer, published(trainer, number), number)
    return [e for group in groups for e in group.episodes], metrics


@pytest.fixture
def served(monkeypatch):
    """The token ids of all answers that were served."""
    found: list[tuple[int, ...]] = []
    add = Recording.add

    def recorded(self, begun, tokens, answer, reason):
        found.append((begun.prompt, tuple(tokens.ids.tolist())))
        return add(self, begun, tokens, answer, reason)

    monkeypatch.setattr(Recording, "add", recorded)
    return found


def runs_of(batch):
    """The runs of tokens that a batch trains on."""
    arrays = batch.tokens, batch.loss_mask, batch.positions
    found = []
    for row in zip(*map(np.asarray, arrays), strict=True):
        run: list[int] = []
        before = -1
        for token, marked, position in zip(*(a.tolist() for a in row), strict=True):
            # A branch follows another one, but its positions do not.
            if run and (not marked or position != before + 1):
                found.append(tuple(run))
                run = []
            if marked:
                run.append(token)
            before = position
        found += [tuple(run)] if run else []
    return found


def step_as_served(trainer, served, number):
    """A step that must train what was served in it; returns its metrics and groups."""
    served.clear()
    trainer.updater.learner.seen.clear()
    metrics, groups = trainer.step(number)
    # Groups whose rewards do not differ are trained on too, with advantage 0.
    batches = trainer.updater.learner.seen
    trained = sorted(run for _, batch in batches for run in runs_of(batch))
    assert trained == sorted(ids for _, ids in served)
    # The sampler's log-probs, at the run's temperature, are the trainer's.
    assert abs(metrics["mismatch/token_mult_prob_error"] - 1) < 1e-3
    return metrics, groups


# Thirty steps in the longer tier; four show the same.
@pytest.mark.parametrize(
    ("branching", "steps"),
    daily([(False, 4), (True, 4), (True, 30)], {(True, 4)}),
)
def test_every_row_trains_what_was_served_and_nothing_else(served, branching, steps):
    with training(Letters(branching=branching)) as trainer:
        for number in range(1, steps + 1):
            metrics, _ = step_as_served(trainer, served, number)
            assert len(served) == 8 * (3 if branching else 2)
            assert metrics["env/agent_edited"] == 0
            assert metrics["env/agent_branched"] == float(branching)


def test_a_batch_that_agents_sampled_ahead_trains_what_was_served(served):
    config = dataclasses.replace(
        CONFIG, rollout=dataclasses.replace(CONFIG.rollout, ahead=1), steps=3
    )
    with training(Letters(), config) as trainer:
        first = trainer.updater.learner.seen
        first.clear()
        ages = [trainer.step(number)[0]["rollout/staleness"] for number in (1, 2, 3)]
        trained = sorted(run for _, batch in first for run in runs_of(batch))
    assert trained == sorted(ids for _, ids in served)
    assert ages == [0.0, 1.0, 1.0]


def test_an_agent_that_sends_token_ids_trains_what_was_served(served):
    with training(Numbers()) as trainer:
        for number in range(1, 4):
            metrics, groups = step_as_served(trainer, served, number)
            assert len(served) == 8 * 3
            assert metrics["env/agent_bridged"] == metrics["env/agent_branched"] == 1
            assert metrics["env/agent_edited"] == 0
    whole = {(*prompt, *ids) for prompt, ids in served}
    for episode in (episode for group in groups for episode in group.episodes):
        assert episode.parents == [None, 0, 0]
        for span in episode.spans:
            assert tuple(episode.tokens[span].ids.tolist()) in whole
        row = conversation(episode, trained=True)
        heard = [turn["heard"][0]["text"] for turn in row["turns"]]
        assert heard[:2] == [episode.prompt_text, "1="]
        assert heard[2].endswith("2=")


@pytest.mark.parametrize("steps", [4, pytest.param(30, marks=pytest.mark.all)])
def test_an_agent_of_a_framework_is_trained_as_it_is(served, steps):
    """Steps of pydantic-ai, which keeps the conversation itself."""
    with training(Conversing()) as trainer:
        for number in range(1, steps + 1):
            metrics, _ = step_as_served(trainer, served, number)
            # It sends back the served answers unchanged.
            assert metrics["env/agent_edited"] == metrics["env/agent_branched"] == 0
            assert metrics["env/agent_turns"] > 1.5


def test_an_agent_that_speaks_responses_trains_what_was_served(served):
    with training(Responding()) as trainer:
        for number in (1, 2):
            metrics, _ = step_as_served(trainer, served, number)
            assert len(served) == 8 * 2
            assert metrics["env/agent_bridged"] == 1
            assert metrics["env/agent_edited"] == 0


@pytest.mark.parametrize("support", daily(["kept", "full"], {"full"}))
def test_constrained_answers_are_scored_among_what_was_allowed(served, support):
    config = dataclasses.replace(
        CONFIG, algorithm=dataclasses.replace(CONFIG.algorithm, support=support)
    )
    with training(Choosing(), config) as trainer:
        metrics, groups = step_as_served(trainer, served, 1)
        batches = [batch for _, batch in trainer.updater.learner.seen]
    assert metrics["rollout/kept_unrecorded"] == (support == "full")
    for episode in (episode for group in groups for episode in group.episodes):
        for turn, allowed in zip(episode.turns, (3, 1), strict=True):
            recorded = (turn.sampled.kept >= 0).sum(axis=1).tolist()
            assert recorded[0] == (allowed if support == "kept" else 0)
    # Where one token alone could come, nothing is learned: its log-prob is 0.
    found = np.concatenate([b.behavior_logprobs[b.loss_mask] for b in batches])
    forced = np.abs(found) < 1e-6
    assert forced.mean() > 0.5 if support == "kept" else not forced.any()


def test_what_samples_mark_as_trained_is_the_loss_mask_of_the_batch():
    with training(Letters(branching=True)) as trainer:
        trainer.updater.learner.seen.clear()
        _, groups = trainer.step(1)
        batches = [batch for _, batch in trainer.updater.learner.seen]
        held_out = trainer.evaluate().groups
    episodes = [episode for group in groups for episode in group.episodes]
    rows = [conversation(each, trained=is_trained(each)) for each in episodes]
    turns = [turn for row in rows for turn in row["turns"]]
    marked = sorted(turn["sampled"] for turn in turns if turn["trained"])
    assert marked == sorted(len(run) for each in batches for run in runs_of(each))
    assert sum(marked) == sum(int((b.loss_mask > 0).sum()) for b in batches)
    for row, episode in zip(rows, episodes, strict=True):
        # The second question was asked twice, each time after the first answer.
        assert [turn["parent"] for turn in row["turns"]] == [None, 0, 0]
        heard = [[m["text"] for m in turn["heard"]] for turn in row["turns"]]
        assert heard == [[episode.prompt_text], ["1="], ["2="]]
        marks = [
            mark
            for turn in row["turns"]
            for mark in [False] * turn["context"] + [turn["trained"]] * turn["sampled"]
        ]
        assert marks == episode.tokens.sampled.tolist()
    # The order of the answers in an episode stays in its checkpoint.
    again = [Episode.from_json(episode.to_json()) for episode in episodes]
    assert [conversation(e, trained=True) for e in again] == rows
    # Held-out answers are sampled, and never trained on.
    samples = _samples("eval", held_out, 8) + _samples("train", groups, 8, is_trained)
    for sample in samples:
        assert {turn["trained"] for turn in sample.conversation["turns"]} == {
            sample.split == "train"
        }


def test_the_tokens_of_a_branch_are_its_whole_prompt_and_its_answer(served):
    with training(Letters(branching=True)) as trainer:
        episodes, _ = collected(trainer)
    whole = {(*prompt, *ids) for prompt, ids in served}
    for episode in episodes:
        assert len(episode.turns) == 3
        assert episode.segments == (2,)
        assert len(episode.spans) == 2
        for span in episode.spans:
            assert tuple(episode.tokens[span].ids.tolist()) in whole
        assert Episode.from_json(episode.to_json()).segments == (2,)
        # Only the last answer of the second sequence is sampled.
        last = episode.tokens[episode.spans[1]]
        assert int(last.sampled.sum()) == len(episode.turns[2].sampled)


def test_branches_are_packed_with_the_first_turn_that_they_share(served):
    update = dataclasses.replace(CONFIG.update, microbatch_tokens=256)
    config = dataclasses.replace(CONFIG, update=update)
    with training(Letters(branching=True), config) as trainer:
        metrics, groups = step_as_served(trainer, served, 1)
        batches = [batch for _, batch in trainer.updater.learner.seen]
    whole = packed = 0
    for group in groups:
        packed += len(group.episodes[0].turns[0].context)
        for episode in group.episodes:
            prompt, first = episode.turns[0].context, episode.turns[0].sampled
            one, other = (episode.tokens[span].ids for span in episode.spans)
            size = min(len(one), len(other))
            shared = int((one[:size] != other[:size]).argmax())
            # The prompt, the first answer, and what the template puts after it.
            assert shared > len(prompt) + len(first)
            whole += len(one) + len(other)
            packed += len(one) - len(prompt) + len(other) - shared
    assert sum(np.count_nonzero(batch.ends) for batch in batches) == packed
    assert metrics["packing/repeated_tokens"] == 0
    assert metrics["packing/shared"] == pytest.approx(1 - packed / whole)
    assert packed < 0.6 * whole


def test_turns_get_the_rewards_that_were_posted():
    with training(Letters(credited=True)) as trainer:
        episodes, _ = collected(trainer)
    for episode in episodes:
        first, second = episode.turns
        assert first.reward == 0
        share = [
            sum(letter in "02468" for letter in turn.text) / max(len(turn.text), 1)
            for turn in (first, second)
        ]
        # The step's own reward is for the first answer, at the episode's end.
        assert second.reward == pytest.approx(sum(share))


def test_an_agent_that_fails_fails_its_episode_alone():
    config = trainers.changed(
        "rollout", max_turns=3, prompts_per_step=8, max_failed_share=0.5
    )
    environment = Letters(size=8, broken=0, silent=1)
    with training(environment, config) as trainer:
        episodes, metrics = collected(trainer)
    errors = {e.task_id: e.error for e in episodes if e.error}
    assert errors.keys() == {0, 1}
    assert "out of order" in errors[0]
    assert errors[1] == "the agent ended without a call that was answered"
    assert metrics["rollout/failed"] == 8
    assert metrics["rollout/failed/raised"] == 4
    assert metrics["rollout/failed/other"] == 4
    assert all(e.reward is None for e in episodes if e.task_id in (0, 1))


def test_more_calls_than_turns_are_refused():
    config = trainers.changed("rollout", max_turns=1, max_failed_share=1.0)
    with training(Letters(size=8), config) as trainer:
        sampler = published(trainer, 0)
        tasks = [(0, trainer.experience.environment.tasks("train")[0])]
        sampling = trainer.experience.sampling()
        [group] = trainer.experience.collector.run(sampler, tasks, 2, sampling)
    for episode in group.episodes:
        assert "has had its 1 turns (--rollout.max-turns)" in episode.error


def test_the_run_decides_how_to_sample_and_the_same_step_samples_the_same():
    def tokens():
        with training(Letters()) as trainer:
            episodes, _ = collected(trainer)
        return [e.tokens.ids.tolist() for e in episodes], episodes

    first, episodes = tokens()
    # The agent asks for temperature 0.3; the log-probs are the trained policy's, at 1.
    assert max(float(t.sampled.logprobs.max()) for e in episodes for t in e.turns) < -1
    assert tokens()[0] == first


def test_the_evaluation_is_greedy_and_beside_training():
    with training(Letters()) as trainer:
        sampler = published(trainer, 0)
        found = trainer.experience.evaluate(sampler)
        again = trainer.experience.evaluate(sampler)
    one, other = (
        [e.tokens.ids.tolist() for g in each.groups for e in g.episodes]
        for each in (found, again)
    )
    assert len(one) == 6
    assert one == other


def test_an_agent_that_never_ends_is_closed_at_the_deadline():
    config = trainers.changed("rollout", max_turns=3, deadline_s=0.01)
    with training(Letters(), config) as trainer:
        assert isinstance(trainer.experience.collector.episodes, EpisodeSource)
        with pytest.raises(
            RolloutTimeoutError,
            match=r"episodes were not finished after .*agents were not done",
        ):
            collected(trainer)


@pytest.mark.slow("the agent that hangs has a deadline of ten seconds")
def test_an_agent_that_hangs_is_stopped_at_its_deadline_alone(monkeypatch):
    closed, names = {}, {}
    take = Episodes.take

    def taken(self, name, why):
        recording = take(self, name, why)
        names[name.rpartition("-")[0]] = name
        closed[name.rpartition("-")[0]] = recording
        return recording

    monkeypatch.setattr(Episodes, "take", taken)
    environment = Letters(size=8, hanging=0)
    tasks = environment.tasks("train")
    with (
        training(environment) as trainer,
        WorkerPool(environment, 2, deadline_s=10.0) as quick,
    ):
        sampler, sampling = published(trainer, 0), trainer.experience.sampling()
        # The sampler is compiled first, which takes longer than an agent may here.
        trainer.experience.collector.run(sampler, [(1, tasks[1])], 1, sampling)
        server = trainer.experience.collector.episodes.server
        collector = Collector(Agents(server, quick, max_turns=3), deadline_s=600.0)
        begin = time.monotonic()
        groups = collector.run(sampler, [(2, tasks[0]), (3, tasks[2])], 1, sampling)
        assert 10.0 <= time.monotonic() - begin < 500.0
        service = server.served.service
        late = httpx.get(f"{server.url}/episodes/{names['2-0']}")
    hung, other = (episode for group in groups for episode in group.episodes)
    assert hung.error.startswith("timeout: step took longer than its deadline of 10 s")
    assert hung.reward is None
    assert (other.error, len(other.turns)) == ("", 2)
    assert closed["2-0"].ended == (
        "its agent was stopped at --rollout.reward-deadline-s"
    )
    # Earlier served answers are in the episode, and are not trained on.
    assert len(hung.turns) == len(closed["2-0"].turns) == 1
    assert not is_trained(hung)
    assert closed["3-0"].ended == closed["1-0"].ended == "the agent is done"
    assert late.status_code == 404
    assert service.samples == 0


def test_the_url_of_an_episode_is_never_that_of_another(monkeypatch):
    """Calls that an agent left behind are refused; names decide nothing else."""
    names = []
    keep = Episodes.keep

    def kept(self, recording, deadline_s):
        names.append(recording.id)
        return keep(self, recording, deadline_s)

    monkeypatch.setattr(Episodes, "keep", kept)
    with training(Letters()) as trainer:
        sampler, sampling = published(trainer, 0), trainer.experience.sampling()
        task = trainer.experience.environment.tasks("train")[0]
        collector = trainer.experience.collector
        found = [
            each.run(sampler, [(5, task)], 1, sampling)[0].episodes[0]
            for each in (collector, collector.apart())
        ]
        late = httpx.get(f"{collector.episodes.server.url}/episodes/{names[0]}")
    assert len(set(names)) == 2
    assert all(name.startswith("5-0-") for name in names)
    assert late.status_code == 404
    one, other = (episode.tokens.ids.tolist() for episode in found)
    assert one == other


def test_an_address_that_is_taken_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = trainers.changed("rollout", serve=address)
        with (
            pytest.raises(ConfigError, match=r"--rollout\.serve: cannot listen on"),
            training(Letters(), config),
        ):
            pass


ADDRESSES = ("0.0.0.0:0", "example.org:1", "8000", "::1")


@pytest.mark.parametrize(
    ("section", "options", "told"),
    [
        *(("rollout", {"serve": each}, "serve: must be an") for each in ADDRESSES),
        ("rollout", {"judges": "ray:local"}, "judges: agents reach the sampler on"),
        ("reward", {"model": "judge"}, "model: reads an answer to a task's prompt"),
    ],
)
def test_options_that_no_agent_can_have_are_refused(section, options, told):
    config = trainers.changed(section, **options)
    with pytest.raises(ConfigError, match=rf"^--{section}\.{told}"):
        check_agents(Letters(), config)
    if "serve" not in options:  # The options of a run without agents.
        check_agents(Arithmetic(), config)


def test_an_address_for_agents_needs_agents():
    told = r"^--rollout\.serve 127\.0\.0\.1:8000: .* and coin:Coin has none"
    with pytest.raises(ConfigError, match=told):
        check_agents(Arithmetic(), trainers.changed("rollout", serve="127.0.0.1:8000"))


@pytest.mark.parametrize("name", ["ppo", "reinforce_plus_plus"])
def test_a_credit_that_cannot_follow_branches_is_refused(name):
    def config(name, credit):
        algorithm = AlgorithmConfig(name, turn_credit=credit)
        return dataclasses.replace(CONFIG, algorithm=algorithm)

    told = f"^--algorithm.turn-credit turns: {name} sums rewards along a sequence"
    with pytest.raises(ConfigError, match=told):
        check_agents(Letters(), config(name, "turns"), sums_rewards=True)
    check_agents(Letters(), config(name, "outcome"), sums_rewards=True)
    check_agents(Letters(), config("grpo", "turns"))
    check_agents(Arithmetic(), config(name, "turns"), sums_rewards=True)


def test_too_few_turns_for_a_game_are_refused_before_it_begins():
    told = r"^--rollout\.max-turns: an episode of nim\(4-9\) may need 9 calls; got 8; "
    with pytest.raises(ConfigError, match=f"{told}raise it to 9$"):
        check_agents(Nim(most=9), trainers.changed("rollout", max_turns=8))
    check_agents(Nim(most=9), trainers.changed("rollout", max_turns=9))
    check_agents(Letters(), trainers.changed("rollout", max_turns=1))
