"""Selections over a group of ranks: which rank does what, and what they exchange; see `tamis.ops.index_topk`."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from hashlib import blake2b
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.shard import Shard
from tamis.ops import memory
from tamis.ops.index import merge, sharing
from tamis.ops.index.break_even import SHARES, sharing_pays
from tamis.ops.index.operations import IndexTopk
from tamis.ops.index.prepared import run_remembered
from tamis.ops.index.ranks import Ranks, Sizes
from tamis.ops.library import implementation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CHECKED: memory.Memory[list[memory.Apart]] = memory.Memory()
"""Calls that passed all checks, with what their outputs must be separate from if they are given."""


class OverRanks:
    """How the ranks of a group select together."""

    def __init__(self, group: "ProcessGroup", shard: Shard | None, share: str, prefix: str = "") -> None:
        """Take part in a group. What `shard` and `share` are is checked later, so that other ranks learn of an error.

        Args:
            group: the ranks.
            shard: the part of each request's keys that this rank holds; None if all ranks hold the same keys.
            share: "auto" or "always", as in `index_topk`.
            prefix: what the caller's arguments `group` and `share` begin with, for errors.
        """
        self.group, self.ranks, self.shard, self.share = group, Ranks.of(group, f"{prefix}group"), shard, share
        self._prefix = prefix

    @classmethod
    def of(cls, group: "ProcessGroup | None", shard: Shard | None, share: str) -> Self | None:
        """The ranks that a call needs; None if there is no other, and the call is one without a group."""
        if group is None:
            checks.option("share", share, SHARES)
            if shard is None or checks.instance("shard", shard, Shard).ranks == 1:
                return None
            raise checks.refuse("group", "the ranks that hold the other shards", None, "pass group= with shard=")
        found = cls(group, shard, share)
        return found if found.ranks.size > 1 else cls.checked(group, shard, share)

    @classmethod
    def checked(cls, group: "ProcessGroup", shard: Shard | None, share: str, prefix: str = "") -> Self | None:
        """The ranks of a call or a layer whose options are checked now; None if there is no other rank."""
        found = cls(group, shard, share, prefix)
        found.check(None)
        return found if found.ranks.size > 1 else None

    def check(self, device: torch.device | None) -> None:
        """Refuse options that do not fit the group, and a device whose tensors it does not carry."""
        ranks, shard = self.ranks, self.shard
        if torch.compiler.is_compiling():
            remedy = "call outside of compiled code"
            raise checks.refuse(f"{self._prefix}group", "None while torch.compile traces", "a group", remedy)
        checks.option(f"{self._prefix}share", self.share, SHARES)
        if shard is not None:
            checks.instance("shard", shard, Shard)
            if (shard.ranks, shard.rank) != (ranks.size, ranks.rank):
                expected = f"that of rank {ranks.rank} of {ranks.size}, as in the group"
                raise checks.refuse("shard", expected, shard, "pass Shard(group.size(), group.rank(), interleave)")
        if device is not None:
            ranks.check_device(device)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Let the other ranks, which wait for this one, know what is raised here."""
        try:
            yield
        except Exception as error:
            self.ranks.agree(None, error)

    def agree(self, device: torch.device, sizes: Sizes) -> None:
        """Raise if another rank raised while it was `telling`, or has other sizes: for callers that write before they
        select."""
        if self.ranks.must_agree(device, sizes):
            self.ranks.agree(sizes)

    def local_lengths(self, lengths: Tensor) -> Tensor:
        """How many keys of this rank each token sees."""
        return lengths if self.shard is None else self.shard.local_lengths(lengths)

    def local(self, call: IndexTopk) -> IndexTopk:
        """A call whose lengths are those of this rank's keys. Options are checked here, and lengths before they are
        divided."""
        self.check(call.q.device if isinstance(call.q, Tensor) else None)
        checks.tensor("lengths", call.lengths, "T", (torch.int32,))
        return call._replace(lengths=self.local_lengths(call.lengths))

    def knows(self, signature: memory.Signature | None, call: IndexTopk) -> bool:
        """Whether such a call has passed its checks, so that only the address of its output may be wrong."""
        known = None if signature is None else _CHECKED.find((self.shard, *signature))
        return known is not None and all(apart(call.out, *call.read) for apart in known)

    def keep(self, signature: memory.Signature | None, call: IndexTopk) -> None:
        """Remember that a call passed its checks."""
        if signature is not None:
            apart = [] if call.out is None else [memory.Apart(call.out, *call.read)]
            _CHECKED.keep((self.shard, *signature), apart)

    def run(self, call: IndexTopk) -> None:
        """Run a checked call from `local`. A part of its `out` is written once all ranks have selected for its tokens.
        Where ranks exchange messages, one that fails before its last positions travel makes all raise."""
        sizes = self._sizes(call)
        if not call.q.shape[0] or not self._together(call):
            # Nothing travels after this, so that a rank that fails keeps no other waiting.
            self.agree(call.q.device, sizes)
            run_remembered(call)
            return
        must_agree = self.ranks.must_agree(call.q.device, sizes)
        step, spent = self._step(call)
        rest = max(1, call.workspace_bytes - min(step, call.q.shape[0]) * spent)
        every, before = None, call
        for _, part in call._replace(workspace_bytes=rest).chunks(step):
            with self.telling() if must_agree else nullcontext():
                if every is not None:
                    self._place(every, before)
                    every = None  # its memory is for what is gathered next
                mine = self._own(part)
            if must_agree:
                self.ranks.agree(sizes)
            every, before = self.ranks.gather(mine), part
        assert every is not None
        self._place(every, before)

    def _own(self, part: IndexTopk) -> Tensor:
        """What this rank sends for a part of the tokens."""
        if self.shard is None:
            return sharing.select_part(part, self.ranks.size, self.ranks.rank)
        return merge.select_candidates(part, self.shard)

    def _place(self, every: Tensor, part: IndexTopk) -> None:
        """Write what all ranks sent for a part of the tokens to its `out`."""
        if self.shard is None:
            sharing.place_parts(part, every, self.ranks.rank)
        else:
            merge.merge(every, part.out)

    def _together(self, call: IndexTopk) -> bool:
        """Whether ranks need each other for a call, or save time with each other."""
        if self.shard is not None or self.share == "always":
            return True
        (tokens, heads, _), (requests, pages) = call.q.shape, call.block_table.shape
        keys, on_host = pages * call.cache.page_size, call.q.device.type == "cpu"
        return sharing_pays(tokens, requests, keys, heads, call.k, self.ranks.size, on_host=on_host)

    def _step(self, call: IndexTopk) -> tuple[int, int]:
        """How many tokens are exchanged at a time, and the bytes that each of them takes."""
        size = self.ranks.size
        if self.shard is None:
            spent = sharing.shared_bytes(call, size)
            # A quarter of the workspace is enough for 4096 x 2048 positions. The scores of the own rows get the rest.
            return sharing.shared_step(call.workspace_bytes // 4 // spent, size), spent
        spent = merge.merge_bytes(call.k, size)
        return max(1, call.workspace_bytes // 2 // spent), spent

    def _sizes(self, call: IndexTopk) -> Sizes:
        """What must be the same on all ranks."""
        q, cache, shard = call.q, call.cache, self.shard
        table = tuple(call.block_table.shape)
        how: Sizes = (("share", self.share), ("block_table", table), ("page_size", cache.page_size))
        if shard is not None:
            how = (("shard.ranks", shard.ranks), ("shard.interleave", shard.interleave))
        elif checks.visible(call.lengths):
            # Ranks that see other lengths would make one result of two selections.
            seen = call.lengths.clamp_min(0).numpy().tobytes()
            how += (("lengths", f"with digest {blake2b(seen, digest_size=8).hexdigest()}"),)
        return (
            ("q", tuple(q.shape)),
            ("dtypes", (q.dtype, call.weights.dtype)),
            ("k", call.k),
            ("workspace_bytes", call.workspace_bytes),
            ("cache", cache.layout.key),
            ("backend", implementation("index", call.backend, q.device).__name__),
            *how,
        )
