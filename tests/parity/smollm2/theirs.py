"""Results of transformers and TRL for SmolLM2-135M-Instruct, for test_smollm2.py.

    python tests/parity/smollm2/theirs.py MODEL OUT [--gguf FILE]

MODEL is a Hugging Face directory of the model. OUT gets expected.json and expected.npz:
texts and token ids, chats, logits, greedy answers and their log-probs; and for each
loss of TRL a batch of real answers, NAME.npz, and a directory NAME of the gradient,
written as a checkpoint. With --gguf, the file from which MODEL was made: MODEL's
weights and token ids must be those that transformers reads there.
"""
# pyright: reportMissingImports=false
# ruff: noqa: RUF001

import argparse
import copy
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import trl
from datasets import Dataset
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

HERE = Path(__file__).parent
TEMPERATURES = (0.7, 1.0, 1.3)
PROMPTS, SAMPLES, ANSWER = 4, 4, 16
# TRL's options of each GRPO loss; beta is the KL coefficient.
GRPO = {
    "dapo": {"loss_type": "dapo"},
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "sequences": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.3},
}
BETA = 0.04
CPU = {"use_cpu": True, "bf16": False, "report_to": "none"}
CPU |= {"activation_checkpointing": False, "save_strategy": "no"}

Json = dict[str, Any]


def texts() -> list[str]:
    """Texts to tokenize: prose, code, white space, numbers, scripts, marks."""
    found = [
        "", " ", "\n", "\t\t", "  two  spaces ", "a\r\nb", "12345678901234567890",
        "3.14159, -2e-7, 1_000", "naïve façade — “quotes” … ½ ² ٣٤", "Straße, Ärger, ß",
        "Привет, мир!", "你好，世界。", "こんにちは", "مرحبا بالعالم", "שלום", "नमस्ते",
        "🙂👩‍👩‍👧‍👦🇩🇪",
        "<|im_start|>user\nhi<|im_end|>\n", "<|endoftext|>", "<|im_end|", "x" * 300,
        "if (a!=b){return c[i]+=0x1F;}", "don't I'll we've he'd they're it's",
        "\u00a0\u200b\u2028\ufeff", "e\u0301 vs \u00e9", "\x00\x07\x1b[0m", "#" * 40,
    ]  # fmt: skip
    root = HERE.parents[2]
    for name in ("README.md", "ARCHITECTURE.md", "tests/parity/cases.py"):
        found += (root / name).read_text(encoding="utf-8").splitlines()[:300]
    draw = random.Random(0)
    planes = [(32, 127), (160, 592), (880, 1424), (0x4E00, 0x9FA5), (0x1F300, 0x1F6FF)]
    for _ in range(200):
        low, high = draw.choice(planes)
        length = draw.randrange(1, 40)
        found.append("".join(chr(draw.randrange(low, high)) for _ in range(length)))
    return found


def chats() -> list[list[Json]]:
    """Conversations, with and without a system prompt, of one and of several turns."""
    user = [
        "What is the capital of France?", "What is 23 plus 45?", "Name three colours.",
        "Write a haiku about the sea.", "  Spaces  and\n\nlines. ", "Translate: 'Hund'",
        "Is 7 a prime number?", "What is 60 plus 17? Answer with the number only.",
    ]  # fmt: skip
    alone = [[{"role": "user", "content": content}] for content in user]
    system = {"role": "system", "content": "Be brief."}
    answered = {"role": "assistant", "content": "Red, green and blue."}
    return [*alone, [system, *alone[1]], [*alone[2], answered, *alone[6]]]


def encoded(tokenizer: Any) -> tuple[list[list[int]], list[Json]]:
    """Token ids of the texts, and text and token ids of the chats' prompts."""
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts()]
    rows = []
    for messages in chats():
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        found = tokenizer.encode(text, add_special_tokens=False)
        rows.append({"messages": messages, "text": text, "ids": found})
    return ids, rows


