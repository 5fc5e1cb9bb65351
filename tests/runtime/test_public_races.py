"""The races of public reports: the sanitizer names the line, orders change the result, and the fix silences both."""

from pathlib import Path

import pytest
import torch
from public_races import REPORTS

ALL = pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.name)
pytestmark = [
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def no_group():
    yield
    if torch.distributed.is_initialized():  # some programs make one
        torch.distributed.destroy_process_group()


@ALL
@pytest.mark.parametrize("mode", ["inline", "async", "sync"])
def test_the_sanitizer_names_the_line(report, mode):
    with torch.openreg.launch_mode(mode):
        assert report.sanitized(False) == report.race
        assert report.sanitized(True) is None


@ALL
def test_the_result_without_the_fix(report):
    assert report.result() == report.wrong


@ALL
def test_the_fix_gives_one_result_in_every_order(report):
    assert torch.openreg.schedules(report.run, True, seeds=5).passed


def test_the_documentation():
    """Each race is exposed, and docs/streams.md lists it with its report."""
    assert all(report.race or report.wrong == "some orders" for report in REPORTS)
    text = (Path(__file__).parents[2] / "docs/streams.md").read_text()
    found = {"some orders": "yes", "always": "the same in every order", "never": "no"}
    for report in REPORTS:
        pattern = report.pattern[0].upper() + report.pattern[1:]
        row = f"[{report.name}]({report.url}) | {pattern}. | {'yes' if report.race else 'no'} | {found[report.wrong]} |"
        assert row in text
    assert f"exposed {len(REPORTS)} of {len(REPORTS)}\n" in text
    assert (
        f"The sanitizer finds {sum(report.race is not None for report in REPORTS)} of them and names the line. " in text
    )
    assert f"Orders of streams find {sum(report.wrong == 'some orders' for report in REPORTS)}." in text
