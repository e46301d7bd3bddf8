"""Every fault of the crash harness, at a few points of every phase. `make test-crash` runs all points."""
import os
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import BIN

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "crash"))
import harness as crash  # noqa: E402


@pytest.fixture(scope="module", params=crash.CONVERSIONS)
def harness(request):
    # Not below pytest's folder, which an unprivileged user cannot reach.
    with tempfile.TemporaryDirectory() as work:
        yield crash.Harness(BIN, work, crash.CONVERSIONS[request.param], every=100)


@pytest.mark.parametrize("fault", crash.FAULTS)
def test_whatever_happens_it_resumes_and_nothing_else_passes(harness, fault):
    if fault in crash.PRIVILEGED and os.geteuid() != 0:
        pytest.skip("only root mounts file systems")
    harness.rows.clear()
    try:
        crash.FAULTS[fault](harness)
    except crash.Unavailable as reason:
        pytest.skip(str(reason))
    runs = sum(row[0] for row in harness.rows.values())
    assert runs > 0 and not harness.failures, "\n".join(harness.failures)
