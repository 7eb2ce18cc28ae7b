"""SGLang finds the plugin and takes its options."""

from importlib.metadata import entry_points


def test_the_entry_point_is_found() -> None:
    (found,) = (one for one in entry_points(group="sglang.srt.plugins") if one.name == "tamis")
    assert found.value == "tamis.integrations.sglang:register"
