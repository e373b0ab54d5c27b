"""Every fault: of losses, kernels, sampling, packing, episodes and processes."""

from tests.mutations.environment_faults import ENVIRONMENTS
from tests.mutations.fault import Fault
from tests.mutations.judge_faults import JUDGES
from tests.mutations.kernel_faults import KERNELS
from tests.mutations.loss_faults import LOSSES
from tests.mutations.model_faults import MODELS
from tests.mutations.picture_faults import PICTURES
from tests.mutations.protocol_faults import PROTOCOLS
from tests.mutations.sampler_faults import SAMPLER
from tests.mutations.selection_faults import SELECTION
from tests.mutations.serve_faults import SERVE
from tests.mutations.tool_faults import TOOLS
from tests.mutations.vision_faults import VISION
from tests.mutations.watch_faults import WATCHING

__all__ = ["FAULTS"]

PACKING = [
    Fault(
        "a sequence's first token is trained on",
        "data/packing/rows.py::_fill",
        "batch.loss_mask[row, start] = False",
        "pass",
        "data/test_packing.py",
    ),
    Fault(
        "positions go on over a row's sequences",
        "data/packing/rows.py::_fill",
        "batch.positions[row, span] = np.arange(position, position + size)",
        "batch.positions[row, span] = np.arange(start, start + size)",
        "data/test_packing.py",
    ),
    Fault(
        "a token is seen to the end of its row",
        "data/packing/rows.py::_fill",
        "batch.ends[row, span] = end",
        "batch.ends[row, span] = batch.shape[1]",
        "data/test_packing.py",
    ),
    Fault(
        "what the policy did not say is trained on",
        "data/packing/units.py::Sequence.loss_mask",
        "return self.tokens.sampled",
        "return np.ones_like(self.tokens.sampled)",
        "data/test_packing.py rollout/test_batch.py",
    ),
    Fault(
        "log-probs stand one token to the left",
        "data/packing/rows.py::_fill",
        "batch.behavior_logprobs[row, span] = sequence.tokens.logprobs",
        "batch.behavior_logprobs[row, span] = np.roll(sequence.tokens.logprobs, -1)",
        "data/test_packing.py",
    ),
    Fault(
        "log-probs are of the token behind",
        "learner/step.py::predict",
        "chunks.take(hidden, batch.previous)",
        "hidden",
        "learner/test_learner.py sampler/test_engine.py",
    ),
    Fault(
        "every answer of a group is predicted from the token to its left",
        "types.py::previous_tokens",
        "return jnp.where(seen, index, 0).max(axis=-1)",
        "return jnp.broadcast_to(jnp.maximum(index - 1, 0), ends.shape)",
        "data/test_trees.py learner/test_trees.py",
    ),
    Fault(
        "a node that is repeated is trained on each time",
        "data/packing/rows.py::_fitting",
        "unit.node if end in chosen else context",
        "unit.node",
        "data/test_trees.py",
    ),
    Fault(
        "a token that two sequences train on is shared",
        "data/packing/sharing.py::_shared",
        "end = min(second, *(member.limit for member in members))",
        "end = min(member.limit for member in members)",
        "data/test_trees.py",
    ),
    Fault(
        "a node's tokens count as those of a sequence that does not train on them",
        "data/packing/sharing.py::_grown",
        "(last in each[0], each[0][0])",
        "each[0][0]",
        "data/test_trees.py learner/test_trees.py",
    ),
    Fault(
        "a node has the values of its first sequence, whichever trains on it",
        "data/packing/sharing.py::_grown",
        "(owner or joined[0]).node(start, end)",
        "joined[0].node(start, end)",
        "data/test_trees.py",
    ),
    Fault(
        "branches end the return of the sequence around them",
        "losses/credit/returns.py::_side_by_side",
        "key = jnp.where(segment_ids > 0, segment_ids, length + 1)",
        "key = jnp.zeros_like(segment_ids) + length",
        "losses/test_returns.py learner/test_trees.py",
    ),
    Fault(
        "the answers to a prompt see each other",
        "kernels/attention/tiles.py::_scores",
        "seen = (of_key.indices[:, None] <= index) & (index < of_key.ends[:, None])",
        "seen = of_key.indices[:, None] <= index",
        "kernels/test_attention.py learner/test_trees.py",
    ),
    Fault(
        "a tile that holds the end of a prompt is skipped",
        "kernels/attention/tiles.py::_tasks",
        "active = key.ends.max(axis=-1)[:, k] > first",
        "active = key.ends.max(axis=-1)[:, k] > last",
        "kernels/test_attention.py learner/test_trees.py",
    ),
    Fault(
        "the gradient of a tile's keys is that of the last tile of queries",
        "kernels/attention/tiles.py::_gradients.step",
        "_put(total, blocks, _take(total, blocks) + new)",
        "_put(total, blocks, new)",
        "kernels/test_attention.py learner/test_trees.py",
    ),
    Fault(
        "the rejected answer of a pair is the chosen one of the next",
        "algorithms/pairs.py::sides",
        "follower = jnp.pad(batch.ends, ((0, 0), (0, 1)))",
        "follower = jnp.pad(batch.ends, ((0, 0), (0, 1))).at[:, 1:].set(batch.ends)",
        "algorithms/test_preference.py learner/test_trees.py",
    ),
    Fault(
        "the mean of a step is the mean of its microbatches",
        "learner/step.py::_count",
        "return jnp.where(count == 0, 1.0, count)",
        "return jnp.where(count == 0, 1.0, count / 2)",
        "learner/test_learner.py",
    ),
    Fault(
        "gradients are scaled up to the clip",
        "learner/step.py::apply",
        "clip = jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, 1e-12))",
        "clip = max_grad_norm / jnp.maximum(norm, 1e-12)",
        "learner/test_learner.py",
    ),
    Fault(
        "a critic's values are those after the token",
        "learner/updater.py::Updater._scored",
        'found["values_before"] = np.take_along_axis(said, previous, axis=1)',
        'found["values_before"] = said',
        "programs/test_rl.py",
    ),
    Fault(
        "an advantage goes to another episode",
        "rollout/batch.py::sequences",
        "by_turn = values[row, column]",
        "by_turn = values[row, column - 1]",
        "rollout/test_batch.py",
    ),
    Fault(
        "a failed judgement is a reward of 0",
        "rollout/episode.py::Group.valid",
        "return np.array([e.reward is not None for e in self.episodes], np.bool_)",
        "return np.ones(len(self.episodes), np.bool_)",
        "rollout/test_batch.py rollout/test_episode.py",
    ),
    Fault(
        "a turn's reward stands at another turn's end",
        "rollout/batch.py::_at_ends",
        "placed[np.flatnonzero(turns == number)[-1]] = rewards[number - 1]",
        "placed[np.flatnonzero(turns == number)[-1]] = rewards[-number]",
        "rollout/test_batch.py",
    ),
]