def answer(model: Any, rows: list[Json]) -> Iterator[list[int]]:
    """The model's greedy answers, one at a time and so without padding."""
    for row in rows:
        ids = torch.tensor([row["ids"]])
        with torch.no_grad():
            found = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False,
                max_new_tokens=ANSWER,
            )  # fmt: skip
        yield found[0, ids.shape[1] :].tolist()


def logprobs_of(
    model: Any, prompt: list[int], continuation: list[int], *temperatures: float
) -> torch.Tensor:
    """float32 log-probs of a continuation's tokens, by temperature."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + continuation])).logits[0].float()
    before = logits[len(prompt) - 1 : -1]
    chosen = torch.tensor(continuation)[:, None]
    return torch.stack(
        [(before / t).log_softmax(-1).gather(1, chosen)[:, 0] for t in temperatures]
    )


def moved(model: Any, by: float) -> Any:
    """A copy whose weights have noise: `by` times each tensor's deviation."""
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in copied.parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor += by * tensor.std() * noise
    return copied


def sampled(model: Any, tokenizer: Any, rows: list[Json]) -> list[tuple[list, list]]:
    """Prompts with answers that the model draws at temperature 1."""
    torch.manual_seed(0)
    found = []
    for row in rows[:PROMPTS]:
        ids = torch.tensor([row["ids"]] * SAMPLES)
        with torch.no_grad():
            drawn = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True,
                temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=ANSWER,
            )  # fmt: skip
        for continuation in drawn[:, ids.shape[1] :].tolist():
            if tokenizer.eos_token_id in continuation:
                end = continuation.index(tokenizer.eos_token_id)
                continuation = continuation[: end + 1]
            found.append((row["ids"], continuation))
    return found


def padded(rows: list[list], left: bool = False) -> torch.Tensor:
    """Rows of one length, with zeros."""
    width = max(map(len, rows))
    pads = [[0] * (width - len(row)) for row in rows]
    pairs = zip(rows, pads, strict=True)
    return torch.tensor([[*pad, *row] if left else [*row, *pad] for row, pad in pairs])


