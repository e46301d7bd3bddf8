"""The files in deploy/ do what they say: their own command lines are run, and give what one process gives.

No Slurm and no cluster is needed: a stand-in for sbatch sets what Slurm sets, and container commands get the variables that
Kubernetes gives. deploy/ray has tests of its own, tests/ray.
"""
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from conftest import BIN, GLM, ROOT, files_of, ok

DEPLOY = ROOT / "deploy"
SLURM = DEPLOY / "slurm"
KUBERNETES = DEPLOY / "kubernetes" / "convert.yaml"
SCRIPTS = sorted(SLURM.glob("*.sbatch"))

# Runs every task of a job at once, one after the other, and answers with the job's number. A job whose dependency has failed
# is not run. Tasks named in FAIL_TASKS fail.
SBATCH = f"""\
#!{sys.executable}
import os, subprocess, sys
state = os.environ["SBATCH_STATE"]
options, args = dict(), sys.argv[1:]
while args[0].startswith("--"):
    name, _, value = args.pop(0)[2:].partition("=")
    options[name] = value
assert set(options) <= {{"parsable", "array", "dependency", "kill-on-invalid-dep"}}, options
job = len(os.listdir(state)) + 1
result = os.path.join(state, str(job))
kind, _, on = options.get("dependency", "").partition(":")
assert kind in ("", "afterok")
status = 0
if on and open(os.path.join(state, on)).read() != "0":
    status = "never"
else:
    tasks = []
    for item in options.get("array", "").partition("%")[0].split(","):
        first, _, last = item.partition("-")
        tasks += range(int(first), int(last or first) + 1) if item else [None]
    for task in tasks:
        env = {{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}}
        env.update(SLURM_JOB_ID=str(job), SLURM_CPUS_PER_TASK="1")
        if task is not None:
            env.update(SLURM_ARRAY_JOB_ID=str(job), SLURM_ARRAY_TASK_ID=str(task))
        failing = str(task) in os.environ.get("FAIL_TASKS", "").split(",")
        # Slurm runs a copy of the script.
        command = ["false"] if failing else ["bash", "-s", "--", *args[1:]]
        with open(args[0]) as script:
            done = subprocess.run(command, stdin=script, env=env, stdout=sys.stderr)
        status = max(status, done.returncode)
with open(result, "w") as file:
    file.write(str(status))
print(job if "parsable" in options else f"Submitted batch job {{job}}")
"""


# Slurm


