"""Write chat_templates.json: chat templates, conversations, and what transformers makes of them.

    python tests/models/make_chat_templates.py

The templates have what those of known models have. It needs transformers, which the tests do not.
"""

from __future__ import annotations

import json
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

FILE = Path(__file__).resolve().parent / "chat_templates.json"
WORDS = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {
    "chatml": """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}""",
    "instructions": """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}
{% else %}
{{ message['content'] + eos_token }}
{% endif %}
{% endfor %}""",
    "headers": """{%- set ns = namespace(system='') -%}
{%- if tools is not none %}{{ tools | tojson }}{% endif -%}
{%- for message in messages %}
{%- if message['role'] == 'system' %}{% set ns.system = message['content'] %}{% endif %}
{%- endfor %}
{{- bos_token + '<|start|>' + ({'system': ns.system, 'é': [1, none]} | tojson) }}
{%- for message in messages if message['role'] != 'system' %}
    {{- '<|start|>' ~ message['role'] ~ '<|end|>\\n\\n' ~ message['content'] | trim ~ '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|end|>\\n\\n' }}{% endif %}""",
}
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "  What is a cat? "},
    {"role": "assistant", "content": "An animal with <whiskers> & 'claws'."},
    {"role": "user", "content": "Ça suffit.\nAnd a dog?"},
]
CONVERSATIONS = [TURNS[:1], TURNS, [SYSTEM, TURNS[0]], [SYSTEM, *TURNS]]


def main() -> None:
    """Render every conversation with every template; an error is null."""
    cases = []
    for name, template in TEMPLATES.items():
        for messages in CONVERSATIONS:
            try:
                (text,), _ = render_jinja_template(
                    conversations=[messages],
                    chat_template=template,
                    add_generation_prompt=True,
                    **WORDS,
                )
            except Exception:
                text = None
            cases.append({"name": name, "messages": messages, "text": text})
    document = {"words": WORDS, "templates": TEMPLATES, "cases": cases}
    FILE.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
