"""How index queries and keys are prepared before they are compared."""

from dataclasses import dataclass
from typing import Any, Self

from tamis import checks
from tamis.model import hf_config


@dataclass(frozen=True)
class IndexRecipe:
    """What is done to index queries and index keys alike: their dot products mean something only if both had the same.

    The defaults are DeepSeek-V3.2's. A `PagedCache` of index keys may record its recipe (`recipe=`); what is written to
    it and compared with it must then have the same one.
    """

    rope_dim: int = 64
    """How many of the columns are rotated."""
    interleaved: bool = False
    """Pairs (2i, 2i+1); otherwise pairs (i, i + rope_dim/2)."""
    rope_first: bool = True
    """The rotated columns are the first (V3.2); otherwise the last (V4)."""
    hadamard: bool = False
    """Rotate by the orthonormal Hadamard matrix after the rope: the same scores, a smaller quantisation error."""

    def __post_init__(self) -> None:
        """Refuse a rope that has no pairs."""
        for name in ("interleaved", "rope_first", "hadamard"):
            checks.flag(name, getattr(self, name))
        if checks.integer("rope_dim", self.rope_dim, low=0) % 2:
            raise checks.refuse("rope_dim", "even", self.rope_dim, "a rope rotates pairs")

    @classmethod
    def of_v4(cls, rope_dim: int = 64, *, hadamard: bool = False) -> Self:
        """DeepSeek-V4's: adjacent pairs in the last columns."""
        return cls(rope_dim, interleaved=True, rope_first=False, hadamard=hadamard)

    def check_width(self, width: int, name: str = "width") -> None:
        """Refuse rows that the Hadamard matrix does not fit; `name` is what the caller calls their width."""
        if self.hadamard:
            check_hadamard(width, name)

    @classmethod
    def from_hf(cls, config: Any, *, hadamard: bool = False) -> Self:
        """From a Hugging Face config (object or dict) of the V3.2 family (V3.2, GLM-5.x) or the V4 family.

        `indexer_rope_interleave` decides the pairs where a V3.2-like config has it; otherwise they are halves, and
        adjacent in GLM-MoE-DSA, as in transformers' own model.
        """
        fields = hf_config.fields_of(config)
        if hf_config.whole(fields, "kv_lora_rank", low=0, default=0):
            rope = hf_config.whole(fields, "qk_rope_head_dim", low=0, default=0)
            pairs = fields.get("indexer_rope_interleave")
            usual = str(fields.get("model_type")) == "glm_moe_dsa"
            interleaved = usual if pairs is None else checks.flag("config.indexer_rope_interleave", pairs)
            return cls(rope, interleaved=interleaved, hadamard=hadamard)
        if fields.get("head_dim") is None:
            raise checks.refuse("config", "one with 'kv_lora_rank' or 'head_dim'", "none", "this model has no indexer")
        return cls.of_v4(hf_config.rope_width(fields), hadamard=hadamard)


def check_hadamard(width: int, name: str) -> None:
    """Refuse a width that has no Hadamard matrix; `name` is what the caller calls it."""
    if width < 1 or width & (width - 1):
        raise checks.refuse(name, "a power of two for a Hadamard rotation", width, "use a recipe without it")
