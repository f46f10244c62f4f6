"""A chat template is a program that came with the model: it must not reach outside its sandbox.

And what it writes must be what ``transformers`` writes, or the model is asked in a foreign form.
"""

import json
import os
from pathlib import Path

import pytest

from core.errors import ConfigError, RequestError
from router.chat_template import ChatTemplate, read_chat_template
from router.tokenizer import Tokenizer
from tests.router.model_folder import make_model_folder

MESSAGES = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "What is 2 + 2?\n"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "\N{SNOWMAN}?"},
]


def _render(source: str) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES)


def test_template_language_of_the_field() -> None:
    assert _render("{{ bos_token }}{{ messages | length }}") == "<s>4"
    assert _render("{{ messages[0].content | tojson }}") == '"Be <brief> & kind."'
    assert _render("{% for m in messages %}{% break %}{% endfor %}x") == "x"
    assert _render("{% generation %}{{ messages[2].content }}{% endgeneration %}!") == "4!"
    assert len(_render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert _render("{% set ns = namespace(n=0) %}{% set ns.n = 5 %}{{ ns.n }}") == "5"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system messages') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ missing.field }}",
        "{{ messages[0].content + 5 }}",
    ],
)
def test_whatever_goes_wrong_in_a_template_is_the_requests_error(source: str) -> None:
    with pytest.raises(RequestError, match="chat template refuses"):
        _render(source)


def test_broken_template_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="not valid Jinja"):
        ChatTemplate("{% for %}", {})


def test_template_file_and_list_of_templates_are_found(tmp_path: Path) -> None:
    make_model_folder(tmp_path, chat_template=False)
    assert read_chat_template(tmp_path) is None
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = read_chat_template(tmp_path)
    assert template is not None
    assert template.render(MESSAGES) == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    template = read_chat_template(tmp_path)
    assert template is not None
    assert template.render(MESSAGES) == "file"


def test_default_model_is_asked_as_transformers_asks_it() -> None:
    cache = Path(os.environ.get("SLUICE_CACHE", Path.home() / ".cache" / "sluice"))
    path = cache / "models" / "SmolLM2-135M-Instruct"
    if not (path / "tokenizer.json").is_file():
        pytest.skip(f"the default model is not in {path}")
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import, and not for all tests

    theirs = AutoTokenizer.from_pretrained(path)
    template, tokenizer = read_chat_template(path), Tokenizer.load(path)
    assert template is not None
    for messages in (MESSAGES, MESSAGES[1:2]):
        text = template.render(messages)
        assert text == theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=True) == theirs.encode(text)
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
