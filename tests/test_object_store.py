"""Checkpoints in a real S3 server, over connections that break."""

import contextlib
import json
import os
import random
import threading
import time

import pytest
import torch

from checkpoint_file import CheckpointNotFoundError, CheckpointWriteError, write_checkpoint_file
from checkpoint_utils import CheckpointConfig, NoUsableCheckpointError, checkpoint_paths
from checkpoint_utils.object_store import Mirror, ObjectStoreError, fetch, open_store, retrying, s3
from checkpoint_utils.object_store.manifest import Manifest
from checkpoint_utils.urls import url_problem
from tests.s3_server import BUCKET, SECRET, Proxy, Server


@pytest.fixture(scope="module")
def server():
    with contextlib.closing(Server()) as server:
        yield server


@pytest.fixture
def proxy(server, monkeypatch):
    proxy = Proxy(server.port)
    for name, value in server.environment(proxy.port).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(retrying, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(s3, "READ_TIMEOUT_S", 5.0)
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)  # the least that S3 takes
    yield proxy
    proxy.close()


@pytest.fixture
def url(request):
    return f"s3://{BUCKET}/" + "".join(c if c.isalnum() else "-" for c in request.node.name)


def keys(server, url) -> list[str]:
    prefix = url.removeprefix(f"s3://{BUCKET}/") + "/"
    found = server.client().list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
    return [entry["Key"].removeprefix(prefix) for entry in found]


def manifest(server, url) -> Manifest:
    key = url.removeprefix(f"s3://{BUCKET}/") + "/manifest.json"
    return Manifest.from_json(server.client().get_object(Bucket=BUCKET, Key=key)["Body"].read(), url)


def save(folder, update: int, names=("checkpoint_last.pt",), run_id="run", numbers: int = 4000) -> None:
    """A checkpoint of `update` in the folder, as a run writes one: one file, replaced and linked."""
    folder.mkdir(exist_ok=True)
    state = {
        "format_version": 1,
        "run_id": run_id,
        "cfg": {"checkpoint": {}},
        "model": {"w": torch.full((numbers,), float(update))},
        "optimizer_history": [{"num_updates": update}],
        "extra_state": {},
    }
    write_checkpoint_file(state, str(folder / "new.pt"))
    for name in names:
        (folder / name).unlink(missing_ok=True)
        os.link(folder / "new.pt", folder / name)
    (folder / "new.pt").unlink()


def update_in(folder, name="checkpoint_last.pt") -> int:
    return int(torch.load(folder / name, weights_only=True)["model"]["w"][0])


CFG = CheckpointConfig(save_dir="x", keep_interval_updates=2)


def mirror(url, folder) -> Mirror:
    made = Mirror(url, str(folder), open_store())
    made.begin()
    return made


def test_a_save_goes_up_and_comes_down_on_another_machine(server, proxy, url, tmp_path):
    here = mirror(url, tmp_path / "here")
    save(tmp_path / "here", 1, ["checkpoint_1_1.pt", "checkpoint_last.pt"])
    here.push(CFG)
    here.flush(CFG)
    assert set(manifest(server, url).entries) == {"checkpoint_1_1.pt", "checkpoint_last.pt"}
    assert len([key for key in keys(server, url) if key.startswith("data/")]) == 1  # one content, one object
    mirror(url, tmp_path / "there")
    assert update_in(tmp_path / "there") == 1
    assert os.path.samefile(tmp_path / "there" / "checkpoint_last.pt", tmp_path / "there" / "checkpoint_1_1.pt")
    assert proxy.count("GET .*data/") == 1


def test_what_is_kept_follows_the_folder_and_no_object_is_left_over(server, proxy, url, tmp_path):
    here = mirror(url, tmp_path / "here")
    for update in range(1, 6):
        save(tmp_path / "here", update, [f"checkpoint_1_{update}.pt", "checkpoint_last.pt"])
        for path in checkpoint_paths(tmp_path / "here", r"checkpoint_\d+_(\d+)\.pt")[2:]:
            os.unlink(path)
        here.push(CFG)
    here.flush(CFG)
    assert sorted(manifest(server, url).entries) == ["checkpoint_1_4.pt", "checkpoint_1_5.pt", "checkpoint_last.pt"]
    assert len(keys(server, url)) == 3  # two contents and the manifest
    there = mirror(url, tmp_path / "there")  # has the newest alone, and prunes what it never saw
    save(tmp_path / "there", 6, ["checkpoint_1_6.pt", "checkpoint_last.pt"])
    there.push(CFG)
    there.flush(CFG)
    assert sorted(manifest(server, url).entries) == ["checkpoint_1_5.pt", "checkpoint_1_6.pt", "checkpoint_last.pt"]
    assert len(keys(server, url)) == 3


