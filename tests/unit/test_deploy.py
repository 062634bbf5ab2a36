"""The files in deploy/ are well formed, and agree with each other and the program. No cluster is needed."""

import os
import re
import shlex
import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest
import yaml

from shoestring.config import Run
from shoestring.wire import keys
from tests.unit.launch.processes import LIMIT_S, clean_environment

DEPLOY = Path(__file__).parents[2] / "deploy"
KINDS = {"kuberay.yaml": ["RayJob"], "kubernetes.yaml": ["ConfigMap", "Service", "StatefulSet", "Job"]}


def document(**properties):
    """A mapping with exactly these fields; a name that ends in `_` need not be there."""
    return {
        "type": "object",
        "properties": {name.rstrip("_"): schema for name, schema in properties.items()},
        "required": [name for name in properties if not name.endswith("_")],
        "additionalProperties": False,
    }


def array(items):
    return {"type": "array", "items": items, "minItems": 1}


def either(*schemas):
    return {"oneOf": list(schemas)}


TEXT, COUNT, FLAG = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
QUANTITY = {"type": "string", "pattern": r"^[0-9]+(Ki|Mi|Gi|m)?$"}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
AMOUNTS = {"type": "object", "additionalProperties": QUANTITY, "minProperties": 1}
METADATA = document(name=NAME, labels_=TEXTS)
VOLUME = either(
    document(name=NAME, persistentVolumeClaim=document(claimName=NAME)),
    document(name=NAME, secret=document(secretName=NAME, defaultMode={"type": "integer", "maximum": 0o777})),
    document(name=NAME, emptyDir=document(medium={"const": "Memory"}, sizeLimit=QUANTITY)),
)
VARIABLE = either(
    document(name=TEXT, value={"type": "string"}),
    document(name=TEXT, valueFrom=document(fieldRef=document(fieldPath=TEXT))),
)
CONTAINER = document(
    name=NAME,
    image=TEXT,
    command_=array(TEXT),
    env_=array(VARIABLE),
    envFrom_=array(document(configMapRef=document(name=NAME))),
    ports_=array(document(name=NAME, containerPort=COUNT)),
    resources=document(requests=AMOUNTS, limits=AMOUNTS),
    volumeMounts=array(document(name=NAME, mountPath=TEXT, readOnly_=FLAG)),
)
POD = document(
    containers=array(CONTAINER),
    volumes=array(VOLUME),
    restartPolicy_={"enum": ["Never", "OnFailure"]},
    affinity_={"type": "object"},
)
TEMPLATE = document(metadata=document(labels=TEXTS), spec=POD)
RAY_TEMPLATE = document(spec=POD)
LABELS = document(matchLabels=TEXTS)

SCHEMAS = {
    "ConfigMap": document(apiVersion={"const": "v1"}, kind=TEXT, metadata=METADATA, data=TEXTS),
    "Service": document(
        apiVersion={"const": "v1"},
        kind=TEXT,
        metadata=METADATA,
        spec=document(
            clusterIP={"const": "None"},
            publishNotReadyAddresses=FLAG,
            selector=TEXTS,
            ports=array(document(name=NAME, port=COUNT)),
        ),
    ),
    "StatefulSet": document(
        apiVersion={"const": "apps/v1"},
        kind=TEXT,
        metadata=METADATA,
        spec=document(
            serviceName=NAME,
            replicas=COUNT,
            podManagementPolicy={"const": "Parallel"},
            selector=LABELS,
            template=TEMPLATE,
        ),
    ),
    "Job": document(
        apiVersion={"const": "batch/v1"},
        kind=TEXT,
        metadata=METADATA,
        spec=document(
            completionMode={"const": "Indexed"},
            completions=COUNT,
            parallelism=COUNT,
            backoffLimit=COUNT,
            template=TEMPLATE,
        ),
    ),
    "RayJob": document(
        apiVersion={"const": "ray.io/v1"},
        kind=TEXT,
        metadata=METADATA,
        spec=document(
            entrypoint=TEXT,
            shutdownAfterJobFinishes=FLAG,
            ttlSecondsAfterFinished=COUNT,
            rayClusterSpec=document(
                rayVersion=TEXT,
                authOptions=document(mode={"const": "token"}),
                headGroupSpec=document(rayStartParams=TEXTS, template=RAY_TEMPLATE),
                workerGroupSpecs=array(
                    document(
                        groupName=NAME,
                        replicas=COUNT,
                        minReplicas=COUNT,
                        maxReplicas=COUNT,
                        rayStartParams=TEXTS,
                        template=RAY_TEMPLATE,
                    )
                ),
            ),
        ),
    ),
}


def load(name: str) -> dict[str, dict]:
    """The documents of a manifest, by kind."""
    return {found["kind"]: found for found in yaml.safe_load_all((DEPLOY / name).read_text())}


def pods(node) -> list[dict]:
    """Every pod's specification, however deep."""
    if isinstance(node, dict):
        own = [node] if "containers" in node else []
        return own + [pod for value in node.values() for pod in pods(value)]
    return [pod for value in node for pod in pods(value)] if isinstance(node, list) else []


@pytest.mark.parametrize(("name", "kinds"), KINDS.items())
def test_a_manifest_follows_its_schema(name, kinds):
    found = load(name)
    assert list(found) == kinds
    for kind, own in found.items():
        jsonschema.Draft202012Validator(SCHEMAS[kind]).validate(own)


