"""Speed of CTranslate2 on the generation of `benchmarks/grpo_step.py`.

    python benchmarks/peers/ctranslate2_generate.py --shape small --models FOLDER

Needs an environment of its own with ctranslate2; to make a model, torch and
transformers too. 8 prompts of 16 random tokens x 8 samples, exactly 64 new tokens each,
float32, two threads, all 64 rows in one batch. CTranslate2 returns one score per
sequence, not one log-prob per token.

A random Qwen2 checkpoint of the shape is made and converted once, in a child process,
so that the timed process does not load torch.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from load import Load

PROMPTS, SAMPLES, PROMPT_TOKENS, TOKENS = 8, 8, 16, 64
SHAPES = {
    "tiny": dict(vocab_size=512, hidden_size=256, intermediate_size=688,
                 num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
                 max_position_embeddings=1024),
    "small": dict(vocab_size=32000, hidden_size=512, intermediate_size=1376,
                  num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
                  max_position_embeddings=4096),
}  # fmt: skip


def build(shape: str, models: Path) -> None:
    """Makes the checkpoint and the converted model."""
    import ctranslate2.converters
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    size = SHAPES[shape]
    config = Qwen2Config(
        **size, tie_word_embeddings=True, rms_norm_eps=1e-6, rope_theta=1e6,
        bos_token_id=None, eos_token_id=0, pad_token_id=None,
        use_sliding_window=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).to(torch.float32)
    source, target = models / f"hf-{shape}", models / f"ct2-{shape}"
    model.save_pretrained(source)
    words = Tokenizer(
        WordLevel({f"t{i}": i for i in range(size["vocab_size"])}, unk_token="t1")
    )
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="t1", eos_token="t0", bos_token="t0"
    ).save_pretrained(source)
    ctranslate2.converters.TransformersConverter(str(source)).convert(
        str(target), quantization="float32", force=True
    )
    shutil.rmtree(source)
    print(sum(p.numel() for p in model.parameters()), "parameters", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--models", type=Path, required=True, help="folder")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--build", action="store_true", help="only make the model")
    parser.add_argument("--no-scores", action="store_true")
    options = parser.parse_args()
    if options.build:
        build(options.shape, options.models)
        return
    directory = options.models / f"ct2-{options.shape}"
    if not (directory / "model.bin").exists():
        subprocess.run(
            [
                sys.executable,
                __file__,
                "--build",
                "--shape",
                options.shape,
                "--models",
                str(options.models),
            ],
            check=True,
            stdout=sys.stderr,
        )

    import ctranslate2
    import numpy as np

    generator = ctranslate2.Generator(
        str(directory), device="cpu", compute_type="float32",
        inter_threads=1, intra_threads=options.threads,
    )  # fmt: skip
    ctranslate2.set_random_seed(0)
    random = np.random.default_rng(0)
    vocabulary = SHAPES[options.shape]["vocab_size"]

    def run(hypotheses: int, top_k: int, temperature: float) -> float:
        prompts = [
            [f"t{i}" for i in random.integers(0, vocabulary, PROMPT_TOKENS)]
            for _ in range(PROMPTS)
        ]
        copies = SAMPLES // hypotheses
        batch = [prompt for prompt in prompts for _ in range(copies)]
        begin = time.perf_counter()
        results = generator.generate_batch(
            batch,
            max_batch_size=0,
            beam_size=1,
            num_hypotheses=hypotheses,
            min_length=TOKENS,
            max_length=TOKENS,
            sampling_topk=top_k,
            sampling_temperature=temperature,
            include_prompt_in_result=False,
            return_scores=not options.no_scores,
        )
        seconds = time.perf_counter() - begin
        rows = [ids for result in results for ids in result.sequences_ids]
        assert len(rows) == PROMPTS * SAMPLES, len(rows)
        assert all(len(ids) == TOKENS for ids in rows), {len(ids) for ids in rows}
        nonlocal distinct
        distinct = len({tuple(ids) for ids in rows})
        return seconds

    distinct = 0
    sampled = PROMPTS * SAMPLES * TOKENS
    variants = {}
    for name, hypotheses, top_k in (
        ("sampling, 64 prompts x 1 hypothesis", 1, 0),
        ("sampling, 8 prompts x 8 hypotheses", SAMPLES, 0),
        ("greedy, 64 prompts x 1 hypothesis", 1, 1),
    ):
        run(hypotheses, top_k, 1.0)
        load = Load()
        times = [run(hypotheses, top_k, 1.0) for _ in range(options.repeats)]
        median = statistics.median(times)
        variants[name] = {
            "seconds": median,
            "seconds_best": min(times),
            "tokens_per_second": sampled / median,
            "distinct_sequences": distinct,
            "load": load.report(),
        }
    sampling = {k: v for k, v in variants.items() if k.startswith("sampling")}
    best = min(sampling, key=lambda name: sampling[name]["seconds"])
    result = {
        "peer": "CTranslate2",
        "shape": options.shape,
        "tokens_per_second": variants[best]["tokens_per_second"],
        "seconds": variants[best]["seconds"],
        "variant": best,
        "greedy_tokens_per_second": variants["greedy, 64 prompts x 1 hypothesis"][
            "tokens_per_second"
        ],
        "variants": variants,
        "settings": {
            "compute_type": generator.compute_type,
            "intra_threads": options.threads,
            "cores": len(os.sched_getaffinity(0)),
            "sampling_topk": 0,
            "temperature": 1,
            "min_length": TOKENS,
            "max_length": TOKENS,
            "return_scores": not options.no_scores,
            "repeats": options.repeats,
            "environment": {
                name: os.environ.get(name)
                for name in ("CT2_USE_MKL", "CT2_FORCE_CPU_ISA", "OMP_NUM_THREADS")
            },
        },
        "peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "versions": {
            "ctranslate2": ctranslate2.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
