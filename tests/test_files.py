"""Locks and writes; that damaged files are noticed is in test_fuzz.py, killed processes and full disks in faults.py."""

import hashlib
import os
import subprocess
import sys

import pytest
from conftest import ROOT

import oldfiles as files
from oldconfig import UserError

HOLDER = """
import sys, time, oldfiles
with oldfiles.hold(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(folder):
    """A process that holds a folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, folder], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_folder_has_one_holder(tmp_path):
    process = holder(tmp_path)
    try:
        with pytest.raises(UserError, match=f"is in use by process {process.pid} on .*; wait for its end, or remove"):
            with files.hold(tmp_path):
                pytest.fail("held twice")
    finally:
        process.kill()
        process.wait()
    with files.hold(tmp_path):  # what held it is dead
        assert (tmp_path / ".lock").read_text().split()[0] == str(os.getpid())
    with files.hold(tmp_path / "new"):
        pass
    assert not list(tmp_path.iterdir())  # nor a folder that was made for the lock alone


def test_a_holder_of_another_machine_is_believed(tmp_path):
    (tmp_path / ".lock").write_text("123456\nanother-machine\n")
    with pytest.raises(UserError, match="in use by process 123456 on another-machine"):
        with files.hold(tmp_path):
            pytest.fail("held twice")


def test_a_file_that_was_removed_is_noticed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with open(path, "a") as file:
        files.append(file, "1\n")
        path.rename(tmp_path / "other")
        with pytest.raises(UserError, match="metrics.jsonl was removed or replaced"):
            files.append(file, "2\n")
        path.write_text("")
        with pytest.raises(UserError, match="metrics.jsonl was removed or replaced"):
            files.append(file, "3\n")


def test_a_failed_write_names_its_file_and_leaves_the_old_one(tmp_path):
    files.write_json(tmp_path / "a.json", {"a": 1})

    def write(temporary):
        temporary.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError) as caught:
        files.write_atomic(tmp_path / "a.json", write)
    assert caught.value.filename == tmp_path / "a.json"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert files.read_json(tmp_path / "a.json", "a file") == {"a": 1}
    with pytest.raises(UserError, match="is not a file; choose another name"):
        files.write_json(tmp_path, {"a": 1})


def test_checksums(tmp_path):
    """Of a file that is read in several pieces; of a record, whatever the order of its keys. One is not left out."""
    content = bytes(range(256)) * 20_000
    (tmp_path / "a").write_bytes(content)
    assert files.sha256(tmp_path / "a") == hashlib.sha256(content).hexdigest()
    assert files.sealed({"a": 1, "b": 2}) == files.sealed({"b": 2, "a": 1})
    files.write_json(tmp_path / "a.json", {"n": 1})
    with pytest.raises(UserError, match="a.json was altered: it does not match its checksum"):
        files.read_record(tmp_path / "a.json", "a file", {"n": int})


def test_half_a_surrogate_pair_is_escaped(tmp_path):
    files.write_text(tmp_path / "a", "é\ud800")
    assert (tmp_path / "a").read_text(encoding="utf-8") == "é\\ud800"
