"""What must hold of rendered manifests. Each check returns its findings, in words."""

import functools
import json
import re
from pathlib import Path

import jsonschema
import kubernetes_validate
from rendered import containers, of_kind, pods

CRDS = Path(__file__).parent / "crds"
OLDEST, NEWEST = "1.31", "1.37"
# Made by people, as docs/deploy.md says; never by these files.
SECRETS = {"kvxfer-store", "hf-token"}
_PINNED = re.compile(r"^[\w./-]+:(?!latest$)[\w.-]*\d[\w.-]*$")
_SECRET_NAME = re.compile(r"PASSWORD|TOKEN|SECRET|ACCESS_KEY", re.IGNORECASE)
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def _schema_of(kind):
    schema = json.loads((CRDS / f"{kind}.json").read_text())
    _close(schema)
    return schema


def _close(schema):
    """The API server drops fields that a custom resource's schema does not know: refuse them."""
    if isinstance(schema, dict):
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
        for part in schema.values():
            _close(part)
    elif isinstance(schema, list):
        for part in schema:
            _close(part)


def wrong_schema(objects):
    return [finding for item in objects for finding in _wrong(json.dumps(item))]


@functools.cache
def _wrong(text):
    """Most objects are the same in several overlays."""
    item = json.loads(text)
    name = f"{item['kind']} {item['metadata']['name']}"
    if (CRDS / f"{item['kind']}.json").exists():
        validator = jsonschema.Draft202012Validator(_schema_of(item["kind"]))
        return [f"{name}: {error.message}" for error in validator.iter_errors(item)]
    errors = [(version, _refusal(item, version)) for version in (OLDEST, NEWEST)]
    return [f"{name}: {version}: {error}" for version, error in errors if error]


def _refusal(item, version):
    try:
        kubernetes_validate.validate(item, version, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        return str(error)
    return None


def unpinned(images):
    return [image for image in images if not _PINNED.match(image)]


def images_of(objects):
    return [item["image"] for _, pod in pods(objects) for item in containers(pod)]


def insecure(objects):
    """Breaches of Kubernetes' restricted pod security standard."""
    findings = []
    for name, pod in pods(objects):
        spec, context = pod["spec"], pod["spec"].get("securityContext", {})
        wrong = {
            "runAsNonRoot": context.get("runAsNonRoot") is not True,
            "runAsUser": not context.get("runAsUser"),
            "seccompProfile": context.get("seccompProfile", {}).get("type") != "RuntimeDefault",
            "host": any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")),
            "token": spec.get("automountServiceAccountToken") is not False,
            "volumes": any(
                set(volume) - {"name", "configMap", "emptyDir", "persistentVolumeClaim", "secret"}
                for volume in spec.get("volumes", [])
            ),
        }
        for container in containers(pod):
            own = container.get("securityContext", {})
            label = container["name"]
            wrong |= {
                f"{label} escalation": own.get("allowPrivilegeEscalation") is not False,
                f"{label} capabilities": own.get("capabilities") != {"drop": ["ALL"]},
                f"{label} loosened": bool(
                    {"privileged", "runAsUser", "runAsNonRoot", "seccompProfile"} & set(own)
                ),
                f"{label} hostPort": any("hostPort" in p for p in container.get("ports", [])),
            }
        findings += [f"{name}: {what}" for what, is_wrong in wrong.items() if is_wrong]
    return findings


def unprobed(objects):
    """Containers that serve without probes, and containers without resources."""
    findings = []
    for name, pod in pods(objects):
        for container in containers(pod):
            resources = container.get("resources", {})
            if not {"cpu", "memory"} <= set(resources.get("requests", {})):
                findings.append(f"{name}: {container['name']}: requests")
            if "memory" not in resources.get("limits", {}):
                findings.append(f"{name}: {container['name']}: memory limit")
            if container.get("ports") and "livenessProbe" not in container:
                findings.append(f"{name}: {container['name']}: livenessProbe")
            named = {port["name"] for port in container.get("ports", [])}
            actions = [(probe, container.get(probe, {})) for probe in _PROBES]
            findings += [
                f"{name}: {container['name']}: {probe}: port"
                for probe, action in actions
                for way in ("httpGet", "tcpSocket")
                if way in action and action[way]["port"] not in named
            ]
    return findings


def dangling(objects):
    """Names that nothing in the overlay answers to."""
    made = {(item["kind"], item["metadata"]["name"]) for item in objects}
    findings = []
    for name, pod in pods(objects):
        wanted = set()
        for volume in pod["spec"].get("volumes", []):
            if "configMap" in volume:
                wanted.add(("ConfigMap", volume["configMap"]["name"]))
            if "persistentVolumeClaim" in volume:
                wanted.add(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
        if "serviceAccountName" in pod["spec"]:
            wanted.add(("ServiceAccount", pod["spec"]["serviceAccountName"]))
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])}
        mounted = {m["name"] for c in containers(pod) for m in c.get("volumeMounts", [])}
        findings += [f"{name}: {kind} {what}" for kind, what in sorted(wanted - made)]
        findings += [f"{name}: volume {what}" for what in sorted(mounted ^ volumes)]
    return [*findings, *_unselected(objects)]


