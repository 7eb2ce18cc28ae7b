"""Random numbers of the tests: every generator starts from here, so that `pytest --seed N` changes all inputs.

A test names its generators by small numbers, as before; with `--seed 0`, the default, they are the seeds themselves.
"""

import numpy as np
import torch

# torch's host generator reads 32 bits of a seed. An odd factor makes different runs different for every k.
_BITS, _STEP = 2**32, 0x9E3779B1
_run = [0]


def choose_run(number: int) -> None:
    """Set what all seeds of this process depend on; called once, with pytest's option."""
    _run[0] = number


def seed_of(k: int) -> int:
    """The seed that `k` stands for in this run."""
    return (k + _run[0] * _STEP) % _BITS if _run[0] else k


def seeded(k: int) -> torch.Generator:
    """A host generator that starts from seed `k` of this run."""
    return torch.Generator(device="cpu").manual_seed(seed_of(k))


def reseed(k: int) -> None:
    """Start torch's own generators from seed `k` of this run."""
    torch.manual_seed(seed_of(k))


def numpy_seeded(k: int) -> np.random.Generator:
    """A numpy generator that starts from seed `k` of this run."""
    return np.random.default_rng(seed_of(k))