def test_the_schema_finds_a_mistyped_field():
    job = load("kubernetes.yaml")["Job"]
    job["spec"]["completion"] = job["spec"].pop("completions")
    with pytest.raises(jsonschema.ValidationError, match="completion"):
        jsonschema.Draft202012Validator(SCHEMAS["Job"]).validate(job)


@pytest.mark.parametrize("name", KINDS)
def test_volumes_that_are_mounted_exist(name):
    for pod in pods(list(load(name).values())):
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounts = {mount["name"] for own in pod["containers"] for mount in own["volumeMounts"]}
        assert mounts == volumes


def test_shards_workers_and_addresses_agree():
    found = load("kubernetes.yaml")
    settings = found["ConfigMap"]["data"]
    shards, job, service = found["StatefulSet"], found["Job"]["spec"], found["Service"]
    count, name = shards["spec"]["replicas"], shards["metadata"]["name"]
    assert shards["spec"]["serviceName"] == service["metadata"]["name"]
    labels = shards["spec"]["template"]["metadata"]["labels"]
    assert labels == shards["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    port = service["spec"]["ports"][0]["port"]
    host = f"{{}}.{service['metadata']['name']}:{port}"
    assert settings["SHOESTRING_SHARDS"].split(",") == [
        "tcp://" + host.format(f"{name}-{n}") for n in range(count)
    ]
    (container,) = shards["spec"]["template"]["spec"]["containers"]
    assert container["ports"][0]["containerPort"] == port
    assert f"--shards {count} " in container["command"][-1]
    assert f":{port}" in container["command"][-1]
    assert job["completions"] == job["parallelism"] == int(settings["SHOESTRING_WORKERS"])


def test_settings_are_ones_that_a_worker_reads():
    found = load("kubernetes.yaml")
    (container,) = found["Job"]["spec"]["template"]["spec"]["containers"]
    known = {f"SHOESTRING_{field.name.upper()}" for field in fields(Run)} | {"SHOESTRING_RUN"}
    given = dict(found["ConfigMap"]["data"])
    assert set(given) | {variable["name"] for variable in container["env"]} <= known
    run = Run.here({**given, "SHOESTRING_WORKER": "3", "SHOESTRING_KEYS": "/tmp/keys"})
    assert (run.name, run.worker, run.workers, len(run.shards), run.resume) == ("train", 3, 4, 2, None)


def test_the_job_on_ray_gives_options_that_there_are(tmp_path):
    found = load("kuberay.yaml")["RayJob"]["spec"]
    words = shlex.split(found["entrypoint"])
    assert words[:2] == ["shoestring", "run"]
    help_text = subprocess.run(
        [sys.executable, "-m", "shoestring", "run", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**clean_environment(), "COLUMNS": "200"},
    ).stdout
    for option in [word for word in words if word.startswith("--")]:
        assert option in help_text
    workers = int(words[words.index("--workers") + 1])
    assert sum(group["replicas"] for group in found["rayClusterSpec"]["workerGroupSpecs"]) == workers
    version = tuple(map(int, found["rayClusterSpec"]["rayVersion"].split(".")))
    assert version >= (2, 52)  # the first with tokens


def test_a_shards_pod_comes_up_with_the_keys_of_its_secret(tmp_path):
    mounted = tmp_path / "mounted"
    for who in ("shard", "worker-0"):
        keys.new(who, mounted)
    (mounted / "worker-0.secret").unlink()
    for path in mounted.iterdir():
        path.chmod(0o440)  # as Kubernetes mounts it
    found = load("kubernetes.yaml")
    (container,) = found["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    text = container["command"][-1].replace(" /keys/", f" {mounted}/").replace(":7000", ":0")
    text = text.replace("/tmp/keys", f"{tmp_path}/keys")
    environment = {
        **found["ConfigMap"]["data"],
        "SHOESTRING_CHECKPOINT": str(tmp_path / "checkpoints"),
        "POD_IP": "127.0.0.1",
        "HOSTNAME": "shoestring-shard-1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(["/bin/sh", "-ec", text], env=clean_environment() | environment, **given) as pod:
        overdue = threading.Timer(LIMIT_S, pod.kill)
        overdue.start()
        try:
            assert re.fullmatch(r"tcp://127\.0\.0\.1:[0-9]+\n", pod.stdout.readline()), pod.communicate()
            pod.terminate()
            _, err = pod.communicate(timeout=LIMIT_S)
        finally:
            overdue.cancel()
            pod.kill()
    assert pod.returncode == 0
    assert "shard 1 of 2 of run `train` is ready" in err


def test_the_slurm_script_makes_keys_and_takes_them_away(tmp_path):
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    srun = bin_folder / "srun"
    srun.write_text('#!/bin/sh\nls "$SHOESTRING_KEYS"; echo "$@"\n')
    srun.chmod(0o755)
    environment = {
        **clean_environment(),
        "PATH": f"{bin_folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "17",
        "SLURM_NTASKS": "2",
    }
    done = subprocess.run(
        [str(DEPLOY / "slurm.sh"), "my.py", "--epochs", "3"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    *names, command = done.stdout.splitlines()
    owners = ("shard", "worker-0", "worker-1")
    assert set(names) == {f"{who}.{kind}" for who in owners for kind in ("secret", "public")}
    assert command == "--kill-on-bad-exit=1 python my.py --epochs 3"
    assert not list(tmp_path.glob("keys-*"))


def test_the_slurm_script_asks_for_what_it_uses():
    text = (DEPLOY / "slurm.sh").read_text()
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.+)$", text, re.MULTILINE))
    assert int(asked["gpus-per-node"]) == int(asked["ntasks-per-node"])