class Losses:
    """Computes TRL's losses and gradients and writes them."""

    def __init__(self, model: Any, tokenizer: Any, rows: list[Json], out: Path) -> None:
        self.model, self.tokenizer, self.out = model, tokenizer, out
        self.answers = sampled(model, tokenizer, rows)
        # Before TRL gives the model its own forward pass, which a copy would share.
        self.old, self.reference = moved(model, 0.02), moved(model, 0.05)
        self.values: dict[str, float] = {}
        self.scratch = tempfile.mkdtemp()

    def write(self, name: str, loss: torch.Tensor, model: Any, **arrays: Any) -> None:
        """Differentiates a loss; writes it with its gradient and its batch."""
        model.zero_grad()
        loss.backward()
        folder = self.out / name
        folder.mkdir(parents=True)
        gradients = {
            key: tensor.grad.contiguous() for key, tensor in model.named_parameters()
        }
        save_file(gradients, folder / "model.safetensors", metadata={"format": "pt"})
        model.config.save_pretrained(folder)
        np.savez(self.out / f"{name}.npz", **arrays)
        self.values[name] = float(loss.detach())

    def grpo(self) -> None:
        """The losses of GRPO, off policy, with the KL to a reference."""
        answers = self.answers
        known = {
            name: [logprobs_of(which, *pair, 1.0)[0].tolist() for pair in answers]
            for name, which in (("old", self.old), ("reference", self.reference))
        }
        prompts, completions = zip(*answers, strict=True)
        advantages = torch.linspace(-1.5, 2.0, len(answers))
        counts = [len(completion) for completion in completions]
        inputs = {
            "prompt_ids": padded(list(prompts), left=True),
            "prompt_mask": padded([[1] * len(p) for p in prompts], left=True),
            "completion_ids": padded(list(completions)),
            "completion_mask": padded([[1] * len(c) for c in completions]),
            "advantages": advantages,
            "old_per_token_logps": padded(known["old"]),
            "ref_per_token_logps": padded(known["reference"]),
            "num_items_in_batch": torch.tensor(float(sum(counts))),
        }
        for name, options in GRPO.items():
            config = trl.GRPOConfig(
                output_dir=self.scratch, beta=BETA, num_generations=SAMPLES,
                per_device_train_batch_size=len(answers), max_completion_length=ANSWER,
                **options, **CPU,
            )  # fmt: skip
            trainer = trl.GRPOTrainer(
                self.model, reward_funcs=no_reward, args=config,
                processing_class=self.tokenizer,
                train_dataset=Dataset.from_dict({"prompt": ["x"] * len(answers)}),
            )  # fmt: skip
            trainer.current_gradient_accumulation_steps = 1
            trainer.model.train()
            loss = trainer._compute_loss(trainer.model, inputs)
            self.write(
                name, loss, trainer.model,
                tokens=padded([p + c for p, c in answers]),
                prompt=[len(p) for p in prompts], completion=counts,
                advantages=advantages, old=inputs["old_per_token_logps"],
                reference=inputs["ref_per_token_logps"],
            )  # fmt: skip

    def dpo(self) -> None:
        """DPO, to a reference; a pair is two drawn answers to one prompt."""
        answers = self.answers
        pairs = [
            {"prompt": p, "chosen": answers[i][1], "rejected": answers[i + 1][1]}
            for i, (p, _) in enumerate(answers)
            if i % SAMPLES == 0
        ]
        said = {
            key: [self.tokenizer.decode(pair[key]) for pair in pairs]
            for key in ("prompt", "chosen", "rejected")
        }
        trainer = trl.DPOTrainer(
            self.model, ref_model=self.reference,
            args=trl.DPOConfig(
                output_dir=self.scratch, per_device_train_batch_size=len(pairs),
                **CPU,
            ),
            processing_class=self.tokenizer, train_dataset=Dataset.from_dict(said),
        )  # fmt: skip
        self.examples("dpo", trainer, self.reference)

    def sft(self) -> None:
        """Supervised fine-tuning on drawn answers; their tokens alone are learned."""
        answers = self.answers
        said = {
            "prompt": [self.tokenizer.decode(p) for p, _ in answers],
            "completion": [self.tokenizer.decode(c) for _, c in answers],
        }
        trainer = trl.SFTTrainer(
            self.model,
            args=trl.SFTConfig(
                output_dir=self.scratch, per_device_train_batch_size=len(answers),
                **CPU,
            ),
            processing_class=self.tokenizer, train_dataset=Dataset.from_dict(said),
        )  # fmt: skip
        self.examples("sft", trainer)

    def examples(self, name: str, trainer: Any, reference: Any = None) -> None:
        """The loss of a trainer's own first batch."""
        trainer.current_gradient_accumulation_steps = 1
        inputs = next(iter(trainer.get_train_dataloader()))
        lengths = inputs["attention_mask"].sum(1)
        if "completion_mask" in inputs:
            counted = inputs["completion_mask"] > 0
        else:
            counted = inputs["labels"] != -100
        tokens, arrays = inputs["input_ids"], {}
        if reference is not None:
            known = np.zeros(tokens.shape, np.float32)
            for row, length in enumerate(lengths.tolist()):
                ids = tokens[row, :length].tolist()
                known[row, 1:length] = logprobs_of(reference, ids[:1], ids[1:], 1.0)[0]
            arrays["reference"] = np.where(counted, known, 0.0)
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, dict(inputs))
        self.write(
            name, loss, trainer.model,
            tokens=tokens, lengths=lengths, counted=counted, **arrays,
        )  # fmt: skip


def no_reward(completions: list, **_: Any) -> list[float]:
    """Stands where TRL wants a reward; nothing is rewarded here."""
    return [0.0] * len(completions)