def test_the_folder_goes_on_if_it_is_ahead_and_gives_way_if_another_machine_was(server, proxy, url, tmp_path):
    here = mirror(url, tmp_path / "here")
    save(tmp_path / "here", 1)
    here.push(CFG)
    here.flush(CFG)
    save(tmp_path / "here", 2)  # killed before it was uploaded
    again = mirror(url, tmp_path / "here")
    assert update_in(tmp_path / "here") == 2
    again.push(CFG)
    again.flush(CFG)
    there = mirror(url, tmp_path / "there")
    assert update_in(tmp_path / "there") == 2
    save(tmp_path / "there", 1)  # it went back, so that fewer updates are newer
    there.push(CFG)
    there.flush(CFG)
    mirror(url, tmp_path / "here")
    assert update_in(tmp_path / "here") == 1


def test_a_folder_that_the_store_never_saw_is_kept_aside(server, proxy, url, tmp_path):
    here = mirror(url, tmp_path / "here")
    save(tmp_path / "here", 5)
    here.push(CFG)
    here.flush(CFG)
    save(tmp_path / "there", 9)
    mirror(url, tmp_path / "there")
    assert update_in(tmp_path / "there") == 5
    assert update_in(tmp_path / "there" / "abandoned") == 9


LARGE = 1_400_000  # numbers: two parts of an upload, and two ranges of a download


@pytest.mark.parametrize(
    "how", ["drop", "cut", pytest.param("500", marks=pytest.mark.slow), pytest.param("stall", marks=pytest.mark.slow)]
)
def test_broken_connections_are_waited_out(server, proxy, url, tmp_path, how, caplog):
    """A third of all requests goes wrong, uploads of parts among them."""
    choose = random.Random(1)
    proxy.misbehave = lambda line: how if choose.random() < (0.1 if how == "stall" else 0.33) else None
    here = mirror(url, tmp_path / "here")
    for update in (1, 2):
        save(tmp_path / "here", update, numbers=LARGE)
        here.push(CFG)
        here.flush(CFG)
    mirror(url, tmp_path / "there")
    assert (tmp_path / "there" / "checkpoint_last.pt").read_bytes() == (
        tmp_path / "here" / "checkpoint_last.pt"
    ).read_bytes()
    proxy.misbehave = lambda line: None
    assert len(keys(server, url)) <= 3  # what a removal that failed left goes with the next start
    assert SECRET not in caplog.text


def test_an_upload_that_breaks_off_is_never_the_newest(server, proxy, url, tmp_path, monkeypatch):
    monkeypatch.setattr(retrying, "TRIES", 2)
    here = mirror(url, tmp_path / "here")
    save(tmp_path / "here", 1)
    here.push(CFG)
    here.flush(CFG)
    for what in (r"PUT .*data/", r"(PUT|POST) .*data/.*(partNumber|uploadId)", r"PUT .*manifest"):
        proxy.misbehave = lambda line: "drop" if __import__("re").search(what, line) else None
        save(tmp_path / "here", 2, numbers=LARGE)
        here.push(CFG)
        here.wait()
        assert here.failed_in_a_row > 0
        assert mirror(url, tmp_path / what[-5:].replace("*", "")).url == url
        assert update_in(tmp_path / what[-5:].replace("*", "")) == 1
    proxy.misbehave = lambda line: None
    with pytest.raises(CheckpointWriteError, match="uploads in a row have failed.*max_failed_saves=3"):
        here.raise_failure(3)
    here.raise_failure(4)
    here.flush(CFG)  # once more, and well
    assert here.failed_in_a_row == 0
    mirror(url, tmp_path / "after")
    assert update_in(tmp_path / "after") == 2
    mirror(url, tmp_path / "here")
    assert len(keys(server, url)) == 2
    assert not [name for name in os.listdir(tmp_path / "here") if name.startswith(".upload")]


def test_training_is_not_stopped_by_an_upload_and_the_file_may_go_meanwhile(server, proxy, url, tmp_path):
    here = mirror(url, tmp_path / "here")
    gate = threading.Event()
    proxy.misbehave = lambda line: gate.wait(20) and None if "PUT" in line and "data/" in line else None
    save(tmp_path / "here", 1, ["checkpoint_1_1.pt"])
    begun = time.monotonic()
    here.push(CFG)
    assert time.monotonic() - begun < 10 and not keys(server, url)
    (tmp_path / "here" / "checkpoint_1_1.pt").unlink()
    gate.set()
    here.flush(CFG)
    assert set(manifest(server, url).entries) == {"checkpoint_1_1.pt"}


