"""tamis inside SGLang."""


def register() -> None:
    """Extend SGLang's options and backends."""
