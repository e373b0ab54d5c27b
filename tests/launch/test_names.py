"""Names of other frameworks' options: what each is here, in every program."""

import re

import pytest

from jaxrl_post import algorithms
from jaxrl_post.specs import named_parameters
from launch import cli, grpo
from launch.names import PROGRAMS, answers, check_names, names, options_of, program_of

OWN = {name: options_of(program_of(name).default([])) for name in PROGRAMS}
SAMPLES = "TRL's num_generations is --rollout.samples-per-prompt"
ROLLOUT_N = "verl's actor_rollout_ref.rollout.n is --rollout.samples-per-prompt"


def refused(*arguments: str, program: str = "grpo") -> list[str]:
    """The lines of the error about options."""
    with pytest.raises(ValueError, match=r"\A(?s:.+)\Z") as caught:
        check_names(arguments, f"launch.{program}", OWN[program])
    return str(caught.value).splitlines()


def answer(word: str, program: str = "grpo") -> str:
    return "; ".join(answers(word, f"launch.{program}", OWN[program]))


def test_there_are_names_of_every_framework():
    counts = {}
    for each in names():
        counts[each.framework] = counts.get(each.framework, 0) + 1
    assert counts.keys() == {"TRL", "verl", "prime-rl", "OpenRLHF"}
    assert min(counts.values()) >= 60


@pytest.mark.parametrize("each", names(), ids=lambda each: each.name)
def test_every_option_of_a_row_exists(each):
    assert each.to or each.note
    options = set.union(*OWN.values()) | {"--help", "--step", "--config", "--dry-run"}
    mentioned = re.findall(r"--[a-z][\w.-]*\w", each.note)
    for option in (*each.to, *mentioned):
        assert option in options, option
    # Programs in a remark, too.
    for program in re.findall(r"launch\.(\w+)", each.note):
        assert program in PROGRAMS


def test_algorithms_of_a_remark_have_its_parameters():
    found = [
        pair for each in names() for pair in re.findall(r"'(\w+)\?(\w+)=", each.note)
    ]
    found = [(name, parameter) for name, parameter in found if name != "jsonl"]
    assert ("sapo", "tau_positive") in found
    for name, parameter in found:
        accepted, _ = named_parameters(getattr(algorithms, name), name)
        assert parameter in {each.name for each in accepted}


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_name_is_answered_with_options_of_the_program_or_with_its_place(program):
    for each in names():
        said = answers(each.name, f"launch.{program}", OWN[program])
        if f"--{each.name.replace('_', '-')}" in OWN[program]:
            continue
        assert said, each.name
        for line in said:
            told = line.partition(": ")[0]
            for option in re.findall(r"--[a-z][\w.-]*\w", told):
                elsewhere = re.findall(r"launch\.(\w+)", told)
                assert option in OWN[program] or any(
                    option in OWN[other] for other in elsewhere
                ), line


@pytest.mark.parametrize(
    "spelled",
    [
        ["--num_generations", "8"],
        ["--num-generations", "8"],
        ["--num_generations=8"],
        ["--grpo.num-generations", "8"],
        ["--training_args.num_generations", "8"],
        ["num_generations=8"],
        ["--Num_Generations", "8"],
    ],
)
def test_a_name_is_answered_in_every_spelling(spelled):
    [line] = refused(*spelled)
    assert line == f"{spelled[0].partition('=')[0]}: {SAMPLES}"


@pytest.mark.parametrize(
    "spelled",
    [
        ["actor_rollout_ref.rollout.n=8"],
        ["+actor_rollout_ref.rollout.n=8"],
        ["++actor_rollout_ref.rollout.n=8"],
        ["--actor_rollout_ref.rollout.n=8"],
        ["--steps", "3", "actor_rollout_ref.rollout.n=8"],
        ["--rollout.n", "8"],
    ],
)
def test_a_key_of_hydra_is_answered(spelled):
    assert refused(*spelled)[0].endswith(f": {ROLLOUT_N}")


