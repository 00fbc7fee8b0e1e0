"""Files that start a script on TPUs: a TPU VM by queued resources, GKE by JobSet, and SkyPilot.

They follow the documentation of Google Cloud, JobSet and SkyPilot; none of them was run here.
"""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tpuport.foundation.files import write_atomically
from tpuport.repository.sizes import Blank
from tpuport.sharding.topology import Topology, find_topology


@dataclass(frozen=True)
class _Generation:
    """The names of a generation: of Cloud TPU's accelerators and software, of GKE's machines."""

    accelerator: str
    runtime: str
    gke: str
    machine: str


_GENERATIONS = {
    "v5e": _Generation("v5litepod", "v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice", "ct5lp-hightpu"),
    "v5p": _Generation("v5p", "v2-alpha-tpuv5", "tpu-v5p-slice", "ct5p-hightpu"),
    "v6e": _Generation("v6e", "v2-alpha-tpuv6e", "tpu-v6e-slice", "ct6e-standard"),
}
_CHIPS_OF_HOST = 4
_SETUP = 'pip install "tpuport[jax,tpu,train]"'

_STACK = "ulimit -s unlimited"

_RUN = """\
#!/bin/sh
# Starts the script, in this folder if it is here, else in the repository that was read.
set -eu
[ -e {script} ] || cd {root}
{blanks}exec {command}
"""

_VM = """\
#!/bin/sh
# Asks for a slice as a queued resource, copies this repository and starts run.sh on all its hosts.
# Usage: ZONE=us-east5-b sh {file} [create | start | delete]
set -eu
: "${{ZONE:?Set ZONE to a zone that has {accelerator}}}"
NAME="${{NAME:-{name}}}"
case "${{1:-create}}" in
create)
  gcloud compute tpus queued-resources create "$NAME" --node-id="$NAME" --zone="$ZONE" \\
    --accelerator-type={accelerator} --runtime-version={runtime}
  echo "Wait until it is ACTIVE: gcloud compute tpus queued-resources describe $NAME --zone=$ZONE"
  ;;
start)
  gcloud compute tpus tpu-vm scp --recurse {root} "$NAME":project --zone="$ZONE" --worker=all
  gcloud compute tpus tpu-vm scp {run} "$NAME":run.sh --zone="$ZONE" --worker=all
  gcloud compute tpus tpu-vm ssh "$NAME" --zone="$ZONE" --worker=all \\
    --command='{setup} && cd project && sh ../run.sh'
  ;;
delete)
  gcloud compute tpus queued-resources delete "$NAME" --zone="$ZONE" --force
  ;;
esac
"""

_JOBSET = """\
# kubectl apply -f {file}
{blanks}# IMAGE is an image of yours, with the repository in /project and tpuport[jax,tpu,train].
# The node pool: gcloud container node-pools create {name} --machine-type={machine} \\
#   --tpu-topology={shape} --num-nodes={hosts}
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
  annotations:
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  failurePolicy:
    maxRestarts: 3
  replicatedJobs:
  - name: workers
    replicas: 1
    template:
      spec:
        parallelism: {hosts}
        completions: {hosts}
        backoffLimit: 0
        template:
          spec:
            restartPolicy: Never
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: {gke}
              cloud.google.com/gke-tpu-topology: {shape}
            containers:
            - name: train
              image: IMAGE
              workingDir: /project
              command: {command}
              ports:
              - containerPort: 8471
              resources:
                limits:
                  google.com/tpu: {chips}
"""

_SKY = """\
# sky launch {file}
{blanks}name: {name}
resources:
  accelerators: tpu-{accelerator}
  accelerator_args:
    runtime_version: {runtime}
workdir: {workdir}
setup: |
  {setup}
run: {run_command}
"""