@pytest.fixture
def slurm(tmp_path):
    """slurm(commands, **environment): runs shell commands where sbatch and ggshard are on the PATH."""
    tools, state = tmp_path / "tools", tmp_path / "state"
    tools.mkdir()
    state.mkdir()
    (tools / "sbatch").write_text(SBATCH)
    (tools / "sbatch").chmod(0o755)
    (tools / "ggshard").symlink_to(BIN)

    def shell(commands, **environment):
        env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SBATCH_STATE": str(state), **environment}
        done = subprocess.run(["bash", "-euc", commands], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done

    return shell


def submission(out, model=GLM):
    """The two commands that the head of convert.sbatch tells to submit, for a small model."""
    text = (SLURM / "convert.sbatch").read_text()
    lines = re.findall(r"^#   (job=\$\(sbatch .*|sbatch --dependency=.*)$", text, re.M)
    assert len(lines) == 2
    commands = "\n".join(lines)
    for there, here in (("/models/glm5.gguf", model), ("/models/glm5-tp8", out), ("vllm-0.32", "hf")):
        assert there in commands
        commands = commands.replace(there, shlex.quote(str(here)))
    return commands


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_slurm_scripts_are_sound(script):
    subprocess.run(["bash", "-n", script], check=True)
    linter = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([linter, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    lines = script.read_text().splitlines()
    directives = [i for i, line in enumerate(lines) if line.startswith("#SBATCH ")]
    commands = [i for i, line in enumerate(lines) if line and not line.startswith("#")]
    assert directives and max(directives) < min(commands), "sbatch reads no directives after the first command"


def test_slurm_as_its_head_says(slurm, converted, tmp_path):
    out = tmp_path / "out"
    done = slurm(submission(out))
    assert "ok: " in done.stderr
    assert files_of(out) == files_of(converted(GLM, "--tp", 8))


def test_slurm_groups_of_ranks(slurm, converted, tmp_path):
    """Three ranks per task, and what is left for the last; then the seal, compared with the source."""
    out = tmp_path / "out"
    convert = f"sbatch --array=0-2%1 deploy/slurm/convert.sbatch {GLM} {out} 8"
    done = slurm(f"{convert}\nsbatch deploy/slurm/seal.sbatch {out} --source {GLM}", RANKS_PER_TASK="3")
    assert "every byte compared" in done.stderr
    assert files_of(out) == files_of(converted(GLM, "--tp", 8))


def test_slurm_a_failed_task_is_not_sealed_over_and_the_same_again_resumes(slurm, converted, tmp_path):
    out = tmp_path / "out"
    slurm(submission(out), FAIL_TASKS="3,5")
    assert len(list(out.glob("*.done"))) == 6 and not (out / "ggshard.json").exists()
    done = slurm(submission(out))
    assert done.stderr.count("(1 of them finished before)") == 6
    assert files_of(out) == files_of(converted(GLM, "--tp", 8))


@pytest.mark.parametrize("arguments", [[], ["source", "output"]])
def test_slurm_says_how_to_use_it(slurm, arguments):
    done = slurm(f"bash deploy/slurm/convert.sbatch {' '.join(arguments)} || echo status $?", SLURM_ARRAY_TASK_ID="0")
    assert "usage: sbatch --array=0-LAST" in done.stderr and "status 2" in done.stdout


# Kubernetes


@pytest.fixture(scope="module")
def kubernetes():
    """{name: object} of the file."""
    return {document["metadata"]["name"]: document for document in yaml.safe_load_all(KUBERNETES.read_text())}


def pod(job):
    return job["spec"]["template"]["spec"]


def run_container(container, mounts, **environment):
    """Runs a container's command as the kubelet would, with its variables and other places for its mounts."""

    def expand(word):
        word = re.sub(r"\$\((\w+)\)", lambda m: environment.get(m[1], m[0]), word)
        for inside, outside in mounts.items():
            if word == inside or word.startswith(f"{inside}/"):
                return str(outside) + word.removeprefix(inside)
        return word

    command = [expand(word) for word in container["command"] + container["args"]]
    assert command[0] == "ggshard"
    return ok(*command[1:])


@pytest.mark.parametrize("version", ["1.29", "1.33", "1.37"])
def test_kubernetes_objects_fit_the_schema(kubernetes, version):
    for document in kubernetes.values():
        kubernetes_validate.validate(document, version, strict=True)


def test_kubernetes_objects_fit_each_other(kubernetes):
    convert, seal = kubernetes["ggshard-convert"], kubernetes["ggshard-seal"]
    [container] = pod(convert)["containers"]
    args = container["args"]
    assert convert["spec"]["completionMode"] == "Indexed"
    assert convert["spec"]["completions"] == int(args[args.index("--tp") + 1])
    assert args[args.index("--ranks") + 1] == "$(JOB_COMPLETION_INDEX)" and "--resume" in args
    assert seal["spec"]["suspend"] is True
    # What the API server checks beyond the schema.
    assert pod(convert)["restartPolicy"] == "Never", "backoffLimitPerIndex and podFailurePolicy demand it"
    names = [rule["onExitCodes"]["containerName"] for rule in convert["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert names == [container["name"]]
    for job in (convert, seal):
        containers = pod(job).get("initContainers", []) + pod(job)["containers"]
        volumes = {volume["name"] for volume in pod(job)["volumes"]}
        assert {mount["name"] for c in containers for mount in c["volumeMounts"]} == volumes
        assert all(c["image"] == container["image"] and c["securityContext"]["readOnlyRootFilesystem"] for c in containers)
    read_only = {mount["name"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
    assert read_only == {"source": True, "out": False}
    assert kubernetes["gguf-out"]["spec"]["accessModes"] == ["ReadWriteMany"]


def test_kubernetes_containers_make_a_checkpoint(kubernetes, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    shutil.copy(GLM, source / "model.gguf")
    mounts = {"/source": source, "/out": out}
    convert, seal = kubernetes["ggshard-convert"], kubernetes["ggshard-seal"]
    [container] = pod(convert)["containers"]
    for index in range(convert["spec"]["completions"]):
        run_container(container, mounts, JOB_COMPLETION_INDEX=str(index))
    [sealing], [verifying] = pod(seal)["initContainers"], pod(seal)["containers"]
    for _ in range(2):  # A Job may start a pod again that had succeeded.
        run_container(sealing, mounts)
        assert "ok: " in run_container(verifying, mounts)
    run_container(container, mounts, JOB_COMPLETION_INDEX="0")
    single = tmp_path / "single"
    ok("convert", source / "model.gguf", single, "--tp", convert["spec"]["completions"])
    assert files_of(out / "model-tp8") == files_of(single)


def test_the_image_is_built_from_what_is_there():
    text = (DEPLOY / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.M):
        for name in line.split()[:-1]:
            assert (ROOT / name).exists(), name
    toolchain = tomllib.loads((ROOT / "rust-toolchain.toml").read_text())["toolchain"]["channel"]
    assert f"FROM rust:{toolchain}-" in text
    assert f":{tomllib.loads((ROOT / 'Cargo.toml').read_text())['package']['version']}" in KUBERNETES.read_text()
