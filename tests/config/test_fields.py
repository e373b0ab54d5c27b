"""The rules of every option: its range, and whether a continuation may change it."""

from dataclasses import asdict, is_dataclass, replace
from typing import Any, get_args, get_type_hints

import pytest

from jaxrl_post.config.convert import ConvertConfig
from jaxrl_post.config.evaluate import EvaluateConfig, RedteamConfig
from jaxrl_post.config.fields import ANY, Range, fields_of
from jaxrl_post.config.offline import PreferenceConfig, RewardConfig, SFTConfig
from jaxrl_post.config.plan import PlanConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import RunConfig, differences
from jaxrl_post.config.serve import ChatConfig, ServeConfig


def under(section: str, rules: dict[str, str]) -> dict[str, str]:
    return {f"{section}.{name}": rule for name, rule in rules.items()}


# Ranges of every number, and options that may change; "any" has no range of its own.
OPTIMIZER = {
    "learning_rate": "greater than 0",
    "warmup_steps": "at least 0",
    "warmup_ratio": "in [0, 1], free",
    "schedule_steps": "at least 1, free",
    "final_ratio": "in [0, 1]",
    "decay_ratio": "in (0, 1]",
    "momentum": "in [0, 1)",
    "beta1": "in [0, 1)",
    "beta2": "in [0, 1)",
    "epsilon": "greater than 0",
    "weight_decay": "at least 0",
    "max_grad_norm": "at least 0",
}
LORA = {
    "rank": "at least 0",
    "alpha": "greater than 0",
    "dropout": "in [0, 1)",
}
TRAINING = {
    "run_dir": "free",
    "resume": "free",
    "seed": "in [0, 4294967295]",
    "mesh": "free",
    "steps": "at least 1, free",
    "update.minibatches": "at least 1",
    "update.epochs": "at least 1",
    "update.trees": "free",
    "update.microbatch_tokens": "at least 1, free",
    "update.remat": "free",
    "update.scan_layers": "free",
    "update.stage_rounds": "at least 1, free",
    "update.stage_groups": "at least 1, free",
    "update.router_balance": "at least 0",
    "update.router_z": "at least 0",
    "eval.every": "at least 0, free",
    "eval.num_tasks": "at least 1, free",
    "eval.solved_reward": "any, free",
    "eval.graders": "free",
    "eval.graded_samples": "at least 0, free",
    "checkpoint.every": "at least 1, free",
    "checkpoint.keep": "at least 1, free",
    "checkpoint.keep_best": "free",
    "checkpoint.best_is": "free",
    "checkpoint.patience": "at least 1, free",
    "checkpoint.min_delta": "at least 0, free",
    "warm_start.steps": "at least 0",
    "warm_start.examples_per_step": "at least 1",
    "warm_start.learning_rate": "greater than 0",
    "template.on_mismatch": "free",
    "kernels": "free",
    "epochs": "greater than 0, free",
    "log": "free",
    "log_project": "free",
    "push_to_hub": "free",
    "push_public": "free",
    "profile": "free",
    "watch.rules": "free",
    "watch.off": "free",
    "watch.webhook": "free",
    "watch.listen": "free",
    "watch.pause_s": "greater than 0, free",
    "callbacks": "free",
    "processes.coordinator": "free",
    "processes.count": "at least 1, free",
    "processes.index": "at least 0, free",
    "processes.deadline_s": "greater than 0, free",
    "retries.disk_s": "at least 0, free",
    "retries.trackers_s": "at least 0, free",
    "retries.judges_s": "at least 0, free",
    "compile_cache.path": "free",
    "compile_cache.max_gib": "greater than 0, free",
    **under("optimizer", OPTIMIZER),
    **under("lora", LORA),
}
OFFLINE = {
    **TRAINING,
    "examples_per_step": "at least 1",
    "max_tokens": "at least 1",
    "log_every": "at least 1, free",
}
RULES = {
    RLConfig: {
        **TRAINING,
        "log_samples": "at least 0, free",
        "log_eval_samples": "at least 0, free",
        "log_rollouts": "free",
        "algorithm.clip_low": "at least 0",
        "algorithm.clip_high": "at least 0",
        "algorithm.kl_coefficient": "at least 0",
        "algorithm.reference_sync_steps": "at least 0",
        "algorithm.reference_mixup": "in (0, 1]",
        "algorithm.entropy_coefficient": "at least 0",
        "algorithm.turn_discount": "in [0, 1]",
        "algorithm.correction.cap": "any",
        "algorithm.correction.low": "any",
        "algorithm.correction.high": "any",
        "critic.gamma": "in [0, 1]",
        "critic.gae_lambda": "in [0, 1]",
        "critic.value_lambda": "in [0, 1]",
        "critic.clip": "at least 0",
        "critic.coefficient": "at least 0",
        "critic.warmup_steps": "at least 0",
        "prm.beta": "greater than 0",
        "prm.solved_reward": "any",
        "distill.temperature": "greater than 0",
        "distill.beta": "any",
        "distill.top_k": "any",
        "reward.weight": "any",
        "reward.environment_weight": "any",
        "reward.batch_tokens": "at least 1",
        "reward.mesh": "free",
        "rollout.prompts_per_step": "at least 1",
        "rollout.samples_per_prompt": "at least 1",
        "rollout.max_prompt_tokens": "at least 0",
        "rollout.max_tokens": "at least 1",
        "rollout.max_turns": "at least 1",
        "rollout.max_result_tokens": "at least 1",
        "rollout.partial": "at least 0",
        "rollout.ahead": "at least 0",
        "rollout.staleness": "at least 1",
        "samplers": "any, free",
        "fleet.listen": "free",
        "fleet.least": "at least 1, free",
        "fleet.wait_s": "greater than 0, free",
        "fleet.silence_s": "greater than 0, free",
        "fleet.key_file": "free",
        "rollout.temperature": "at least 1e-05",
        "rollout.top_k": "at least 0",
        "rollout.top_p": "in (0, 1]",
        "rollout.min_p": "in [0, 1]",
        "rollout.num_slots": "at least 0",
        "rollout.cache_tokens": "at least 0",
        "rollout.steps_per_call": "at least 0",
        "rollout.guesses": "at least 0",
        "rollout.guess_rows": "at least 1",
        "mismatch.warn": "at least 1, free",
        "mismatch.stop": "at least 1, free",
        "rollout.overlong_buffer": "at least 0",
        "rollout.overlong_penalty": "at least 0",
        "rollout.mesh": "free",
        "rollout.publish_mib": "at least 1, free",
        "rollout.max_draws": "at least 1",
        "rollout.group_reward_low": "any",
        "rollout.group_reward_high": "any",
        "rollout.judges": "free",
        "rollout.reward_workers": "at least 1, free",
        "rollout.reward_cpus": "greater than 0, free",
        "rollout.reward_deadline_s": "greater than 0, free",
        "rollout.reward_memory_gib": "greater than 0, free",
        "rollout.reward_grace_s": "at least 0, free",
        "rollout.serve": "free",
        "rollout.max_failed_share": "in [0, 1], free",
        "rollout.deadline_s": "greater than 0, free",
        **under("critic.optimizer", OPTIMIZER),
        **under("critic.lora", LORA),
        **under("prm.optimizer", OPTIMIZER),
        **under("prm.lora", LORA),
    },
    SFTConfig: OFFLINE,
    PreferenceConfig: {
        **OFFLINE,
        "data.eval_share": "in (0, 1)",
        "loss.beta": "greater than 0",
        "loss.reference_sync_steps": "at least 0",
        "loss.reference_mixup": "in (0, 1]",
        "loss.label_smoothing": "in [0, 0.5)",
        "loss.margin": "any",
        "loss.nll_weight": "at least 0",
        "loss.alpha": "any",
        "loss.tau": "any",
        "loss.desirable_weight": "at least 0",
        "loss.undesirable_weight": "at least 0",
    },
    RewardConfig: {
        **OFFLINE,
        "data.eval_share": "in (0, 1)",
        "centering": "at least 0",
        "margin": "at least 0",
    },
    ServeConfig: {
        "follow_wait_s": "greater than 0",
        "step": "any",
        "port": "in [0, 65535]",
        "max_model_len": "at least 0",
        "max_tokens": "at least 0",
        "cache_tokens": "at least 0",
        "num_slots": "at least 1",
        "max_samples": "at least 1",
        "max_episodes": "at least 1",
        "episode_deadline_s": "greater than 0",
        "max_responses": "at least 1",
        "max_responses_mib": "greater than 0",
        "max_body_mib": "greater than 0",
        "timeout_s": "greater than 0",
        "grace_s": "at least 0",
        "seed": "in [0, 4294967295]",
        "processes.count": "at least 1",
        "processes.index": "at least 0",
        "processes.deadline_s": "greater than 0",
        "compile_cache.max_gib": "greater than 0",
    },
    ChatConfig: {
        "step": "any",
        "max_turns": "at least 1",
        "max_result_tokens": "at least 1",
        "temperature": "at least 0",
        "top_k": "at least 0",
        "top_p": "in (0, 1]",
        "min_p": "in [0, 1]",
        "max_tokens": "at least 0",
        "seed": "in [0, 4294967295]",
        "compile_cache.max_gib": "greater than 0",
    },
    EvaluateConfig: {
        "step": "any",
        "num_tasks": "at least 1",
        "samples": "at least 1",
        "temperature": "at least 0",
        "top_k": "at least 0",
        "top_p": "in (0, 1]",
        "min_p": "in [0, 1]",
        "max_tokens": "at least 1",
        "max_turns": "at least 1",
        "max_result_tokens": "at least 1",
        "max_prompt_tokens": "at least 0",
        "solved_reward": "any",
        "seed": "in [0, 4294967295]",
        "num_slots": "at least 1",
        "reward_workers": "at least 1",
        "reward_cpus": "greater than 0",
        "reward_deadline_s": "greater than 0",
        "reward_memory_gib": "greater than 0",
        "processes.count": "at least 1",
        "processes.index": "at least 0",
        "processes.deadline_s": "greater than 0",
        "compile_cache.max_gib": "greater than 0",
        "deadline_s": "greater than 0",
        "against_margin": "in [0, 1]",
    },
    ConvertConfig: {
        "step": "any",
        "max_shard_gb": "any",
    },
    RedteamConfig: {
        "num_tasks": "at least 1",
        "max_turns": "at least 1",
        "max_tokens": "at least 1",
        "solved_reward": "any",
        "tolerance": "in [0, 1)",
        "reward_workers": "at least 1",
        "reward_cpus": "greater than 0",
        "reward_deadline_s": "greater than 0",
        "reward_memory_gib": "greater than 0",
    },
    PlanConfig: {
        "rows": "any",
        "row_tokens": "any",
        "stage_rounds": "at least 1",
        "rollout.prompts_per_step": "at least 0",
        "rollout.samples_per_prompt": "at least 1",
        "rollout.max_prompt_tokens": "at least 1",
        "rollout.max_tokens": "at least 1",
        "rollout.ahead": "at least 0",
        "rollout.publish_mib": "at least 1",
        "rollout.num_slots": "at least 0",
        "rollout.steps_per_call": "at least 0",
        "mean_tokens": "at least 0",
        "step_overhead_s": "at least 0",
        "rates.compute": "in (0, 1]",
        "rates.memory": "in (0, 1]",
        "rates.links": "in (0, 1]",
        "days": "at least 0",
        "memory_fraction": "in (0, 1]",
        "samplers": "any",
        "network.bytes_per_s": "greater than 0",
        "network.changed": "in [0, 1]",
        **under("lora", LORA),
    },
}
REQUIRED = {
    EvaluateConfig: ("model",),
    ServeConfig: ("model",),
    ChatConfig: ("model",),
    ConvertConfig: ("input", "output"),
    PlanConfig: ("model", "topology"),
    RedteamConfig: ("env",),
}


