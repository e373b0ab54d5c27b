"""`launch.report`: the page again, from the files of a run."""

from jaxrl_post.records.directory import RunDirectory
from jaxrl_post.records.sinks import MetricsLog
from launch import report


def test_the_report_is_written_again(tmp_path, capsys):
    directory = RunDirectory(tmp_path)
    with MetricsLog(directory) as log:
        log.write(1, {"reward/mean": 0.25})
    assert report.main([str(tmp_path), "--title", "A second look"]) == 0
    assert capsys.readouterr().out == f"report: {directory.report}\n"
    assert "A second look" in directory.report.read_text()


def test_a_folder_without_a_run_is_an_error(tmp_path, capsys):
    assert report.main([str(tmp_path)]) == 1
    said = f"error: run_dirs: {tmp_path} is no run directory, it has no metrics.jsonl"
    assert said in capsys.readouterr().out
