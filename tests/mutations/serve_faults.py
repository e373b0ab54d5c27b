"""Faults of what a server's requests ask for."""

from tests.mutations.fault import Fault

__all__ = ["SERVE"]

CONSTRAINTS = "sampler/test_constraints.py"

SERVE = [
    Fault(
        "a constraint's second burst sees the state of the first",
        "sampler/scheduler.py",
        "                sample.constraint.advance(token)\n        sample.own.tokens",
        "                pass\n        sample.own.tokens",
        CONSTRAINTS,
    ),
    Fault(
        "a constrained burst has several steps",
        "sampler/batches.py",
        "min(sample.remaining, 1) if constrained else sample.remaining",
        "sample.remaining",
        CONSTRAINTS,
    ),
    Fault(
        "the mass that a constraint leaves is not recorded",
        "sampler/sampling.py",
        "log_masses = jnp.log(left.sum(axis=0)) + top - normalizer",
        "log_masses = jnp.log(left.sum(axis=0))",
        CONSTRAINTS,
    ),
    Fault(
        "requests of one seed are told apart by their ids",
        "sampler/batches.py",
        "request.prompt_id if noise_id is None else noise_id",
        "request.prompt_id",
        CONSTRAINTS,
    ),
    Fault(
        "samples of several prompts of a request share their noise",
        "serve/completions.py",
        "Wanted(prompt, sampling, fields.n, at * fields.n, fields.seed, constrain)",
        "Wanted(prompt, sampling, fields.n, 0, fields.seed, constrain)",
        "serve/test_completions.py",
    ),
    Fault(
        "served tokens are rendered again in the next prompt",
        "serve/prompts.py",
        "if not pinned or (last and not continue_final):",
        "if True:",
        "serve/test_chat.py",
    ),
    Fault(
        "a client that leaves is sampled for all the same",
        "serve/calls.py",
        "        if self._left:\n            self._stop()",
        "        del kind",
        "serve/test_bad_input.py",
    ),
    Fault(
        "a turn is trained on in every branch that contains it",
        "serve/recordings.py",
        "if number in trained:",
        "if False:",
        "serve/test_episodes.py",
    ),
    Fault(
        "an agent's edited answer counts as the served one",
        "serve/recordings.py",
        "and said[:length] == turn.said",
        "and said[: length - 1] == turn.said[:-1]",
        "serve/test_episodes.py",
    ),
    Fault(
        "a repeated call gets the same noise",
        "serve/recordings.py",
        'f"{self.seed} {begun.number}"',
        'f"{self.seed}"',
        "serve/test_episodes.py",
    ),
    Fault(
        "the stop token of a served answer is repeated in the next prompt",
        "data/bridges.py",
        "return ids[1:] if stop_id == end else ids",
        "return ids",
        "serve/test_recordings.py",
    ),
    Fault(
        "an agent's branch is joined to the one before it",
        "rollout/episode.py",
        "begins = [0, *(at[number] for number in self.segments)]",
        "begins = [0, *(at[number] for number in self.segments[:0])]",
        "programs/test_agents.py",
    ),
    Fault(
        "an agent's own temperature samples what is trained",
        "serve/chat.py",
        "sampling = as_trained(sampling, recording.sampling)",
        "pass",
        "programs/test_agents.py",
    ),
    Fault(
        "the seed of a request is the noise of all samples of a group",
        "serve/chat.py",
        "seed = seed if own is None else own",
        "seed = own if seed is None else seed",
        "serve/test_episodes.py",
    ),
    Fault(
        "calls at the same time have more turns than an episode may",
        "serve/recordings.py",
        "most, running = self.most_turns, self.running.total()",
        "most, running = self.most_turns, 0",
        "serve/test_recordings.py",
    ),
    Fault(
        "a turn of an agent is credited with what was given before it",
        "rollout/batch.py",
        "[*episode.order, *range(len(episode.turns), most)]",
        "[*range(most)]",
        "rollout/test_batch.py",
    ),
    Fault(
        "a stream ends before its last piece",
        "serve/texts.py",
        "        if reason is not None:\n            return text\n",
        "",
        "serve/test_texts.py",
    ),
    Fault(
        "a player's call continues the other player's answer",
        "serve/recordings.py",
        "                turn.player == player\n                and turn.settings",
        "                turn.settings",
        "serve/test_recordings.py",
    ),
    Fault(
        "a player's reward is the last speaker's",
        "serve/agents.py",
        "n for n in reversed(episode.order) if turns[n].player == name",
        "n for n in reversed(episode.order)",
        "programs/test_players.py",
    ),
    Fault(
        "players are compared with each other",
        "rollout/batch.py",
        "compute([group.of_player(name) for group in groups])",
        "compute([group.of_player(players_of(groups)[0]) for group in groups])",
        "rollout/test_players.py",
    ),
]
