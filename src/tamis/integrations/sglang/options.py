"""Values of SGLang's command-line options that the plugin adds."""

import typing
from typing import Any

NAME = "tamis"
"""The value of an option that chooses tamis."""


def add_choice(server_args: type[Any], field: str) -> None:
    """Let an option of SGLang take "tamis".

    SGLang keeps an option's choices in a list inside the annotation of the field of its arguments. Its parser is built
    after plugins are loaded, and options that share the list (the older names of these) then take the value as well.

    Args:
        server_args: SGLang's class of arguments.
        field: the name of the option's field.
    """
    hint = typing.get_type_hints(server_args, include_extras=True).get(field)
    found = [m.choices for m in getattr(hint, "__metadata__", ()) if isinstance(getattr(m, "choices", None), list)]
    if not found:
        raise LookupError(f"SGLang's arguments have no field {field!r} with a list of choices")
    for choices in found:
        if NAME not in choices:
            choices.append(NAME)
