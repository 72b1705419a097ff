"""The file of tuned choices: read once, under the cache folder's rules, by several processes, damaged and forged."""

import fcntl
import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.unit.runtime.card import B, D, H, make_card, normal  # noqa: F401 (a fixture)
from tests.unit.runtime.serving.tuned_machine import (
    CARD,
    SHAPE,
    Times,
    config_of,
    make_machine,  # noqa: F401 (a fixture)
    others,
    problem_of,
    row_of,
    write,
)
from warpattn.problem.launch import BUILT_IN
from warpattn.runtime.plan import plan
from warpattn.runtime.tuned import rows, table
from warpattn.serving import tuning

CARD_OF = table.card_of  # before the fixture replaces it

def test_calls_of_another_process_read_the_file_once(machine, monkeypatch):
    winner, reads = others(SHAPE)[0], []
    write(row_of(SHAPE, winner))
    real = rows.read
    monkeypatch.setattr(rows, "read", lambda file: reads.append(file) or real(file))
    for rows_of_q in (20, 19, 18, 20):
        wa.attention(normal(B, rows_of_q, H, D), normal(), normal())
    assert machine[0] == config_of(SHAPE, winner) and len(reads) == 1


def damaged(text):
    listed = json.loads(text.partition(b"\n")[2])

    def signed(changed):
        body = json.dumps(changed).encode()
        header = {"format": rows.FORMAT, "sha256": rows.hashlib.sha256(body).hexdigest()}
        return json.dumps(header).encode() + b"\n" + body

    return {
        "cut": text[:-3], "a bit": text.replace(b"8.0", b"7.0"), "no JSON": b"\x00" * 99, "empty": b"",
        "format": text.replace(b"tuned 1", b"tuned 0"), "a list": b"[]\n[]", "deep": b"[" * 100_000,
        "no field": signed([{}]), "a name": signed([listed[0] | {"candidate": "best"}]),
        "a number": signed([listed[0] | {"microseconds": {BUILT_IN: 1.0, listed[0]["candidate"]: -1.0}}]),
        "rows": signed(listed * (rows.MOST_ROWS + 1)), "no list": signed(7),
    }  # fmt: skip


KINDS = list(damaged(b'{}\n[{"candidate": "x"}]'))


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_one_sentence_and_no_choice(kind, machine, capsys):
    write(row_of(SHAPE, others(SHAPE)[0]))
    file = rows.path()
    wa.attention(normal(), normal(), normal())
    tuned = machine[-1]
    file.write_bytes(damaged(file.read_bytes())[kind])
    table.TABLE.rows = None
    for length in (18, 19):
        wa.attention(normal(B, length, H, D), normal(), normal())
    tuning.execute.forget()
    wa.attention(normal(), normal(), normal())
    assert machine[-1] != tuned
    said = capsys.readouterr().err
    assert said.count("tuned choices in") == 1 and "`python -m warpattn tune --forget` removes it" in said
    with pytest.raises(wa.AttentionError, match="are not used: it is damaged"):
        wa.tune([SHAPE], timer=Times())
    rows.forget(file)
    assert wa.tune([SHAPE], timer=Times())[0].row.candidate == BUILT_IN


@pytest.mark.parametrize("who", ["file", "folder", "link", "pipe"])
def test_files_that_others_may_have_written_are_not_read(who, machine, capsys, tmp_path):
    write(row_of(SHAPE, others(SHAPE)[0]))
    file = rows.path()
    if who in ("file", "folder"):
        (file if who == "file" else file.parent).chmod(0o777)
    else:
        text = file.read_bytes()
        file.unlink()
        (tmp_path / "other").write_bytes(text)
        file.symlink_to(tmp_path / "other") if who == "link" else rows.os.mkfifo(file)
    wa.attention(normal(), normal(), normal())
    assert machine[-1] != config_of(SHAPE, others(SHAPE)[0])
    assert capsys.readouterr().err.count("are not used: ") == 1