EXAMPLES = [
    Fault(
        "desirable and undesirable answers are exchanged",
        "examples/packed.py::JudgedExamples.encode",
        "1.0 if each.desirable else -1.0",
        "-1.0 if each.desirable else 1.0",
        "examples/test_packed.py",
    ),
    Fault(
        "a margin is that of the rejected answer",
        "algorithms/reward_model.py::bradley_terry.objective",
        "margin, _ = sides(counted(batch.margins, last), batch)",
        "_, margin = sides(counted(batch.margins, last), batch)",
        "algorithms/test_preference.py",
    ),
]

COLLECTOR = [
    Fault(
        "a reply is trained on",
        "rollout/flight.py::_judged",
        "Tokens.context(event.reply)",
        "Tokens.generated(list(event.reply), [0.0] * len(event.reply), version=0)",
        "rollout/test_flight.py rollout/test_batch.py",
    ),
    Fault(
        "a cut answer forgets what it had said",
        "rollout/flight.py::_sampled",
        "flight.partial + tokens.led_by(None)",
        "tokens.led_by(None)",
        "rollout/test_flight.py rollout/test_collector.py "
        "rollout/test_engine_episodes.py",
    ),
    Fault(
        "an episode has a turn too many",
        "rollout/flight.py::has_turns_left",
        "return not step.done and len(flight.episode.turns) < limits.max_turns",
        "return not step.done and len(flight.episode.turns) <= limits.max_turns",
        "rollout/test_flight.py",
    ),
    Fault(
        "the environment sees the stop token",
        "rollout/dialogue.py::Dialogue._completed",
        'said = ids[: -1 if completion.finish_reason == "stop" else None]',
        "said = ids",
        "rollout/test_collector.py rollout/test_chat_episodes.py",
    ),
    Fault(
        "a judgement goes to the sample that was asked about last",
        "rollout/judgements.py::Judgements.take",
        "yield self._waiting.pop(number), ready[number]",
        "yield self._waiting.pop(max(self._waiting)), ready[number]",
        "rollout/test_collector.py",
    ),
    Fault(
        "a sample that goes on may be longer than the limit",
        "rollout/dialogue.py::_request",
        "sampling.max_tokens - effect.num_sampled",
        "sampling.max_tokens",
        "rollout/test_collector.py rollout/test_engine_episodes.py",
    ),
    Fault(
        "restored episodes are not judged",
        "rollout/dialogue.py::Dialogue.restore",
        "each.awaits == 'environment'",
        "each.awaits == 'nobody'",
        "rollout/test_collector.py programs/test_partial.py",
    ),
    Fault(
        "a suspended group is not taken up again",
        "rollout/dialogue.py::Dialogue.suspend",
        "group.submitted = False",
        "group.submitted = True",
        "rollout/test_collector.py programs/test_partial.py",
    ),
    Fault(
        "a group's episodes are in the order of their end",
        "rollout/collector.py::_ordered",
        "sorted(episodes)",
        "sorted(group.flights, key=lambda i: group.flights[i].episode.num_sampled)",
        "rollout/test_collector.py",
    ),
    Fault(
        "the last group waits longest",
        "rollout/buffer.py::Buffer.take",
        "self._groups[:count], self._groups[count:]",
        "self._groups[-count:], self._groups[:-count]",
        "rollout/test_buffer.py",
    ),
    Fault(
        "a step is taken one step too late for its oldest group",
        "rollout/buffer.py::Buffer.complete",
        "self._number + 1 + place // wanted.groups",
        "self._number + place // wanted.groups",
        "rollout/test_buffer.py",
    ),
    Fault(
        "a resumed run forgets when its groups were begun",
        "rollout/buffer.py::Buffer.load",
        "{prompt_id: step for prompt_id, step in value['begun']}",
        "{prompt_id: 8 for prompt_id, step in value['begun']}",
        "rollout/test_buffer.py",
    ),
    Fault(
        "a version is tried that another process has not fetched",
        "fleet/lockstep.py::together",
        "all(([digest, attempt] in map(list, each['fetched']) for each in everyone))",
        "[digest, attempt] in map(list, everyone[0]['fetched'])",
        "fleet/test_lockstep.py",
    ),
    Fault(
        "one process of a sampler goes on when another one ends",
        "fleet/lockstep.py::together",
        "any((each['stop'] for each in everyone))",
        "everyone[0]['stop']",
        "fleet/test_lockstep.py",
    ),
    Fault(
        "a changed task is taken for the one of the checkpoint",
        "rollout/flight.py::Flight.from_json",
        "_fingerprint(task) != value['task']",
        "not value['task']",
        "rollout/test_flight.py rollout/test_collector.py programs/test_partial.py",
    ),
]

