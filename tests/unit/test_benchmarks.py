"""The arithmetic and the text of the benchmarks; nothing is timed here."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bars
import bench_results
import forks
from bench_bars import Bar, at_most, bars_of_turns, bars_table, is_so
from bench_joiner import Joiner, joiner_bars
from bench_led import led_rounds
from bench_more import OtherMeasurement, both, measured_before, next_repeat
from bench_peer import Batches, Module
from bench_plan import (
    ALONE,
    DDP,
    NATIVE,
    NATIVE_CLEAR,
    OURS,
    OURS_8BIT,
    STOCK,
    STOCK_SIZED,
    averaging_specs,
    full_plan,
    quick_plan,
    step_specs,
)
from bench_results import Run, plain, report, write
from bench_spec import Case, TurnSpec, json_lines, outcomes_of
from bench_stats import (
    Round,
    marginal_megabytes_per_s,
    markdown_table,
    megabytes_per_s,
    number,
    pair_ratios,
    percent,
    rotated,
    rounds_of_marks,
    summary,
    whole_share,
)
from bench_tables import all_tables
from bench_turn import Turn, read_turn
from herd import BATCH, Herd
from run import run_repeats

WHOLE = Round(time=1.0, advanced=1, samples=32, contributors=2, fraction=1.0, wait_s=0.5)


def turn(spec: TurnSpec, repeat: int, step_s: float, **changes: object) -> Turn:
    rounds = [[WHOLE, WHOLE], [WHOLE, replace(WHOLE, fraction=0.5)]]
    measured = Turn(spec=spec, repeat=repeat, load=0.0, steps=2, step_s=step_s, cpu_s=1.0)
    return replace(measured, **{"rounds": rounds, "history": rounds, **changes})


class TestSummaries:
    def test_median_and_range_leave_out_what_was_not_measured(self) -> None:
        found = summary([3.0, math.nan, 1.0, 2.0, 10.0])
        assert (found.median, found.low, found.high, found.count) == (2.5, 1.0, 10.0, 4)
        assert found.show() == "2.50 (1.00 to 10.0)"

    def test_a_single_measurement_has_no_range_and_none_is_a_dash(self) -> None:
        assert summary([0.25]).show(" s") == "0.250 s"
        assert summary([math.nan]).show() == "-"

    @given(st.lists(st.floats(0.001, 1e6), min_size=1))
    def test_the_median_lies_in_the_range(self, values: list[float]) -> None:
        found = summary(values)
        assert min(values) == found.low <= found.median <= found.high == max(values)

    @pytest.mark.parametrize(
        ("value", "text"),
        [(0.012345, "0.0123"), (1.0, "1.00"), (99.96, "100.0"), (1234.5, "1234"), (0.0, "0"), (math.nan, "-")],
    )
    def test_numbers_have_three_digits_and_no_exponent(self, value: float, text: str) -> None:
        assert number(value) == text

    def test_share_of_nothing_is_a_dash(self) -> None:
        assert (percent(1, 3), percent(0, 0)) == ("33%", "-")


class TestPairs:
    def test_ratios_compare_turns_of_the_same_repeat_only(self) -> None:
        assert pair_ratios({0: 4.0, 1: 9.0, 2: 5.0}, {1: 3.0, 0: 2.0, 3: 1.0}) == [2.0, 3.0]

    def test_a_turn_without_a_measurement_makes_no_pair(self) -> None:
        assert pair_ratios({0: 4.0, 1: 4.0}, {0: math.nan, 1: 2.0}) == [2.0]
        failed, other = pair_ratios({0: math.nan, 1: 4.0}, {0: 1.0, 1: 2.0})
        assert math.isnan(failed)
        assert other == 2.0
        assert pair_ratios({0: 1.0}, {0: 0.0}) == []

    def test_every_contender_runs_first_once(self) -> None:
        orders = [rotated("abc", repeat) for repeat in range(3)]
        assert [order[0] for order in orders] == ["a", "b", "c"]
        assert all(sorted(order) == ["a", "b", "c"] for order in orders)


class TestRates:
    def test_a_megabyte_is_a_million_bytes_and_a_float_has_four(self) -> None:
        assert megabytes_per_s(5_000_000, 0.5) == pytest.approx(40.0)
        assert math.isnan(megabytes_per_s(5_000_000, 0.0))

    def test_the_marginal_rate_is_free_of_the_fixed_cost(self) -> None:
        # 0.3 s of fixed cost, then 100 MB/s
        assert marginal_megabytes_per_s((5_000_000, 0.5), (25_000_000, 1.3)) == pytest.approx(100.0)
        assert math.isnan(marginal_megabytes_per_s((5_000_000, 0.5), (25_000_000, 0.4)))


class TestRounds:
    def test_whole_means_everybody_and_everything(self) -> None:
        partial, alone = replace(WHOLE, fraction=0.997), replace(WHOLE, contributors=1)
        skipped = replace(WHOLE, advanced=3, contributors=0, fraction=0.0)
        assert whole_share([WHOLE, partial, alone, skipped], peers=2) == (1, 6)

    def test_a_mark_takes_the_last_round_that_ended_before_it(self) -> None:
        marks = [
            {"time": 1.0, "epoch": 4, "samples": 8},
            {"time": 2.0, "epoch": 5, "samples": 16},
            {"time": 3.0, "epoch": 8, "samples": 32, "wait_s": 0.75},
        ]
        outcomes = [
            {"time": 0.9, "contributors": 1, "fraction": 1.0},
            {"time": 1.2, "contributors": 1, "fraction": 0.5},
            {"time": 1.9, "contributors": 2, "fraction": 1.0, "wait_s": 0.25},
        ]
        first, second = rounds_of_marks(marks, outcomes)
        assert (first.advanced, first.samples, first.contributors, first.wait_s) == (1, 16, 2, 0.25)
        assert (second.advanced, second.contributors, second.fraction, second.wait_s) == (3, 0, 0.0, 0.75)

    def test_a_line_that_was_cut_off_is_left_out(self, tmp_path: Path) -> None:
        (tmp_path / "marks.jsonl").write_text('{"epoch": 1}\n{"epo', encoding="utf-8")
        assert json_lines(tmp_path / "marks.jsonl") == [{"epoch": 1}]
        assert json_lines(tmp_path / "none.jsonl") == []

    def test_ours_are_read_from_the_events(self, tmp_path: Path) -> None:
        lines = [
            '{"event": "RoundStarted", "time": 1.0, "epoch": 0, "samples": 8}',
            '{"event": "EpochCommitted", "time": 2.0, "epoch": 1, "samples": 8, "contributors": 2, "fraction": 1.0,'
            ' "duration_s": 0.5}',
        ]
        (tmp_path / "events-1.jsonl").write_text("\n".join(lines), encoding="utf-8")
        (found,) = outcomes_of(TurnSpec(contender=OURS, kind="ours"), tmp_path, 1)
        assert (found["time"], found["contributors"], found["wait_s"]) == (2.0, 2, 0.5)

    def test_messages_are_those_of_the_coordinator_since_the_step_before(self) -> None:
        notes = [
            {"led": led, "messages": messages, "bytes": 100 * messages}
            for led, messages in [(False, 5), (True, 10), (True, 17), (False, 20), (True, 30), (True, 36)]
        ]
        assert led_rounds(notes) == [(5, 500), (7, 700), (10, 1000), (6, 600)]


class TestTables:
    def test_steps_made_alone_do_not_make_a_whole_step_quicker(self) -> None:
        alone = replace(WHOLE, contributors=1)
        found = turn(step_specs(2, 0.025)[0], 0, 0.5, steps=4, rounds=[[WHOLE, alone, alone, alone], [WHOLE] * 4])
        assert found.whole_step_s == pytest.approx(2.0)
        assert math.isnan(replace(found, rounds=[[alone], []]).whole_step_s)

    def test_columns_line_up_and_a_short_row_is_refused(self) -> None:
        table = markdown_table(["who", "n"], [["ours", "1"], ["stock", "20"]])
        assert table.splitlines() == ["| who   |   n |", "| :---- | --: |", "| ours  |   1 |", "| stock |  20 |"]
        with pytest.raises(ValueError, match="1 cells, the header has 2"):
            markdown_table(["who", "n"], [["ours"]])

    def test_ratios_shares_and_failures_are_shown(self) -> None:
        spec = {one.contender: one for one in step_specs(2, 0.025)}
        turns = [turn(spec[OURS], repeat, 0.3 * (1 + repeat)) for repeat in range(2)]
        turns += [turn(spec[DDP], repeat, 0.1) for repeat in range(2)]
        turns += [turn(spec[STOCK_SIZED], repeat, 0.5) for repeat in range(2)]
        turns += [turn(spec[STOCK], 0, 3.0)]
        turns += [turn(spec[STOCK], 1, math.nan, cpu_s=math.nan, rounds=[], failure="no step in 20 s")]
        text = all_tables(turns)
        (row,) = (line for line in text.splitlines() if line.startswith(f"| {OURS} ") and "to 6.00" in line)
        assert cells(row) == [
            OURS,
            "2",
            "0.100",
            "0.450 (0.300 to 0.600)",
            "0.450 (0.300 to 0.600)",
            "4.50 (3.00 to 6.00)",
            "0.100",
            "0.875 (0.500 to 1.25)",
            "0.500 (0.500 to 0.500)",
            "32.0 (32.0 to 32.0)",
            "1.00 (1.00 to 1.00)",
        ]
        assert f"- {STOCK}, 2 peers, 10 parameters, steps of 0.100 s, repeat 2: no step in 20 s" in text
        reliability = text.split("## Reliability")[1]
        (row,) = (line for line in reliability.splitlines() if line.startswith(f"| {OURS} "))
        assert cells(row) == [OURS, "10", "2", "0.100", "8", "6", "75%", "0.500"]
        assert f"| {DDP}" not in reliability
        assert "## Averaging" not in text, "none was measured"

    def test_what_averaging_adds_is_told_from_what_the_same_steps_take_without_it(self) -> None:
        specs = {one.contender: one for one in averaging_specs(5)}
        turns = [turn(specs[ALONE], repeat, 0.2 + repeat, cpu_s=0.25) for repeat in range(2)]
        turns += [turn(specs[OURS], repeat, 0.6 + repeat, sent_bytes=[20.2e6]) for repeat in range(2)]
        turns += [turn(specs[NATIVE], repeat, 0.4 + repeat, cpu_s=0.5, sent_bytes=[20e6]) for repeat in range(2)]
        text = all_tables(turns).split("## Reliability")[0]
        rows = {cells(line)[0]: cells(line) for line in text.splitlines() if line.startswith("| ")}
        assert [cell.split(" ")[0] for cell in rows[NATIVE][3:5]] == ["0.250", "0.333"]
        assert rows[NATIVE][9].startswith("100"), "20 MB in 0.2 s"
        assert [cell.split(" ")[0] for cell in rows[NATIVE][6:8]] == ["0.200", "0.500"]
        assert rows[NATIVE][10:] == ["20.0", "1.00"]
        assert rows[OURS][-2:] == ["20.2", "1.01"]
        assert rows[OURS][4] == rows[OURS][7] == "1"
        assert ALONE not in rows

    def test_the_rate_counts_the_bytes_of_the_gradient_whatever_the_codec(self) -> None:
        specs = [spec for specs in full_plan() for spec in specs if spec.contender in (OURS_8BIT, ALONE)]
        text = all_tables([turn(spec, 0, 0.1 if spec.contender == ALONE else 1.1) for spec in specs])
        rows = [line for line in text.split("## Averaging")[1].splitlines() if line.startswith(f"| {OURS_8BIT} ")]
        assert [cells(row)[9] for row in rows[:2]] == ["20.0", "100"]
        assert "Seconds per global step" not in text, "none was measured"

    def test_large_gradients_are_averaged_by_every_engine_between_any_number_of_peers(self) -> None:
        specs = averaging_specs(50, peers=4)
        assert {spec.case for spec in specs} == {Case(50, 4, 0.2)}
        assert {OURS, NATIVE, NATIVE_CLEAR, DDP, ALONE} <= {spec.contender for spec in specs}
        (clear,) = (spec for spec in specs if spec.contender == NATIVE_CLEAR)
        assert clear.options["insecure_lan"]
        assert clear.ideal_bytes == pytest.approx(1.5 * 50e6 * 4)

    def test_the_gradients_of_a_deep_model_are_like_those_of_a_shallow_one(self) -> None:
        """With torch's own initial weights a hundred layers had gradients of zeros, and took three times as long."""
        for layers in (1, 100):
            (spec, *_) = averaging_specs(layers)
            module = Module(replace(spec, batch_s=0.0))
            torch.autograd.backward(module.training_step(next(iter(Batches(spec)))))
            for parameter in module.parameters():
                assert parameter.grad is not None
                assert 1e-4 < float(parameter.grad.abs().mean()) < 1


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


