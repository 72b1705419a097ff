"""The benchmarks' own arithmetic: cases, requirements, statistics, correctness, record, table, plot, ncu's CSV."""

import json
import random

import pytest
import torch

from bench import correct, first_call, host, ncu, run
from bench.cases import REQUIREMENTS, Case, LimitRequirement, SpeedRequirement, TimeRequirement, find, groups
from bench.measure import inputs, record, table, timing
from bench.measure.timing import Summary
from bench.peers import OWN, PEERS, Unsupported


def _case(**changes):
    fields = {"batch": 2, "seq_q": 96, "seq_k": 96, "heads_q": 4, "heads_kv": 2, "dim": 16, "dim_v": 16}
    return Case(**({"name": "test"} | fields | changes))


def _visible(case):
    rows = torch.arange(case.seq_q)[:, None] + case.seq_k - case.seq_q
    keys = torch.arange(case.seq_k)[None, :]
    return ((keys <= rows) & ((case.window is None) | (rows - keys < (case.window or 0)))).sum().item()


# Cases and requirements


def test_flops_are_four_b_h_s_s_d_and_half_of_it_if_causal():
    full, causal = find("d128-1x16k-full"), find("d128-1x16k-causal")
    assert full.flops() == 4 * 1 * 16 * 16384**2 * 128
    assert causal.flops() == full.flops() / 2
    assert full.tflops(1000.0) == pytest.approx(full.flops() / 1e12)


@pytest.mark.parametrize(
    ("seq_q", "seq_k", "window"), [(96, 96, 10), (40, 96, None), (96, 40, None), (96, 40, 7), (5, 9, 1)]
)
def test_pairs_of_windows_and_unequal_lengths_are_counted(seq_q, seq_k, window):
    case = _case(seq_q=seq_q, seq_k=seq_k, causal=True, window=window)
    assert case.pairs() == _visible(case)


def test_flops_with_another_v_dim():
    assert _case(dim=192, dim_v=128).flops() == 2 * 2 * 4 * 96 * 96 * (192 + 128)


def test_documents_see_themselves():
    assert _case(seq_q=96, seq_k=96, causal=True, documents=4).pairs() == 4 * 24 * 24 / 2
    with pytest.raises(ValueError, match="documents"):
        _case(seq_q=97, seq_k=97, causal=True, documents=4)


@pytest.mark.parametrize("window", [0, 8])
def test_a_window_needs_causal_and_a_key(window):
    with pytest.raises(ValueError, match="window"):
        _case(window=window, causal=window == 0)


def test_groups_have_the_required_shapes():
    found = groups()
    for name, heads, dim in (("d128", 16, 128), ("d64", 32, 64), ("d256", 8, 256)):
        cases = found[name]
        assert len(cases) == 10
        assert {(c.batch, c.seq_q) for c in cases} == {(16, 1024), (8, 2048), (4, 4096), (2, 8192), (1, 16384)}
        assert {(c.heads_q, c.heads_kv, c.dim, c.dim_v, c.dtype) for c in cases} == {
            (heads, heads, dim, dim, "bfloat16")
        }
        assert sum(c.causal for c in cases) == 5
    assert {(c.heads_q, c.heads_kv, c.dim, c.causal) for c in found["gqa"]} == {(64, 8, 128, True)}
    wide = found["wide"]
    assert len(wide) >= 60
    assert {c.dim for c in wide} >= {40, 72, 80, 96, 112, 160, 192, 208, 224, 256} and any(c.softcap for c in wide)
    assert {c.dtype for c in wide} == {"float16", "bfloat16"} and any(c.window for c in wide)
    assert any(c.documents > 1 for c in wide) and any(c.seq_k > 8 * c.seq_q for c in wide)
    names = [case.name for group in found.values() for case in group]
    assert len(names) == len(set(names))


def test_requirements_name_groups_cases_and_peers_that_exist():
    speeds = {(r.group, r.peer): (r.must, r.aim) for r in REQUIREMENTS if isinstance(r, SpeedRequirement)}
    assert speeds == {
        ("d128", "cudnn"): (1.03, None),
        ("d128", "fa4"): (0.97, 1.0),
        ("d64", "cudnn"): (1.0, None),
        ("d64", "fa4"): (None, 0.95),
        ("d256", "cudnn"): (1.0, None),
        ("d256", "fa4"): (None, 0.95),
        ("gqa", "cudnn"): (1.03, None),
        **dict.fromkeys((("wide", peer) for peer in ("cudnn", "fa4", "fa3")), (1.0, None)),
    }
    assert all(group in groups() and peer in PEERS for group, peer in speeds)
    (window,) = (r for r in REQUIREMENTS if isinstance(r, TimeRequirement))
    assert (find(window.case).window, find(window.against).window, window.at_most) == (1024, None, 0.18)
    limits = {(r.section, r.key): r.at_most for r in REQUIREMENTS if isinstance(r, LimitRequirement)}
    assert limits == {("host", "ratio"): 1.2, ("first_call", "warm_s"): 0.5, ("first_call", "cold_s"): 6.0}


