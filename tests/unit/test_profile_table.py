"""benchmarks/profile_table.py: kernels go to the call that launched them; numbers add up."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts: plain names

import profile_table
from profile_table import CLOCKS, MEANS, SUMS

OWN, PEERS = "hopper_fwd_kernel", "void cutlass::device_kernel<flash>"


def printed(path: Path, peer: str, *kernels: tuple[str, int, float]) -> Path:
    """What ncu and one_call.py print; of each kernel the name, its clocks, and all percentages."""
    columns = ["ID", "Kernel Name", "device__attribute_display_name"]
    columns += [*SUMS.values(), *MEANS.values()]
    with open(path, "w", newline="") as file:
        file.write("==PROF== Connected\ntorch 2.11.0, triton 3.6.0\n")
        file.write(f"forward of full 1024: keel, then {peer}; they differ by 0.003\n")
        out = csv.DictWriter(file, columns, quoting=csv.QUOTE_ALL)
        out.writeheader()
        out.writerow(dict.fromkeys(columns, ""))  # units
        for number, (name, clocks, share) in enumerate(kernels):
            line = dict.fromkeys(SUMS.values(), str(clocks // 2)) | {CLOCKS: f"{clocks:,}"}
            line |= dict.fromkeys(MEANS.values(), str(share))
            line |= {"ID": str(number), "Kernel Name": name, columns[2]: "a GPU"}
            out.writerow(line)
    return path


def test_kernels_of_a_call_are_added_up(tmp_path, capsys):
    kernels = [(OWN, 9000, 80.0), (PEERS, 2000, 20.0), (PEERS, 6000, 60.0)]
    raw = printed(tmp_path / "raw.csv", "fa3", *kernels)
    profile_table.main([str(raw), "--out", str(tmp_path)])
    own, peer = csv.DictReader((tmp_path / "profile.csv").open())
    assert (own["who"], own["kernels"], own["clocks"]) == ("keel", "1", "9000")
    assert (peer["who"], peer["kernels"], peer["clocks"]) == ("fa3", "2", "8000")
    assert (peer["instructions"], peer["tensor_pct"]) == ("4000", "50")  # (2 * 20 + 6 * 60) / 8
    assert (peer["gpu"], peer["torch"], peer["triton"]) == ("a GPU", "2.11.0", "3.6.0")
    shown = (
        "| forward of full 1024 | 1.125 | 80.0 / 50.0 % | 1.12 | 80.00 / 50.00 | 100.0 / 100.0 %"
    )
    assert shown in capsys.readouterr().out


def test_without_names_that_tell_both_launch_as_many(tmp_path):
    raw = printed(tmp_path / "raw.csv", "keel-plain", *[(OWN, 100 * n, 1.0) for n in (1, 2, 3, 4)])
    own, plain = profile_table.read(raw)
    assert (own.clocks, plain.clocks, plain.who) == (300, 700, "keel-plain")


def test_kernels_of_nobody_are_an_error(tmp_path):
    raw = printed(tmp_path / "raw.csv", "fa3", (OWN, 100, 1.0))
    with pytest.raises(SystemExit, match="1 cells, but kernels of 1 calls"):
        profile_table.read(raw)
    for other in (b"nothing\n", b"\x89PNG", b'"cell","who"\n"a","b"\n'):
        raw.write_bytes(other)
        with pytest.raises(SystemExit, match=r"no cells of one_call\.py or no kernels"):
            profile_table.read(raw)


def test_what_cannot_be_read_says_what_to_do(tmp_path):
    with pytest.raises(SystemExit, match=r"nowhere\.csv is no file: have ncu print to it"):
        profile_table.main([str(tmp_path / "nowhere.csv")])
    raw = printed(tmp_path / "raw.csv", "fa3", (OWN, 100, 1.0), (PEERS, 100, 1.0))
    asked = SUMS["instructions"]
    raw.write_text(raw.read_text().replace('"50"', '"n/a"'))
    with pytest.raises(SystemExit, match=r"of forward of full 1024, keel, is no number .*n/a"):
        profile_table.main([str(raw), "--out", str(tmp_path)])
    raw.write_text(raw.read_text().replace(asked, "another"))
    with pytest.raises(SystemExit, match=rf"lacks {asked}: call ncu with the sections and metrics"):
        profile_table.main([str(raw), "--out", str(tmp_path)])
    assert not (tmp_path / "profile.csv").exists()


def test_what_ncu_is_asked_for(capsys):
    profile_table.main(["--metrics"])
    asked = capsys.readouterr().out.strip().split(",")
    assert asked == [SUMS[name] for name in profile_table.ASKED]
