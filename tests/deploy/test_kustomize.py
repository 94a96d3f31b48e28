"""Every overlay renders, and is what Kubernetes, its operators and this package accept."""

from pathlib import PurePosixPath

import build
import prometheus_rule
import pytest
import yaml
from manifest_checks import dangling, images_of, insecure, leaked, unpinned, unprobed, wrong_schema
from rendered import DEPLOY, KUSTOMIZE, OVERLAYS, containers, fitting_job, of_kind, overlay, pods

from kvstore_xfer.cli.main import _parser
from kvstore_xfer.family import load_family
from kvstore_xfer.store.url import local_folders

RENDERED = [*OVERLAYS, "fit"]


def _objects(name):
    return fitting_job() if name == "fit" else overlay(name)


def _engines(objects):
    """(pod, the container that holds the tier) of each server."""
    return [
        (pod, next(c for c in containers(pod) if _variables(c).get("KVXFER_CONFIG")))
        for _, pod in pods(objects)
        if pod["metadata"]["labels"]["app.kubernetes.io/component"] == "engine"
    ]


def _variables(container):
    return {variable["name"]: variable.get("value") for variable in container.get("env", [])}


def _mounts(pod, container):
    """Mount path -> the volume there."""
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    return {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}


def _family(objects, tmp_path):
    (config,) = [c for c in of_kind(objects, "ConfigMap") if "family.yaml" in c["data"]]
    file = tmp_path / "family.yaml"
    file.write_text(config["data"]["family.yaml"])
    return load_family(file)


def _models(pod):
    """The model that the pod's engine loads."""
    for container in containers(pod):
        for argument in container.get("args", []):
            if argument.startswith("--model-path="):
                return argument.partition("=")[2]
            if container["name"] == "vllm" and not argument.startswith("-"):
                return argument
    raise AssertionError("no model")


@pytest.mark.parametrize("name", RENDERED)
@pytest.mark.parametrize("check", [wrong_schema, insecure, unprobed, dangling, leaked])
def test_rendered_manifests_pass(name, check):
    assert check(_objects(name)) == []


@pytest.mark.parametrize("name", RENDERED)
def test_every_image_is_pinned(name):
    images = images_of(_objects(name))
    assert images
    assert unpinned(images) == []


@pytest.mark.parametrize("name", OVERLAYS)
def test_servers_are_the_models_of_the_manifest(name, tmp_path):
    objects = overlay(name)
    family = _family(objects, tmp_path)
    served = sorted(_models(pod) for pod, _ in _engines(objects))
    assert served == sorted(model.path for model in family.models.values())


@pytest.mark.parametrize("name", OVERLAYS)
def test_manifest_mappers_and_store_are_mounted_where_they_are_looked_for(name, tmp_path):
    objects = overlay(name)
    family = _family(objects, tmp_path)
    folders = local_folders(family.store)  # refuses a URL that is wrong
    assert len(_engines(objects)) == 2
    for pod, container in _engines(objects):
        mounts = _mounts(pod, container)
        manifest = PurePosixPath(_variables(container)["KVXFER_CONFIG"])
        assert "configMap" in mounts[str(manifest.parent)]
        for pair in family.pairs:
            mappers = mounts[str(PurePosixPath(pair.mapper).parent)]
            assert "persistentVolumeClaim" in mappers or _filled(pod, mappers["name"])
        for folder in folders:
            claim = mounts[str(folder)]["persistentVolumeClaim"]["claimName"]
            (volume,) = [c for c in of_kind(objects, "PersistentVolumeClaim") if _named(c, claim)]
            assert volume["spec"]["accessModes"] == ["ReadWriteOnce"]


def _named(item, name):
    return item["metadata"]["name"] == name


def _filled(pod, volume):
    """Whether an init container that ends writes to the volume."""
    return any(
        "restartPolicy" not in container
        and any(mount["name"] == volume for mount in container["volumeMounts"])
        for container in pod["spec"]["initContainers"]
    )


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_store_is_the_one_that_the_overlay_names(name, tmp_path):
    objects = overlay(name)
    engine, _, store = name.partition("-")
    url = _family(objects, tmp_path).store
    assert url.partition(":")[0] == store
    hosts = {item["metadata"]["name"] for item in of_kind(objects, "Service")}
    if store in ("valkey", "mooncake"):
        host, _, port = url.partition("://")[2].partition("/")[0].partition("?")[0].partition(":")
        (service,) = [s for s in of_kind(objects, "Service") if _named(s, host)]
        assert int(port) in [entry["port"] for entry in service["spec"]["ports"]]
    assert any(host.startswith({"sglang": "sglang", "lmcache": "vllm"}[engine]) for host in hosts)


def test_every_component_and_base_is_in_some_overlay():
    """Nothing here is left unrendered."""
    texts = [
        (KUSTOMIZE / "overlays" / name / "kustomization.yaml").read_text() for name in OVERLAYS
    ]
    for component in (KUSTOMIZE / "components").iterdir():
        assert any(f"components/{component.name}\n" in text for text in texts), component
    for base in ("sglang", "lmcache"):
        assert any(f"base/{base}\n" in text for text in texts)


