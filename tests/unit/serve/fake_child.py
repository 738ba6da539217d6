"""A tiny program in the place of `python -m jdisagg.serve`: says READY, answers /ready, writes down what happens to it.

FAKE_DIR holds the notes. FAKE_MODE: "" | "crash-once" (decode exits 3 at its first start) | "crash" (decode always) |
"bad-config" (decode exits 2) | "deaf" (decode ignores SIGTERM) | "silent" (decode never says READY, and ignores SIGTERM)
| "brief" (decode says READY and exits 3).
"""

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from jdisagg.serve.environment import die_with_parent

role = sys.argv[sys.argv.index("--role") + 1]
mode = os.environ.get("FAKE_MODE", "") if role == "decode" else ""
notes = Path(os.environ["FAKE_DIR"])


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def note(event: str) -> None:
    with (notes / "events").open("a") as file:
        file.write(f"{time.monotonic()} {event} {role} {os.getpid()} {' '.join(sys.argv[1:])}\n")


def stop(*_: object) -> None:
    note("stopped")
    os._exit(0)


die_with_parent(os.environ)
signal.signal(signal.SIGTERM, signal.SIG_IGN if mode in ("deaf", "silent") else stop)
note("started")
sys.stderr.write("a line of the log\n")
sys.stderr.flush()
if mode == "bad-config":
    sys.exit(2)
if mode == "crash" or (mode == "crash-once" and (notes / "events").read_text().count("started decode") == 1):
    sys.exit(3)
server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
threading.Thread(target=server.serve_forever, daemon=True).start()
address = f"127.0.0.1:{server.server_port}"
if mode != "silent":
    ready = {
        "event": "ready",
        "role": role,
        "pid": os.getpid(),
        "http": address,
        "grpc": address,
        "model": "m",
        "executables": 2,
    }
    print(json.dumps(ready), flush=True)
if mode == "brief":
    sys.exit(3)
while True:
    signal.pause()