def test_every_unknown_option_has_a_line():
    lines = refused("--num-generations", "8", "--steps", "3", "--foo", "--beta=1")
    assert [line.partition(":")[0] for line in lines] == [
        "--num-generations",
        "--foo",
        "--beta",
    ]
    assert "--algorithm.kl-coefficient" in lines[2]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--steps", "3"],
        ["--no-resume", "--resume"],
        ["--update.no-trees"],
        ["--foo", "3"],
        # Values of options, not names.
        ["--algorithm.reward-weights", "own=1", "beta=0.5"],
        ["--template.variables", "num_generations=3"],
        ["--run-dir", "trainer.seed=3"],
        ["--run-dir", "runs/max_steps=20"],
    ],
)
def test_what_is_no_foreign_name_is_left_to_the_parser(arguments):
    check_names(arguments, "launch.grpo", OWN["grpo"])


def test_a_path_that_looks_like_a_key_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "max_steps=20").mkdir()
    check_names(["max_steps=20"], "launch.report", OWN["report"])


@pytest.mark.parametrize(
    ("program", "word", "told"),
    [
        ("sft", "num_generations", "of launch.grpo, launch.ppo, launch.distill and"),
        ("sft", "--rollout.samples-per-prompt", "an option of launch.grpo, launch.ppo"),
        ("grpo", "--loss.beta", "an option of launch.dpo; launch.grpo has none"),
        ("grpo", "--max-tokens", "launch.grpo has --rollout.max-tokens"),
        ("dpo", "beta", "TRL's beta is --loss.beta"),
        ("grpo", "beta", "TRL's beta is --algorithm.kl-coefficient"),
        ("dpo", "loss_type", "TRL's loss_type is --loss.name"),
        ("grpo", "temperature", "TRL's temperature is --rollout.temperature"),
        ("sft", "max_seq_length", "TRL's max_seq_length is --max-tokens"),
        ("grpo", "max_steps", "TRL's and prime-rl's max_steps is --steps"),
        ("grpo", "use_vllm", "TRL's use_vllm has no counterpart: the sampler"),
        ("grpo", "--no_use_vllm", "TRL's use_vllm has no counterpart"),
        ("grpo", "trainer.optim.lr", "optim.lr is --optimizer.learning-rate"),
        ("grpo", "ppo_mini_batch_size", "is --update.minibatches: a number of parts"),
        ("grpo", "actor_rollout_ref.ref.fsdp_config.dtype", "is --dtype"),
        ("serve", "tensor_parallel_size", "is --mesh"),
    ],
)
def test_the_answer_is_of_the_program_that_is_asked(program, word, told):
    assert told in answer(word, program)


@pytest.mark.parametrize("word", ["--foo", "--modle", "--learning-rat", "--name2", "x"])
def test_an_unknown_name_gets_no_answer(word):
    assert answer(word) == ""


def test_a_name_of_the_program_itself_is_not_answered_by_a_part_of_another():
    # --path is nearer to --data.path than to verl's actor_rollout_ref.model.path.
    assert answer("--path") == ""


@pytest.mark.parametrize(
    "arguments", [["--num_generations", "8"], ["--recipe", "demo"]]
)
def test_the_program_says_it(arguments, capsys):
    status = cli.call(grpo.PROGRAM, [*arguments, "--beta", "0"])
    assert status == 1
    said = capsys.readouterr().out
    assert "error: " in said
    assert "--beta: TRL's beta is --algorithm.kl-coefficient" in said


def test_help_finds_a_name(capsys):
    def told(*arguments: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as ended:
            cli.read_options(grpo.PROGRAM, [*arguments])
        return ended.value.code, capsys.readouterr().out

    status, said = told("--help", "num_generations")
    assert status == 0
    assert said.splitlines()[0] == SAMPLES
    # With the help of the option itself, and of no other.
    assert re.findall(r"│ (--\S+)", said) == ["--rollout.samples-per-prompt"]
    assert "samples of a prompt, which form its group" in said
    status, said = told("--help", "vllm")
    assert status == 0
    # The topic comes first, then the names.
    topic, *lines = said.splitlines()
    assert topic.startswith("vllm: the sampler is part of the run")
    assert sum("TRL's " in line for line in lines) == len(lines) - 1 == 12
    assert "and " in said.splitlines()[-1]
    # Options that mention the word come first.
    status, said = told("--help", "temperature")
    assert said.index("--rollout.temperature") < said.index("TRL's temperature is")
    status, said = told("--help", "zzz")
    assert (status, said) == (
        1,
        "no option mentions 'zzz'; docs/how-to/index.md lists all guides\n",
    )