RESUME = [
    Fault(
        "a suspended answer of an agent begins again",
        "sampler/requests.py::Request.rest",
        "(*self.prompt, *ids)",
        "self.prompt",
        "serve/test_suspended.py",
    ),
    Fault(
        "episodes that ended are lost with an unfinished group",
        "rollout/collector.py::Collector.restore",
        "self._add(map(Episode.from_json, saved.get('ended', ())))",
        "pass",
        "rollout/test_collector.py programs/test_partial.py",
    ),
    Fault(
        "groups that run are not counted when others are begun",
        "rollout/buffer.py::Buffer.admits",
        "wanted.groups + wanted.spare - len(self) - in_flight",
        "wanted.groups + wanted.spare - len(self)",
        "programs/test_partial.py",
    ),
    Fault(
        "a resumed run counts its prompts from 0",
        "programs/experience.py::Experience.restore",
        'self.drawn = value["drawn"]',
        "self.drawn = 0",
        "programs/test_rl.py programs/test_partial.py",
    ),
    Fault(
        "a resumed run forgets the groups that wait",
        "programs/rl.py::OnlineTrainer.restore",
        'self.queue.load(meta["queue"])',
        "pass",
        "programs/test_rl.py programs/test_partial.py",
    ),
    Fault(
        "a resumed run has the reference of its beginning",
        "learner/reference.py::Reference.restore",
        "self.params = saved",
        "pass",
        "programs/test_reference.py",
    ),
    Fault(
        "held-out pairs keep the log-probs of the first reference",
        "programs/offline.py::HeldOut.scored",
        "self._scored is None or follows",
        "self._scored is None",
        "programs/test_reference.py",
    ),
    Fault(
        "a resumed run trains on its first examples again",
        "learner/checkpoint.py::Checkpoints.restore",
        'iterator.set_state(restored["data"])',
        "pass",
        "learner/test_checkpoint.py",
    ),
    Fault(
        "restored arrays stand in each other's places",
        "learner/checkpoint.py::_ordered",
        "return [found[name] for name in wanted]",
        "return [found[name] for name in sorted(wanted)]",
        "learner/test_checkpoint.py",
    ),
    Fault(
        "a checkpoint of other shapes is not refused",
        "learner/checkpoint.py::_misfits",
        "(tuple(have.shape), have.dtype) != (want.shape, want.dtype)",
        "have.dtype != want.dtype",
        "learner/test_checkpoint.py",
    ),
    Fault(
        "any option may change on resuming",
        "config/run.py::differences",
        "before.get(name) != now.get(name)",
        "before.get(name) != now.get(name) and before == now",
        "config programs/test_run.py programs/test_resume.py",
    ),
    Fault(
        "a damaged checkpoint is taken for whole",
        "learner/checkpoint.py::Checkpoints._set_damaged_aside",
        "self.damage(step)",
        "None",
        "learner/test_checkpoint.py programs/test_damage.py",
    ),
    Fault(
        "the order of the data does not depend on the seed",
        "data/prompts.py::task_indices",
        "grain.MapDataset.range(num_tasks).seed(seed).shuffle()",
        "grain.MapDataset.range(num_tasks).seed(0).shuffle()",
        "data/test_prompts.py",
    ),
    Fault(
        "samples are lost where a signal put an evaluation off",
        "programs/rl.py::OnlineTrainer.restore",
        "[Sample(**each) for each in meta.get(SHOWN, ())]",
        "[]",
        "programs/test_signals.py",
    ),
    Fault(
        "of equal values the later one is the best",
        "learner/best.py::Standing.after",
        "gain > 0",
        "gain >= 0",
        "programs/test_best.py",
    ),
    Fault(
        "a run that was killed before its best model was whole has none",
        "learner/best.py::Best.restore",
        "return not whole",
        "return False",
        "programs/test_best.py",
    ),
    Fault(
        "the best model has its name before a checkpoint of its step is whole",
        "programs/journal.py::RunJournal._keep",
        "self._run.checkpoints.wait()",
        "pass",
        "programs/test_best.py",
    ),
    Fault(
        "samples of an evaluation that was put off are logged twice",
        "programs/journal.py::RunJournal._begin",
        "training.logs(kept, began)",
        "training.logs(began, began)",
        "programs/test_signals.py",
    ),
    Fault(
        "the rollouts of a step whose evaluation was put off are lost",
        "programs/journal.py::RunJournal._begin",
        "training.logs(kept, began)",
        "training.logs(kept, kept)",
        "programs/test_signals.py",
    ),
    Fault(
        "a run whose initial model is gone goes on with random weights",
        "programs/places.py::initial_of",
        "saved is None or is_stored(model) or model not in PRESETS",
        "saved is None or not directory.path.joinpath(INITIAL).exists()",
        "programs/test_lost.py",
    ),
    Fault(
        "a model gets its name before its files are on the disk",
        "pretrained/directory.py::staged",
        "settle(staging)",
        "pass",
        "programs/test_lost.py",
    ),
    Fault(
        "rows of steps that are taken again stay in the log",
        "records/sinks.py::MetricsLog.__init__",
        "self._rows = JsonLines(directory.metrics, resume_step)",
        "self._rows = JsonLines(directory.metrics, None)",
        "records/test_sinks.py programs/test_resume.py",
    ),
    Fault(
        "events that happen again stay in the timeline",
        "records/timeline.py::Timeline.open",
        "itertools.islice(_rows(self.path), self.count)",
        "_rows(self.path)",
        "records/test_timeline.py programs/test_ahead.py",
    ),
]