# Timing


class _FakeSample:
    """A sample whose times are a list: the clock of the machine is `drift`, shared by all samples of a round."""

    mode, calls, note = "fake", 7, None

    def __init__(self, times, log, name):
        self._times, self._log, self._name = iter(times), log, name

    def start(self):
        self._log.append(self._name)

    def milliseconds(self):
        return next(self._times)


def test_rounds_are_interleaved_shuffled_and_warmed_up():
    log = []
    # 20 ms per call × 7 calls × 2 samples: two rounds warm up 300 ms
    samples = {name: _FakeSample([20.0, 20.0, *range(1, 13)], log, name) for name in ("a", "b")}
    times = timing.interleave(samples, 12, seed=3, warm_ms=300.0)
    assert times == {"a": list(range(1, 13)), "b": list(range(1, 13))}
    pairs = [tuple(log[i : i + 2]) for i in range(0, len(log), 2)]
    assert len(pairs) == 14
    assert set(pairs) == {("a", "b"), ("b", "a")}


def test_ratios_are_taken_per_round():
    drift = [random.Random(0).uniform(1, 3) for _ in range(9)]
    own, peer = [2.0 * d for d in drift], [2.5 * d for d in drift]
    ratio = timing.paired_ratio(peer, own)
    assert (ratio.median, ratio.q1, ratio.q3, ratio.n) == (
        pytest.approx(1.25),
        pytest.approx(1.25),
        pytest.approx(1.25),
        9,
    )
    with pytest.raises(ValueError, match="argument"):
        timing.paired_ratio(peer, own[1:])


def test_summary():
    assert Summary.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Summary(3.0, 2.0, 4.0, 5)
    assert Summary.of([4.0]) == Summary(4.0, 4.0, 4.0, 1)


def test_host_batches_take_turns_and_drop_the_first_rounds():
    now, order = [0.0], []

    def call(name, seconds):
        now[0] += seconds
        order.append(name)

    calls = {OWN: lambda: call(OWN, 2e-6), "cudnn": lambda: call("cudnn", 4e-6)}
    times = host.alternate(calls, lambda: now[0], lambda: None, rounds=5, batch=10)
    assert {name: len(values) for name, values in times.items()} == {OWN: 5, "cudnn": 5}
    assert len(order) == 2 * 7 * 10
    found = host.summarise(times)
    assert found["warpattn_us"] == pytest.approx(2.0)
    assert found["ratio"] == pytest.approx(0.5)


# Correctness


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": True},
        {"causal": True, "window": 9},
        {"causal": True, "seq_q": 150, "seq_k": 70},
        {"causal": True, "seq_q": 31, "seq_k": 200, "dim_v": 24},
    ],
)
def test_expected_is_attention_and_wrong_outputs_are_refused(changes, monkeypatch):
    monkeypatch.setattr(correct, "SCORES", 96 * 96)  # several chunks of rows
    case = _case(**changes)
    qkv = inputs.make(case, torch.device("cpu"), seed=1)
    want = correct.expected(case, qkv)
    q, k, v = (t.transpose(1, 2).double() for t in qkv)
    rows = torch.arange(case.seq_q)[:, None] + case.seq_k - case.seq_q
    keys = torch.arange(case.seq_k)[None, :]
    keep = (keys <= rows) & (rows - keys < (case.window or 10**6)) if case.causal else keys < case.seq_k
    scores = (q @ k.repeat_interleave(2, 1).mT * case.dim**-0.5).masked_fill(~keep, -torch.inf)
    full = (scores.softmax(-1).nan_to_num(0.0) @ v.repeat_interleave(2, 1)).transpose(1, 2)
    torch.testing.assert_close(want.out, full.float(), rtol=1e-4, atol=1e-5)

    right = full.to(torch.bfloat16)
    assert correct.verdict(case, right, want)[1] is None
    spoiled = right.clone()
    spoiled[-1, -1, -1, -1] = torch.nan
    assert "nan" in correct.verdict(case, spoiled, want)[1]
    shifted = right.clone()
    shifted[1, :, 2] *= 1.05
    assert "allowed" in correct.verdict(case, shifted, want)[1]
    assert "shape" in correct.verdict(case, right.transpose(1, 2), want)[1]