def configuration(kind: type) -> Any:
    return kind(**dict.fromkeys(REQUIRED.get(kind, ()), "given"))


def may_change(config: Any, name: str) -> bool:
    """Whether a run resumes if the option had another value."""
    if not isinstance(config, RunConfig):
        return False
    saved: Any = asdict(config)
    *sections, last = name.split(".")
    section = saved
    for each in sections:
        section = section[each]
    section[last] = "another"
    changed = differences(saved, config)
    assert not changed or changed[0].startswith(f"{name}: 'another' then, "), changed
    return not changed


def test_a_run_of_an_earlier_version_is_resumed_with_the_defaults_of_new_options():
    saved: Any = asdict(RLConfig())
    del saved["template"], saved["rollout"]["partial"]
    saved["update"]["gone"] = 0
    assert differences(saved, RLConfig()) == []
    given = replace(RLConfig(), rollout=replace(RLConfig().rollout, partial=2))
    assert differences(saved, given) == ["rollout.partial: 0 then, 2 now"]
    saved["update"]["gone"] = 64
    assert differences(saved, RLConfig()) == ["update.gone: 64 then, None now"]


@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.__name__)
def test_every_option_has_the_rules_that_it_had(kind):
    config, found = configuration(kind), {}
    for name, value, notes in fields_of(config):
        if is_dataclass(value):
            continue
        rules = [str(note) for note in notes if isinstance(note, Range)]
        rules += ["any"] if ANY in notes else []
        rules += ["free"] if may_change(config, name) else []
        if rules:
            found[name] = ", ".join(rules)
    assert found == RULES[kind]


@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.__name__)
def test_every_number_states_its_range_or_that_it_has_none(kind):
    config = configuration(kind)
    values = (value for _, value, _ in fields_of(config) if is_dataclass(value))
    for section in (config, *values):
        hints = get_type_hints(type(section))
        annotated = get_type_hints(type(section), include_extras=True)
        for name, hint in hints.items():
            notes = getattr(annotated[name], "__metadata__", ())
            ranges = [note for note in notes if note == ANY or isinstance(note, Range)]
            number = bool({hint, *get_args(hint)} & {int, float})
            assert len(ranges) == number, f"{type(section).__name__}.{name}"