LAYOUTS = [
    Fault(
        "parameters of the last step stay in the sampler",
        "rollout/weights.py::Relayout.__call__",
        "all((leaves[i] is self._sources[i] for i in group.places))",
        "self._placed[group.places[0]] is not None",
        "rollout/test_weights.py",
    ),
    Fault(
        "the sampler's last copy is kept beside the new one",
        "rollout/weights.py::Relayout.__call__",
        "self._placed[way.place].delete()",
        "pass",
        "rollout/test_weights.py",
    ),
    Fault(
        "a device keeps the part of its neighbour",
        "sharding/reshard.py::reshard.local",
        "start = jax.lax.axis_index(name) * size",
        "start = (sizes[factor] - 1 - jax.lax.axis_index(name)) * size",
        "sharding/test_reshard.py",
    ),
    Fault(
        "what a move sends counts what stays",
        "sharding/reshard.py::Plan.values_sent",
        "total += local * (size - 1) // size",
        "total += local",
        "sharding/test_reshard.py",
    ),
    Fault(
        "the sampler gets a new base and an old adapter",
        "programs/build/layouts.py::SamplerLayout.moved",
        "params, sent = self.trained(params)",
        "params, sent = self.trained(model.params)",
        "programs/test_layouts.py",
    ),
    Fault(
        "the sampler decodes under the trainer's mesh",
        "sampler/engine.py::Engine._own_mesh",
        "return nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)",
        "return nullcontext()",
        "programs/test_layouts.py",
    ),
]

