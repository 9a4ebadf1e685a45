# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""What docs/results/auto.md says of its records, and which cells of the sweep are left to measure."""

import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "training"))

import auto
import auto_predictions_report
import auto_report
import auto_worker
from records import read_records


def candidate(label, predicted_ms, measured_ms, at_pace_ms=None):
    return {
        "label": label,
        "predicted_ns": predicted_ms * 1e6,
        "measured_ns": measured_ms * 1e6,
        "predicted_at_pace_ns": at_pace_ms and at_pace_ms * 1e6,
    }


def record(rate="1gbit", workers=2, chosen=1, auto_ms=(103, 101, 102), rival_ms=(100, 100, 100), rival="bf16"):
    blocks = []
    for method, times in (("auto(quality=balanced)", auto_ms), (rival, rival_ms)):
        for number, step_ms in enumerate(times):
            block = {"set": "comparing", "round": number, "method": method, "step_ms": step_ms, "steps_ms": [step_ms]}
            blocks.append(block)
    candidates = [candidate("dense", 194, 200), candidate("cast(bf16)", 104, 100)]
    return {
        "model": "mlp",
        "rate": rate,
        "workers": workers,
        "quality": "balanced",
        "auto": "auto(quality=balanced)",
        "rounds": 3,
        "choosing_rounds": 1,
        "started": "2026-01-01 00:00",
        "commit": "abc",
        "machine": {"cpu": "some"},
        "links": "links",
        "blocks": blocks,
        "decided": {
            "decision": {"chosen": chosen, "candidates": candidates, "reason": "because"},
            "measuring_steps_ms": [500, 1500],
        },
        "rival": {"method": rival, "first_ms": {"ddp": 200, "cast(bf16)": 110, "cast(fp16)": 90}},
        "result": {
            "times_ms": {"auto(quality=balanced)": 102, rival: 100},
            "error": 0.002,
            "replicas_equal": True,
        },
    }


def test_verdicts_are_those_of_the_numbers():
    found = {asked: (text, met) for asked, text, met in auto_report.verdicts([record(), record("unshaped", chosen=0)])}
    assert found["never slower than the best rival by more than 3 %"] == (
        "0 of 2 cells slower, the worst 1.02, in 0 of them with the same setting as the rival; "
        "beyond noise 0 of the 0 with rounds enough to tell",
        "yes",
    )
    assert found["predicted within 5 % (median): settings tried"] == ("4.0 % over 2, at most 4 %", "yes")
    assert not any("at the machine's speed" in asked for asked in found)  # records from before say nothing of it
    # Of the first one auto's blocks are the setting's, too: 100 ms on trial, 103, 101 and 102 later.
    assert found["predicted within 5 % (median): settings tried, all their blocks"] == (
        "3.2 % over 2, at most 4 %",
        "yes",
    )
    assert found["predicted within 5 % (median): dense steps"] == ("3.0 % over 2, at most 3 %", "yes")
    # Of the second one dense was chosen: 194 predicted, 102 in the second set.
    assert found["predicted within 5 % (median): the setting chosen, in the second set"][1] == "**no**"
    repeated = found["beside it: a setting tried, measured again as a rival (median difference)"]
    assert repeated == ("9.1 % over 2, at most 9 %", "-")  # 100 ms on trial, 110 as a rival; fp16 was not tried
    assert not any("without what all of a cell are off by" in asked for asked in found)  # one setting says nothing
    assert found["declines on the unshaped links"] == ("1 of 1 cells", "yes")
    assert found["time until the decision"][0] == "2 s, at most 2 s"


def test_what_settings_of_a_cell_have_in_common_is_told_apart():
    slow = record()  # 20, 18 and 25 % too short
    slow["decided"]["decision"]["candidates"] += [candidate("sign", 82, 100), candidate("topk", 75, 100)]
    slow["decided"]["decision"]["candidates"][1] = candidate("cast(bf16)", 80, 100)
    found = {asked: text for asked, text, _ in auto_report.verdicts([slow])}
    asked = "beside it: settings tried, without what all of a cell are off by (median)"
    assert found[asked] == "4.5 % over 3, at most 6 %"
    assert found["predicted within 5 % (median): settings tried"] == "20.0 % over 3, at most 25 %"
    assert "predicted within 5 % (median): settings tried, as simulated" not in found

    # Where predictions know what others took, what was simulated tells what they have in common.
    for tried, simulated_ms in zip(slow["decided"]["decision"]["candidates"][1:], (80, 82, 75), strict=True):
        tried |= {"simulated_ns": simulated_ms * 1e6, "predicted_ns": 99e6}
    found = {asked: text for asked, text, _ in auto_report.verdicts([slow])}
    assert found[asked] == "4.5 % over 3, at most 6 %"
    assert found["predicted within 5 % (median): settings tried"] == "1.0 % over 3, at most 1 %"
    assert found["predicted within 5 % (median): settings tried, as simulated"] == "20.0 % over 3, at most 25 %"


