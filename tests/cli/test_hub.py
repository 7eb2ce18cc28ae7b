"""`--checkpoint` with an id of the Hub: one commit, no file that could run, and clear errors without a network."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tamis.cli import hub, main

huggingface_hub = pytest.importorskip("huggingface_hub")
transformers = pytest.importorskip("transformers")
from cli.test_generate import TINY  # noqa: E402

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ID = "someone/tiny-model"


class Hub:
    """Stands in for `snapshot_download`: it copies the files of a repository that match, and remembers the calls."""

    def __init__(self, repository: Path, cache: Path) -> None:
        self.repository, self.cache, self.calls = repository, cache, []  # type: ignore[var-annotated]

    def __call__(self, name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert name == ID
        self.calls.append((revision, tuple(allow_patterns)))
        folder = self.cache / "snapshots" / COMMIT
        folder.mkdir(parents=True, exist_ok=True)
        for file in huggingface_hub.utils.filter_repo_objects(
            [one.name for one in self.repository.iterdir()], allow_patterns=allow_patterns
        ):
            shutil.copy(self.repository / file, folder)
        return str(folder)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    repository = tmp_path / "repository"
    config = transformers.DeepseekV32Config(**TINY)
    transformers.DeepseekV32ForCausalLM(config).save_pretrained(repository)
    for name in ("modeling.py", "pytorch_model.bin", "tokenizer.py", "weights.pt", "README.md"):
        (repository / name).write_text("raise SystemExit('it ran')")
    monkeypatch.chdir(tmp_path)
    made = Hub(repository, tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made)
    return made


GENERATE = ["generate", "--device", "cpu", "--prompt-ids", "1,2,3", "--max-new-tokens", "2", "--checkpoint"]


def test_a_hub_id_is_fetched_at_one_commit(fake: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GENERATE, ID, "--revision", "v1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["checkpoint"], found["revision"]) == (ID, COMMIT)
    assert len(found["generated"]) == 2
    # The config comes first, and everything else from the commit that the revision named then.
    assert fake.calls == [("v1", hub.CONFIG), (COMMIT, hub.FILES)]
    fetched = {file.name for file in (fake.cache / "snapshots" / COMMIT).iterdir()}
    assert fetched == {"config.json", "generation_config.json", "model.safetensors"}
    assert main([*GENERATE, ID]) == 0
    assert f"checkpoint: {ID} at {COMMIT}\n" in capsys.readouterr().err


def test_the_report_of_inspect_names_the_commit(fake: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    options = ["--device", "cpu", "--prompt-ids", "1,2,3", "--html", str(page)]
    assert main(["inspect", "--checkpoint", ID, *options]) == 0
    assert f"checkpoint: {ID} at {COMMIT}\n" in capsys.readouterr().out
    assert f"{ID} at {COMMIT}" in page.read_text()


def test_size_fetches_the_config_alone(fake: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    file = fake.repository / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"kv_lora_rank": 128}))
    assert main(["size", "--model", ID, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["revision"], found["source"]) == (COMMIT, f"config.json of {ID} at {COMMIT}")
    assert [file.name for file in (fake.cache / "snapshots" / COMMIT).iterdir()] == ["config.json"]


def test_another_model_is_refused_before_its_weights_are_fetched(fake: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    (fake.repository / "config.json").write_text('{"model_type": "llama"}')
    assert main([*GENERATE, ID]) == 2
    assert "got 'llama'; nothing else was downloaded" in capsys.readouterr().err
    (fake.repository / "config.json").write_text('{"model_type": ["llama"]}')
    assert main([*GENERATE, ID]) == 2
    assert "got ['llama']; nothing else was downloaded" in capsys.readouterr().err
    assert fake.calls == 2 * [(None, hub.CONFIG)]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*GENERATE, *arguments]) == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_without_a_network_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(*arguments: Any, **keywords: Any) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network\nand no snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    said = refused(capsys, ID)
    assert f"--checkpoint {ID} is no local directory and cannot be fetched from the Hub: no network" in said
    assert f"run `hf download {ID} --local-dir ./model`, then use --checkpoint ./model" in said


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"need the package huggingface_hub; pip install 'transformers>=5.18'"):
        hub.fetch("--checkpoint", ID, None, weights=True)


def test_a_folder_wins_over_an_id_and_has_no_revision(fake: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    Path(ID).parent.mkdir()
    shutil.copytree(fake.repository, ID)
    (Path(ID) / "pytorch_model.bin").unlink()
    assert main([*GENERATE, ID, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["revision"] is None
    assert fake.calls == []
    assert "--revision must be given with the id of a model on the Hub" in refused(capsys, ID, "--revision", "main")


@pytest.mark.parametrize("text", ["model", "./some/model", "/some/model", "a/b/c", "a/", "https://x/y", "../x"])
def test_other_texts_are_no_ids(text: str) -> None:
    assert not hub.is_hub_id(text)
