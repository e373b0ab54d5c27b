"""Users of other libraries find what they look for by --help and a word.

The words are from the contents of those libraries' documentation. Options and pages
that are named must exist.
"""

import contextlib
import functools
import io
import re
import sys
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

from launch import cli, names, topics
from launch.names import PROGRAMS, options_of, program_of

ROOT = Path(__file__).parents[2]

HOW_TO = "docs/how-to"
WATCH = "docs/watch.md"
NOT = "docs/reference/what-there-is-not.md"

# A word, and what its help must name: an option, a program or a page.
LOOKED_FOR = [
    # Algorithms and losses.
    ("loss_type", "--algorithm.name"),
    ("importance_sampling_level", "--algorithm.name"),
    ("gspo", "docs/reference/algorithms.md"),
    ("reward_weights", "--algorithm.reward-weights"),
    ("top_entropy_quantile", "no counterpart"),
    ("use_adaptive_entropy", "--algorithm.entropy-coefficient"),
    ("vllm_importance_sampling_correction", "--algorithm.correction.kind"),
    ("tis", "--algorithm.correction.kind"),
    ("orpo", "--loss.name"),
    ("online-dpo", f"{NOT}#algorithms"),
    ("opd", "launch.distill"),
    ("opsd", f"{NOT}#algorithms"),
    ("max_rl", "--algorithm.name"),
    ("rae", f"{NOT}#algorithms"),
    ("echo", f"{NOT}#algorithms"),
    ("advantage.estimator", "--algorithm.name"),
    ("use_kl_in_reward", "--algorithm.kl-coefficient"),
    ("adaptive-kl", f"{NOT}#algorithms"),
    ("curriculum", f"{NOT}#algorithms"),
    # Rewards.
    ("custom_reward_function.path", "--env"),
    ("reward-function", "docs/tutorials/your-reward.md"),
    ("remote_url", "--env"),
    ("generative-reward-model", f"{HOW_TO}/judges.md#a-judge"),
    ("reward-model", f"{HOW_TO}/judges.md#a-trained-reward-model"),
    ("value_head_prefix", f"{HOW_TO}/judges.md#a-trained-reward-model"),
    ("prm", "launch.reward"),
    ("sandbox_fusion", f"{HOW_TO}/tools.md#programs-under-test"),
    ("dynamic_filtering", "--rollout.dynamic-sampling"),
    # Data.
    ("train_files", "--data.path"),
    ("prompt_key", "--data.columns"),
    ("dataset-format", f"{HOW_TO}/own-files.md"),
    ("dataset-mixture", f"{HOW_TO}/own-files.md#several-files"),
    ("filter_overlong_prompts", "--rollout.max-prompt-tokens"),
    ("assistant_only_loss", "messages"),
    ("chat_template_kwargs", "--template.variables"),
    ("chat-template", f"{HOW_TO}/own-files.md#chat-templates"),
    # Sampling.
    ("vllm", f"{NOT}#sampling"),
    ("sglang", f"{NOT}#sampling"),
    ("gpu_memory_utilization", "--rollout.cache-tokens"),
    ("num_engines", "--rollout.mesh"),
    ("structured-outputs", f"{HOW_TO}/serving.md#2-answers-of-a-form"),
    ("speculative", "--rollout.guesses"),
    ("mtp", "--rollout.mtp"),
    ("nextn", "--rollout.mtp"),
    ("fp8", "--rollout.weights"),
    ("rollout_skip", f"{NOT}#algorithms"),
    ("disaggregation", f"{HOW_TO}/samplers.md"),
    ("kv-offload", f"{NOT}#sampling"),
    ("router_replay", "--rollout.router-replay"),
    ("max_off_policy_steps", "--rollout.partial"),
    ("async", "--rollout.ahead"),
    ("weight-broadcast", "docs/explanation/one-set-of-arrays.md"),
    # Tools and agents.
    ("max_tool_calling_iterations", "--rollout.max-turns"),
    ("verifiers", f"{HOW_TO}/protocols.md"),
    ("self-play", f"{HOW_TO}/agents.md#5-two-players-one-policy"),
    # Memory and layouts.
    ("packing", "--update.microbatch-tokens"),
    ("gradient-checkpointing", "--update.remat"),
    ("activation_offloading", "--update.remat"),
    ("optimizer_offload", "--mesh"),
    ("qlora", "--lora.quantize"),
    ("liger", "--kernels"),
    ("context-parallel", "--mesh"),
    ("moe", "--update.router-balance"),
    ("use_dynamic_bsz", "--update.microbatch-tokens"),
    ("ppo_mini_batch_size", "--update.minibatches"),
    ("prompt-tuning", f"{NOT}#models"),
    ("vision", "--vision"),
    ("multimodal", f"{HOW_TO}/pictures.md"),
    ("audio", f"{NOT}#models"),
    ("new-model", f"{HOW_TO}/model-family.md"),
    # Runs.
    ("yaml", f"{HOW_TO}/runs.md#options-in-a-file"),
    ("toml", "--config"),
    ("dry-run", "--dry-run"),
    ("sweep", f"{HOW_TO}/runs.md#options-in-a-file"),
    ("callbacks", "--callbacks"),
    ("push_to_hub", "--push-to-hub"),
    ("report_to", "--log"),
    ("mlflow", f"{HOW_TO}/runs.md#callbacks"),
    ("log_completions", "--log-samples"),
    ("weave", f"{HOW_TO}/runs.md#look-into-steps"),
    ("prometheus", "--watch.listen"),
    ("prometheus", WATCH),
    ("metrics_server", "--watch.listen"),
    ("alarm", WATCH),
    ("alert", "--watch.rules"),
    ("watch", "--watch.off"),
    ("monitoring", WATCH),
    ("webhook", "--watch.webhook"),
    ("slack", "--watch.webhook"),
    ("grader", "--eval.graders"),
    ("grader", "docs/tutorials/your-reward.md"),
    ("held-out-grader", f"{WATCH}#held-out-graders"),
    ("profiler", "--profile"),
    ("debugger", f"{NOT}#runs"),
    ("eval.interval", "--eval.every"),
    ("pass@k", "launch.evaluate"),
    ("mcnemar", f"{HOW_TO}/evaluation.md"),
    ("ckpt.keep_last", "--checkpoint.keep"),
    ("fork", f"{HOW_TO}/runs.md#another-run-from-a-checkpoint"),
    ("cache", "--compile-cache.path"),
    ("compilation", "--compile-cache.path"),
    ("jax_compilation_cache_dir", f"{HOW_TO}/runs.md#compiled-programs-are-kept"),
    ("torch-compile", f"{HOW_TO}/runs.md#compiled-programs-are-kept"),
    ("model_merger", "launch.convert"),
    ("full_determinism", "to the last bit"),
    ("notebook", "docs/tutorials/notebook.md"),
    # Machines.
    ("slurm", "docs/tutorials/pod.md#slurm-kubernetes-cloud-tpu"),
    ("kubernetes", "docs/tutorials/pod.md#slurm-kubernetes-cloud-tpu"),
    ("ray", "--rollout.judges"),
    ("skypilot", "--processes.coordinator"),
    ("docker", "docs/tutorials/pod.md#an-image"),
    ("rocm", f"{NOT}#memory-and-devices"),
    ("hardware", "launch.plan"),
    ("serve", "launch.serve"),
    ("reward-hacking", "launch.redteam"),
    ("diagnose", "launch.doctor"),
    ("post-mortem", "launch.doctor"),
    ("dashboard", "launch.watch"),
    ("compare-runs", "launch.report"),
]