def write_launch_files(
    root: Path,
    out: Path,
    words: Sequence[str],
    options: Sequence[str],
    name: str,
    blanks: Sequence[Blank] = (),
    *,
    unlimited_stack: bool = False,
) -> list[str]:
    """Write `run.sh` and the launch files for a slice, and return their names.

    Args:
        root: The repository.
        out: Where the files go.
        words: The script, relative to the repository, and its arguments.
        options: Options of `tpuport run`.
        name: The slice, such as `v6e-8`.
        blanks: What in the arguments a person has to fill in: the files stop or say so.
        unlimited_stack: Whether libtpu needs a stack without a limit for the script.

    Raises:
        UsageError: there is no such slice.
    """
    topology = find_topology(name)
    places = {"script": shlex.quote(words[0]), "root": shlex.quote(str(root.resolve()))}
    words = ["tpuport", "run", *options, *words]
    command = " ".join(_shell_word(word, blanks) for word in words)
    asked = "".join(_asked(blank) for blank in blanks)
    if unlimited_stack:
        asked += f"# libtpu crashes on this model otherwise.\n{_STACK}\n"
        words = ["sh", "-c", f"{_STACK} && exec {shlex.join(words)}"]
    files = {
        "run.sh": _RUN.format(command=command, blanks=asked, **places),
        **_launch_files(root, out, topology, words, blanks),
    }
    for file, text in files.items():
        mode = 0o755 if file.endswith(".sh") else None
        write_atomically(out / file, text.encode(errors="surrogateescape"), mode=mode)
    return list(files)


def _shell_word(word: str, blanks: Sequence[Blank]) -> str:
    """Quote a word for a shell, with a variable for a blank: `data.path="$FILL_IN_PATH"`."""
    for blank in blanks:
        if word.endswith(blank.variable):
            start = word.removesuffix(blank.variable)
            return f'{shlex.quote(start) if start else ""}"${blank.variable}"'
    return shlex.quote(word)


def _asked(blank: Blank) -> str:
    """Return lines of a shell script that have a value filled in, or stop."""
    hint = re.sub(r"[^\w ,.;:()/+=-]", " ", blank.hint)
    return (
        f"# After `:-` fill in {_line(blank.hint)}.\n"
        f'{blank.variable}="${{{blank.variable}:-}}"\n'
        f': "${{{blank.variable}:?Fill in {hint}}}"\n'
    )


def _line(text: str) -> str:
    return " ".join(text.split())


def _launch_files(
    root: Path, out: Path, topology: Topology, words: Sequence[str], blanks: Sequence[Blank]
) -> dict[str, str]:
    family, shape = topology.libtpu_name.split(":")
    generation = _GENERATIONS.get(family)
    if generation is None:
        return {}
    size = topology.name.rpartition("-")[2] if "-" in topology.name else str(topology.num_chips)
    accelerator = f"{generation.accelerator}-{size}"
    chips = min(topology.num_chips, _CHIPS_OF_HOST)
    values = {
        "name": _label(f"{root.resolve().name}-{family}-{size}"),
        "accelerator": accelerator,
        "runtime": generation.runtime,
        "gke": generation.gke,
        "machine": f"{generation.machine}-{chips}t",
        "shape": shape,
        "hosts": -(-topology.num_chips // _CHIPS_OF_HOST),
        "chips": chips,
        "root": shlex.quote(str(root.resolve())),
        "run": shlex.quote(str((out / "run.sh").resolve())),
        "workdir": json.dumps(str(root.resolve())),
        "command": json.dumps(list(words)),
        "run_command": json.dumps(shlex.join(words)),
        "setup": _SETUP,
        "blanks": "".join(
            f"# Replace {blank.variable}: {_line(blank.hint)}.\n" for blank in blanks
        ),
    }
    templates = {"tpu_vm.sh": _VM, "jobset.yaml": _JOBSET, "sky.yaml": _SKY}
    return {file: text.format(file=file, **values) for file, text in templates.items()}


def _label(name: str) -> str:
    """Return a name as Kubernetes and Cloud TPU allow it."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:50] or "run"
