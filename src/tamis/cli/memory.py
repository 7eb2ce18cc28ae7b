"""Recognises out-of-memory errors."""

_WORDS = ("can't allocate memory", "cannot allocate memory", "not enough memory", "out of memory")
"""Words in the errors of torch (CPU and GPU) and of the operating system, which are not MemoryError."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the host or a device is out of memory."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(words in str(error).lower() for words in _WORDS)