@functools.cache
def headings(page: str) -> set[str]:
    """The anchors of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {slugify(re.sub(r"[`*]", "", each), "-") for each in found}


def check_place(place: str) -> None:
    page, _, heading = place.partition("#")
    assert (ROOT / page).is_file(), place
    assert not heading or heading in headings(page), place


def help_of(word: str, program: str = "grpo") -> str:
    """Returns what `--help WORD` prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        cli.read_options(program_of(program), ["--help", word])
    assert ended.value.code == 0, word
    return out.getvalue()


@pytest.fixture(scope="module", autouse=True)
def short_help():
    """One listing of all options for all words: it takes a second each time."""
    read = cli._read_options
    written = io.BytesIO()
    out = io.TextIOWrapper(written, encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        read(program_of("grpo"), ["--help"])
    text = written.getvalue().decode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "_read_options", lambda *_, **__: sys.stdout.write(text))
        yield


@pytest.mark.parametrize(
    ("word", "expected"), LOOKED_FOR, ids=[w for w, _ in LOOKED_FOR]
)
def test_help_of_a_word_says_where_it_is(word, expected):
    assert expected in help_of(word)
    if expected.startswith("docs/"):
        check_place(expected)
    elif expected.startswith("launch."):
        assert expected.removeprefix("launch.") in PROGRAMS
    elif expected.startswith("--"):
        known = set.union(
            *(options_of(program_of(p).default([])) for p in ("grpo", "dpo"))
        )
        assert expected in known | {"--config", "--dry-run"}


def test_every_topic_names_pages_and_options_that_exist():
    known = set.union(*(options_of(program_of(p).default([])) for p in PROGRAMS))
    known |= {"--config", "--dry-run", "--help"}
    for each in topics.topics():
        check_place(each.page)
        for option in re.findall(r"--[a-z][\w.-]*\w", each.say):
            assert option in known, option
        for program in re.findall(r"launch\.(\w+)", each.say):
            assert program in PROGRAMS


def test_a_word_has_one_topic():
    words = [word for each in topics.topics() for word in each.words]
    assert sorted(words) == sorted({*words})
    assert all(word == word.lower() and "_" not in word for word in words)


@pytest.mark.parametrize(
    ("arguments", "page"),
    [
        (["@", "rl.toml"], "runs.md#options-in-a-file"),
        (["@rl.toml"], "runs.md#options-in-a-file"),
        (["--slurm"], "pod.md#slurm-kubernetes-cloud-tpu"),
        (["--wandb", "--steps", "3"], "runs.md#logs"),
        (["--Speculative_Decoding=4"], "sampling.md#guess-tokens-ahead"),
    ],
)
def test_a_word_as_an_option_is_answered(arguments, page):
    own = options_of(program_of("grpo").default([]))
    with pytest.raises(ValueError, match=re.escape(page)):
        names.check_names(arguments, "launch.grpo", own)


def test_a_value_that_begins_with_an_at_sign_is_a_value():
    own = options_of(program_of("grpo").default([]))
    names.check_names(["--run-dir", "@runs"], "launch.grpo", own)


def test_help_finds_beginnings_of_words():
    assert "│" not in help_of("pd")  # As in update.
    assert "--mesh" in help_of("tp")
    assert "--data.format" not in help_of("tp")  # As in output.
    assert "--rollout.max-turns" in help_of("turns")
