"""Another user of the machine, without the token, at every door of a session: run as a script, prints what was answered as JSON.

Input (JSON, one argument): ports, unix sockets, directories and the file an accepted job would write. Started by root it becomes
`nobody` before it touches anything; otherwise it stays who it is, but has no token.
"""

import http.client
import importlib
import json
import os
import pkgutil
import socket
import ssl
import sys
from typing import Any

PATHS = ("/", "/metrics", "/logs", "/api/version", "/api/jobs/", "/api/v0/actors", "/api/snapshot", "/get_runtime_envs_info")
ORDERS = ("/api/job_agent/jobs/", "/api/jobs/", "/get_or_create_runtime_env", "/delete_runtime_env_if_possible")
INSIDE = ("ObjectManagerService/Push", "ObjectManagerService/Pull")  # not in the Python package


def grpc_methods() -> list[tuple[str, bool]]:
    """Every method of every service Ray defines (Ray client's too), and whether it takes a stream."""
    import ray.core.generated as generated

    found = [*((f"/ray.rpc.{name}", False) for name in INSIDE), ("/ray.rpc.syncer.RaySyncer/StartSync", True)]
    for module in pkgutil.iter_modules(generated.__path__):
        if module.name.endswith("_pb2"):
            described = importlib.import_module(f"ray.core.generated.{module.name}").DESCRIPTOR
            for service in described.services_by_name.values():
                for method in service.methods:
                    found.append((f"/{service.full_name}/{method.name}", method.client_streaming))
    return found


def by_http(port: int, touched: str) -> list[int | str]:
    """Status codes; a job that writes a file is among the orders."""
    job = json.dumps({"entrypoint": f"touch {touched}", "runtime_env": {}, "submission_id": None})
    answers: list[int | str] = []
    for method, path, body in [*(("GET", p, None) for p in PATHS), *(("POST", p, job) for p in ORDERS)]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            answers.append(connection.getresponse().status)
        except (OSError, http.client.HTTPException) as error:
            answers.append(type(error).__name__)  # speaks no HTTP/1
            if isinstance(error, TimeoutError):  # nor anything else
                break
        finally:
            connection.close()
    return answers


def server_certificate(port: int) -> bytes | None:
    """What the server shows to everybody, if it speaks TLS: enough to trust it, not to be trusted."""
    try:
        return ssl.get_server_certificate(("127.0.0.1", port), timeout=10).encode()
    except OSError:
        return None


def by_grpc(port: int, methods: list[tuple[str, bool]], credentials: Any = None, metadata: Any = ()) -> dict[str, list[str]]:
    """Status code to methods."""
    import grpc

    answers: dict[str, list[str]] = {}
    address = f"127.0.0.1:{port}"
    with grpc.secure_channel(address, credentials) if credentials else grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary("/no/such")(b"", timeout=5)  # whoever speaks gRPC with us says UNIMPLEMENTED at once
        except grpc.RpcError as error:
            if error.code().name in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):  # type: ignore[attr-defined]
                return {"UNAVAILABLE": []}
        for name, streams in methods:
            try:
                if streams:
                    list(channel.stream_stream(name)(iter([b""]), timeout=10, metadata=metadata))
                else:
                    channel.unary_unary(name)(b"", timeout=10, metadata=metadata)
                code = "OK"
            except grpc.RpcError as error:
                code = error.code().name  # type: ignore[attr-defined]
            answers.setdefault(code, []).append(name)
    return answers


def by_tls(port: int, methods: list[tuple[str, bool]]) -> dict[str, list[str]]:
    """With trust in whatever the server is, and without a key."""
    import grpc

    shown = server_certificate(port)
    return by_grpc(port, methods, grpc.ssl_channel_credentials(shown)) if shown else {}


def by_redis(port: int) -> str:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(b"*1\r\n$4\r\nPING\r\n")
            connection.settimeout(3)
            return connection.recv(64).decode(errors="replace")
    except OSError as error:
        return type(error).__name__


def by_unix(path: str) -> str:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(path)
        except OSError as error:
            return type(error).__name__
        return "connected"


def enter(directory: str) -> str:
    try:
        return f"lists {os.listdir(directory)}"
    except PermissionError:
        return "PermissionError"


def main(order: dict[str, Any]) -> dict[str, Any]:
    methods = grpc_methods()  # before the change of user: the interpreter may lie where only root reads
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    for name in [n for n in os.environ if n.startswith("RAY_")]:
        del os.environ[name]
    return {
        "user": os.getuid(),
        "methods": len(methods),
        "http": {port: by_http(port, order["touched"]) for port in order["ports"]},
        "grpc": {port: by_grpc(port, methods) for port in order["ports"]},
        "tls": {port: by_tls(port, methods) for port in order["ports"]},
        "redis": {port: by_redis(port) for port in order["ports"]},
        "unix": {path: by_unix(path) for path in order["unix"]},
        "directories": {path: enter(path) for path in order["directories"]},
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