def test_what_is_told_for_the_speed_of_the_machine_is_counted_apart():
    slow = record()
    slow["decided"]["decision"]["candidates"][1] = candidate("cast(bf16)", 80, 100, at_pace_ms=97)
    found = {asked: text for asked, text, _ in auto_report.verdicts([slow, record()])}
    assert found["predicted within 5 % (median): settings tried"] == "12.0 % over 2, at most 20 %"
    asked = "predicted within 5 % (median): settings tried, at the machine's speed then"
    assert found[asked] == "3.0 % over 1, at most 3 %"


def test_a_slower_cell_shows():
    rows = auto_report.verdicts([record(auto_ms=(110, 103, 104)), record("unshaped")])
    assert rows[0] == [
        "never slower than the best rival by more than 3 %",
        "1 of 2 cells slower, the worst 1.04, in 0 of them with the same setting as the rival; "
        "beyond noise 0 of the 0 with rounds enough to tell",
        "**no**",
    ]
    assert ["declines on the unshaped links", "0 of 1 cells", "**no**"] in rows
    same = record(auto_ms=(110, 103, 104), rival="cast(bf16)")
    assert "in 1 of them with the same setting as the rival" in auto_report.verdicts([same])[0][1]


def test_slower_beyond_noise_takes_rounds_that_agree():
    def found(auto_ms):
        return auto_report.verdicts([record(auto_ms=auto_ms, rival_ms=[100] * len(auto_ms))])[0][1]

    assert "beyond noise 0 of the 0 with" in found([104] * 5)  # 1 of 32 chances that all are on one side
    assert "beyond noise 1 of the 1 with" in found([104] * 6)
    assert "beyond noise 0 of the 1 with" in found([95, 96, 97, *[104] * 9])  # of 12 the third smallest counts
    assert "beyond noise 1 of the 1 with" in found([95, 96, *[104] * 10])


def test_a_cell_that_is_measured_again_has_the_rounds_of_both_runs(tmp_path):
    slow, again = (
        record(workers=4, auto_ms=(104, 106, 107)),
        record(workers=4, auto_ms=(90, 90, 90), rival="cast(bf16)"),
    )
    text = auto_report.write_report([slow, record(), again], tmp_path).read_text()
    # Of six rounds 90, 90, 90, 104, 106 and 107 the median is 97.
    ratio = "0.97 (0.90-1.07); 2 runs: 1.060, 0.900"
    assert (
        f"| mlp | 1gbit | 4 | `cast(bf16)` | 97 | `bf16` (`cast(bf16)` was a rival, too); `cast(bf16)` | 100 | {ratio}"
        in text
    )
    assert "0 of 2 cells slower, the worst 1.02, in 0 of them" in text
    asked = "beside it: single runs above 1.03, of cells that were measured more than once"
    assert f"| {asked} | 1 of 2: mlp 1gbit 4: 1.060 | - |" in text
    assert "2 cells, 3 runs of them" in text
    assert text.count("- mlp, 1gbit, 4 workers: because") == 2
    assert (tmp_path / "auto" / "balanced.png").stat().st_size > 1000


def test_cells_over_the_loopback_are_others(tmp_path):
    loopback = record("unshaped") | {"links": "loopback, NOT shaped (network namespaces need root)"}
    text = auto_report.write_report([record("unshaped"), loopback], tmp_path).read_text()
    assert "| mlp | unshaped | 2 |" in text and "| mlp | unshaped (loopback) | 2 |" in text
    assert "- links: links; loopback, NOT shaped (network namespaces need root)\n" in text


def test_a_rival_that_was_not_the_best_shows():
    """Auto runs what is a rival itself, and another one was chosen."""
    found = {asked: text for asked, text, _ in auto_report.verdicts([record(auto_ms=(80, 82, 81)), record("unshaped")])}
    asked = "beside it: auto's own setting was a rival, too, and another one was chosen"
    assert found[asked] == "2 of 2 cells (auto / rival): mlp 1gbit 2: 0.81, mlp unshaped 2: 1.02"
    dense = record(chosen=0, rival="bf16")
    assert auto_report.own_rival(dense) == "ddp" and auto_report.was_passed_over(dense)
    assert not auto_report.was_passed_over(record(rival="cast(bf16)"))


