"""A throwaway PostgreSQL server: made by ``initdb``, run as somebody who is not root, gone with the tests."""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg

PASSWORD = "s3cret"
_CAPABILITIES = "+dac_override,+dac_read_search"


def program(name: str) -> str:
    """A program of the newest PostgreSQL that is installed; Debian keeps them off the PATH."""
    found = shutil.which(name)
    versions = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: float(path.parts[-3]))
    assert found or versions, f"{name} is missing: .ci/setup installs PostgreSQL"
    return str(versions[-1]) if versions else str(found)


class Server:
    """One server on a free port of this machine, with a password."""

    def __init__(self, root: Path) -> None:
        self.data = root / "data"
        self.data.mkdir()
        self._numbers = itertools.count(1)
        self._as: list[str] = []
        if os.geteuid() == 0:
            user = pwd.getpwnam("postgres")
            os.chown(self.data, user.pw_uid, user.pw_gid)
            # It may pass through the private directories that the tests lie in.
            self._as = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
            self._as += [f"--inh-caps={_CAPABILITIES}", f"--ambient-caps={_CAPABILITIES}", "--pdeathsig=INT"]
        password = root / "password"
        password.write_text(PASSWORD)
        subprocess.run(
            [
                *[*self._as, program("initdb"), "-D", str(self.data), "-U", "lionwt", "-A", "scram-sha-256"],
                *[f"--pwfile={password}", "-E", "UTF8", "--locale=C", "--no-sync"],
            ],
            check=True,
            capture_output=True,
            timeout=120,
            cwd=root,
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        settings = ["listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off", "shared_buffers=8MB"]
        self._log = open(root / "log", "wb")
        self._process = subprocess.Popen(
            [
                *[*self._as, program("postgres"), "-D", str(self.data), "-p", str(self.port)],
                *[part for setting in settings for part in ("-c", setting)],
            ],
            stdout=self._log,
            stderr=self._log,
            cwd=root,
        )

    @property
    def pid(self) -> int:
        """The server's main process."""
        return self._process.pid

    def url(self, database: str = "postgres", password: str = PASSWORD) -> str:
        return f"postgresql://lionwt:{password}@127.0.0.1:{self.port}/{database}"

    def answers(self) -> bool:
        assert self._process.poll() is None, Path(self._log.name).read_text()
        with contextlib.suppress(psycopg.OperationalError), psycopg.connect(self.url(), connect_timeout=5):
            return True
        return False

    def database(self) -> str:
        """The URL of a new, empty database."""
        name = f"test{next(self._numbers)}"
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return self.url(name)

    def end(self) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(30)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait(30)
            self._log.close()


@contextlib.contextmanager
def silent() -> Iterator[int]:
    """The port of something that takes connections and never says a word."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield int(listening.getsockname()[1])