PLANS = [
    Fault(
        "a collective in a loop counts once",
        "programs/planning/hlo.py::_lines.visit",
        "times * trips",
        "times",
        "planning/test_hlo.py",
    ),
    Fault(
        "remat costs no computation",
        "programs/planning/work.py::ModelWork.accumulate",
        "remat == 'full'",
        "False",
        "planning/test_work.py",
    ),
    Fault(
        "every expert computes every token",
        "programs/planning/work.py::Product.rows",
        "return tokens * (self.chosen or 1)",
        "return tokens * self.experts",
        "planning/test_work.py",
    ),
    Fault(
        "a step that samples ahead waits for all of the step before",
        "programs/planning/pools.py::Pace.step",
        "sum(parts) / (1 + self.ahead)",
        "sum(parts)",
        "planning/test_pools.py",
    ),
    Fault(
        "a plan samples a prompt once",
        "programs/planning/sampling.py::SamplerPlan._calls",
        "rollout.samples_per_prompt",
        "1",
        "planning/test_sampling.py",
    ),
    Fault(
        "a ring enters a node by the networks of all of its devices on the first one",
        "programs/planning/links.py::Network._ring",
        "own.min()",
        "own[0]",
        "planning/test_clusters.py",
    ),
    Fault(
        "a GPU's whole memory is free for programs",
        "programs/planning/plan.py::_memory",
        "share * whole",
        "whole",
        "planning/test_clusters.py",
    ),
    Fault(
        "operands of a collective count as its results",
        "programs/planning/hlo.py::_results",
        "type_[place + 1:]",
        "type_",
        "planning/test_clusters.py",
    ),
]

PROCESSES = [
    Fault(
        "an exchange returns the values in the order in which they came",
        "sharding/channel.py::Channel.exchange",
        "values = [found[index] for index in range(self.count)]",
        "values = [found[index] for index in sorted(found, reverse=True)]",
        "sharding/test_channel.py",
    ),
    Fault(
        "two exchanges of other names are one",
        "sharding/channel.py::Channel._found",
        "frame['at'] != [number, name]",
        "frame['at'][0] != number",
        "sharding/test_channel.py",
    ),
    Fault(
        "process 0 keeps a death to itself",
        "sharding/channel.py::Channel._end",
        "self.index == 0",
        "self.index",
        "sharding/test_channel.py",
    ),
    Fault(
        "a process applies only the judgements of its own workers",
        "rollout/judgements.py::Judgements._arrivals",
        "{int(number): decode_outcome(value) for _, theirs in everyone for "
        "number, value in theirs.items()}",
        "{int(number): decode_outcome(value) for _, theirs in "
        "[everyone[processes.index()]] for number, value in theirs.items()}",
        "e2e/test_processes.py",
    ),
    Fault(
        "a signal stops the process that got it alone",
        "programs/journal.py::RunJournal.end",
        'any(processes.exchange("stop", self._should_stop()))',
        'processes.exchange("stop", self._should_stop())[processes.index()]',
        "e2e/test_processes.py",
    ),
    Fault(
        "the tensor of several processes is written in the order of its axes",
        "pretrained/param_files.py::_gathered",
        "jax.jit(lambda value: value.transpose(order), out_shardings=replicated)",
        "jax.jit(lambda value: value, out_shardings=replicated)",
        "e2e/test_processes.py",
    ),
]

FILES = [
    Fault(
        "rows of a GGUF file's queries and keys stay in llama.cpp's order",
        "pretrained/gguf_files.py::_hf_values",
        "return pairs.swapaxes(1, 2).reshape(values.shape)",
        "return values",
        "pretrained/test_gguf_files.py",
    ),
    Fault(
        "a tokenizer of a GGUF file splits at every digit, whatever its name",
        "data/gguf_tokenizer.py::gguf_tokenizer",
        "split in SINGLE_DIGITS",
        "True",
        "data/test_gguf_tokenizer.py",
    ),
]

FAULTS = [
    *PROCESSES,
    *FILES,
    *LAYOUTS,
    *PLANS,
    *LOSSES,
    *KERNELS,
    *MODELS,
    *SAMPLER,
    *SELECTION,
    *SERVE,
    *TOOLS,
    *VISION,
    *WATCHING,
    *PICTURES,
    *JUDGES,
    *ENVIRONMENTS,
    *PROTOCOLS,
    *PACKING,
    *EXAMPLES,
    *COLLECTOR,
    *RESUME,
]