def _unselected(objects):
    """Services, network policies and monitors that select nothing, and ports nobody opens."""
    findings = []
    running = [
        (
            pod["metadata"]["labels"],
            {p["name"] for c in containers(pod) for p in c.get("ports", [])},
        )
        for _, pod in pods(objects)
    ]
    for service in of_kind(objects, "Service"):
        selector = service["spec"]["selector"].items()
        opened = [ports for labels, ports in running if selector <= labels.items()]
        findings += [
            f"Service {service['metadata']['name']}: {port['name']}"
            for port in service["spec"]["ports"]
            if not any(port["targetPort"] in ports for ports in opened)
        ]
    for monitor in of_kind(objects, "ServiceMonitor"):
        findings += _unscraped(monitor, of_kind(objects, "Service"))
    for policy in of_kind(objects, "NetworkPolicy"):
        ingress = policy["spec"]["ingress"]
        selectors = [policy["spec"]["podSelector"]]
        selectors += [peer["podSelector"] for rule in ingress for peer in rule["from"]]
        for selector in selectors:
            wanted = selector["matchLabels"].items()
            if not any(wanted <= labels.items() for labels, _ in running):
                findings.append(f"NetworkPolicy {policy['metadata']['name']}: {selector}")
    return findings


def _unscraped(monitor, services):
    """Services that the monitor finds but none of whose ports it scrapes."""
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    found = [s for s in services if wanted <= s["metadata"]["labels"].items()]
    ports = {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]}
    unscraped = [s for s in found if not ports & {port["name"] for port in s["spec"]["ports"]}]
    names = [service["metadata"]["name"] for service in unscraped] if found else ["no Service"]
    return [f"ServiceMonitor {monitor['metadata']['name']}: {name}" for name in names]


def leaked(objects):
    """Secrets in the manifests themselves, or under names that the guide does not explain."""
    findings = [f"Secret {item['metadata']['name']}" for item in of_kind(objects, "Secret")]
    for name, pod in pods(objects):
        for container in containers(pod):
            findings += [
                f"{name}: {variable['name']}"
                for variable in container.get("env", [])
                if _SECRET_NAME.search(variable["name"]) and variable.get("value")
            ]
            used = {
                source["secretRef"]["name"]
                for source in container.get("envFrom", [])
                if "secretRef" in source
            } | {
                variable["valueFrom"]["secretKeyRef"]["name"]
                for variable in container.get("env", [])
                if "secretKeyRef" in variable.get("valueFrom", {})
            }
            findings += [f"{name}: Secret {secret}" for secret in sorted(used - SECRETS)]
    return findings