def test_rows_of_other_kernels_are_ignored_and_said_so(machine):
    write(row_of(SHAPE, others(SHAPE)[0], kernels="0badc0de"))
    wa.attention(normal(), normal(), normal())
    assert machine[-1] != config_of(SHAPE, others(SHAPE)[0])
    assert "is ignored: it was made by kernels 0badc0de" in str(plan(problem_of(SHAPE)))


def test_a_forged_name_is_no_configuration(machine, capsys):
    write(row_of(SHAPE, "1x1 kv99 q9 heads1 parts1"))
    wa.attention(normal(), normal(), normal())
    assert "which is no configuration of this problem" in capsys.readouterr().err
    assert "tuned" not in str(plan(problem_of(SHAPE)))


def test_two_processes_lose_no_row(tmp_path):
    code = (
        "import sys; from pathlib import Path; from warpattn.runtime.tuned import rows\n"
        "fields = eval(sys.argv[2])\n"
        "for n in range(40): rows.add(Path(sys.argv[1]), [rows.Row(**fields | {'key': sys.argv[3] + str(n)})])"
    )
    fields = repr(asdict(row_of(SHAPE, others(SHAPE)[0])))
    started = [subprocess.Popen([sys.executable, "-c", code, rows.path(), fields, name]) for name in "ab"]
    assert [process.wait() for process in started] == [0, 0]
    assert len(rows.read(rows.path())) == 80
    assert sorted(path.name for path in rows.path().parent.iterdir()) == ["choices.json", "lock"]


def test_a_file_is_read_and_written_under_a_lock(monkeypatch):
    real, busy = rows.read, []

    def read(file):
        with file.with_name("lock").open("wb") as other, pytest.raises(BlockingIOError) as raised:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        busy.append(raised)
        return real(file)

    monkeypatch.setattr(rows, "read", read)
    write(row_of(SHAPE, others(SHAPE)[0]))
    assert len(busy) == 1


def test_the_oldest_rows_leave(monkeypatch):
    monkeypatch.setattr(rows, "MOST_ROWS", 3)
    for n in (0, 1, 2, 0, 3):
        write(row_of(SHAPE, others(SHAPE)[0], key=str(n)))
    assert list(rows.read(rows.path())) == ["2", "0", "3"]


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(wa.AttentionError, match="tuned choices cannot be kept: others may write in"):
        wa.tune([SHAPE], timer=Times())


def test_lse_and_sinks_have_the_row_of_the_call_without():
    problem = problem_of(SHAPE)
    key = table.key_of(problem, "sm90", CARD)
    assert table.key_of(replace(problem, has_lse=True, has_sinks=True, device_type="cuda"), "sm90", CARD) == key
    for name, value in (("batch", 3), ("seq_k", 21), ("dtype", torch.float16), ("mask", ()), ("heads_kv", 1)):
        assert table.key_of(replace(problem, **{name: value}), "sm90", CARD) != key
    assert table.key_of(problem, "sm90", "Other (132 SMs)") != key


def test_without_a_folder_there_are_no_rows():
    assert rows.read(None) == {}


def test_each_card_has_its_own_rows(monkeypatch):
    monkeypatch.setattr(table, "_card", lambda index: f"card {index}")
    assert [CARD_OF(torch.device("cuda", i)) for i in (0, 1)] == ["card 0", "card 1"]
    assert CARD_OF(torch.device("cuda")) == "card 0" and CARD_OF(torch.device("cpu")) == ""


def test_a_row_of_other_kernels_is_stale_whatever_it_names(capsys):
    """It says so itself, so nothing else is said of the configuration."""
    write(replace(row_of(SHAPE, "no longer there"), kernels="others"))
    row = table.tuned_row(problem_of(SHAPE), "sm90", CARD)
    assert row is not None and row.stale and "is ignored" in row.words and capsys.readouterr().err == ""