def test_one_wrong_block_of_small_values_is_found():
    case = _case(batch=1, seq_q=1024, seq_k=1024, heads_q=2)
    out = torch.randn((1, 1024, 2, 16), generator=torch.Generator().manual_seed(0))
    out[:, 512:] *= 0.01
    want = correct.Expected(out, correct.Error(largest=0.01, block=0.008))
    assert correct.verdict(case, out * 1.001, want)[1] is None
    wrong = out.clone()
    wrong[0, 640:768, 1] *= 1.09  # what one missing key tile of a long sequence does; its largest error is 0.003
    assert "block of 128 rows is 0.09" in correct.verdict(case, wrong, want)[1]


# Running


class _TorchPeer:
    """A peer of torch's own attention on the CPU; `spoil` makes it wrong."""

    def __init__(self, name, spoil=0.0, error=None):
        self.name, self._spoil, self._error = name, spoil, error

    def available(self):
        return None

    def version(self):
        return "1"

    def prepare(self, case, q, k, v):
        if self._error is not None:
            raise self._error
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        attention = torch.nn.functional.scaled_dot_product_attention
        return lambda: (attention(q, k, v, is_causal=case.causal, enable_gqa=True) + self._spoil).transpose(1, 2)


@pytest.fixture(scope="module")
def entry():
    peers = [
        _TorchPeer(OWN),
        _TorchPeer("cudnn"),
        _TorchPeer("fa2", spoil=0.1),
        _TorchPeer("fa4", error=Unsupported("no kernel")),
        _TorchPeer("flex", error=RuntimeError("first\nsecond")),
    ]
    case = _case(causal=True, seq_q=64, seq_k=64)
    return run.run_case("d128", case, peers, run.Settings(rounds=3, rotate=2))


def test_only_right_results_are_timed_and_every_other_says_why(entry):
    results = entry["results"]
    assert {name: result["status"] for name, result in results.items()} == {
        OWN: "timed",
        "cudnn": "timed",
        "fa2": "wrong",
        "fa4": "unsupported",
        "flex": "failed",
    }
    assert results["fa4"]["reason"] == "no kernel"
    assert results["flex"]["reason"] == "RuntimeError: first"
    assert "ms" not in results["fa2"]
    assert results["cudnn"]["speed"]["n"] == 3
    assert results[OWN]["speed"] is None


def test_every_peer_runs_or_says_why():
    for peer in PEERS.values():
        reason = peer.available()
        assert reason is None or (isinstance(reason, str) and reason and "\n" not in reason)


# The record


def _timed(case, ms, speed):
    spread = {"median": ms, "q1": ms * 0.99, "q3": ms * 1.02, "n": 5}
    times = {"status": "timed", "reason": None, "error": None, "mode": "graph", "calls": 3, "ms": spread}
    ratio = None if speed is None else {"median": speed, "q1": speed, "q3": speed, "n": 5}
    return times | {"tflops": case.tflops(ms), "speed": ratio}


@pytest.fixture
def synthetic():
    argv = ["--group", "d128,window", "--json", "/somewhere/x.json", "--rounds", "5"]
    found = record.start("bench.run", argv, {"rounds": 5})
    found["peers"] = {
        OWN: {"available": True, "reason": None, "version": "1"},
        "cudnn": {"available": True, "reason": None, "version": "9"},
        "fa4": {"available": False, "reason": "cannot import flash_attn", "version": None},
    }
    for group in ("d128", "window"):
        for index, case in enumerate(groups()[group]):
            windowed = case.window is not None
            results = {OWN: _timed(case, 0.2 if windowed else 1.0, None)}
            results["cudnn"] = _timed(case, 1.05, 1.05 if index else 1.01)
            if windowed:
                results["cudnn"] = {"status": "unsupported", "reason": "no window", "error": None, "speed": None}
            found["cases"].append({"group": group, "case": case.asdict(), "flops": case.flops(), "results": results})
    found["host"] = {"ratio": 1.1, "warpattn_us": 22.0, "cudnn_us": 20.0}
    found["first_call"] = {"reason": "no GPU"}
    return found


def test_verdicts_judge_what_was_measured(synthetic):
    found = record.verdicts(synthetic)
    cudnn = [v for v in found if v["requirement"] == "speed ≥ 1.03 × cudnn" and v["group"] == "d128"]
    assert [v["met"] for v in cudnn] == [False, *[True] * 9]
    assert all(v["met"] is None and v["aim"] == 1.0 for v in found if v["requirement"].endswith("fa4"))
    (window,) = (v for v in found if v["group"] == "window")
    assert (window["measured"], window["met"], window["sense"]) == (pytest.approx(0.2), False, "<=")
    assert [v["met"] for v in found if v["group"] == "host"] == [True]
    assert [v["met"] for v in found if v["group"] == "first_call"] == [None, None]
    assert not [v for v in found if v["group"] in ("d64", "d256", "gqa")]


