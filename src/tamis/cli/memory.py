"""How memory that is not enough shows itself."""

_WORDS = ("can't allocate memory", "cannot allocate memory", "not enough memory", "out of memory")
"""What errors say that are not MemoryError: torch's on a CPU and on a GPU, and the system's."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory was not enough, on the host or on a device."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(words in str(error).lower() for words in _WORDS)
