"""docs/results.md is what the CSV files say."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # scripts: plain names

import results_page  # noqa: E402


def test_the_committed_page_is_the_generated_one() -> None:
    text = results_page.make_page(results_page.RESULTS, results_page.PAGE)
    assert results_page.PAGE.read_text(encoding="utf-8") == text, (
        "run python benchmarks/results_page.py"
    )


def test_every_csv_has_its_section_and_links_lead_somewhere() -> None:
    found = {path.name for path in results_page.RESULTS.glob("*.csv")}
    assert found <= set(results_page.SECTIONS)
    text = results_page.PAGE.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert {Path(link).name for link in links} >= found
    for link in links:
        assert (results_page.PAGE.parent / link).exists(), link


def test_a_changed_figure_changes_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, page = tmp_path / "results", tmp_path / "results.md"
    shutil.copytree(results_page.RESULTS, results)
    arguments = ["--results", str(results), "--page", str(page)]
    assert results_page.main([*arguments, "--check"]) == 1  # there is none yet
    assert results_page.main(arguments) == 0
    assert results_page.main([*arguments, "--check"]) == 0
    path = results / "muon.csv"
    before = path.read_text()
    first = before.splitlines()[1].split(",")
    assert first[:3] == ["keel", "4096x4096", "2.447"]
    path.write_text(before.replace(",2.447,", ",9.447,"))
    assert results_page.main([*arguments, "--check"]) == 1
    assert "is not what the CSV files say" in capsys.readouterr().out
    old = page.read_text()
    assert results_page.main(arguments) == 0
    new = page.read_text()
    assert [a for a, b in zip(old.splitlines(), new.splitlines(), strict=True) if a != b] == [
        "| 4096 × 4096 | 3.30 ms, 625 TFLOP/s | 2.45 ms, 842 TFLOP/s | 1.35x |"
    ]


def test_sections_come_with_their_files(tmp_path: Path) -> None:
    (tmp_path / "qk_clip.csv").write_text(
        "what,ms,beside_ms,beside,layers,heads,hidden,gpu,torch\n"
        '"step, idle",0.09,0.05,graph,60,64,7168,G,2\n'
    )
    text = results_page.make_page(tmp_path, tmp_path / "results.md")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["QK-Clip, milliseconds"]
    assert "| step, idle | 0.09 | graph | 0.05 | 60 | 64 | 7168 |" in text
    assert "Measured on: G; torch 2." in text
    with pytest.raises(SystemExit, match="is no folder"):
        results_page.main(["--results", str(tmp_path / "nowhere")])


def test_the_newest_of_rows_of_the_same(tmp_path: Path) -> None:
    (tmp_path / "backward_memory.csv").write_text(
        "mask,tokens,hq,hk,d,provider,extra_mib,stated_mib,q_mib\n"
        "full,64,2,1,8,keel,7,7,1\nfull,64,2,1,8,fa3,9,nan,1\nfull,64,2,1,8,keel,5,5,1\n"
    )
    text = results_page.make_page(tmp_path, tmp_path / "results.md")
    rows = [line for line in text.splitlines() if line.startswith("| full")]
    assert rows == ["| full | 64 | 2 | 1 | 8 | keel | 5 | 5 | 1 |",
                    "| full | 64 | 2 | 1 | 8 | fa3 | 9 | nan | 1 |"]  # fmt: skip
