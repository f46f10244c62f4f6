"""Fields that clients know and this server does not: refused, unless they ask for nothing.

Ignoring one would change what the client gets without telling it.
"""

from collections.abc import Mapping
from typing import Any, Final

from core.errors import RequestError

# Values that ask for nothing, besides null.
_NO_OPS: Final[Mapping[str, tuple[object, ...]]] = {
    "suffix": ("",),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "truncate_prompt_tokens": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
}


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Return if ``body`` asks for nothing that is not supported.

    Raises:
        RequestError: it does; the message names the field.
    """
    for field, value in body.items():
        no_ops = _NO_OPS.get(field)
        if no_ops is None or value is None:
            continue
        if not any(type(value) is type(no_op) and value == no_op for no_op in no_ops):
            raise RequestError(
                f"{field}={value!r:.60} is not supported by this server; leave {field} out",
                field=field,
            )