def test_the_fitting_job_runs_commands_that_exist():
    ((_, pod),) = pods(fitting_job())
    fit, check = containers(pod)
    parsed = {}
    for container in (fit, check):
        program, *rest = container["command"]
        assert program == "kvxfer"
        arguments = [*rest, *container["args"]]
        parsed[rest[0]] = _parser(arguments).parse_args(arguments)
    assert parsed["fit"].resume
    assert list(map(str, parsed["check"].mapper)) == [str(parsed["fit"].out)]
    assert parsed["check"].dtype == parsed["fit"].dtype == "bfloat16"
    for path in (parsed["fit"].out, parsed["fit"].text, parsed["check"].text):
        parents = {str(parent) for parent in path.parents}
        volumes = [v for m, v in _mounts(pod, fit).items() if m in parents]
        assert any("persistentVolumeClaim" in volume for volume in volumes), path


def test_the_fitting_job_gives_up_on_a_rejected_mapper():
    (job,) = of_kind(fitting_job(), "Job")
    rules = job["spec"]["podFailurePolicy"]["rules"]
    codes = next(rule["onExitCodes"] for rule in rules if rule["action"] == "FailJob")
    assert (codes["containerName"], codes["operator"], codes["values"]) == ("check", "In", [3])


def test_the_fitting_job_writes_what_the_servers_of_each_overlay_read(tmp_path):
    ((_, pod),) = pods(fitting_job())
    out = next(a for a in containers(pod)[0]["args"] if a.startswith("--out=")).partition("=")[2]
    for name in OVERLAYS:
        assert out in [pair.mapper for pair in _family(overlay(name), tmp_path).pairs]


def _break_field(objects):
    of_kind(objects, "Deployment")[0]["spec"]["template"]["spec"]["containers"][0]["imagePull"] = 1


def _break_privilege(objects):
    spec = of_kind(objects, "Deployment")[0]["spec"]["template"]["spec"]
    spec["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True


def _break_probe(objects):
    spec = of_kind(objects, "Deployment")[0]["spec"]["template"]["spec"]
    spec["containers"][0]["livenessProbe"] = {"httpGet": {"path": "/", "port": "nothing"}}


def _break_selector(objects):
    of_kind(objects, "Service")[0]["spec"]["selector"]["app.kubernetes.io/name"] = "other"


def _break_claim(objects):
    objects.remove(of_kind(objects, "PersistentVolumeClaim")[0])


def _break_secret(objects):
    spec = of_kind(objects, "Deployment")[0]["spec"]["template"]["spec"]
    spec["containers"][0].setdefault("env", []).append({"name": "DB_PASSWORD", "value": "x"})


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_alerts_are_those_of_the_rules_file(name):
    (resource,) = of_kind(overlay(name), "PrometheusRule")
    assert resource["spec"] == yaml.safe_load(prometheus_rule.RULES.read_text())


def test_the_resource_of_the_rules_is_up_to_date():
    assert build.generated()[prometheus_rule.RESOURCE] == prometheus_rule.RESOURCE.read_text()


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_dashboards_are_the_generated_ones_and_labelled_for_the_sidecar(name):
    given = {}
    for config in of_kind(overlay(name), "ConfigMap"):
        if config["metadata"].get("labels", {}).get("grafana_dashboard") == "1":
            given |= config["data"]
    files = sorted((DEPLOY / "grafana").glob("*.json"))
    assert len(files) >= 4
    assert given == {file.name: file.read_text() for file in files}


def _break_rule(objects):
    del of_kind(objects, "PrometheusRule")[0]["spec"]["groups"][0]["rules"][0]["expr"]


def _break_monitor(objects):
    of_kind(objects, "ServiceMonitor")[0]["spec"]["endpoint"] = []


def _break_scrape(objects):
    of_kind(objects, "ServiceMonitor")[0]["spec"]["endpoints"] = [{"port": "other"}]


@pytest.mark.parametrize(
    ("check", "fault"),
    [
        (wrong_schema, _break_field),
        (wrong_schema, _break_rule),
        (wrong_schema, _break_monitor),
        (dangling, _break_scrape),
        (insecure, _break_privilege),
        (unprobed, _break_probe),
        (dangling, _break_selector),
        (dangling, _break_claim),
        (leaked, _break_secret),
    ],
)
def test_the_checks_see_a_fault(check, fault):
    objects = overlay("sglang-valkey")
    fault(objects)
    assert len(check(objects)) >= 1


@pytest.mark.parametrize("image", ["valkey", "valkey:latest", "valkey:stable", "a/b:", "a:v1:2"])
def test_an_unpinned_image_is_seen(image):
    assert unpinned([image, "valkey/valkey:9.1.2"]) == [image]
