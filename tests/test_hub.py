"""Models and data sets by name, from a server on this machine that speaks both hubs' interfaces."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hub_server import COMMIT, HubServer, entries, hub_server
from isotrain import hub
from isotrain.data.prepare.gsm8k import read_split, write_rows
from isotrain.data.rows import read_rows, source_digest
from isotrain.errors import DataError, ModelError, RecipeError
from isotrain.models.files import hub_commit, model_directory
from isotrain.recipe.load import load_recipe
from isotrain.trainers.start import check_same_data, hub_commits, model_digest, write_start

HUBS = ["huggingface", "modelscope"]
NO_CLIENT = "no modelscope_hub: pip install modelscope-hub"
PARTIAL = 14 << 20  # clients write pieces of up to 10 MiB


@pytest.fixture
def server(tiny: Path) -> Iterator[HubServer]:
    with hub_server() as running:
        running.models["someone/tiny"] = tiny / "model"
        yield running


@pytest.fixture
def variables(server: HubServer, tmp_path: Path) -> dict[str, str]:
    return {
        **{"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "huggingface"), "HF_HUB_OFFLINE": "0"},
        **{"MODELSCOPE_ENDPOINT": server.url, "MODELSCOPE_CACHE": str(tmp_path / "modelscope")},
        "MODELSCOPE_HOME": str(tmp_path / "home"),
    }


@pytest.fixture(params=HUBS)
def chosen(request: pytest.FixtureRequest, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """This process asks the stand-in of one hub, with an empty cache."""
    from huggingface_hub import constants

    for name, value in (variables | {hub.VARIABLE: request.param}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    if request.param == hub.MODELSCOPE:
        client = pytest.importorskip("modelscope_hub", reason=NO_CLIENT)
        client.set_default_config(None)
    else:
        # Its client has read the variables when it was imported.
        monkeypatch.setattr(constants, "ENDPOINT", variables["HF_ENDPOINT"])
        template = f"{variables['HF_ENDPOINT']}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", f"{variables['HF_HOME']}/hub")
    return str(request.param)


only_modelscope = pytest.mark.parametrize("chosen", ["modelscope"], indirect=True)


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_a_model_is_the_same_from_both(chosen: str, server: HubServer, tiny: Path) -> None:
    directory = model_directory("someone/tiny")
    assert entries(directory) == entries(tiny / "model")
    assert model_digest(directory) == model_digest(tiny / "model")
    asked = len(server.requests)
    assert model_directory("someone/tiny") == directory
    later = [path for _, path, _ in server.requests[asked:]]
    assert later and not any("resolve" in path or "FilePath" in path for path in later)


def test_only_what_models_need_is_downloaded(chosen: str, server: HubServer, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    for name in ("config.json", "model.safetensors", "pytorch_model.bin", "modeling_mine.py", "README.md"):
        (repository / name).write_text("{}")
    server.models["someone/mixed"] = repository
    assert {entry["path"] for entry in entries(hub.download("someone/mixed", files=["config.json"]))} == {
        "config.json"
    }
    assert {entry["path"] for entry in entries(model_directory("someone/mixed"))} == {
        "config.json",
        "model.safetensors",
    }


def test_without_a_network_the_cache_is_enough(
    chosen: str, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        go_offline(patch)
        with pytest.raises(ModelError, match=r"HF_HUB_OFFLINE is set: unset it, or write a local directory"):
            model_directory("someone/tiny")
        assert not server.requests
    directory, commit = model_directory("someone/tiny"), hub_commit("someone/tiny")
    asked = len(server.requests)
    go_offline(monkeypatch)
    assert (model_directory("someone/tiny"), hub_commit("someone/tiny")) == (directory, commit)
    assert len(server.requests) == asked


def test_a_name_that_is_not_there(chosen: str) -> None:
    message = rf"reward.model.path: 'someone/none' .* on {hub.TITLES[chosen]} .* check the name"
    with pytest.raises(ModelError, match=message):
        model_directory("someone/none", "reward.model.path")


def test_a_server_that_is_not_there(chosen: str, server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
    if chosen == hub.MODELSCOPE:
        import modelscope_hub

        monkeypatch.setattr("modelscope_hub._legacy_api.REPO_TREE_PAGE_MAX_ATTEMPTS", 1)
        modelscope_hub.set_default_config(None)
    advice = {
        "huggingface": "set HF_ENDPOINT to a mirror or ISOTRAIN_HUB=modelscope",
        "modelscope": "unset ISOTRAIN_HUB to ask the Hugging Face Hub",
    }
    with pytest.raises(ModelError, match=advice[chosen]):
        model_directory("someone/tiny")


@pytest.mark.parametrize("name", HUBS)
def test_a_waiting_process_goes_on_with_a_killed_download(
    name: str, server: HubServer, variables: dict[str, str], tmp_path: Path
) -> None:
    if name == hub.MODELSCOPE:
        pytest.importorskip("modelscope_hub", reason=NO_CLIENT)
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "config.json").write_text("{}")
    (repository / "model.safetensors").write_bytes(random.Random(0).randbytes(PARTIAL + (2 << 20)))
    server.models["someone/large"] = repository
    server.stop_after["model.safetensors"] = PARTIAL
    command = [sys.executable, "-c", "from isotrain.hub import download; print(download('someone/large'))"]
    settings: dict[str, Any] = {"env": {**os.environ, **variables, hub.VARIABLE: name}, "text": True}
    with subprocess.Popen(command, **settings, stderr=subprocess.DEVNULL) as first:
        _wait_for(lambda: any(_size(path) >= 10 << 20 for path in tmp_path.rglob("*.incomplete")))
        with subprocess.Popen(
            command, **settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=1
        ) as second:
            assert second.stderr is not None
            line = second.stderr.readline()
            assert line == "someone/large: waiting for another process that downloads it\n"
            server.resume.set()
            first.kill()
            output, errors = second.communicate(timeout=60)
    assert second.returncode == 0, errors
    assert entries(Path(output.strip())) == entries(repository)
    assert len(server.downloads("config.json")) == 1
    _, again = server.downloads("model.safetensors")
    # The Hub's client begins a file again that another process had begun.
    assert again == "" if name == "huggingface" else int(again.strip("bytes=-")) >= 10 << 20


def _size(path: Path) -> int:
    """0 of a file that was complete, and moved, before it was looked at."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _wait_for(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@only_modelscope