def check_origin(model: Any, tokenizer: Any, gguf: Path) -> None:
    """Compares a converted directory with transformers' reading of the GGUF file."""
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    theirs = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    expected, found = theirs.state_dict(), model.state_dict()
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    rounded = 0
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name],
            tensor,
            rtol=2**-22,
            atol=0.0,
            msg=lambda m, n=name: f"{n}: {m}",
        )
        rounded += int((found[name] != tensor).sum())
    other = AutoTokenizer.from_pretrained(**where)
    # The file says that each digit stands alone (tokenizer.ggml.pre "smollm"), which
    # transformers does not read. It shows in digits that are not ASCII, as in " ½".
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    (ids, rows), (their_ids, their_rows) = encoded(tokenizer), encoded(other)
    for text, ours, wanted in zip(texts(), ids, their_ids, strict=True):
        assert ours == wanted, f"{text!r}: {ours} is not {wanted}"
        assert tokenizer.decode(ours) == other.decode(wanted), text
    assert rows == their_rows
    for name in ("eos_token", "bos_token", "pad_token", "unk_token"):
        ours, wanted = getattr(tokenizer, name), getattr(other, name)
        assert ours == wanted, f"{name}: {ours} is not {wanted}"
    for name in ("rope_parameters", "max_position_embeddings", "tie_word_embeddings"):
        ours, wanted = (getattr(each.config, name) for each in (model, theirs))
        assert ours == wanted, f"{name}: {ours} is not {wanted}"
    ours, wanted = (np.float32(each.config.rms_norm_eps) for each in (model, theirs))
    assert ours == wanted, f"rms_norm_eps: {ours} is not {wanted}"
    sys.stdout.write(
        f"{len(expected)} tensors and {len(ids)} texts as transformers reads them in "
        f"{gguf.name}; {rounded} numbers rounded otherwise\n"
    )


def main(directory: Path, out: Path, gguf: Path | None) -> None:
    """Writes everything."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    model, report = load(directory, dtype=torch.float32, output_loading_info=True)
    problems = {key: value for key, value in report.items() if value}
    assert not problems, f"{directory}: {problems}"
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model.eval()
    if gguf is not None:
        check_origin(model, tokenizer, gguf)
    ids, rows = encoded(tokenizer)
    answers = list(answer(model, rows))
    arrays: dict[str, Any] = {"tokens": padded([rows[1]["ids"], rows[8]["ids"]])}
    arrays["lengths"] = [len(rows[1]["ids"]), len(rows[8]["ids"])]
    with torch.no_grad():
        arrays["logits"] = torch.stack(
            [model(row[None]).logits[0] for row in arrays["tokens"]]
        )
    narrow = load(directory, dtype=torch.bfloat16).eval()
    for name, which in (("float32", model), ("bfloat16", narrow)):
        found = [
            logprobs_of(which, row["ids"], said, *TEMPERATURES)
            for row, said in zip(rows, answers, strict=True)
        ]
        for each, temperature in zip(torch.cat(found, 1), TEMPERATURES, strict=True):
            arrays[f"logprobs_{name}_{temperature}"] = each
    del narrow
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    np.savez(out / "expected.npz", **arrays)
    # transformers gives the padding token's embedding no gradient, and this model pads
    # with the token that ends a turn.
    model.get_input_embeddings().padding_idx = None
    losses = Losses(model, tokenizer, rows, out)
    losses.grpo()
    losses.sft()
    losses.dpo()
    for row, said in zip(rows, answers, strict=True):
        row |= {"answer": said, "said": tokenizer.decode(said)}
    written = {"texts": texts(), "ids": ids, "chats": rows, "losses": losses.values}
    written["versions"] = {
        m.__name__: m.__version__ for m in (transformers, trl, torch)
    }
    (out / "expected.json").write_text(json.dumps(written), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gguf", type=Path)
    given = parser.parse_args()
    main(given.model, given.out, given.gguf)
