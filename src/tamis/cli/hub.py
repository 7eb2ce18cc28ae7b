"""Checkpoints named by their id on the Hugging Face Hub: downloaded at one commit, and nothing of them is run.

Only weights in safetensors, configurations and tokenizers are fetched: no pickles and no Python files. The config comes
first, so that a model that tamis does not know is refused before its weights are downloaded.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from tamis._extras import install_command
from tamis.cli.text import one_line
from tamis.integrations.hf.names import MODELS

CONFIG = ("config.json",)
FILES = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja"),
)
"""Patterns of the files that are fetched."""
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


@dataclass(frozen=True)
class Source:
    """Where a model's files are."""

    given: str
    """The folder or the id as it was typed."""
    folder: Path
    revision: str | None = None
    """The commit on the Hub; None for a local folder."""

    def __str__(self) -> str:
        """The source as reports show it."""
        return self.given if self.revision is None else f"{self.given} at {self.revision}"


def is_hub_id(text: str) -> bool:
    """Whether a text is an id such as `deepseek-ai/DeepSeek-V3.2`, and not a folder that exists."""
    return bool(_ID.fullmatch(text)) and not Path(text).exists()


def check_local(option: str, text: str, revision: str | None) -> None:
    """Refuse a place that is neither a checkpoint's folder nor an id, before anything heavy is imported."""
    if is_hub_id(text):
        return
    if revision is not None:
        raise ValueError(f"--revision must be given with the id of a model on the Hub, got the folder {text}; drop it")
    if not (Path(text) / "config.json").is_file():
        remedy = "save a model there, or give an id such as deepseek-ai/DeepSeek-V3.2"
        raise ValueError(f"{option} must be a directory with a config.json, got {text}; {remedy}")


def fetch(option: str, text: str, revision: str | None, *, weights: bool) -> Source:
    """The folder of a model: a local one as it is, or one of the Hub at the commit that the revision names now."""
    if not is_hub_id(text):
        return Source(text, Path(text))
    folder = _download(option, text, revision, CONFIG)
    commit = folder.name
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise ValueError(f"{option} {text}: the Hub's cache names no commit, but {commit!r}; update huggingface_hub")
    if weights:
        _check_type(option, text, folder)
        folder = _download(option, text, commit, FILES)
    return Source(text, folder, commit)


def _check_type(option: str, text: str, folder: Path) -> None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind = config.get("model_type")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{option} {text} has no readable config.json: {error}") from error
    if not isinstance(kind, str) or kind not in MODELS:
        known = ", ".join(MODELS)
        raise ValueError(f"{option} {text} must be a model of type {known}, got {kind!r}; nothing else was downloaded")


def _download(option: str, text: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]
    except ImportError as error:
        remedy = install_command("transformers")
        raise ValueError(f"{option} {text}: ids of the Hub need the package huggingface_hub; {remedy}") from error
    disable_progress_bars()  # our own line shows that something is under way
    try:
        return Path(huggingface_hub.snapshot_download(text, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # the package has many errors of its own, and the network adds others
        reason = one_line(error).rstrip(".") or type(error).__name__
        remedy = f"where there is a network, run `hf download {text} --local-dir ./model`, then use {option} ./model"
        failed = f"{option} {text} is no local directory and cannot be fetched from the Hub"
        raise ValueError(f"{failed}: {reason}; {remedy}") from error
