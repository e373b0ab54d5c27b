"""Parts of the measurement of an accelerator, the most important first."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PARTS", "Part"]


@dataclass(frozen=True)
class Part:
    """A command that measures something.

    Attributes:
        name: of the part, and of its JSON.
        asks: the question that it answers.
        seconds: time that it is given in a call; more is not allowed.
        command: module and arguments; {json} is the part's file, {folder} its folder.
        dry: arguments that follow in a dry run, on a CPU, and make it small.
    """

    name: str
    asks: str
    seconds: int
    command: str
    dry: str = ""

    def arguments(self, folder: Path, *, dry: bool) -> list[str]:
        """The command line.

        >>> Part("a", "?", 9, "this --json {json}", "--few").arguments(
        ...     Path("b"), dry=True
        ... )[1:]
        ['-m', 'this', '--json', 'b/a.json', '--few']
        """
        places = {"json": folder / f"{self.name}.json", "folder": folder / self.name}
        words = [*shlex.split(self.command), *(shlex.split(self.dry) if dry else [])]
        return [sys.executable, "-m", *(word.format(**places) for word in words)]


KERNELS = "benchmarks.kernels --json {json} --compilers 8"
FAST = "--by xla pallas_tpu pallas_gpu cudnn tokamax"
# A model in bfloat16 that decodes 256 samples with a context of 1,024 tokens.
DECODING = (
    "benchmarks.rollout --json {json} --dtype bfloat16 --kinds fixed --slots 256 "
    "--prompts 32 --prompt-tokens 768 --max-tokens 256 --repeats 2 --shape"
)
# Two bursts: a step is timed in the second.
FEW_SAMPLES = (
    "--shape demo --slots 8 --prompts 1 --prompt-tokens 16 --max-tokens 40 --repeats 1"
)
AGREEMENT = "benchmarks.accelerator.agreement --json {json}"
FEW_TOKENS = "--work.prompts 2 --work.samples 2 --work.max-tokens 8"
# Interpreted kernels take seconds; where they are timed, XLA's programs stand in.
STAND_IN = "--interpret --repeats 1 --by xla cudnn"

PARTS = (
    Part(
        "right",
        "Is each kernel its definition, forward and gradient, and the same bits twice?",
        180,
        f"{KERNELS} --no-time --operations next_token decode_attention attention "
        f"token_logprob --packs ragged {FAST}",
        "--interpret",
    ),
    Part(
        "agreement",
        "Do sampler and trainer agree, to the bit in exact mode, and device and CPU?",
        200,
        AGREEMENT,
        f"--shapes demo {FEW_TOKENS} "
        '--checks "exact, bfloat16" "CPU, float32" "kernels, bfloat16"',
    ),
    Part(
        "step",
        "What does a step of GRPO take, and what share of the peak does it reach?",
        180,
        "benchmarks.grpo_step --json {json} --shape qwen2.5-1.5b --dtype bfloat16 "
        "--prompt-tokens 256 --max-tokens 224 --microbatch-rows 4 --repeats 3",
        "--shape demo --prompts 2 --samples 2 --prompt-tokens 16 --max-tokens 8 "
        "--microbatch-rows 1 --repeats 1",
    ),
    Part(
        "rollout",
        "How far is a decoding step from its roofline (launch.plan, step-overhead-s)?",
        90,
        f"{DECODING} qwen2.5-1.5b",
        FEW_SAMPLES,
    ),
    Part(
        "speed",
        "Which kernel waits, at full size, where XLA and cuDNN do not?",
        180,
        f"{KERNELS} --no-check --operations attention next_token decode_attention "
        f"token_logprob --packs causal ragged {FAST}",
        STAND_IN,
    ),
    Part(
        "demo",
        "Does a whole run learn here, in bfloat16, with the kernels?",
        170,
        "launch.grpo --recipe demo --dtype bfloat16 --run-dir {folder}",
        "--steps 1 --warm-start.steps 1 --eval.num-tasks 4 --checkpoint.every 1 "
        "--rollout.prompts-per-step 2 --rollout.samples-per-prompt 2",
    ),
    Part(
        "rollout_8b",
        "How far is the decoding step of an 8B model from its roofline?",
        110,
        f"{DECODING} llama-3.1-8b",
        FEW_SAMPLES,
    ),
    Part(
        "states",
        "Do models with states agree, in the sampler, the trainer and on a CPU?",
        170,
        f"{AGREEMENT} --shapes demo-qwen3.5 demo-lfm2",
        f'--shapes demo-lfm2 {FEW_TOKENS} --checks "sampler and trainer, float32"',
    ),
    Part(
        "float32",
        "What do XLA's programs take in float32, which no kernel for GPUs computes?",
        150,
        f"{KERNELS} --no-check --dtype float32 --shapes qwen2.5-0.5b qwen2.5-1.5b "
        f"{FAST}",
        f"{STAND_IN} --operations next_token",
    ),
)