def test_a_record_keeps_five_digits():
    given = {"ms": {"median": 0.53320227350, "n": 7, "flops": 171798691840.0}, "us": [1234567.25, None, "0.123456789"]}
    kept = {"ms": {"median": 0.5332, "n": 7, "flops": 171798691840.0}, "us": [1234600.0, None, "0.123456789"]}
    assert record.rounded(given) == kept


def test_record_is_json_and_comes_back(synthetic, tmp_path):
    path = tmp_path / "results" / "x.json"
    record.write(synthetic, path)
    found = record.read(path)
    assert found == record.rounded(json.loads(json.dumps(synthetic)))
    lines = path.read_text().splitlines()
    assert [json.loads(line.strip(",")) for line in lines if line.startswith('  {"group"')] == found["cases"]
    assert found["command"] == "python -m bench.run --group d128,window --rounds 5"
    assert set(found) == {
        *("schema", "command", "date", "machine", "versions", "settings"),
        *("peers", "cases", "host", "first_call", "ncu", "verdicts"),
    }
    assert {"gpu", "driver", "cuda", "python"} <= set(found["machine"])
    assert "torch" in found["versions"]
    path.write_text("[]")
    with pytest.raises(ValueError, match="schema 1"):
        record.read(path)


def test_a_real_entry_fits_the_record(entry, synthetic):
    synthetic["cases"] = [entry]
    json.dumps(synthetic)
    assert set(entry) == set(synthetic["cases"][0])
    assert {*entry["results"]["cudnn"]} >= {"status", "reason", "error", "mode", "calls", "ms", "tflops", "speed"}


def test_table_names_numbers_reasons_and_verdicts(synthetic):
    synthetic["verdicts"] = record.verdicts(synthetic)
    text = table.render(synthetic)
    assert "fa4: unavailable: cannot import flash_attn" in text
    assert "cudnn on window-1x16k-1024: unsupported: no window" in text
    assert "(1.050×)" in text
    assert "9/10" in text
    assert "NOT MET" in text
    assert "not measured" in text


def test_plot_is_an_svg_with_every_peer(synthetic, tmp_path):
    pytest.importorskip("matplotlib")
    from bench import plot

    path = tmp_path / "x.svg"
    plot.plot(synthetic, path)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<?xml") and "</svg>" in text
    assert all(word in text for word in (OWN, "cudnn", "4×4k causal", "TFLOP/s"))
    with pytest.raises(ValueError, match="no timed case"):
        plot.plot(synthetic | {"cases": []}, path)


def test_ncu_csv_is_parsed_and_kernels_of_a_call_add_up():
    header = '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    lines = [
        *("==PROF== Connected to process 7", "", header),
        '"0","7","prefill","sm__cycles_elapsed.max","cycle","5,070,000"',
        '"0","7","prefill","gpu__time_duration.sum","usecond","3,400.5"',
        '"0","7","prefill","sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed","%","80.5"',
        '"1","7","combine","sm__cycles_elapsed.max","cycle","1,000"',
        '"1","7","combine","gpu__time_duration.sum","nsecond","500"',
        '"1","7","combine","dram__bytes.sum","Mbyte","n/a"',
    ]
    kernels = ncu.parse("\n".join(lines))
    assert [kernel["name"] for kernel in kernels] == ["prefill", "combine"]
    assert ncu.counted(kernels[:1]) == {"metrics": kernels[0]["metrics"], "kernels": [{"name": "prefill"}]}
    total = ncu.counted(kernels)["metrics"]
    assert total["sm__cycles_elapsed.max"] == 5_071_000
    assert total["gpu__time_duration.sum"] == pytest.approx(3.401e-3)
    assert total["sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"] == 80.5
    assert ncu.parse("==ERROR== no permission") == []


def test_ncu_kernels_belong_to_the_call_before_their_marker():
    names = ["prefill", "spin_kernel(long)", "at::spin_kernel(long)", "attend", "combine", "spin_kernel(long)", "lost"]
    calls = ncu.split({"name": name, "metrics": {}} for name in names)
    assert [[kernel["name"] for kernel in call] for call in calls] == [["prefill"], [], ["attend", "combine"]]


def test_first_call_reports_a_failing_process(monkeypatch):
    monkeypatch.setattr(first_call, "ROOT", first_call.ROOT / "bench" / "peers")  # there is no package `bench` below it
    monkeypatch.setenv("PYTHONPATH", "")
    assert "bench" in first_call.measure(warm_runs=1)["reason"]
