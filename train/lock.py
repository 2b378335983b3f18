"""One command at a time writes to a folder."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def sole_writer(folder: Path, flag: str) -> Iterator[None]:
    """Makes the folder, and keeps other commands out of it until the end; it is gone again if nothing was put there.

    Args:
      folder: to write to.
      flag: that names it, for the message.

    Raises:
      ValueError: another command is writing there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"another command is writing to {folder}: wait for it, or name another folder with {flag}"
            raise ValueError(message) from None
        except OSError:
            pass  # Some file systems of clusters have no locks.
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if list(folder.iterdir()) == [path]:
                    path.unlink()
                    folder.rmdir()
