"""A real S3 server in a process of its own, and a proxy before it that behaves badly when told to."""

from __future__ import annotations

import os
import re
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

BUCKET = "bucket"
SECRET = "a-secret-that-is-nowhere-else"


class Server:
    """`moto_server` on a free port, with an empty BUCKET; `client` is boto3's, straight to it."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{self.port}'])"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < deadline and self._process.poll() is None, "the S3 server does not start"
                time.sleep(0.1)
        self.client().create_bucket(Bucket=BUCKET)

    @staticmethod
    def environment(port: int) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def client(self):
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            region_name="us-east-1",
            aws_access_key_id="key",
            aws_secret_access_key=SECRET,
        )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Proxy:
    """Passes connections on to the server. `requests` holds the first line of each request that came.

    misbehave: given such a line, None (pass it on), "drop" (close the connection after it has been read in part),
    "500" (answer that), "stall" (say nothing for a second), or "cut" (close the connection in the middle of the answer).
    """

    def __init__(self, port: int) -> None:
        self.requests: list[str] = []
        self.misbehave: Callable[[str], str | None] = lambda line: None
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._target)) as server:
            try:
                self._pump(client, server)
            except OSError:
                pass  # one of the two has closed it

    def _pump(self, client: socket.socket, server: socket.socket) -> None:
        selector, doing = selectors.DefaultSelector(), None
        selector.register(client, selectors.EVENT_READ)
        selector.register(server, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                data = key.fileobj.recv(65536)
                if not data:
                    return
                if key.fileobj is server:
                    if doing == "cut":
                        client.sendall(data[: len(data) // 2])
                        return
                    client.sendall(data)
                    continue
                found = re.match(rb"(GET|PUT|POST|DELETE|HEAD) (\S+) HTTP", data)
                if found:
                    line = found[0].decode().removesuffix(" HTTP")
                    self.requests.append(line)
                    doing = self.misbehave(line)
                if doing == "drop":
                    server.sendall(data[: data.index(b"\r\n\r\n")])  # moto, unlike S3, would keep a part of a body
                    return
                if doing == "500":
                    body = b"<Error><Code>InternalError</Code><Message>not today</Message></Error>"
                    client.sendall(
                        b"HTTP/1.1 500 No\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
                    )
                    return
                if doing == "stall":
                    time.sleep(1.0)
                server.sendall(data)

    def count(self, pattern: str) -> int:
        return sum(re.search(pattern, line) is not None for line in list(self.requests))

    def close(self) -> None:
        if self._listener.fileno() >= 0:
            self._listener.shutdown(socket.SHUT_RDWR)  # closed alone, the thread that waits there takes one more
        self._listener.close()
