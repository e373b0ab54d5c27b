"""Agents that take longer than a step: they wait, and later parameters answer them."""

import json

import numpy as np
import pytest

from jaxrl_post.data.prompts import task_indices
from tests.programs import trainers
from tests.programs.agent_letters import Letters
from tests.programs.test_agents import runs_of, served, training

pytestmark = pytest.mark.processes
__all__ = ["served"]

CONFIG = trainers.changed("rollout", max_turns=3, prompts_per_step=2, partial=1)


def waiting(path) -> Letters:
    """One agent of the first group waits for a file after its first call."""
    size = Letters().size
    first = int(next(task_indices(size, CONFIG.seed)))
    return Letters(waiting=first, until=str(path))


@pytest.mark.parametrize("recompute", [True, False])
def test_an_agent_goes_on_in_a_later_step(tmp_path, served, recompute):
    config = trainers.changed(
        "rollout",
        max_turns=3,
        prompts_per_step=2,
        partial=1,
        recompute_cache=recompute,
    )
    until, found, steps = tmp_path / "now", [], 0
    with training(waiting(until), config) as trainer:
        # Other tests share the learner.
        trainer.updater.learner.seen.clear()
        while not any(group.prompt_id == 0 for group in found):
            steps += 1
            assert steps < 100
            metrics, groups = trainer.step(steps)
            assert len(groups) == 2
            assert metrics["rollout/in_flight"] == 1
            if steps == 1:
                assert all(group.prompt_id for group in groups)
            if steps == 2:
                until.touch()
            found += groups
        batches = [batch for _, batch in trainer.updater.learner.seen]
    [group] = [group for group in found if group.prompt_id == 0]
    begun = [int(e.turns[0].sampled.versions.min()) for e in group.episodes]
    ended = [int(e.turns[-1].sampled.versions.max()) for e in group.episodes]
    assert min(begun) == 0
    assert max(ended) >= 2, "the agent that waited was answered by later parameters"
    # Each trained run is what an agent was served, and all of the group's were trained.
    trained = [run for batch in batches for run in runs_of(batch)]
    answers = {ids for _, ids in served}
    assert set(trained) <= answers
    own = [tuple(t.sampled.ids.tolist()) for e in group.episodes for t in e.turns]
    assert set(own) <= set(trained)
    stale = np.concatenate([np.ravel(batch.stale) for batch in batches])
    assert stale.any()


def test_a_checkpoint_has_what_ended_and_begins_the_rest_again(tmp_path, caplog):
    until = tmp_path / "now"
    with training(waiting(until), CONFIG) as trainer:
        trainer.step(1)
        meta = json.loads(json.dumps(trainer.meta()))
        version = int(trainer.updater.state.step)
    [saved] = meta["flights"]
    assert (saved["prompt_id"], saved["count"]) == (0, 4)
    unfinished = {each["sample_index"] for each in saved["flights"]}
    ended = {each["sample_index"]: each for each in saved["ended"]}
    assert unfinished
    assert unfinished | ended.keys() == set(range(4))
    until.touch()
    with training(waiting(until), CONFIG) as other:
        other.restore(other.snapshot(), meta)
        assert "had not ended at the checkpoint" in caplog.text
        assert other.experience.drawn == trainer.experience.drawn == 3
        found, number = [], 1
        while not any(group.prompt_id == 0 for group in found):
            number += 1
            assert number < 100
            found += other.step(number)[1]
    [group] = [group for group in found if group.prompt_id == 0]
    assert [e.sample_index for e in group.episodes] == [0, 1, 2, 3]
    for index, episode in enumerate(group.episodes):
        assert not episode.error
        if index in ended:
            assert json.loads(json.dumps(episode.to_json())) == ended[index]
    assert version == 1


def test_an_evaluation_leaves_unfinished_agents_alone(tmp_path):
    until = tmp_path / "now"
    with training(waiting(until), CONFIG) as trainer:
        trainer.step(1)
        first = trainer.evaluate()
        assert not trainer.weights.engine.busy
        assert trainer.experience.collector.prompt_ids == (0,)
        second = trainer.evaluate()
        until.touch()
    one, other = (
        [e.tokens.ids.tolist() for g in each.groups for e in g.episodes]
        for each in (first, second)
    )
    assert one == other
