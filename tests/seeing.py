"""Tokenizers of models that see, with templates as released ones have them."""

import tokenizers

from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.messages import PICTURE
from jaxrl_post.pictures import Eyes, PictureProcessor
from tests.pictures.files import colours, encoded

__all__ = ["BLIND", "EYES", "QWEN", "QWEN3", "RED", "SEEING", "WIDE", "seeing"]

# As Qwen2.5-VL's: parts in messages of every role.
QWEN = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3-VL's: a system message is text, of parts the texts alone.
QWEN3 = (
    "{% macro parts(content) %}{% if content is string %}{{ content }}{% else %}"
    "{% for item in content %}{% if item.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in item %}"
    "{{ item.text }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'system' and message.content is not string %}"
    "{% for item in message.content %}{% if 'text' in item %}{{ item.text }}{% endif %}"
    "{% endfor %}{% else %}{{ parts(message.content) }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
PLAIN = Tokenizer.train(["user assistant system tool 1+2=3 what"] * 3, vocab_size=300)


def seeing(template: str | None = QWEN, image: str = "<|image_pad|>") -> Tokenizer:
    """A tokenizer with eyes, whose blocks are 4 pixels wide; `image` is a token."""
    backend = tokenizers.Tokenizer.from_str(PLAIN.backend.to_str())
    backend.add_special_tokens([*MARKS, image])
    stop = "<|im_end|>" if template else "<|eos|>"
    made = Tokenizer(
        backend, stop_ids=(backend.token_to_id(stop),), chat_template=template
    )
    processor = PictureProcessor(patch_size=2, min_pixels=16, max_pixels=16 * 64)
    return made.with_eyes(Eyes(processor, backend.token_to_id(image)))


SEEING = seeing()
EYES = SEEING.eyes
assert EYES is not None
BLIND = SEEING.with_eyes(None)
# Two tokens, and three.
RED = encoded(colours(4, 8, seed=1))
WIDE = encoded(colours(4, 12, seed=2), "JPEG")
assert PICTURE not in QWEN + QWEN3