def test_a_damaged_object_gives_way_to_the_newest_sound_one(server, proxy, url, tmp_path, caplog):
    here = mirror(url, tmp_path / "here")
    for update in (1, 2):
        save(tmp_path / "here", update, [f"checkpoint_1_{update}.pt", "checkpoint_last.pt"])
        here.push(CFG)
        here.flush(CFG)
    found, client = manifest(server, url), server.client()
    prefix = url.removeprefix(f"s3://{BUCKET}/")

    def damage(name):
        key = f"{prefix}/{found.entries[name].key}"
        data = bytearray(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
        data[len(data) // 2] ^= 1
        client.put_object(Bucket=BUCKET, Key=key, Body=bytes(data))

    damage("checkpoint_last.pt")
    mirror(url, tmp_path / "there")
    assert not (tmp_path / "there" / "checkpoint_last.pt").exists()
    assert update_in(tmp_path / "there", "checkpoint_1_1.pt") == 1 and "DAMAGED CHECKPOINT PASSED OVER" in caplog.text
    damage("checkpoint_1_1.pt")
    with pytest.raises(NoUsableCheckpointError):
        mirror(url, tmp_path / "elsewhere")


def test_two_runs_do_not_share_a_prefix(server, proxy, url, tmp_path):
    one, other = mirror(url, tmp_path / "one"), mirror(url, tmp_path / "other")
    save(tmp_path / "one", 1)
    one.push(CFG)
    one.flush(CFG)
    save(tmp_path / "other", 7)
    other.push(CFG)
    with pytest.raises(CheckpointWriteError, match="another run writes there"):
        other.flush(CFG)
    mirror(url, tmp_path / "third")
    assert update_in(tmp_path / "third") == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(format=9),
        lambda m: m.update(entries={"../../x.pt": m["entries"]["checkpoint_last.pt"]}),
        lambda m: m["entries"].update({"checkpoint.best_../x_1.0.pt": m["entries"]["checkpoint_last.pt"]}),
        lambda m: m["entries"]["checkpoint_last.pt"].update(key="../secret"),
        lambda m: m["entries"]["checkpoint_last.pt"].update(bytes="many"),
        lambda m: m.pop("entries"),
    ],
)
def test_a_manifest_is_not_trusted(change):
    entry = {"key": "data/00000001-checkpoint_last.pt", "bytes": 1, "crc32": 2, "num_updates": 3, "run_id": "r"}
    text = {"format": 1, "generation": 1, "writer": "w", "entries": {"checkpoint_last.pt": entry}}
    assert Manifest.from_json(json.dumps(text), "u").entries
    change(text)
    with pytest.raises(ObjectStoreError, match="not a manifest"):
        Manifest.from_json(json.dumps(text), "u")


def test_one_checkpoint_is_fetched_once_by_its_name_or_its_object(server, proxy, url, tmp_path):
    here = mirror(url, tmp_path / "here")
    save(tmp_path / "here", 3)
    here.push(CFG)
    here.flush(CFG)
    for _ in range(2):
        path = fetch(f"{url}/checkpoint_last.pt", str(tmp_path))
        assert int(torch.load(path, weights_only=True)["model"]["w"][0]) == 3
    assert proxy.count("GET .*data/") == 1
    with pytest.raises(CheckpointNotFoundError):
        fetch(f"{url}/checkpoint_best.pt", str(tmp_path))


@pytest.mark.parametrize(
    "wrong, word",
    [
        ("gs://bucket/x", "not offered"),
        (f"s3://key:{SECRET}@bucket/x", "environment"),
        ("s3://bucket", "s3://bucket/prefix"),
        ("s3:///x", "s3://bucket/prefix"),
    ],
)
def test_a_url_that_cannot_work_is_told(wrong, word):
    assert word in url_problem(wrong) and SECRET not in url_problem(wrong)


def test_refusals_are_told_at_once_and_without_secrets(server, proxy, tmp_path, monkeypatch):
    with pytest.raises(ObjectStoreError, match="NoSuchBucket") as caught:
        store = open_store()
        save(tmp_path / "x", 1)
        store.upload(str(tmp_path / "x" / "checkpoint_last.pt"), "s3://nowhere/x/y.pt")
    assert SECRET not in str(caught.value) and len(proxy.requests) < 4
    for name in s3.IDENTITIES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ObjectStoreError, match="AWS_ACCESS_KEY_ID"):
        open_store()


def test_a_server_that_is_gone_is_an_error_within_the_retries(proxy, url, tmp_path, monkeypatch):
    monkeypatch.setattr(retrying, "TRIES", 2)
    proxy.close()
    with pytest.raises(ObjectStoreError, match="reading it failed"):
        mirror(url, tmp_path)
