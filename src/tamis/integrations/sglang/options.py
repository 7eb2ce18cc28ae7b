"""The options of SGLang's command line that choose tamis."""

import typing
from typing import Any

NAME = "tamis"
"""The value of an option that chooses tamis."""
FIELDS = {"decode": "dsa_decode_backend", "prefill": "dsa_prefill_backend"}
"""The fields of SGLang's arguments that choose an implementation of DSA, by phase."""
V4_FIELD = "dsv4_attn_backend"
"""The field that chooses the attention of V4, in versions that have it."""
_DSA, _V4 = ("dsa", "nsa"), "dsv4"
"""SGLang's names for the attention backends that tamis is a part of."""


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


def check_attention_backends(built: Any, kernel: Any) -> None:
    """Refuse a model for which "tamis" was chosen by an option that does not apply to it: it would run without tamis.

    Whether the options for DSA apply to V4 depends on SGLang's version, and is judged by V4's own backend.

    Args:
        built: what SGLang's `build_attention_backends` returned.
        kernel: SGLang's options of kernels, `get_exec().kernel`.
    """
    names = {"decode": built.decode_attention_backend_str, "prefill": built.prefill_attention_backend_str}
    if _has_own_dsa(getattr(built, "attn_backend", None)):
        names = dict.fromkeys(names, _DSA[0])
    allowed: dict[tuple[str, str], tuple[str, ...]] = {(field, phase): (*_DSA, _V4) for phase, field in FIELDS.items()}
    allowed |= {(V4_FIELD, phase): (_V4,) for phase in FIELDS}
    for (field, phase), backends in allowed.items():
        if getattr(kernel, field, None) == NAME and names[phase] not in backends:
            option = f"--{field.replace('_', '-')}"
            raise ValueError(
                f"{option} {NAME} was chosen, but {phase} runs on the attention backend {names[phase]!r}, to which it "
                f"does not apply; drop {option}, or choose --attention-backend {backends[0]} if the model has it"
            )


def _has_own_dsa(backend: Any) -> bool:
    """Whether layers with an indexer have a DSA backend of their own, whatever runs the others: dots3 has windows too.
    With two-batch overlap, that backend is inside another."""
    return getattr(getattr(backend, "primary", backend), "dsa_backend", None) is not None