class TestModelScopesCache:
    def test_a_file_that_changed_is_downloaded_again(
        self, chosen: str, server: HubServer, tmp_path: Path
    ) -> None:
        repository = tmp_path / "repository"
        repository.mkdir()
        (repository / "config.json").write_text("{}")
        (repository / "model.safetensors").write_bytes(b"1234")
        server.models["someone/own"] = repository
        directory = model_directory("someone/own")
        before = hub_commit("someone/own")
        (repository / "model.safetensors").write_bytes(b"5678")
        (repository / "README.md").write_text("of no consequence")
        assert hub_commit("someone/own") != before
        assert (directory / "model.safetensors").read_bytes() == b"5678"
        assert len(server.downloads("model.safetensors")) == 2 and len(server.downloads("config.json")) == 1
        # What somebody else wrote into the cache is not what ModelScope has.
        (directory / "model.safetensors").write_bytes(b"9999")
        model_directory("someone/own")
        assert (directory / "model.safetensors").read_bytes() == b"5678"

    def test_offline_what_is_missing_is_named(
        self, chosen: str, server: HubServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.download("someone/tiny", files=["config.json"])
        go_offline(monkeypatch)
        assert hub.download("someone/tiny", files=["config.json"]).is_dir()
        with pytest.raises(ModelError, match=r"chat_template.jinja was not downloaded"):
            model_directory("someone/tiny")

    def test_the_cache_of_another_program_is_used(
        self, chosen: str, variables: dict[str, str], tiny: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        go_offline(monkeypatch)
        old = Path(variables["MODELSCOPE_CACHE"]) / "models" / "someone" / "tiny"
        old.mkdir(parents=True)
        (old / "config.json").write_bytes((tiny / "model" / "config.json").read_bytes())
        assert model_directory("someone/tiny") == old
        assert hub_commit("someone/tiny") is None
        with pytest.raises(ModelError, match="it was not downloaded"):
            model_directory("someone/tiny@v2")

    def test_names_that_lead_elsewhere_are_refused(
        self, chosen: str, server: HubServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        entry = {"path": "../../outside.json", "size": 2, "sha256": "0" * 64}
        monkeypatch.setattr("hub_server.entries", lambda directory: [entry])
        with pytest.raises(ModelError, match=r"forbidden name: '../../outside.json'"):
            model_directory("someone/tiny")
        assert not server.downloads("outside.json")

    def test_a_tokenizer_is_found_for_the_viewer(self, chosen: str) -> None:
        assert hub.cached_file("someone/tiny", "tokenizer.json") is None
        directory = model_directory("someone/tiny")
        assert hub.cached_file("someone/tiny", "tokenizer.json") == directory / "tokenizer.json"

    def test_the_package_is_not_installed(self, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "modelscope_hub", None)
        with pytest.raises(ModelError, match=r"pip install '\.\[modelscope\]' in a clone of isotrain"):
            model_directory("someone/tiny")


def test_a_run_records_the_hub(
    chosen: str, tmp_path: Path, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        f"name: r\noutput: {tmp_path}/run\nmodel: {{path: someone/tiny}}\n"
        "data: {train: rows.jsonl}\nalgorithm: {name: sft}\n"
    )
    recipe = load_recipe(file)
    commit = hub_commits(recipe)["model.path"]
    assert commit == COMMIT if chosen == "huggingface" else commit.startswith("modelscope:")
    write_start(recipe, file.read_text(), {}, {})
    check_same_data(recipe, {})
    other = "modelscope" if chosen == "huggingface" else "huggingface"
    commits = {"huggingface": "1" * 40, "modelscope": "modelscope:1"}
    monkeypatch.setattr("isotrain.trainers.start.hub_commits", lambda recipe: {"model.path": commits[other]})
    with pytest.raises(RecipeError, match=rf"started from {hub.TITLES[chosen]}; set ISOTRAIN_HUB={chosen}"):
        check_same_data(recipe, {})
    monkeypatch.setattr("isotrain.trainers.start.hub_commits", lambda recipe: {"model.path": commits[chosen]})
    with pytest.raises(RecipeError, match=r"set another output, and write name@"):
        check_same_data(recipe, {})


@only_modelscope
def test_data_sets_come_from_it_too(chosen: str, server: HubServer, tmp_path: Path) -> None:
    directory = tmp_path / "gsm8k"
    (directory / "main").mkdir(parents=True)
    for split, count in (("train", 3), ("test", 2)):
        rows = [{"question": f"{split} {number}?", "answer": f"#### {number}"} for number in range(count)]
        write_rows(directory / "main" / f"{split}.jsonl", rows)
    (directory / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n"
        "  - {split: train, path: main/train.jsonl}\n  - {split: test, path: main/test.jsonl}\n---\n"
    )
    server.datasets["AI-ModelScope/gsm8k"] = directory
    assert [row.values["question"] for row in read_split(None, "test")] == ["test 0?", "test 1?"]
    name = "AI-ModelScope/gsm8k:main:train"
    assert len(list(read_rows(name))) == 3
    before = source_digest(name)
    with (directory / "main" / "train.jsonl").open("a") as file:
        file.write('{"question": "new?", "answer": "#### 9"}\n')
    assert source_digest(name) != before and len(list(read_rows(name))) == 4
    server.datasets["someone/like-it"] = tmp_path / "other"
    shutil.copytree(directory, tmp_path / "other")
    (tmp_path / "other" / "main" / "train.jsonl").write_text('{"question": "other?", "answer": "#### 1"}\n')
    assert [row.values["question"] for row in read_rows("someone/like-it:main:train")] == ["other?"]
    with pytest.raises(DataError, match=r"someone/none is neither .* on ModelScope .* check the name"):
        list(read_rows("someone/none"))


def test_an_unknown_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hub.VARIABLE, "ms")
    with pytest.raises(RecipeError, match="ISOTRAIN_HUB=ms: write huggingface or modelscope"):
        model_directory("someone/tiny")
    with pytest.raises(RecipeError, match="ISOTRAIN_HUB=ms"):
        list(read_rows("someone/rows"))


def test_workers_on_other_machines_ask_the_same_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in hub.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert hub.settings() == {}
    monkeypatch.setenv(hub.VARIABLE, "modelscope")
    assert hub.settings() == {hub.VARIABLE: "modelscope"}
