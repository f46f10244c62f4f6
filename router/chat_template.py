"""A model's own chat template: messages in, prompt text out.

The template comes with the model and is untrusted, so it runs in Jinja's immutable sandbox and
sees nothing but JSON values. Source: the environment of ``transformers`` 5,
``utils/chat_template_utils.py``, without the tracking of assistant spans.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from core.errors import ConfigError, RequestError

MAX_RENDERED_CHARS = 16 * 1024 * 1024


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks assistant text for training; here it only passes its body on."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        """Return the block's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders conversations. Safe to call from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile ``source``.

        Args:
            source: Jinja text.
            special_tokens: ``bos_token`` and the like, which templates refer to by name.

        Raises:
            ConfigError: the template is not Jinja.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(
                source, globals={"raise_exception": _raise_template_error, "strftime_now": _now}
            )
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template is not valid Jinja: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt text for ``messages``, an open assistant turn at its end.

        Raises:
            RequestError: the template refuses the conversation, for the reason in the message.
        """
        try:
            text = self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except Exception as error:  # a template is a program: it can raise anything
            raise RequestError(
                f"messages: the model's chat template refuses this conversation: {error}",
                field="messages",
            ) from error
        if len(text) > MAX_RENDERED_CHARS:
            raise RequestError("messages: too long for any model", field="messages")
        return text


def read_chat_template(model_path: Path) -> ChatTemplate | None:
    """Return the template in ``model_path``, or None where the model has none.

    Raises:
        ConfigError: there is one that cannot be used.
    """
    config = read_json(model_path / "tokenizer_config.json")
    source: object = config.get("chat_template")
    file = model_path / "chat_template.jinja"
    if file.is_file():
        source = file.read_text(encoding="utf-8")
    if isinstance(source, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in source}  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        source = named.get("default")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, _special_tokens(config))


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``; empty where there is no such file.

    Raises:
        ConfigError: the file is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return content  # pyright: ignore[reportUnknownVariableType]


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
    tokens: dict[str, str] = {}
    for name in names:
        value = config.get(name)
        if isinstance(value, Mapping):  # an added token with its settings
            value = value.get("content")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates pass these by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    # Jinja's own filter escapes HTML characters, which a model has never seen escaped.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(date_format: str) -> str:
    return datetime.now().astimezone().strftime(date_format)
