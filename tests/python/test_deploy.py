"""The workflow in deploy/ci: its step that verifies is run as it stands."""
import os
import subprocess
import textwrap

import pytest
from conftest import BIN, ROOT

WORKFLOW = ROOT / "deploy" / "ci" / "verify.yml"


def script(step):
    """What a step runs."""
    lines = WORKFLOW.read_text().split(f"- name: {step}\n")[1].split("run: |\n")[1].split("\n\n")[0]
    return textwrap.dedent(lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("deploy") / "a folder"
    subprocess.run([BIN, "convert", ROOT / "fixtures" / "families" / "llama.gguf", out, "--tp", "2"], check=True, capture_output=True)
    return out


@pytest.mark.parametrize(
    "case, status, says",
    [
        ("whole", 0, "Verified"),
        ("source", 0, "Verified"),
        ("damaged", 1, "::error::{} differs from what it should be"),
        ("without manifest", 1, "::error::{} could not be checked"),
    ],
)
def test_the_step_that_verifies(folder, tmp_path, case, status, says):
    checked = tmp_path / "a copy"
    subprocess.run(["cp", "-r", folder, checked], check=True)
    if case == "damaged":
        with open(sorted(checked.glob("*.safetensors"))[0], "ab") as file:
            file.write(b"x")
    if case == "without manifest":
        (checked / "ggshard.json").unlink()
    source = ROOT / "fixtures" / "families" / "llama.gguf" if case == "source" else ""
    environment = {**os.environ, "FOLDER": str(checked), "SOURCE": str(source), "PATH": f"{BIN.parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-e", "-c", script("Verify")], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert says.format(checked) in done.stdout
    assert bool((tmp_path / "report.json").read_text()) == (case != "without manifest")
