"""tamis inside SGLang."""


def register() -> None:
    """Extend SGLang's options and backends."""
    from tamis.integrations.sglang.v4_plugin import install

    install()
