"""Advisory locks with a bounded wait, always taken in one order.

promotion (repository) → lease (a whole verb on that lease) → run (opening the
run, reserving ids) → registration (repository; adding or retiring a worktree).
A lock file is never unlinked: two processes would then hold two inodes of one
name. The kernel frees a lock when its last descriptor closes, so the children
that move the target inherit the promotion lock's and outlive a killed parent
under it (ADR-0091 A1.1).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lionwt.errors import LionwtError, from_os_error
from lionwt.faults import point
from lionwt.store import make_private_dir, open_to_group, shared

#: Seconds a command waits for a lock that another lionwt holds.
DEFAULT_WAIT: Final = 30.0


@contextlib.contextmanager
def held(path: Path, what: str, wait: float = DEFAULT_WAIT) -> Iterator[int]:
    """Hold the lock file ``path`` and yield its descriptor.

    Raises ``lock_timeout`` after ``wait`` seconds.
    """
    from filelock import FileLock, Timeout

    # Directory and lock of a shared repository are its group's, like everything in it.
    is_shared = path.parent.name == "lionwt" and shared(path.parent.parent)
    descriptors: list[int] = []
    point("locks.asked")
    try:
        make_private_dir(path.parent)
        if is_shared:
            open_to_group(path.parent)
        lock = FileLock(
            path,
            timeout=max(wait, 0.0),
            mode=0o660 if is_shared else 0o600,
            thread_local=False,
            poll_interval=0.02,
            fallback_to_soft=False,
            preserve_lock_file=True,
            on_acquired=descriptors.append,
        )
        lock.acquire()
    except Timeout as error:
        raise LionwtError(
            "lock_timeout",
            f"another lionwt holds the {what} lock {path} (waited {wait:g} s for it); nothing was changed",
            hint="run the same command again when it has finished",
        ) from error
    except OSError as error:
        hint = f"{path.parent} has to be a directory that can be made; LIONAGI_HOME says where the runs' own lie"
        raise from_os_error(error, f"taking the {what} lock {path}", hint) from error
    try:
        yield descriptors[-1]
    finally:
        lock.release()
