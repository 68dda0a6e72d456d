"""The table of faults: a session replaces what it has run, and nothing else."""

from fault_results import Results


def test_a_session_replaces_its_own_sections(tmp_path):
    path = tmp_path / "RESULTS.md"
    first = Results()
    first.add("engine", killed_at="1 s", outcome="went on")
    first.add("driver", killed_at="2 s", outcome="went on")
    first.add("driver", killed_at="3 s", outcome="lost a prompt")
    first.write(path)
    second = Results()
    second.add("driver", killed_at="4 s", outcome="went on")
    second.write(path)
    assert path.read_text().partition("## ")[2] == (
        "driver\n\n| killed at | outcome |\n| --- | --- |\n| 4 s | went on |\n\n"
        "## engine\n\n| killed at | outcome |\n| --- | --- |\n| 1 s | went on |\n"
    )
    Results().write(path)
    assert "4 s" in path.read_text()