def test_a_decision_given_up_within_the_comparison_shows(tmp_path):
    def state(decided=True, chosen="cast(bf16)", step=40):
        return {"decided": decided, "chosen": chosen, "step": step}

    left, stayed = record(), record("unshaped")
    for each in (left, stayed):
        each["decided"]["decision"]["step"] = 40
        for block in each["blocks"][:3]:
            block["auto"] = state()
    asked = "beside it: auto gave its setting up while it was compared"
    assert asked not in {asked for asked, _, _ in auto_report.verdicts([left, stayed])}
    left["blocks"][2]["auto"] = state(decided=False, chosen="dense")
    found = {asked: text for asked, text, _ in auto_report.verdicts([left, stayed])}
    assert found[asked] == "1 of 2 cells (auto / rival): mlp 1gbit 2: 1.02"
    assert auto_report.blocks_of_setting_ms(left) == [103, 101]
    assert auto_report.blocks_of_setting_ms(stayed) == [103, 101, 102]
    text = auto_report.write_report([left, stayed], tmp_path).read_text()
    assert "| mlp | 1gbit | 2 | `cast(bf16)`, given up |" in text
    assert "| 1.02 (1.01-1.03) | - |" in text and "| 1.02 (1.01-1.03) | 0.002 |" in text

    # It had decided again, and for the same: between them were trials.
    left["blocks"][2]["auto"] = state(step=90)
    assert auto_report.gave_up(left)
    # A record without states of blocks has what was so at its end.
    old = record()
    old["decided"]["decision"]["step"] = 40
    candidates = old["decided"]["decision"]["candidates"]
    old["result"]["decision"] = {"decided": True, "chosen": 1, "candidates": candidates, "step": 40}
    assert not auto_report.gave_up(old)
    old["result"]["decision"] |= {"decided": False, "chosen": 0}
    assert auto_report.gave_up(old) and auto_report.blocks_of_setting_ms(old) == []


def test_cells_that_are_missing_or_failed_are_named(tmp_path):
    failed = auto.failure("mlp", "1gbit", 5, "balanced", auto.WorkerFailed("a worker failed\nrank 1: exit status 1"))
    text = auto_report.write_report([record(), failed, record("unshaped", 4)], tmp_path).read_text()
    assert "Of the 36 cells of the sweep 34 were not measured: gpt 100mbit, 2, 3, 4, 5 workers; " in text
    assert "; mlp 1gbit, 3, 4, 5 workers; mlp unshaped, 2, 3, 5 workers; " in text
    assert f"Failed: mlp, 1gbit, 5 workers, {failed['started']}: a worker failed rank 1: exit status 1." in text


def test_a_quality_of_which_all_cells_failed_is_there(tmp_path):
    failed = auto.failure("mlp", "1gbit", 5, "safe", auto.WorkerFailed("a worker failed"))
    said = f"Failed: mlp, 1gbit, 5 workers, {failed['started']}: a worker failed."
    text = auto_report.write_report([failed, record()], tmp_path).read_text()
    assert "## auto(quality=safe)\n\nOf the 36 cells of the sweep 36 were not measured: " in text and said in text
    assert text.index(said) < text.index("## auto(quality=balanced)")
    text = auto_predictions_report.write_predictions([failed, record()], tmp_path).read_text()
    assert f"## auto(quality=safe)\n\n{said}\n\n## auto(quality=balanced)" in text
    again = auto.failure("mlp", "1gbit", 3, "balanced", auto.WorkerFailed("another one failed"))
    text = auto_predictions_report.write_predictions([record(), again], tmp_path).read_text()
    assert text.endswith(f"\n\nFailed: mlp, 1gbit, 3 workers, {again['started']}: another one failed.\n")
    assert "1 cells" in text


class Rival:
    """A runner whose blocks take the times given, one after the other."""

    def __init__(self, name, *times_ms):
        self.name, self.times_ms = name, list(times_ms)
        self.blocks_ms, self.seconds = [], []

    def measure(self, label, number, seconds, most_timed):
        assert label == "choosing"
        self.blocks_ms.append(self.times_ms[len(self.blocks_ms)])
        self.seconds.append(seconds)

    def step_ms(self):
        return statistics.median(self.blocks_ms)


def choose(rounds, *rivals):
    return auto_worker.choose_rival(list(rivals), {"seconds": 60, "choosing_rounds": rounds, "timed": 12}).name


def test_the_rival_is_the_fastest_in_the_median_of_rounds():
    assert choose(3, Rival("steady", 100, 100, 100), Rival("lucky", 90, 110, 110)) == "steady"
    assert choose(3, Rival("slow spell", 100, 160, 100), Rival("steady", 105, 105, 105)) == "slow spell"


def test_a_rival_that_is_out_does_not_come_back():
    """It has one block only, which is no reason to take it when the others have a slow spell later."""
    out, fast, near = Rival("out", 151), Rival("fast", 100, 160, 160), Rival("near", 110, 170, 170)
    assert choose(3, out, fast, near) == "fast"
    assert (len(out.blocks_ms), len(fast.blocks_ms), len(near.blocks_ms)) == (1, 3, 3)


