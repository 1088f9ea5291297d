"""The S3 server of the tests: moto, one request at a time. It takes a free port, and prints which.

moto's own command compares an object's version and replaces the object in two steps, with other requests in between,
so two conditional puts can both succeed. S3 does both in one step; a lock around the application does the same here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


def one_at_a_time(application):
    """A WSGI application that answers a request as a whole before it begins the next one."""
    lock = threading.Lock()

    def answer(environ, start_response) -> Iterable[bytes]:
        with lock:
            return list(application(environ, start_response))

    return answer


if __name__ == "__main__":
    application = one_at_a_time(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()
