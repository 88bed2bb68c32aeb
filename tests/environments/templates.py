"""Three kinds of chat templates: one that extends, one that trims, one that drops earlier thinking."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from isotrain.models.files import load_tokenizer

CHATML = (
    "{% if tools %}{{ '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Trims all contents, and knows tools as `ipython`.
LLAMA = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + ('ipython' if m.role == 'tool' else m.role) + '\\n\\n' }}"
    "{{ m.content | trim }}"
    "{% if m.tool_calls %}{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n\\n' }}{% endif %}"
)
# As Qwen3's, but earlier thinking goes with every new message.
THINKING = (
    "{% for m in messages %}"
    "{% set content = m.content %}"
    "{% if m.role == 'assistant' and not loop.last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Takes answers of tools only after calls, which it writes in its own way.
STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' and not m.tool_call_id and messages[loop.index0 - 1].role != 'tool' "
    "and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('a tool answers a call') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% if m.tool_calls %}{% for call in m.tool_calls %}"
    "{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "thinking": THINKING, "strict": STRICT}


@cache
def tokenizer_with(model: Path, name: str) -> Any:
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer
