"""Exact top-k of many rows of scores on Hopper, one CTA per row (`topk_rows.cu`)."""

from functools import cache
from typing import NamedTuple

from tamis.cuda.compiler import Program
from tamis.cuda.launch import Launch, kernel
from tamis.cuda.params import params_bytes
from tamis.ops.index.hopper.topk_params import SHARED_PER_SM, SYSTEM_SHARED, TopkParams

MOST_SHARED = 227 * 1024
"""Bytes of dynamic shared memory that a CTA may have."""


class Form(NamedTuple):
    """How the source is compiled and launched."""

    threads: int
    """Threads per CTA."""
    ctas: int
    """CTAs per SM."""
    most_k: int
    """The largest k. The list of a streamed row holds half as many scores more."""
    stages: int = 0
    """Tiles of the ring that a row is streamed through; 0 if it is in shared memory as a whole."""
    quads: int = 7
    """Groups of four scores that a thread has in a tile."""

    @property
    def shared(self) -> int:
        """Bytes of shared memory per CTA: its share of the SM."""
        return min(SHARED_PER_SM // self.ctas - SYSTEM_SHARED, MOST_SHARED)

    @property
    def places(self) -> int:
        """Scores of a row that fit in shared memory, with up to three before it; 0 if rows are streamed."""
        return 0 if self.stages else 32 * self.threads


WHOLE = (Form(256, 6, 4096), Form(512, 3, 4096))
"""For rows that fit in shared memory, shorter ones first."""
STREAMED = (Form(256, 4, 2048, 2, 3), Form(256, 2, 4096, 4, 3))
"""For longer rows, by the largest k."""
ALONE = Form(512, 1, 2048, 3)
"""For longer rows that are no more than SMs, and more than half as many."""


def usual_form(tokens: int, width: int, k: int, sms: int, *, aligned: bool) -> Form | None:
    """The fastest form, or None where `topk.cu` is faster: with few long rows, which it divides."""
    places = width if aligned else width + 3
    for form in WHOLE:
        if places <= form.places:
            return form
    if tokens <= sms:
        return ALONE if 2 * tokens > sms and k <= ALONE.most_k else None
    return streamed_form(k)


def streamed_form(k: int) -> Form:
    """The form for rows of any length."""
    return next(form for form in STREAMED if k <= form.most_k)


@cache
def program(form: Form) -> Program:
    """The program `topk_rows.cu` for a form."""
    constants = {name.upper(): value for name, value in form._asdict().items()}
    constants |= {"SHARED_BYTES": form.shared, "PARAMS_BYTES": params_bytes(TopkParams)}
    return Program.packaged(__package__, "topk_rows.cu", **constants)


@cache
def launch(device: int, form: Form) -> Launch:
    """The launch of a form, whose grid is one CTA per row."""
    loaded = kernel(program(form), "topk_rows", device)
    return Launch(loaded, TopkParams, threads=form.threads, shared=form.shared, overlap=True)