class TestBars:
    @pytest.mark.parametrize(
        ("values", "holds", "found"),
        [
            ([1.0, 2.0, 9.0], True, "2.00 s (1.00 to 9.00); 2 of 3 within"),
            ([2.1], False, "2.10 s"),
            ([math.nan], None, "not measured"),
        ],
    )
    def test_the_median_decides(self, values: list[float], holds: bool | None, found: str) -> None:
        assert at_most("what", 2.0, values, " s") == Bar(what="what", bar="<= 2.00 s", found=found, holds=holds)

    def test_a_bar_that_is_missed_stands_out(self) -> None:
        text = bars_table([at_most("one", 1.0, [2.0]), at_most("other", 1.0, [1.0])])
        assert [cells(row)[3] for row in text.splitlines()[2:]] == ["**no**", "yes"]

    def test_the_shortest_step_is_compared_with_stock_hivemind_in_the_same_repeat(self) -> None:
        spec = {one.contender: one for one in step_specs(2, 0.001)}
        turns = [turn(spec[NATIVE], repeat, 0.02 * (1 + repeat)) for repeat in range(3)]
        turns += [turn(spec[STOCK_SIZED], repeat, 0.1 * (1 + repeat)) for repeat in range(3)]
        shortest, stock, sized = bars_of_turns(turns)
        assert (shortest.found, shortest.holds) == ("0.0400 s (0.0200 to 0.0600); 3 of 3 within", True)
        assert (stock.found, stock.holds) == ("not measured", None)
        assert (sized.found, sized.holds) == ("0.200 (0.200 to 0.200); 3 of 3 within", True)
        assert bars_of_turns([turn(step_specs(2, 0.2)[1], 0, 0.8)]) == [], "not of the shortest step"

    @pytest.mark.parametrize("failure", ["no global step within 15 s", "no whole step within 38 s"])
    def test_where_stock_hivemind_makes_no_step_in_its_window_it_needs_that_long_at_least(self, failure: str) -> None:
        """With batches of a millisecond, two of three such turns end so."""
        spec = {one.contender: one for one in step_specs(2, 0.001)}
        none = replace(turn(spec[STOCK_SIZED], 0, math.nan), steps=0, rounds=[], failure=failure)
        broken = replace(turn(spec[STOCK], 0, math.nan), steps=0, rounds=[], failure="peer 0 ended with status 1")
        _, stock, sized = bars_of_turns([turn(spec[NATIVE], 0, 0.02), none, broken])
        assert stock.holds is None
        assert sized.found == number(0.02 / spec[STOCK_SIZED].window_s)
        assert "no whole step" in sized.what, "it is a bound"
        assert "no whole step" not in stock.what

    def test_averaging_has_a_bar_for_every_claim(self) -> None:
        specs = {one.contender: one for one in averaging_specs(50, peers=4)}
        seconds = {ALONE: 0.2, OURS: 1.2, NATIVE: 0.5, NATIVE_CLEAR: 0.4, DDP: 0.3}
        turns = [
            turn(specs[who], 0, step_s, cpu_s=step_s, sent_bytes=[specs[who].ideal_bytes])
            for who, step_s in seconds.items()
        ]
        found = {bar.what.removeprefix("averaging 50M, 4 peers: "): bar for bar in bars_of_turns(turns)}
        assert found["TLS, seconds / hivemind engine"].found == "0.300"
        assert found["TLS, CPU seconds / hivemind engine"].holds
        assert found["in the clear, seconds / hivemind engine"].holds is False
        assert found["in the clear, seconds / gloo"] == Bar(
            what="averaging 50M, 4 peers: in the clear, seconds / gloo", bar="<= 1.50", found="2.00", holds=False
        )
        assert found["native engine, bytes / ideal"].holds
        assert found["TLS, 8 bits, seconds / hivemind engine"].holds is None

    def test_a_joiner_is_measured_against_a_copy_and_a_step(self) -> None:
        joined = Joiner(copy_s=0.5, states=1, join_s=1.8, step_s=1.0, longest_s=2.5)
        copy, longest = joiner_bars([(50, joined)])
        assert (copy.found, copy.holds, longest.found, longest.holds) == ("1.60", True, "2.50", False)

    def test_a_joiner_of_a_small_model_has_two_seconds(self) -> None:
        joined = Joiner(copy_s=0.01, states=1, join_s=1.8, step_s=1.0, longest_s=2.5)
        join, longest = joiner_bars([(1, joined)])
        assert (join.what, join.found, join.holds) == ("joiner, 1M: join", "1.80 s", True)
        assert (longest.found, longest.holds) == ("2.50", False)

    def test_what_json_does_not_have_is_null(self) -> None:
        assert plain({"a": [math.nan, math.inf, 0.12345678], "time": 1}) == {"a": [None, None, 0.123457]}

    def test_a_measurement_that_failed_is_told(self) -> None:
        assert at_most("what", 2.0, [1.0, math.nan, 3.0]).found == "2.00 (1.00 to 3.00); 1 of 3 failed; 1 of 3 within"

    @pytest.mark.parametrize("holds", [True, None, False])
    def test_bars_that_were_written_are_in_the_table_of_all(
        self, holds: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for module in (bars, bench_results):
            monkeypatch.setattr(module, "RESULTS", tmp_path)
        monkeypatch.setattr(bars, "BENCHMARKS", {"a": "run a", "b": "run b"})
        facts = Run().facts()
        others = [is_so("one", "no fork", "none", holds=True)]
        mine = [Bar(what="other", bar="<= 1.00 s", found="0.50 s", holds=holds)]
        for name, found in (("a", others), ("b", mine)):
            write(name, report(name, facts, "| table |", found), facts, found, values={"a": [math.nan]})
        assert "| other | <= 1.00 s | 0.50 s |" in (tmp_path / "b.md").read_text()
        assert json.loads((tmp_path / "b.json").read_text())["values"] == {"a": [None]}
        assert bars.main() == (0 if holds else 1)
        lines = (tmp_path / "bars.md").read_text().splitlines()
        assert f"2 bars, {int(holds is False)} do not hold, {int(holds is None)} were not measured." in lines
        assert [line.split("|")[1].strip() for line in lines if facts["commit"] in line] == ["one", "other"]
        behind = {line.split("|")[7].strip() for line in lines if facts["commit"] in line}
        assert behind == {bars.changes_since(facts["commit"])}
        (tmp_path / "a.json").unlink()
        assert bars.main() == 1
        assert "| all of a |" in (tmp_path / "bars.md").read_text()

    def test_forks_are_counted_among_the_commits_of_all_lineages(self) -> None:
        calm, cut = (forks.schedule(0, kinds) for kinds in ((), ("cut",)))
        assert calm.commits > 0
        assert cut.commits > 0
        assert not calm.faults
        assert not calm.forks
        split = forks.Found(commits=40, forks=2, faults=3, one=False)
        assert forks.row("cut", [split, forks.Found(commits=60, forks=0, faults=1, one=True)]) == [
            "cut", "4", "100", "2", "20", "1 of 2", "1",
        ]  # fmt: skip


class TestPlans:
    def test_contenders_of_a_case_have_the_same_samples_and_computation_per_step(self) -> None:
        for specs in [*full_plan(), *quick_plan()]:
            assert len({(one.case, one.target_samples, one.batches, one.batch_s) for one in specs}) == 1
            assert len({one.contender for one in specs}) == len(specs)

    def test_a_contender_says_which_engine_it_is(self) -> None:
        for spec in (spec for specs in [*full_plan(), *quick_plan()] for spec in specs if spec.kind == "ours"):
            assert spec.contender.startswith(f"{spec.options.get('engine', 'hivemind')} engine")

    def test_every_case_has_ddp_to_compare_with(self) -> None:
        for specs in [*full_plan(), *quick_plan()]:
            assert {OURS, DDP} <= {one.contender for one in specs}


class TestWindows:
    """One that was cut off begins and ends in the middle of a step of peer 0."""

    @staticmethod
    def of(folder: Path, ends: Sequence[float]) -> Turn:
        found = Turn(spec=averaging_specs(1, 2)[0], repeat=0, load=0.0)
        first, last = {"time": 10.0, "epoch": 1, "cpu_s": 100.0}, {"time": 40.0, "epoch": 4, "cpu_s": 160.0}
        (folder / "window.json").write_text(json.dumps({"first": first, "last": last}), encoding="utf-8")
        marks = [{"time": at, "epoch": n, "samples": 8, "sent": 1000 * n} for n, at in enumerate(ends)]
        for index in range(2):
            (folder / f"marks-{index}.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in marks))
        read_turn(found, folder)
        return found

    def test_only_steps_that_lie_in_it_count(self, tmp_path: Path) -> None:
        found = self.of(tmp_path, [2.0, 8.0, 16.0, 24.0, 32.0, 42.0])
        assert (found.steps, found.step_s, found.cpu_s, found.failure) == (2, 8.0, 16.0, "")
        assert found.sent_bytes == [500.0]
        assert [len(peer) for peer in found.rounds] == [2, 2]

    def test_one_that_begins_and_ends_with_a_step_is_all_of_it(self, tmp_path: Path) -> None:
        found = self.of(tmp_path, [2.0, 10.0, 20.0, 30.0, 40.0])
        assert (found.steps, found.step_s, found.cpu_s) == (3, 10.0, 20.0)

    def test_the_end_of_a_single_step_is_no_measurement(self, tmp_path: Path) -> None:
        found = self.of(tmp_path, [5.0, 25.0, 45.0])
        assert math.isnan(found.step_s)
        assert found.failure == "no whole step within 30 s"

    def test_a_step_that_hangs_counts_for_as_long_as_it_was_seen(self, tmp_path: Path) -> None:
        found = self.of(tmp_path, [2.0, 10.0, 12.0, 14.0])
        assert (found.steps, found.step_s, found.cpu_s, found.failure) == (2, 10.0, 20.0, "")


def test_repeats_of_before_count_with_those_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench_more.RESULTS", tmp_path)
    monkeypatch.setattr(bench_results, "RESULTS", tmp_path)
    plan = [averaging_specs(1, 2)]
    seen = Round(time=5.0, advanced=1, samples=8, contributors=2, fraction=1.0, wait_s=0.25)
    measured = [
        Turn(spec=spec, repeat=0, load=0.5, steps=6, step_s=0.5, cpu_s=0.25, rounds=[[seen]], history=[[seen, seen]])
        for spec in plan[0]
    ]
    measured[0].step_s, measured[0].failure = math.nan, "no global step"
    facts = {
        "date": "monday",
        "commit": "one",
        "repeats": "1",
        "cores": "2",
        "command": "a",
        "duration": "b",
        "load": "c",
    }
    with pytest.raises(OtherMeasurement, match="not there"):
        measured_before("averaging", plan, facts)
    write("averaging", "", facts, [], turns=[asdict(one) for one in measured])
    later = {**facts, "commit": "two", "date": "tuesday", "repeats": "2"}
    found, before = measured_before("averaging", plan, later)
    assert [one.spec for one in found] == plan[0]
    assert math.isnan(found[0].step_s)
    assert (found[1].step_s, found[1].repeat, found[1].failure) == (0.5, 0, "")
    (again,) = found[1].all_rounds
    assert replace(again, time=5.0) == seen
    assert both(before, later) == {
        "date": "monday; tuesday",
        "commit": "one; two",
        "repeats": "2",
        "cores": "2",
        "command": "a",
        "duration": "b",
        "load": "c",
    }
    assert both({}, later) == later
    with pytest.raises(OtherMeasurement, match="cores '2', this is '4'"):
        measured_before("averaging", plan, {**facts, "cores": "4"})
    longer = [replace(spec, window_s=2 * spec.window_s) for spec in plan[0]]
    with pytest.raises(OtherMeasurement, match="other turns"):
        measured_before("averaging", [longer], facts)
    another = averaging_specs(1, 4)
    assert len(measured_before("averaging", [another], facts)[0]) == len(measured), "those of another case stay"
    assert [next_repeat(found, specs) for specs in (plan[0], another)] == [1, 0]


def test_each_case_goes_on_with_its_own_next_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "run.run_turn", lambda spec, repeat, keep: Turn(spec=spec, repeat=repeat, load=0.0, total_s=1.0)
    )
    plan = [averaging_specs(1, 2), averaging_specs(1, 4)]
    turns = run_repeats(plan, 1e6, None, [5, 0])
    found = {peers: sorted({one.repeat for one in turns if one.spec.peers == peers}) for peers in (2, 4)}
    assert found == {2: [5, 6], 4: [*range(7)]}
    slow = [(one.spec.peers, one.repeat) for one in turns if one.spec.once]
    assert set(slow) == {(2, 5), (4, 0)}, "what is measured once is so in the first repeat that there is"
    again = run_repeats(plan, 0.0, None, [7, 7], turns)
    assert {one.repeat for one in again} == {7}, "one more, if it is asked for"
    assert not any(one.spec.once for one in again)


def test_what_was_handed_to_another_peer_is_not_counted_twice() -> None:
    batch, step = {"event": "BatchAccumulated", "batch_samples": BATCH}, {"event": "EpochCommitted"}
    with Herd() as herd:
        herd._count = 2

        def twice(**samples: int) -> int:
            slow = [{"event": "PeerStarted", "peer_id": "slow"}, batch, batch]
            slow.append({"event": "GradientHandedOver", "peer": "quick", "samples": samples["handed"]})
            slow.append({"event": "RoundMissed", "samples_lost": samples["lost"]})
            slow.append({**step, "samples": samples["slow"]})
            quick = [{"event": "PeerStarted", "peer_id": "quick"}, batch]
            quick.append({"event": "GradientCarried", "peer": "slow", "samples": samples["carried"]})
            quick.append({**step, "samples": samples["quick"]})
            for number, events in enumerate((slow, quick)):
                text = "".join(json.dumps(one) + "\n" for one in events)
                (herd.folder / f"peer{number}.events.jsonl").write_text(text, encoding="utf-8")
            return herd.counted_twice()

        two, three = 2 * BATCH, 3 * BATCH
        assert twice(handed=two, lost=0, slow=0, carried=two, quick=three) == 0
        assert twice(handed=two, lost=BATCH, slow=0, carried=two, quick=three) == BATCH
        assert twice(handed=0, lost=two, slow=0, carried=two, quick=three) == 0, "the other one was lost, and came back"
        assert twice(handed=0, lost=0, slow=0, carried=two, quick=three) == 0, "killed before it could tell"
        assert twice(handed=0, lost=0, slow=BATCH, carried=two, quick=three) == BATCH, "given by both"
        assert twice(handed=BATCH, lost=0, slow=0, carried=BATCH, quick=three) == BATCH
