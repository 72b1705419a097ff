"""bench.decode: what it counts, what it refuses, and a run on the CPU."""

import json

import pytest
import torch

from bench.decode import __main__ as decode
from bench.decode import cases as decode_cases
from bench.decode import peers as decode_peers
from bench.peers.adapter import Unsupported


def test_bytes_are_those_of_keys_and_values():
    case = decode.Case("x", (1000, 24), 32, 8)
    assert case.bytes() == 2 * 2 * 1024 * 8 * 128
    assert not case.even and decode.Case("x", (8, 8), 8, 8).even


def test_the_required_cases_are_there():
    names = [case.name for case in decode.cases()]
    assert len(set(names)) == len(names) == 40
    required = {"dense-1x16k-32/8", "page16-64x8k-64/8", "page64-32x16k-32/8", "page16-mixed64", "mla-129x2k-128"}
    assert required <= set(names)
    mixed = next(case for case in decode.cases() if case.name == "page64-mixed64")
    assert max(mixed.lengths) == 32768 and min(mixed.lengths) == 512 and mixed.batch == 64
    assert min(next(case for case in decode.cases() if case.name == "page16-skewed64").lengths) == 1


def test_pages_hold_what_the_table_says():
    case = decode.Case("x", (37, 1, 64), 4, 2, page=16, dim=32)
    x = decode_cases.make(case, torch.device("cpu"), 3)
    assert x.table is not None and x.k.shape == (3 + 1 + 4, 16, 2, 32)
    used = [int(page) for b, pages in enumerate((3, 1, 4)) for page in x.table[b, :pages]]
    assert sorted(used) == list(range(8)) and used != sorted(used)
    assert torch.equal(x.sequence(0)[0][32:], x.k[int(x.table[0, 2]), :5])


def test_layers_share_a_table_and_nothing_else():
    layers = decode_cases.make_layers(decode_cases.smoke_cases()[1], torch.device("cpu"), 0, 3)
    assert len({id(x.table) for x in layers}) == len({id(x.lengths) for x in layers}) == 1
    for name in ("q", "k", "v"):
        assert len({getattr(x, name).sum().item() for x in layers}) == 3


def test_latent_values_are_columns_of_the_keys():
    case = next(case for case in decode.smoke_cases() if case.dim_v)
    x = decode_cases.make(case, torch.device("cpu"), 0)
    assert x.v.data_ptr() == x.k.data_ptr() and x.v.shape == (4, 64, 1, 512)
    assert case.bytes() == 2 * 137 * 576


def test_a_wrong_output_is_not_timed(monkeypatch):
    monkeypatch.setattr(decode_peers, "own_calls", lambda layers, fields: [lambda: torch.zeros_like(layers[0].q)])
    entry = decode.run_case(decode.smoke_cases()[0], decode.peers(["warpattn"], []), 1, 0)
    assert entry["results"]["warpattn"]["status"] == "wrong"


def test_the_reader_refuses_what_it_cannot_read_whole():
    x = decode_cases.make(decode.Case("x", (300, 300), 4, 2), torch.device("cpu"), 0)
    with pytest.raises(Unsupported, match="multiple of 128"):
        decode_peers.read_call(x)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the cases of a CPU")
def test_a_run_on_a_cpu(tmp_path, capsys):
    path = tmp_path / "decode.json"
    assert decode.main(["--rounds", "2", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert [entry["results"]["warpattn"]["status"] for entry in record["cases"]] == ["timed"] * 3
    assert [entry["group"] for entry in record["cases"]] == ["decode", "decode", "mla"]
    assert record["peers"]["cudnn"]["available"] is False
    assert "smoke-page16" in capsys.readouterr().out