def test_one_slow_block_puts_no_rival_out():
    assert choose(3, Rival("slow at first", 140, 90, 90), Rival("steady", 100, 100, 100)) == "slow at first"
    late = Rival("late", 140, 120)
    assert choose(3, late, Rival("steady", 100, 100, 100)) == "steady"
    assert len(late.blocks_ms) == 2


def test_choosing_takes_half_of_the_time_whoever_is_left():
    rivals = [Rival("out", 200), Rival("fast", 100, 100, 100), Rival("also out", 300)]
    assert choose(3, *rivals) == "fast"
    assert sum(sum(rival.seconds) for rival in rivals) == pytest.approx(30)


def test_a_record_says_which_rival_was_auto_itself():
    rivals = [Rival("ddp"), Rival("cast(bf16)"), Rival("cast(fp16)")]
    assert auto_worker.passed_over("cast(bf16)", rivals, rivals[2]) == "cast(bf16)"
    assert auto_worker.passed_over("dense", rivals, rivals[2]) == "ddp"
    assert auto_worker.passed_over("cast(fp16)", rivals, rivals[2]) is None
    assert auto_worker.passed_over("plan(hash=1, buckets=2)", rivals, rivals[2]) is None


def test_predictions_are_told_by_link_and_setting(tmp_path):
    far = record("unshaped")
    far["decided"]["decision"]["candidates"] += [
        candidate("plan(hash=1, buckets=2)", 80, 100, at_pace_ms=98),
        {"label": "not tried", "predicted_ns": 80e6, "measured_ns": None},
    ]
    far["decided"]["decision"]["candidates"][1] |= {"simulated_ns": 109e6, "trials_ns": [100e6, 80e6, 90e6]}
    text = auto_predictions_report.write_predictions([far, record()], tmp_path).read_text()
    assert text.index("| 1gbit |") < text.index("| unshaped |")
    assert "| settings tried | 4.0 % | +4.0 % | 3 | yes |" in text  # +4, +4 and -20
    assert "| 1gbit | 4.0 % | +4.0 % | 1 | yes |" in text
    assert "| unshaped | 12.0 % | -8.0 % | 2 | **no** |" in text
    assert "| `plan` | 20.0 % | -20.0 % | 1 | **no** |" in text
    assert "| settings tried, at the machine's speed then | 2.0 % | -2.0 % | 1 | yes |" in text
    assert "| settings tried, as simulated | 9.0 % | +9.0 % | 1 | **no** |" in text
    assert "| beside it: a trial against the setting's trials before | 12.5 % |  | 1 | - |" in text  # 25 and 0
    assert "| unshaped, at the machine's speed then | 2.0 % | -2.0 % | 1 | yes |" in text
    assert "| 1gbit, at the machine's speed then |" not in text
    assert "| `plan`, at the machine's speed then | 2.0 % | -2.0 % | 1 | yes |" in text
    assert "| dense steps | 3.0 % | -3.0 % | 2 | yes |" in text
    assert "| model | link | workers | dense ms | dense | `cast(bf16)` | `plan` |" in text
    assert "| mlp | 1gbit | 2 | 200 | -3 | +4 |  |" in text
    assert "| mlp | unshaped | 2 | 200 | -3 | +4 | -20 |" in text
    assert (tmp_path / "auto_predictions" / "balanced.png").stat().st_size > 1000


def test_what_is_measured_is_not_measured_again(tmp_path, monkeypatch, capsys):
    measured = []

    def measure(model, rate, workers, options):
        measured.append((model, rate, workers))
        return record(rate, workers)

    monkeypatch.setattr(auto, "measure", measure)
    monkeypatch.setattr(auto, "require_cortado", lambda names: None)
    monkeypatch.setattr(auto, "why_not_shaped", lambda: None)
    monkeypatch.setattr(auto, "why_rates_cannot_be", lambda rates: None)
    arguments = ["auto.py", "--models", "mlp", "--rates", "1gbit,unshaped", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--workers", "2"])
    assert auto.main() == 0
    monkeypatch.setattr(sys, "argv", [*arguments, "--workers", "2,3"])
    assert auto.main() == 0
    assert measured == [("mlp", "1gbit", 2), ("mlp", "unshaped", 2), ("mlp", "1gbit", 3), ("mlp", "unshaped", 3)]
    assert "2 of 4 cells to measure" in capsys.readouterr().out
    assert len(read_records(tmp_path / "auto.jsonl")) == 4
    monkeypatch.setattr(sys, "argv", [*arguments, "--workers", "2", "--again"])
    assert auto.main() == 0
    assert len(measured) == 6
